"""Exported mixtures, read by the tools that they are for: their own code parses them, and draws by them.

The tools are large, and only what reads a mixture is run; `make peers` installs them without their dependencies.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from helpers.mixture_files import mixture
from mixwell.integrations.exporters import export

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

WEIGHTS = {"web": 0.1234567, "code": 0.6, "books, old": 0.2765433}
ROUNDED = [0.123457, 0.6, 0.276543]


def consumer(name: str, **environment: str) -> ModuleType:
    """A module of a tool, or a skipped test."""
    reason = f"{name} cannot be imported; `make peers` installs it"
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        for key, value in environment.items():
            patch.setenv(key, value)
        return pytest.importorskip(name, reason=reason, exc_type=ImportError)


def texts(folder: Path, *, rows: int | dict[str, int]) -> dict[str, str]:
    """Folders of JSON Lines, whose text is the number of the domain."""
    paths: dict[str, str] = {}
    for number, name in enumerate(WEIGHTS):
        (folder / name).mkdir()
        count = rows if isinstance(rows, int) else rows[name]
        line = json.dumps({"text": f"{number} " * 8}) + "\n"
        (folder / name / "train.jsonl").write_text(line * count)
        paths[name] = str(folder / name)
    return paths


def share_of(numbers: list[int]) -> list[float]:
    counts = Counter(numbers)
    return [counts[number] / len(numbers) for number in range(len(WEIGHTS))]


class Numbers:
    """Reads the texts above: every word is a token."""

    bos_id, eos_id, pad_token_id, eos_token_id = 8, 9, 9, 9

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]


def test_megatron_reads_the_blend() -> None:
    utils = consumer("megatron.core.datasets.utils")
    paths = {"web": "/data/web_text_document", "code": "30", "books, old": "/data/books,old"}
    text = export(mixture(WEIGHTS), to="megatron", paths=paths, note=print)
    # as `get_blend_and_blend_per_split` of Megatron-LM reads a --data-args-path file
    prefixes, weights = utils.get_blend_from_list(text.split())
    assert prefixes == list(paths.values())
    assert weights == ROUNDED
    assert utils.normalize(weights) == pytest.approx(ROUNDED, abs=1e-12)


def test_megatron_reads_the_blends_per_split() -> None:
    utils = consumer("megatron.core.datasets.utils")
    splits = json.loads(export(mixture(WEIGHTS), to="megatron-per-split", note=print))
    assert utils.get_blend_from_list(splits["train"]) == (list(WEIGHTS), ROUNDED)
    assert utils.get_blend_from_list(splits["valid"]) is None
    assert utils.get_blend_from_list(splits["test"]) is None


def test_megatron_reads_single_domain() -> None:
    utils = consumer("megatron.core.datasets.utils")
    text = export(mixture({"web": 1.0}), to="megatron", note=print)
    assert utils.get_blend_from_list(text.split()) == (["web"], [1.0])


def test_megatron_builds_the_blend() -> None:
    blended = consumer("megatron.core.datasets.blended_dataset")
    utils = consumer("megatron.core.datasets.utils")
    configs = consumer("megatron.core.datasets.blended_megatron_dataset_config")
    consumer("megatron.core.datasets.helpers_cpp")
    text = export(mixture({**WEIGHTS, "web": 0.1234566, "unused": 1e-7}), to="megatron-per-split", note=print)
    prefixes, weights = utils.get_blend_from_list(json.loads(text)["train"])
    assert len(prefixes) == 3  # it refuses weights of zero

    class Set:
        index_split, unique_identifiers = utils.Split.train, {}

        def __len__(self) -> int:
            return 10_000

    config = configs.BlendedMegatronDatasetConfig(
        random_seed=0, sequence_length=4, blend_per_split=[(prefixes, weights), None, None]
    )
    made = blended.BlendedDataset([Set() for _ in prefixes], weights, 10_000, config)
    assert share_of(made.dataset_index.tolist()) == pytest.approx(ROUNDED, abs=2e-4)


def test_torchtitan_samples_by_weights(tmp_path: Path) -> None:
    text_datasets = consumer("torchtitan.hf_datasets.text_datasets")
    paths = texts(tmp_path, rows=400)
    namespace: dict[str, Any] = {}
    exec(export(mixture(WEIGHTS), to="torchtitan", paths=paths, note=print), namespace)
    config = namespace["dataloader"]
    assert isinstance(config, text_datasets.InterleavedHuggingFaceTextDataLoader.Config)
    assert [source.weight for source in config.sources] == ROUNDED
    loader = config.build(dp_world_size=1, dp_rank=0, tokenizer=Numbers(), seq_len=4, local_batch_size=1)
    drawn = [int(inputs["input"][0, 0]) for (inputs, _), _ in zip(loader, range(1500), strict=False)]
    # a frequency of 1500 draws is off by 3 standard deviations of at most .013 each
    assert share_of(drawn) == pytest.approx(ROUNDED, abs=0.04)


def test_torchtitan_keeps_registered_datasets() -> None:
    text_datasets = consumer("torchtitan.hf_datasets.text_datasets")
    own = text_datasets.DATASETS["c4"]
    namespace: dict[str, Any] = {}
    exec(export(mixture({"C4": 0.5, "it's": 0.5}), to="torchtitan", note=print), namespace)
    assert text_datasets.DATASETS["c4"] is own
    assert namespace["dataloader"].sources[0].dataset_path is None
    path, _, _ = text_datasets._validate_dataset("it's", None)
    assert path == "it's"


def test_axolotl_accepts_each_entry() -> None:
    schemas = consumer("axolotl.utils.schemas.datasets", AXOLOTL_DO_NOT_TRACK="1")
    text = export(mixture(WEIGHTS), to="axolotl", note=print)
    entries = yaml.safe_load(text)["datasets"]
    known = set(schemas.SFTDataset.model_fields)
    for entry in entries:
        assert set(entry) <= known  # a key that it does not know would be dropped without a word
        parsed = schemas.SFTDataset(**entry)
        assert (parsed.path, parsed.type) == (entry["path"], "completion")
        assert (parsed.shards, parsed.shards_idx) == (entry.get("shards"), entry.get("shards_idx"))
    assert "weight" not in known, f"axolotl {version('axolotl')} has weights now: use them"


def test_axolotl_builds_mixture(tmp_path: Path) -> None:
    sft = consumer("axolotl.utils.data.sft", AXOLOTL_DO_NOT_TRACK="1")
    default = consumer("axolotl.utils.dict").DictDefault
    rows = {"web": 4000, "code": 3000, "books, old": 5000}
    paths = texts(tmp_path, rows=rows)
    text = export(mixture(WEIGHTS, rows=rows), to="axolotl", paths=paths, note=print)
    config = default({**yaml.safe_load(text), "seed": 42, "shuffle_merged_datasets": True})
    merged = sft.merge_datasets([_loaded(sft, entry, config) for entry in config.datasets], config)
    numbers = [int(text.split()[0]) for text in merged["text"]]
    assert share_of(numbers) == pytest.approx(ROUNDED, rel=0.05)
    assert Counter(numbers)[1] == 3000  # the scarcest is taken whole


def _loaded(sft: ModuleType, entry: Any, config: Any) -> Any:
    """The rows of an entry as axolotl chooses them; what it would do next, cutting into tokens, is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "get_dataset_wrapper", lambda dataset, **_: (dataset, None))
        return sft._load_and_process_single_dataset(entry, config, None, "train", config.seed)[0]


