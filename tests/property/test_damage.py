"""A flipped bit in a file that a later run trusts is found: it never gives another result in silence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import mixwell
from helpers.toy_problems import names, two_layer
from mixwell.data.sources import TextFiles
from mixwell.data.tokenization import tokenize
from mixwell.data.tokenizer import ByteTokenizer
from mixwell.mixer import state
from mixwell.training import checkpoints
from mixwell.training.checkpoints import Checkpoint
from mixwell.utils import checksums
from mixwell.utils.checksums import DamagedError

FLIPS = 400


def flipped(path: Path, *, count: int = FLIPS, seed: int = 0) -> Iterator[int]:
    """Flip one random bit of a file at a time; yield its position, and put it back."""
    content = path.read_bytes()
    rng = np.random.default_rng(seed)
    size = 8 * len(content)
    for place in rng.choice(size, min(count, size), replace=False).tolist():
        changed = bytearray(content)
        changed[place // 8] ^= 1 << (place % 8)
        path.write_bytes(changed)
        yield place
    path.write_bytes(content)


def small_mixer() -> mixwell.Mixer:
    model = two_layer(0, hidden=2, dtype=torch.float32)
    return mixwell.Mixer(model, torch.optim.SGD(model.parameters(), lr=0.1), names(2), budget=4, horizon=2)


def checkpoint_in(folder: Path) -> Path:
    plain = {"sampler": {"taken": 12, "names": ["a", "b"]}, "seconds": 1.25, "config": {"steps": 20}}
    tensors = {"w": torch.arange(6.0)}
    return checkpoints.write_checkpoint(folder, Checkpoint(7, tensors, {"m": torch.ones(3)}, plain), keep=2)


@pytest.mark.parametrize("name", [checkpoints.STATE, checkpoints.MODEL, checkpoints.TRAINING])
def test_flipped_bit_of_checkpoint_is_damage(name: str, tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path)
    for place in flipped(path / name):
        with pytest.raises(DamagedError, match=name):
            checkpoints.read_checkpoint(path)
            pytest.fail(f"bit {place} of {name} was not noticed")
    assert checkpoints.read_checkpoint(path).step == 7


@pytest.mark.parametrize(
    "tamper",
    [
        lambda plain: plain | {"checksums": {}},
        lambda plain: plain | {"checksum": ""},
        lambda plain: {key: value for key, value in plain.items() if key != "checksum"},
        lambda plain: {key: value for key, value in plain.items() if key != "checksums"},
        lambda plain: plain | {"checksums": None},
        lambda plain: plain | {"checksum": None},
    ],
)
def test_missing_or_emptied_checksum_is_damage(tamper: Callable[..., object], tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path) / checkpoints.STATE
    path.write_text(json.dumps(tamper(json.loads(path.read_text()))) + "\n")
    with pytest.raises(DamagedError, match="checksum"):
        checkpoints.read_checkpoint(path.parent)


@pytest.mark.parametrize("kept", [{}, {checkpoints.MODEL: "right"}])
def test_sealed_state_without_all_checksums_is_damage(kept: dict[str, str], tmp_path: Path) -> None:
    path = checkpoint_in(tmp_path) / checkpoints.STATE
    plain = checksums.read_sealed(path)
    right = plain["checksums"]
    path.write_text(checksums.sealed(plain | {"checksums": {name: right[name] for name in kept}}))
    with pytest.raises(DamagedError, match="checksum"):
        checkpoints.read_checkpoint(path.parent)


def test_flipped_bit_of_mixer_state_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "mixer.safetensors"
    mixer = small_mixer()
    mixer.save(path)
    for place in flipped(path):
        with pytest.raises(ValueError, match="mixer.safetensors"):
            state.read(path)
            pytest.fail(f"bit {place} was not noticed")
    mixer.load(path)


def test_mixer_state_without_checksum_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "mixer.safetensors"
    small_mixer().save(path)
    found = dict(state.read(path)["tensors"])
    save_file(found, path)
    with pytest.raises(ValueError, match="no checksum"):
        state.read(path)


@pytest.mark.parametrize("suffix", [".bin", ".npz", ".json"])
@pytest.mark.filterwarnings("ignore:the cached tokens")
def test_flipped_bit_of_cached_tokens_is_repaired(suffix: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 40)
    source, tokenizer = TextFiles([text], base=tmp_path), ByteTokenizer()
    made = tokenize(source, tokenizer, cache=tmp_path / "cache")
    right = {one: made.path.with_suffix(one).read_bytes() for one in (".bin", ".npz", ".json")}
    for place in flipped(made.path.with_suffix(suffix), count=40):
        found = tokenize(source, tokenizer, cache=tmp_path / "cache")
        assert found == made
        for one in (".bin", ".json"):
            assert made.path.with_suffix(one).read_bytes() == right[one], f"bit {place} of {suffix}"
        assert np.array_equal(found.array(), np.frombuffer(right[".bin"], found.dtype))


def test_damaged_cache_is_reported(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 40)
    source, tokenizer = TextFiles([text], base=tmp_path), ByteTokenizer()
    made = tokenize(source, tokenizer, cache=tmp_path / "cache")
    content = made.path.read_bytes()
    made.path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.warns(UserWarning, match=r"the cached tokens of .* are damaged .*tokenized again"):
        tokenize(source, tokenizer, cache=tmp_path / "cache")
    assert made.path.read_bytes() == content


def test_blocks_and_threads_give_checksum_of_running_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 64)
    path, content = tmp_path / "file", np.random.default_rng(0).bytes(1000)
    path.write_bytes(content)
    for length in (0, 1, 63, 64, 65, 640, 1000):
        running = checksums.RunningChecksum()
        for start in range(0, length, 37):
            running.update(content[start : min(start + 37, length)])
        assert checksums.file_checksum(path, length=length) == running.hexdigest()
    seen = {checksums.file_checksum(path, length=length) for length in range(1001)}
    assert len(seen) == 1001
    with pytest.raises(DamagedError, match="has 1000 bytes, fewer than the 1001"):
        checksums.file_checksum(path, length=1001)


def test_zeros_are_covered_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "BLOCK", 64)
    path, content = tmp_path / "file", np.random.default_rng(0).bytes(300)
    path.write_bytes(content)
    found = checksums.file_checksum(path, zeros=range(60, 140))
    path.write_bytes(content[:60] + bytes(80) + content[140:])
    assert found == checksums.file_checksum(path)
