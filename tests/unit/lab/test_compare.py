"""`mixwell compare`: fair in compute, seeds and data, stopped and continued, clear about who cannot take part."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import commands
from helpers.text_configs import WORDS, write_config
from mixwell.lab import problems, tables
from mixwell.lab.compare import budgets, results
from mixwell.lab.compare.variants import choose, parse_horizons
from mixwell.lab.tables import Row
from mixwell.methods import base as methods_base
from mixwell.training import checkpoints, config_io, metrics, mixture_file

PROXIES = {"proxies": 4, "proxy_steps": 2, "samples": 200, "top": 5}
COMPARE = {
    "regmix": {"options": PROXIES},
    "own": {"method": "fixed", "weights": {"letters": 2, "numbers": 1, "marks": 1}},
}
METHODS = "uniform,mixwell,group-dro,doge,regmix,own"
VARIANTS = [
    "uniform",
    "mixwell",
    "mixwell T=1",
    "group-dro",
    "group-dro T=5",
    "doge",
    "doge T=5",
    "regmix",
    "own",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison of tiny runs, and what was printed."""
    folder = tmp_path_factory.mktemp("compare")
    write_config(folder, compare=COMPARE)
    printed, _ = commands.mixwell(*arguments(seeds=2), cwd=folder)
    return folder / "out", printed


def arguments(*, seeds: int, methods: str = METHODS) -> list[str]:
    return [
        *("compare", "tiny.yaml", "--methods", methods, "--seeds", str(seeds), "--horizons", "own,1,5"),
        *("--out", "out", "--workers", "2"),
    ]


def test_all_variants_are_printed_and_drawn(compared: tuple[Path, str]) -> None:
    out, printed = compared
    rows = tables.read(out / results.RUNS)
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (variant, seed) for variant in VARIANTS for seed in (0, 1)
    ]
    assert {str(row["variant"]): row["entry"] for row in rows}["doge T=5"] == "doge"
    assert [row["horizon"] for row in rows if row["seed"] == 0] == ["", 5, 1, 1, 5, 1, 5, "", ""]
    assert all(0 < float(row["test_loss"]) < 6 and float(row["seconds"]) > 0 for row in rows)
    assert all(variant in printed for variant in VARIANTS)
    assert "has the lowest mean test loss of 9 methods" in printed
    assert (out / "report.html").stat().st_size > 10_000
    assert not (out / results.FAILURES).exists()
    weights = tables.read(out / results.WEIGHTS)
    assert len(weights) == len(rows) * len(WORDS)
    kept = {
        str(row["domain"]): row["last"] for row in weights if row["variant"] == "own" and row["seed"] == 0
    }
    assert kept == pytest.approx({"letters": 0.5, "numbers": 0.25, "marks": 0.25})


def test_all_compute_is_charged(compared: tuple[Path, str]) -> None:
    """Worked out by hand for 24 steps: what each variant may train for, and what it computed in all."""
    found = {str(row["variant"]): row for row in tables.read(compared[0] / results.RUNS)}
    # T = 1: a validation gradient of one batch in each step. T = 5: of five batches (40 of the 40 rows or more).
    assert found["uniform"]["steps"] == found["group-dro"]["steps"] == found["own"]["steps"] == 24
    assert found["mixwell T=1"]["steps"] == 12
    # Four proxies of two steps come first, each evaluated on 16 rows: a third of two batches.
    assert found["regmix"]["steps"] == 13
    # A proxy of n steps with n validation gradients, then n steps.
    assert found["doge"]["steps"] == 8
    for row in found.values():
        assert row["budget"] == 24
        assert 0.8 * 24 < float(row["compute"]) <= 24


def test_runs_of_a_seed_share_initialization_and_rows(compared: tuple[Path, str]) -> None:
    runs = compared[0] / "runs"

    def first_loss(folder: Path) -> float:
        return next(iter(metrics.read_metrics(folder, "evaluation")))["losses"]["validation"]

    for seed in (0, 1):
        begun = {
            first_loss(runs / f"{variant}-{seed}")
            for variant in ("uniform", "mixwell", "group-dro", "own", "regmix")
        }
        assert len(begun) == 1
    assert first_loss(runs / "uniform-0") != first_loss(runs / "uniform-1")


def test_finished_comparison_is_not_retrained(compared: tuple[Path, str]) -> None:
    out, _ = compared
    before = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("metrics.jsonl")}
    rows = tables.read(out / results.RUNS)
    commands.mixwell(*arguments(seeds=2), "--no-figures", cwd=out.parent)
    drawn, _ = commands.mixwell("report", "out", "--out", "again", cwd=out.parent)
    assert drawn.split()[-1] == "again/report.html"
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("metrics.jsonl")} == before
    assert tables.read(out / results.RUNS) == rows


