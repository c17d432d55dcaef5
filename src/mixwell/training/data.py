"""From the data sections of a config to rows that can be drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from mixwell.data import overlap
from mixwell.data.datasets import IndexedDataset, TokenRows
from mixwell.data.sources.base import LoadContext, SourceConfig
from mixwell.data.tokenizer import Tokenizer
from mixwell.training.models.base import Trainable

if TYPE_CHECKING:
    from mixwell.training.config import Config

# Lines of licenses and the like are in many texts; copies of a whole text are to be found.
SUSPICIOUS_OVERLAP = 0.05


@final
@dataclass(frozen=True)
class Data:
    """The rows of a run.

    Args:
        warnings: messages about the data, for the user.
    """

    domains: dict[str, IndexedDataset]
    validation: IndexedDataset | None
    test: IndexedDataset | None = None
    warnings: list[str] = field(default_factory=list[str])


def load(
    config: Config,
    tokenizer: Tokenizer,
    trainable: Trainable,
    *,
    given: Mapping[str, IndexedDataset],
    announce: Callable[[str], None],
    track: Callable[[str, int | None], Callable[[int], None]],
) -> Data:
    """Load all rows that a config names; text is tokenized into the cache, or found there.

    Args:
        trainable: its context is the length of a row of text.
        given: rows that Python code passed, by key: ``domains.NAME``, ``validation``, ``test``.
        announce: called with a line for the user.
        track: called with a name and a number of bytes, returns a function that is called with the bytes done.

    Raises:
        ValueError: data are missing, empty or broken; the message begins with the key of the config.
    """
    sections: dict[str, SourceConfig | None] = {f"domains.{key}": one for key, one in config.domains.items()}
    sections |= {"validation": config.validation, "test": config.test}
    rows: dict[str, IndexedDataset] = {}
    for key, section in sections.items():
        if section is None:
            continue
        context = LoadContext(
            key, config.base, tokenizer, trainable.context, trainable.vocabulary, announce, track
        )
        try:
            rows[key] = given[key] if key in given else section.load(context)
            if trainable.check_rows is not None:
                trainable.check_rows(rows[key])
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    domains = {name: rows[f"domains.{name}"] for name in config.domains}
    warnings = _overlaps(rows) + _small(domains, config.batch.rows)
    return Data(domains, rows.get("validation"), rows.get("test"), warnings)


def _overlaps(rows: Mapping[str, IndexedDataset]) -> list[str]:
    tokens = {key: one.tokenized for key, one in rows.items() if isinstance(one, TokenRows)}
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
