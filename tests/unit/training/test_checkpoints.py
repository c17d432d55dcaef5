"""Checkpoints are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from helpers.commands import mixwell
from helpers.text_configs import write_config
from mixwell.training import checkpoints
from mixwell.training.checkpoints import Checkpoint, DamagedError
from mixwell.utils import files


def at(step: int) -> Checkpoint:
    model, training = {"w": torch.full((3, 2), float(step))}, {"optimizer.0.step": torch.tensor(float(step))}
    return Checkpoint(step, model, training, {"sampler": {"taken": step}})


def test_round_trip_and_only_last_are_kept(tmp_path: Path) -> None:
    for step in (3, 12, 100):
        checkpoints.write_checkpoint(tmp_path, at(step), keep=2)
    assert [path.name for path in checkpoints.list_all(tmp_path)] == ["step-00000012", "step-00000100"]
    found, wrong = checkpoints.newest(tmp_path)
    assert found is not None
    assert not wrong
    assert found.step == 100
    assert torch.equal(found.model["w"], at(100).model["w"])
    assert torch.equal(found.training["optimizer.0.step"], torch.tensor(100.0))
    assert found.plain == {"sampler": {"taken": 100}}


@pytest.mark.parametrize("name", [checkpoints.MODEL, checkpoints.TRAINING, checkpoints.STATE])
@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
def test_damaged_checkpoint_falls_back_to_previous(name: str, damage: str, tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoints.write_checkpoint(tmp_path, at(step), keep=2)
    path = tmp_path / "step-00000002" / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 255]) + content[-2:])
    else:
        path.unlink()
    found, wrong = checkpoints.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    if not (name == checkpoints.STATE and damage == "missing"):  # that one is no checkpoint at all
        assert len(wrong) == 1
        assert "step-00000002" in wrong[0]
    checkpoints.tidy(tmp_path, after=1)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_all_damaged_checkpoints_raise(tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, at(1), keep=2)
    (tmp_path / "step-00000001" / checkpoints.MODEL).write_bytes(b"")
    with pytest.raises(DamagedError, match="no checkpoint in .* can be read .* remove them to start"):
        checkpoints.newest(tmp_path)


def test_other_format_is_not_reported_as_damage(tmp_path: Path) -> None:
    path = checkpoints.write_checkpoint(tmp_path, at(1), keep=2) / checkpoints.STATE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version of mixwell reads format 4"):
        checkpoints.newest(tmp_path)


def test_leftovers_of_killed_process_are_removed(tmp_path: Path) -> None:
    whole = checkpoints.write_checkpoint(tmp_path, at(1), keep=2)
    shutil.copytree(whole, tmp_path / "step-00000002.part")
    half = tmp_path / "step-00000003"
    shutil.copytree(whole, half)
    (half / checkpoints.STATE).unlink()
    found, wrong = checkpoints.newest(tmp_path)
    assert found is not None
    assert (found.step, wrong) == (1, [])
    checkpoints.tidy(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_pruning_follows_no_links(tmp_path: Path) -> None:
    elsewhere = checkpoints.write_checkpoint(tmp_path / "elsewhere", at(1), keep=2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "step-00000001").symlink_to(elsewhere)
    (mine / "step-00000009.part").symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    for step in (2, 3, 4):
        checkpoints.write_checkpoint(mine, at(step), keep=1)
    checkpoints.tidy(mine, after=3)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    assert checkpoints.list_all(mine) == []


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "checkpoints/step-00000001"])
def test_links_out_of_run_folder_are_refused(name: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    (run / name).parent.mkdir(parents=True)
    other.mkdir()
    (run / name).symlink_to(other)
    with pytest.raises(OSError, match="is a symbolic link to .* outside of"):
        files.refuse_links_out(run, ["metrics.jsonl", "checkpoints"])
    (run / name).unlink()
    (run / "inside").mkdir()
    (run / name).symlink_to(run / "inside")
    files.refuse_links_out(run, ["metrics.jsonl", "checkpoints"])


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "fidelity.json", "checkpoints"])
@pytest.mark.parametrize("words", [["resume", "run", "--no-report"], ["fidelity", "run", "--steps", "1"]])
def test_commands_refuse_links_out_of_run_folder(words: list[str], name: str, tmp_path: Path) -> None:
    write_config(tmp_path, steps=4, mixer={"horizon": 2})
    mixwell("run", "tiny.yaml", "--out", "run", "--no-report", cwd=tmp_path)
    (tmp_path / "run/fidelity.json").write_text("[]")
    (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    _, err = mixwell(*words, cwd=tmp_path, status=2)
    assert f"{name} is a symbolic link to" in err


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(4, 4, bias=False)
            self.other = torch.nn.Linear(4, 4, bias=False)
            self.other.weight = self.one.weight

    model, copy = Tied(), Tied()
    tensors = checkpoints.unique(model.state_dict())
    assert list(tensors) == ["one.weight"]
    checkpoints.load_model(copy, tensors)
    assert torch.equal(copy.other.weight, model.one.weight)
    with pytest.raises(ValueError, match="another model; it differs in one.weight"):
        checkpoints.load_model(copy, {"one.weight": torch.zeros(3)})


def test_tensors_that_share_memory_are_kept(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    one = Checkpoint(1, {"whole": whole, "part": whole[:2]}, {}, {})
    read = checkpoints.read_checkpoint(checkpoints.write_checkpoint(tmp_path, one, keep=1))
    assert torch.equal(read.model["whole"], whole)
    assert torch.equal(read.model["part"], whole[:2])
