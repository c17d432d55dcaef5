"""torchtitan: its interleaving loader, which is configured in Python.

Since 0.3, ``InterleavedHuggingFaceTextDataLoader.Config`` takes sources with weights. It draws packed sequences,
so that a weight is a fraction of tokens, as in mixwell. A source is a name in the registry ``DATASETS``, in small
letters, and optionally another path for it; names that are not there are registered as text in the column
``text`` of whatever ``datasets.load_dataset`` takes. (After 0.3, ``WeightedDataset`` takes the place of sources.)
"""

from __future__ import annotations

from collections.abc import Sequence

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format

TEMPLATE = '''\
"""A mixture for torchtitan 0.3: import `dataloader` into your config, and give it to the trainer's."""

from datasets import load_dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HFDataSource, InterleavedHuggingFaceTextDataLoader

# The name of each dataset, its path (None for that of torchtitan's own registry), and its share of the tokens.
SOURCES = [
%s]


def load_text(path):
    return load_dataset(path, split="train", streaming=True)


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


def _write(entries: Sequence[Entry]) -> str:
    return TEMPLATE % "".join(f"    ({entry.domain!r}, {entry.path!r}, {entry.text}),\n" for entry in entries)


EXPORTERS.register(
    "torchtitan",
    Format("torchtitan 0.3: a Python module with the config of its interleaving loader", _write),
)
