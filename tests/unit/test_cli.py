"""The command line, run as a user runs it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from helpers.commands import mixwell as inside
from helpers.text_configs import write_config
from mixwell.cli import app
from mixwell.lab.mnist.mnist_data import Mnist


def mixwell(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mixwell", *args], capture_output=True, text=True, cwd=cwd, check=False
    )


def test_reproduce_quadratic(tmp_path: Path) -> None:
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
def test_invalid_input_prints_one_line_with_status_2(args: list[str], message: str, tmp_path: Path) -> None:
    _, err = inside("reproduce", "quadratic", *args, cwd=tmp_path, status=2)
    assert err.startswith("mixwell: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_unwritable_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = mixwell("reproduce", "quadratic", "-T", "1", "--out", "file/inside", cwd=tmp_path)
    assert done.returncode == 2
    assert "file/inside" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_version(tmp_path: Path) -> None:
    assert "reproduce" in mixwell("--help", cwd=tmp_path).stdout
    assert mixwell("--version", cwd=tmp_path).stdout.startswith("mixwell 0.")
    assert "--horizons" in mixwell("reproduce", "quadratic", "--help", cwd=tmp_path).stdout


def test_help_shows_defaults_and_full_summaries(tmp_path: Path) -> None:
    shown, _ = inside("run", "--help", cwd=tmp_path)
    assert "[default: runs/ and the config's name]" in " ".join(shown.split())
    for words in ([], ["reproduce"]):
        shown, _ = inside(*words, "--help", cwd=tmp_path)
        assert "..." not in shown.partition("Commands:")[2]


def every_command() -> list[list[str]]:
    """The words of each command and group, from the parser itself."""
    found: list[list[str]] = []

    def walk(command: Any, words: list[str]) -> None:
        found.append(words)
        for name, one in getattr(command, "commands", {}).items():
            walk(one, [*words, name])

    walk(get_command(app), [])
    return found


@pytest.mark.parametrize("words", every_command(), ids=" ".join)
def test_help_page(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown, _ = inside(*words, "-h", cwd=tmp_path)
    assert shown == inside(*words, "--help", cwd=tmp_path)[0]
    for noise in ("<", "{", "list[", "Path", "class", "function", "None"):
        assert noise not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    _, _, below = shown.partition("Examples:\n")
    lines = [line.split() for line in below.partition("\n\n")[0].splitlines()]
    assert lines
    for line in lines:
        if line[0] != "mixwell" or not words:
            continue  # torchrun; the first page explains its examples
        assert line[1 : len(words) + 1] == words or words == ["reproduce"]
        command: Any = get_command(app)
        rest = line[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        command.make_context("mixwell", rest)  # raises where it does not parse


@pytest.mark.parametrize("command", ["plan", "run", "tokenizer", "compare"])
def test_missing_default_config_names_init(command: str, tmp_path: Path) -> None:
    _, err = inside(command, cwd=tmp_path, status=2)
    assert "mixwell.yaml" in err
    assert "`mixwell init` writes one" in err
    assert len(err.strip().splitlines()) == 1


def test_default_config_is_read(tmp_path: Path) -> None:
    write_config(tmp_path).rename(tmp_path / "mixwell.yaml")
    assert "weight updates" in inside("plan", cwd=tmp_path)[0]
    inside("run", "--no-report", cwd=tmp_path)
    assert (tmp_path / "runs" / "mixwell" / "mixture.json").exists()


def test_unknown_option_is_named(tmp_path: Path) -> None:
    _, err = inside("run", "--outt", cwd=tmp_path, status=2)
    assert "No such option: --outt (Possible options: --out)" in err


SMALL = ["--channels", "2", "--batch-size", "4", "--train-size", "60", "--validation-size", "50"]


def test_reproduce_mnist(mnist_images: Mnist, tmp_path: Path) -> None:
    words = ["reproduce", "mnist", "--budget", "6,9", "--horizons", "1,3,9", "--seeds", "2", *SMALL]
    out, _ = inside(*words, cwd=tmp_path, cache=None)
    assert "10 runs, 0 of them done before" in out
    assert "left out where they are beyond the budget: T = [9]" in out
    assert "N = 9, c = 2, batch 4" in out
    folder = tmp_path / "runs" / "mnist"
    for name in ("panels", "weights", "examples"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.svg").exists()
    page = (folder / "report.html").read_text()
    assert "mixwell reproduce mnist --budget 6,9" in page
    assert "://" not in page.replace("http://www.w3.org", "")
    with (folder / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["budget"], r["horizon"], r["seed"]) for r in rows][:3] == [
        ("6", "1", "0"),
        ("6", "1", "1"),
        ("6", "3", "0"),
    ]
    again, _ = inside(*words, "--no-figures", cwd=tmp_path, cache=None)
    assert "10 runs, 10 of them done before" in again
    inside("report", "runs/mnist", "runs/mnist", "--out", "both", cwd=tmp_path)
    assert (tmp_path / "both" / "panels.png").exists()


def test_reproduce_bounds(tmp_path: Path) -> None:
    words = ["reproduce", "bounds", "--seeds", "2", "--copies", "2", "--decades", "0.5"]
    out, _ = inside(*words, cwd=tmp_path)
    assert "they all hold" in out
    assert "noisy quadratic, noisy gradients: law T = a (N log N)^b; b measured " in out
    folder = tmp_path / "runs" / "bounds"
    for name in ("theorem", "horizons"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "they all hold" in (folder / "report.html").read_text()
    with (folder / "fits.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    inside("report", "runs/bounds", "--out", "again", cwd=tmp_path)
    assert (tmp_path / "again" / "report.html").read_text() == (folder / "report.html").read_text()
    before = (folder / "measurements.csv").read_text()
    again, _ = inside(*words[:-1], "1", "--no-figures", cwd=tmp_path)
    assert "66 measurements, 56 of them done before" in again
    assert set(before.splitlines()) < set((folder / "measurements.csv").read_text().splitlines())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["mnist", "--horizons", "2000"], "no horizon of [2000] is within a budget of [1000] steps"),
        (["mnist", "--budget", "many"], "--budget must be whole numbers of at least 1"),
        (["mnist", "--noise-rate", "2"], "noise_rate must be between 0 and 1, got 2.0"),
        (["mnist", "--seeds", "0"], "a sweep needs at least 1 seed, got 0"),
        (["mnist", "--workers", "0"], "a sweep needs at least 1 worker, got 0"),
        (["mnist", "--engine", "dask"], "the engine must be local or ray, got 'dask'"),
        (
            ["mnist", "--ray-address", "auto"],
            "--ray-address auto is for --engine ray, and the engine is local",
        ),
        (
            ["bounds", "--engine", "ray", "--ray-address", "ray://head:1"],
            "is auto, or host:port of its head, as in 10.0.0.1:6379; got 'ray://head:1'",
        ),
        (["mnist", "--quick", "--channels", "0"], "channels must be at least 1, got 0"),
        (["mnist", "--horizons", ""], "--horizons must be whole numbers"),
        (["bounds", "--quick", "--decades", "9"], "0.5 to 4 decades, got 3, 4 and 9"),
        (["bounds", "--seeds", "1"], "at least 2 seeds"),
    ],
)
def test_invalid_sweep_input_prints_one_line(args: list[str], message: str, tmp_path: Path) -> None:
    _, err = inside("reproduce", *args, cwd=tmp_path, status=2)
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_report_without_runs_fails(tmp_path: Path) -> None:
    _, err = inside("report", tmp_path, cwd=tmp_path, status=2)
    assert "has no results: there is none of metrics.jsonl, runs.csv, compare.csv, measurements.csv" in err
    _, err = inside("report", "a", "b", cwd=tmp_path, status=2)
    assert "a has no results" in err