def test_killed_comparison_resumes_to_same_results(compared: tuple[Path, str], tmp_path: Path) -> None:
    def losses(out: Path) -> list[Row]:
        keep = ("variant", "seed", "steps", "compute", "test_loss")
        return [
            {key: row[key] for key in keep} for row in tables.read(out / results.RUNS) if row["seed"] == 0
        ]

    write_config(tmp_path, compare=COMPARE)
    process = commands.command(*arguments(seeds=1), "--no-figures", cwd=tmp_path)
    while not list((tmp_path / "out").glob("runs/*/mixture.json")) and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=commands.PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode in (0, 130)  # 0: it was quicker than the signal
    commands.mixwell(*arguments(seeds=1), "--no-figures", cwd=tmp_path)
    assert losses(tmp_path / "out") == losses(compared[0])


def test_steps_paid_for_validation_are_next_to_the_loss(compared: tuple[Path, str]) -> None:
    """24 steps for all; with T=1 a validation gradient costs as much as a step, so half of them are trained."""
    out, printed = compared
    head, *lines = printed[printed.index("method") :].splitlines()
    assert head.split().index("steps") == head.split().index("loss") + 1
    line = next(one for one in lines if one.lstrip().startswith("mixwell T=1"))
    assert "12 of 24" in line
    assert "12 of 24" in (out / "report.html").read_text()
    rows = tables.read(out / results.RUNS)
    columns = list(rows[0])
    assert columns[columns.index("steps") - 1].endswith("_loss")
    for row in rows:
        assert float(row["other_steps"]) == pytest.approx(
            float(row["compute"]) - float(row["steps"]), abs=2e-3
        )
    found = {row["variant"]: row for row in rows}
    assert found["mixwell T=1"]["other_steps"] == pytest.approx(12)
    assert found["uniform"]["other_steps"] == 0


def test_equal_steps(tmp_path: Path) -> None:
    write_config(tmp_path)
    commands.mixwell(
        "compare", "tiny.yaml", "--methods", "uniform,doge", "--seeds", "1", "--equal", "steps", "--out", "out",
        "--no-figures", cwd=tmp_path,
    )  # fmt: skip
    rows = {str(row["variant"]): row for row in tables.read(tmp_path / "out" / results.RUNS)}
    assert rows["doge"]["steps"] == rows["uniform"]["steps"] == 24
    assert rows["doge"]["compute"] == 72
    assert rows["doge"]["budget"] == ""


def test_comparison_uses_test_set_without_validation_set(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    plain = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**plain, "validation": None, "mixer": {"method": "uniform"}}))
    args = ["compare", "tiny.yaml", "--methods", "uniform,group-dro,mixwell", "--seeds", "1", "--out", "out"]
    _, error = commands.mixwell(*args, cwd=tmp_path, status=2)
    assert "mixwell needs a validation set" in error
    args[3] = "uniform,group-dro"
    commands.mixwell(*args, cwd=tmp_path)
    assert len(tables.read(tmp_path / "out" / results.RUNS)) == 2
    assert (tmp_path / "out" / "report.html").exists()
    assert not (tmp_path / "out" / results.CURVES).exists()


def test_failed_runs_are_reported_with_reason(tmp_path: Path) -> None:
    write_config(tmp_path, optimizer={"lr": 1e30, "clip_norm": None, "kind": "sgd"})
    _, error = commands.mixwell(
        "compare", "tiny.yaml", "--methods", "uniform", "--seeds", "1", "--out", "out", cwd=tmp_path, status=2
    )
    assert "the run uniform-0 failed" in error
    [row] = tables.read(tmp_path / "out" / results.FAILURES)
    assert (row["variant"], row["seed"]) == ("uniform", 0)


def test_variants_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, compare={"pike-long": {"method": "pike", "horizon": 4}})
    _, error = commands.mixwell(
        "compare",
        "tiny.yaml",
        "--methods",
        "pike,pike-long",
        "--horizons",
        "own,long",
        cwd=tmp_path,
        status=2,
    )
    assert "would share runs/pike-long-0; rename it in `compare`" in error


def test_run_directory_is_not_overwritten(compared: tuple[Path, str]) -> None:
    out, _ = compared
    _, error = commands.mixwell(*arguments(seeds=1)[:-4], "--out", "out/runs/own-0", cwd=out.parent, status=2)
    assert "is the directory of a training run; choose another --out" in error


# ------------------------------------------------------------------------------------------------ who takes part


def read(folder: Path, **changes: Any) -> Any:
    return config_io.read_config(write_config(folder, **changes))


