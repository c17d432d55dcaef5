"""Formats that list the weights: plain files, Hugging Face datasets, LLaMA-Factory, Megatron-LM, torchtitan."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format


def yaml_text(values: Mapping[str, Any]) -> str:
    """Return plain values as YAML, in their order, each on one line."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=float("inf"))


def json_text(values: Any) -> str:
    """Return plain values as JSON that ends with a line break."""
    return json.dumps(values, indent=1, ensure_ascii=False) + "\n"


# ------------------------------------------------------------------------------- {domain: weight}, for any program


def _by_name(entries: Sequence[Entry]) -> dict[str, float]:
    return {entry.name: entry.share for entry in entries}


def _csv(entries: Sequence[Entry]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([("domain", "weight"), *((entry.name, entry.text) for entry in entries)])
    return text.getvalue()


for _name, _summary, _write in (
    ("json", "{domain: weight}", lambda entries: json_text(_by_name(entries))),
    ("csv", "a row for each domain: domain, weight", _csv),
    ("yaml", "{domain: weight}", lambda entries: yaml_text(_by_name(entries))),
):
    EXPORTERS.add(_name, Format(_summary, _write, needs_paths=False, keeps_zeros=True))

# ------------------------------------------------------------------------------------------ Hugging Face datasets


def _interleave(entries: Sequence[Entry]) -> str:
    """Return the probabilities of ``interleave_datasets``.

    ::

        mix = json.load(open("mix.json"))
        rows = [tokenized[name] for name in mix["domains"]]
        interleave_datasets(rows, probabilities=mix["probabilities"], seed=0)

    It draws examples, and mixwell's weights are fractions of rows of equal length: cut the text into such rows
    first, or a domain of long documents has a greater share of the tokens than its weight. NumPy's
    ``Generator.choice``, by which it draws, refuses probabilities that do not sum to one within 1.5e-8.
    """
    mix: dict[str, list[Any]] = {
        "domains": [entry.domain for entry in entries],
        "probabilities": [entry.share for entry in entries],
    }
    if any(entry.path is not None for entry in entries):
        mix["paths"] = [entry.name for entry in entries]
    return json_text(mix)


EXPORTERS.add(
    "datasets",
    Format(
        "Hugging Face: JSON with domains and the probabilities of interleave_datasets",
        _interleave,
        needs_paths=False,
        path_from_data=lambda path: path,
    ),
)

# ------------------------------------------------------------------------------------------------- LLaMA-Factory


def _llama_factory(entries: Sequence[Entry]) -> str:
    """Return three settings of LLaMA-Factory's training file; the names are those of ``dataset_info.json``.

    LLaMA-Factory passes ``interleave_probs`` to ``interleave_datasets`` before it cuts text into tokens, so they
    count examples. ``interleave_under`` ends an epoch when the first dataset ends, so that nothing is repeated and
    the mixture stays the same to the end.
    """
    for name in [entry.name for entry in entries]:
        if "," in name:
            why = "LLaMA-Factory separates the names of datasets by commas"
        elif name.strip() != name:
            why = "LLaMA-Factory takes white space off both ends of a dataset's name"
        elif "${" in name or name == "???":
            why = "LLaMA-Factory reads its file with OmegaConf, to which ${...} and ??? mean something"
        else:
            continue
        raise ValueError(f"{why}, so {name!r} cannot be one; give its name in dataset_info.json as --path")
    settings = {
        "dataset": ",".join(entry.name for entry in entries),
        "mix_strategy": "interleave_under",
        "interleave_probs": ",".join(entry.text for entry in entries),
    }
    comment = (
        "# For LLaMA-Factory's training file. The names are those of dataset_info.json; examples are drawn.\n"
    )
    return comment + yaml_text(settings)


EXPORTERS.add(
    "llama-factory",
    Format("LLaMA-Factory: dataset, mix_strategy and interleave_probs of its training file", _llama_factory),
)

# --------------------------------------------------------------------------------------------------- Megatron-LM

# Megatron reads ``--data-args-path`` as words between white space, a weight and a prefix in turn
# (``get_blend_from_list`` of Megatron-Core), and cuts every prefix into training, validation and test by
# ``--split``. ``--per-split-data-args-path`` is a JSON file with such a list, or ``null``, for each of ``train``,
# ``valid`` and ``test``. A weight is a fraction of samples of equal length, as in mixwell, and must be positive.


def _blend(entries: Sequence[Entry]) -> str:
    for entry in entries:
        if entry.name.split() != [entry.name]:
            raise ValueError(
                f"Megatron reads this file as words, so {entry.name!r} cannot have white space; give another "
                "--path, or take --to megatron-per-split"
            )
    return "".join(f"{entry.text} {entry.name}\n" for entry in entries)


def _per_split(entries: Sequence[Entry]) -> str:
    for entry in entries:
        if entry.name.strip() != entry.name:
            raise ValueError(
                f"Megatron takes white space off both ends of {entry.name!r}; give another --path for it"
            )
    train = [word for entry in entries for word in (entry.text, entry.name)]
    return json_text({"train": train, "valid": None, "test": None})


def _prefix(path: str) -> str | None:
    """Return the prefix of a dataset that Megatron has preprocessed: ``PREFIX.bin`` next to ``PREFIX.idx``."""
    file = Path(path)
    return str(file.with_suffix("")) if file.suffix == ".bin" and file.with_suffix(".idx").is_file() else None


EXPORTERS.add("megatron", Format("Megatron-LM: a blend for --data-args-path", _blend, path_from_data=_prefix))
EXPORTERS.add(
    "megatron-per-split",
    Format(
        "Megatron-LM: JSON for --per-split-data-args-path; put your validation set into it",
        _per_split,
        path_from_data=_prefix,
    ),
)

# ---------------------------------------------------------------------------------------------------- torchtitan

# Since 0.3, ``InterleavedHuggingFaceTextDataLoader.Config`` takes sources with weights. It draws packed sequences,
# so that a weight is a fraction of tokens, as in mixwell. A source is a name in the registry ``DATASETS``, in
# small letters, and optionally another path for it; other names are registered as text in the column ``text`` of
# whatever ``datasets.load_dataset`` takes. (After 0.3, ``WeightedDataset`` takes the place of sources.)
TORCHTITAN = '''\
"""A mixture for torchtitan 0.3: import `dataloader` into your config, and give it to the trainer's."""

import os

from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HFDataSource, InterleavedHuggingFaceTextDataLoader

# The name of each dataset, its path (None for that of torchtitan's own registry), and its share of the tokens.
SOURCES = [
%s]


def load_text(path):
    if "*" not in path and not os.path.isfile(path):  # a folder, or a dataset of the Hub
        return load_dataset(path, split="train", streaming=True)
    kind = next((kind for kind in ("json", "parquet") if "." + kind in path), "text")
    return load_dataset(kind, data_files=path, split="train", streaming=True)


def text_of(sample):
    return sample["text"]


for name, path, _ in SOURCES:
    DATASETS.setdefault(
        name.lower(), DatasetConfig(path=path or name, loader=load_text, sample_processor=text_of)
    )

dataloader = InterleavedHuggingFaceTextDataLoader.Config(
    sources=[
        HFDataSource(dataset=name, dataset_path=path, weight=weight) for name, path, weight in SOURCES
    ]
)
'''


def _torchtitan(entries: Sequence[Entry]) -> str:
    return TORCHTITAN % "".join(
        f"    ({entry.domain!r}, {entry.path!r}, {entry.text}),\n" for entry in entries
    )


EXPORTERS.add(
    "torchtitan",
    Format(
        "torchtitan 0.3: a Python module with the config of its interleaving loader",
        _torchtitan,
        path_from_data=lambda path: path,
    ),
)
