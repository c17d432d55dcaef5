"""From what a config says about data to rows that can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from mixwell.data import overlap, token_files
from mixwell.data.datasets import IndexedDataset, TensorRows, TokenRows, as_rows
from mixwell.data.downloads import cache_folder
from mixwell.data.sources import HuggingFace, JsonLines, Parquet, Source, TextFiles
from mixwell.data.token_files import TokenFile
from mixwell.data.tokenizer import Tokenizer
from mixwell.training import entry_points
from mixwell.training.config import Config, DataConfig
from mixwell.training.trainables import Trainable

# Lines of licenses and the like are in many texts; copies of a whole text are what is to be found.
SUSPICIOUS_OVERLAP = 0.05
TEXT = ("files", "jsonl", "parquet", "dataset")
Announce = Callable[[str], None]
Track = Callable[[str, int | None], Callable[[int], None]]


@final
@dataclass(frozen=True)
class Data:
    """The rows of a run.

    Args:
        domains: by name.
        validation: of the validation set, if there is one.
        test: of the test set, if there is one.
        concerns: what a user should know about them.
    """

    domains: dict[str, IndexedDataset]
    validation: IndexedDataset | None
    test: IndexedDataset | None = None
    concerns: list[str] = field(default_factory=list[str])


def places(config: Config) -> dict[str, DataConfig]:
    """All data that a config names, by their keys in it.

    Args:
        config: the settings.

    Returns:
        Of the domains, and of the validation set and the test set if there are such.
    """
    found = {f"domains.{name}": one for name, one in config.domains.items()}
    held_out = {"validation": config.validation, "test": config.test}
    return found | {key: one for key, one in held_out.items() if one is not None}


def load(
    config: Config,
    tokenizer: Tokenizer,
    trainable: Trainable,
    *,
    given: Mapping[str, IndexedDataset],
    announce: Announce,
    track: Track,
) -> Data:
    """All rows that a config names; text is tokenized into the cache, or found there.

    Args:
        config: the settings.
        tokenizer: for text.
        trainable: says how long a row of text is.
        given: rows that Python code handed over, by the keys of :func:`places`.
        announce: told what is fetched or made.
        track: called with a name and a number of bytes, gives a function that is told the bytes done.

    Returns:
        The rows.

    Raises:
        ValueError: data are missing, empty or broken; the message begins with the key of the config.
    """
    rows: dict[str, IndexedDataset] = {}
    tokens: dict[str, TokenFile] = {}
    for key, data in places(config).items():
        try:
            if data.kind == "given":
                rows[key] = _given(key, given)
            elif data.kind in (*TEXT, "tokens"):
                tokens[key] = _tokens(key, data, config.base, tokenizer, trainable, announce, track)
                rows[key] = TokenRows(tokens[key], length=_context(trainable))
            elif data.kind == "tensors":
                rows[key] = _tensors(config.base / Path(str(data.tensors)).expanduser())
            else:
                made = entry_points.call(str(data.python), data.arguments, base=config.base, key="python")
                rows[key] = as_rows(made)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    domains = {name: rows[f"domains.{name}"] for name in config.domains}
    concerns = _overlaps(tokens) + _small(domains, config.batch.rows)
    return Data(domains, rows.get("validation"), rows.get("test"), concerns)


def source(data: DataConfig, *, base: Path) -> Source:
    """The documents that a config names.

    Args:
        data: text of some kind.
        base: the folder to which relative paths refer.

    Returns:
        A source.

    Raises:
        ValueError: it is not text.
    """
    encoding, errors = data.encoding, data.errors
    if data.files is not None:
        return TextFiles(data.files, base=base, encoding=encoding, errors=errors)
    if data.jsonl is not None:
        return JsonLines(data.jsonl, base=base, field=data.field, encoding=encoding, errors=errors)
    if data.parquet is not None:
        return Parquet(data.parquet, base=base, field=data.field)
    if data.dataset is not None:
        return HuggingFace(
            data.dataset,
            base=base,
            name=data.name,
            split=data.split,
            field=data.field,
            streaming=data.streaming,
            limit=data.limit,
            revision=data.revision,
        )
    raise ValueError(f"{data.kind} is not text that could be tokenized")


def _tokens(
    key: str,
    data: DataConfig,
    base: Path,
    tokenizer: Tokenizer,
    trainable: Trainable,
    announce: Announce,
    track: Track,
) -> TokenFile:
    if data.tokens is not None:
        path = base / Path(data.tokens).expanduser()
        vocabulary = trainable.vocabulary or 2**31
        return token_files.open_tokens(path, dtype=data.dtype, vocabulary=vocabulary)
    documents = source(data, base=base)
    if isinstance(documents, HuggingFace) and documents.remote:
        announce(f"{key}: reading the dataset {data.dataset}, which may download it")
    return token_files.tokenize(
        documents, tokenizer, cache=cache_folder(), progress=track(key, documents.size())
    )


def _given(key: str, given: Mapping[str, IndexedDataset]) -> IndexedDataset:
    if key not in given:
        raise ValueError("these data were handed over by Python code: continue with mixwell.train from there")
    return given[key]


def _context(trainable: Trainable) -> int:
    if trainable.context is None:
        raise ValueError(
            "this model takes no text; give tensors or python, another model, or, if yours does, set model.context"
        )
    return trainable.context


def _tensors(path: Path) -> IndexedDataset:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file ({error})") from error
    missing = [name for name in ("inputs", "targets") if name not in tensors]
    if missing:
        raise ValueError(
            f"{path} has no tensor {' and no '.join(missing)}; it has {', '.join(sorted(tensors))}"
        )
    return TensorRows(tensors["inputs"], tensors["targets"])


def _overlaps(tokens: Mapping[str, TokenFile]) -> list[str]:
    found: list[str] = []
    for held_out in ("validation", "test"):
        if held_out not in tokens:
            continue
        for key, domain in tokens.items():
            if key == held_out or (held_out == "validation" and key == "test"):
                continue
            share = overlap.shared_fraction(tokens[held_out], domain)
            if share > SUSPICIOUS_OVERLAP:
                harm = (
                    "the weights are chosen by it, so the test does not tell how the model does on new text"
                    if key == "validation"
                    else "the model can learn it by heart there, and the weights will favor what was copied"
                )
                found.append(
                    f"{share:.0%} of {held_out} is also in {key}: {harm}. Take those texts out of one of them"
                )
    return found


def _small(domains: Mapping[str, IndexedDataset], batch: int) -> list[str]:
    return [
        f"domains.{name} has {len(rows)} row{'s' if len(rows) > 1 else ''}, fewer than a batch of {batch}: each "
        "is seen often; mixer.max_epochs limits it"
        for name, rows in domains.items()
        if len(rows) < batch
    ]