def test_all_includes_methods_and_variants(tmp_path: Path) -> None:
    chosen, refused = choose(read(tmp_path, compare=COMPARE), ["all"])
    names = [one.name for one in chosen]
    assert {"uniform", "regmix", "tandem", "own"} <= set(names)
    assert "fixed" not in names  # without weights of one's own it is uniform
    assert not refused


def test_default_horizon_is_run_once(tmp_path: Path) -> None:
    chosen, _ = choose(read(tmp_path), ["group-dro", "mixwell"], parse_horizons("own, 1, long"))
    # The horizon of the config is of its method, mixwell; others have their authors'.
    assert [(one.name, one.config.mixer.horizon) for one in chosen] == [
        ("group-dro", "auto"), ("group-dro long", "long"), ("mixwell", 5), ("mixwell T=1", 1),
        ("mixwell long", "long"),
    ]  # fmt: skip


def test_all_skips_methods_with_missing_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(tmp_path, mixer={"method": "uniform", "horizon": "auto"})
    plain = config.model_dump(mode="json")
    plain["validation"] = None
    chosen, refused = choose(config_io.validate_config(plain), ["all"])
    assert {"uniform", "pike", "odm"} <= {one.name for one in chosen}
    assert set(refused) >= {"mixwell", "doge", "regmix"}
    assert refused["mixwell"].startswith("mixer.method: mixwell needs a validation set")
    with pytest.raises(ValueError, match="mixwell needs a validation set"):
        choose(config_io.validate_config(plain), ["mixwell", "uniform"])
    monkeypatch.setattr(methods_base, "find_spec", lambda name: None)
    _, refused = choose(config, ["all"])
    assert (
        refused["tikmix-d"] == "tikmix-d needs scipy, which is not installed: pip install 'mixwell[search]'"
    )


@pytest.mark.parametrize(
    ("changes", "args", "said"),
    [
        ({}, ["--methods", "dogee"], "there is no method 'dogee'; did you mean doge?"),
        ({"compare": COMPARE}, ["--methods", "zzz"], " (`compare` in the config has own, regmix)"),
        ({}, ["--methods", "regmix"], "regmix cannot train a single step within 24"),
        ({}, ["--seeds", "0"], "a comparison needs at least 1 seed, got 0"),
        ({}, ["--equal", "time"], "--equal must be compute or steps, got 'time'"),
        ({}, ["--horizons", "0"], "--horizons takes own, long and whole numbers with commas between, got '0'"),
        ({}, ["--methods", "doge", "--set", "mixer.options={nu: 1}"], "mixwell has no such option"),
        ({"compare": {"doge": {"options": {"nu": 1}}}}, ["--methods", "doge"], "doge has no such option; it has"),
        ({"compare": {"x": {"mehtod": "doge"}}}, ["--methods", "x"], "there is no method 'x'"),
        ({"validation": None, "test": None, "mixer": {"method": "uniform"}}, [], "needs something to compare by"),
        ({"domains": {"a": "letters.txt"}, "mixer": {"method": "fixed"}}, ["--methods", "pike"], "2 domains or"),
    ],
)  # fmt: skip
def test_invalid_input_prints_one_line_without_training(
    changes: dict[str, Any], args: list[str], said: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path)
    plain = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**plain, **changes}))
    _, error = commands.mixwell("compare", "tiny.yaml", *args, "--out", "out", cwd=tmp_path, status=2)
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "runs").exists()


def test_missing_config_fails(tmp_path: Path) -> None:
    _, error = commands.mixwell("compare", "nothing.yaml", cwd=tmp_path, status=2)
    assert "there is no config nothing.yaml" in error
    assert ", ".join(problems.PROBLEMS) in error


# ---------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("method", ["uniform", "mixwell", "doge", "doremi", "tandem", "implicit-neumann"])
@pytest.mark.parametrize("budget", [30, 57.5])
def test_budget_is_not_exceeded(method: str, budget: float, tmp_path: Path) -> None:
    config = read(tmp_path, mixer={"method": method, "horizon": 5}, steps=60)
    sizes = {"letters": 100, "numbers": 100, "marks": 100}
    found = budgets.affordable(config, sizes, 50, budget=budget)
    assert budgets.cost(found, sizes, 50) <= budget
    if found.steps < int(budget):
        plain = found.model_dump(mode="json")
        more = config_io.validate_config({**plain, "steps": found.steps + 1})
        assert budgets.cost(more, sizes, 50) > budget


def test_run_of_comparison_has_mixture_and_checkpoint(compared: tuple[Path, str]) -> None:
    """A run of a comparison is a run like any other: it has its artifact and a checkpoint."""
    run = compared[0] / "runs" / "mixwell-0"
    assert mixture_file.read_mixture(run)["finished"]
    assert checkpoints.newest(run / "checkpoints")[0] is not None