def test_llama_factory_reads_settings(tmp_path: Path) -> None:
    # the version check is of packages that have no part in this
    data_args = consumer("llamafactory.hparams.data_args", DISABLE_VERSION_CHECK="1")
    omegaconf, transformers = consumer("omegaconf"), consumer("transformers")
    datasets = consumer("datasets")
    for weights in (WEIGHTS, {"one: 'only' é": 1.0}):
        paths = {"books, old": "books"} if "books, old" in weights else {}
        file = tmp_path / "train.yaml"
        file.write_text(
            export(mixture(weights), to="llama-factory", paths=paths, note=print), encoding="utf-8"
        )
        plain = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file))  # as its `read_args` does
        (parsed,) = transformers.HfArgumentParser([data_args.DataArguments]).parse_dict(plain)
        assert parsed.dataset == [paths.get(name, name) for name in weights]
        assert parsed.mix_strategy == "interleave_under"
        assert parsed.interleave_probs == (ROUNDED if weights is WEIGHTS else [1.0])
        sets = [datasets.Dataset.from_dict({"n": np.full(2000, number)}) for number in range(len(weights))]
        mixed = datasets.interleave_datasets(sets, probabilities=parsed.interleave_probs, seed=0)
        expected = ROUNDED if weights is WEIGHTS else [1.0, 0, 0]
        assert share_of(list(mixed["n"])) == pytest.approx(expected, abs=0.04)
