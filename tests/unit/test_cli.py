"""The command line, run as a user runs it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest


def mixwell(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mixwell", *args], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_quadratic_prints_checks_writes_and_draws(tmp_path: Path) -> None:
    done = mixwell("reproduce", "quadratic", "-R", "150", "-a", "1", "-T", "1,10,109,2000", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("-35.95", "2.4506", "T = [2000]", "R=150 > 111.1", "T=109: log-odds >= 0.4983"):
        assert part in done.stdout
    assert "FAILED" not in done.stdout
    folder = tmp_path / "runs" / "quadratic"
    assert (folder / "quadratic.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "quadratic.svg").read_text().lstrip().startswith("<?xml")
    with (folder / "quadratic.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["horizon"] == "10"]
    assert len(rows) == 101
    assert float(rows[-1]["log_odds"]) == pytest.approx(2.4506, abs=5e-5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-T", "0"], "--horizons must be whole numbers of at least 1 with commas between, got '0'"),
        (["-T", "a,b"], "got 'a,b'"),
        (["-T", "500", "-N", "10"], "no horizon of [500] is between 1 and the budget"),
        (["-R", "-1"], "the radius must be positive, got -1.0"),
        (["-a", "0"], "the step size must be positive, got 0.0"),
        (["--learning-rate", "1.5"], "the learning rate must be between 0 and 1, got 1.5"),
        (["-c", "0"], "the theorem's c must be positive, got 0.0"),
        (["-N", "0"], "the budget must be at least 1 step, got 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(args: list[str], message: str, tmp_path: Path) -> None:
    done = mixwell("reproduce", "quadratic", *args, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mixwell: ")
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_an_unwritable_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = mixwell("reproduce", "quadratic", "-T", "1", "--out", "file/inside", cwd=tmp_path)
    assert done.returncode == 2
    assert "file/inside" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version(tmp_path: Path) -> None:
    assert "reproduce" in mixwell("--help", cwd=tmp_path).stdout
    assert mixwell("--version", cwd=tmp_path).stdout.startswith("mixwell 0.")
    assert "--horizons" in mixwell("reproduce", "quadratic", "--help", cwd=tmp_path).stdout
