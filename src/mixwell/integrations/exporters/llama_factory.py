"""LLaMA-Factory: three settings of its training file.

The names are those of ``dataset_info.json``. LLaMA-Factory hands ``interleave_probs`` to ``interleave_datasets``
before it cuts text into tokens, so they count examples. ``interleave_under`` ends an epoch when the first dataset
ends, so that nothing is repeated and the mixture holds to the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from mixwell.integrations.exporters.base import EXPORTERS, Entry, Format
from mixwell.integrations.exporters.plain import yaml_text

COMMENT = (
    "# For LLaMA-Factory's training file. The names are those of dataset_info.json; examples are drawn.\n"
)


def _write(entries: Sequence[Entry]) -> str:
    for entry in entries:
        _check(entry.name)
    settings = {
        "dataset": ",".join(entry.name for entry in entries),
        "mix_strategy": "interleave_under",
        "interleave_probs": ",".join(entry.text for entry in entries),
    }
    return COMMENT + yaml_text(settings)


def _check(name: str) -> None:
    if "," in name:
        why = "LLaMA-Factory separates the names of datasets by commas"
    elif name.strip() != name:
        why = "LLaMA-Factory takes white space off both ends of a dataset's name"
    elif "${" in name or name == "???":
        why = "LLaMA-Factory reads its file with OmegaConf, to which ${...} and ??? mean something"
    else:
        return
    raise ValueError(f"{why}, so {name!r} cannot be one; give its name in dataset_info.json as --path")


EXPORTERS.register(
    "llama-factory",
    Format("LLaMA-Factory: dataset, mix_strategy and interleave_probs of its training file", _write),
)
