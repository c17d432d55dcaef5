"""Pages of runs that did not come far, or did not go well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from helpers.text_configs import write_config
from mixwell.report import runs
from mixwell.training import config_io
from mixwell.training.run import Run


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIXWELL_CACHE", str(tmp_path / "cache"))


def train(folder: Path, name: str, *, steps: int) -> Path:
    """A run that is asked to stop after some steps."""
    config = config_io.read_config(write_config(folder))
    asked = iter(range(steps + 1))
    run = Run(
        config,
        folder / name,
        console=Console(quiet=True),
        stopping=lambda: next(asked) == steps,
    )
    with pytest.raises(InterruptedError):
        run.start()
    return folder / name


@pytest.mark.usefixtures("cache")
def test_interrupted_runs(tmp_path: Path) -> None:
    at_once, early = train(tmp_path, "at-once", steps=0), train(tmp_path, "early", steps=7)
    assert "<td>0 of 24</td>" in runs.write_report([at_once], tmp_path / "one")[-1].read_text()
    page = runs.write_report([at_once, early], tmp_path / "two")[-1].read_text()
    assert "<td>0 of 24</td>" in page
    assert "<td>7 of 24</td>" in page
    assert page.count("<img") == 1 + 3 * 2 + 1  # only one has had a weight update


@pytest.mark.usefixtures("cache")
def test_nonfinite_losses_leave_gaps(tmp_path: Path) -> None:
    run = train(tmp_path, "early", steps=13)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("losses", "scores", "noise"):
            if key in line:
                line[key] = dict.fromkeys(line[key])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = runs.write_report([run], tmp_path / "one")[-1].read_text()
    assert "Validation loss" not in page.partition("<main>")[0]
    again = train(tmp_path, "again", steps=1)
    (again / "metrics.jsonl").write_text("")
    assert (
        "No run has a finite validation loss."
        in runs.write_report([run, again], tmp_path / "two")[-1].read_text()
    )
