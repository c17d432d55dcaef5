"""Runs that a method trains first, in a folder that moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from helpers.text_configs import write_config
from mixwell.training import config_io
from mixwell.training.config import Config
from mixwell.training.run import Run, open_run

QUIET = Console(quiet=True)
STEPS = 6
SETTINGS = {
    "doremi": {"method": "doremi"},
    "doremi in the run": {"method": "doremi", "options": {"transfer": False}},
    "dynamic-loading": {"method": "dynamic-loading", "horizon": 2},
}


def stop_after(config: Config, folder: Path, steps: int) -> None:
    """Stop a run after a number of steps of all that it trains."""
    left = iter(range(steps - 1, -1, -1))
    with pytest.raises(InterruptedError):
        Run(config, folder, console=QUIET, stopping=lambda: next(left) == 0).start()


# A reference model is trained first, for as many steps as the run; then the proxy of `doremi`.
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("doremi", STEPS - 1),
        ("doremi", STEPS + 3),
        ("doremi", 2 * STEPS + 3),
        ("doremi in the run", STEPS + 3),
        ("dynamic-loading", STEPS + 3),
    ],
)
def test_run_moved_while_trials_train_resumes(name: str, steps: int, tmp_path: Path) -> None:
    output = {"checkpoint_every": 2, "evaluate_every": 6}
    path = write_config(tmp_path, steps=STEPS, mixer={"horizon": "auto", **SETTINGS[name]}, output=output)
    config = config_io.read_config(path)
    whole = Run(config, tmp_path / "whole", console=QUIET).start()
    stop_after(config, tmp_path / "run", steps)
    moved = tmp_path / "another" / "place"
    moved.parent.mkdir()
    (tmp_path / "run").rename(moved)
    resumed = open_run(moved, console=QUIET).resume()
    assert resumed.finished
    last = f"checkpoints/step-{STEPS:08d}/model.safetensors"
    mine, theirs = load_file(moved / last), load_file(tmp_path / "whole" / last)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert resumed.mixer.weights.average == whole.mixer.weights.average
    assert open_run(moved, console=QUIET).last().finished  # as `mixwell fidelity` opens it


def test_missing_reference_is_named(tmp_path: Path) -> None:
    settings = {"method": "doremi", "options": {"reference": "nothing"}}
    config = config_io.read_config(write_config(tmp_path, mixer=settings))
    with pytest.raises(ValueError, match="nothing is not the directory of a run with a checkpoint"):
        Run(config, tmp_path / "run", console=QUIET).start()


def test_reference_of_another_run_is_a_path(tmp_path: Path) -> None:
    path = write_config(tmp_path, steps=STEPS, mixer={"method": "fixed"})
    Run(config_io.read_config(path), tmp_path / "given", console=QUIET).start()
    settings = {"method": "doremi", "options": {"reference": "given", "transfer": False}}
    config = config_io.read_config(write_config(tmp_path, steps=STEPS, mixer={"horizon": "auto", **settings}))
    Run(config, tmp_path / "run", console=QUIET).start()
    assert not (tmp_path / "run/stages").exists()
    kept = json.loads((tmp_path / "run/checkpoints" / f"step-{STEPS:08d}" / "state.json").read_text())
    assert kept["config"]["mixer"]["options"]["reference"] == "given"
