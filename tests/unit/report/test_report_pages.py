"""Pages of runs that did not come far, or did not go well."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
from rich.console import Console

from helpers.report_runs import write_runs
from helpers.text_configs import write_config
from mixwell.report import runs
from mixwell.training import config_io
from mixwell.training.run import Run
from mixwell.training.verdict import read_verdict


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


def test_one_seed_each_means_nothing_and_several_have_an_interval(tmp_path: Path) -> None:
    folders = write_runs(tmp_path, domains=3, runs=2)
    lead = runs.write_report(folders, tmp_path / "one")[-1].read_text().partition("<main>")[0]
    assert "a difference of one seed each means nothing" in lead
    assert "--methods" in lead
    for folder in list(folders):
        config = config_io.read_config(folder / "config.yaml", ["seed=1"])
        again = tmp_path / f"{folder.name}-again"
        Run(config, again, console=Console(quiet=True)).start()
        folders.append(again)
    lead = runs.write_report(folders, tmp_path / "two")[-1].read_text().partition("<main>")[0]
    assert "95%, paired by seed, 2 seeds" in lead
    assert "The settings of " in lead
    assert ("The interval includes zero" in lead) == ("Next: " in lead)
    assert "means nothing" not in lead


def test_report_begins_with_the_verdict_that_is_printed(tmp_path: Path) -> None:
    (folder,) = write_runs(tmp_path, domains=3, runs=1)
    lead = html.unescape(runs.write_report([folder], tmp_path / "one")[-1].read_text().partition("<main>")[0])
    lead = lead.replace("<code>", "`").replace("</code>", "`")
    for paragraph in read_verdict(folder).paragraphs():
        assert paragraph in lead
