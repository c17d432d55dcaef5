"""Runs in several processes: the same as in one, stopped together, and continued by any number of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from helpers.commands import PATIENCE
from helpers.distributed_training import in_processes, train_runs
from helpers.text_configs import lines, write_config

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
STEPS = 14
WAYS: dict[str, dict[str, Any]] = {
    "projected": {},
    "dense": {"mixer": {"traces": "dense"}},
    "equal": {"batch": {"rows": 12, "counts": "equal", "micro_rows": 2}, "mixer": {"traces": "dense"}},
    "losses": {"mixer": {"method": "group-dro"}},
}


def settings(folder: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    config = write_config(folder, batch={"rows": 12}, steps=STEPS)
    plain = yaml.safe_load(config.read_text()) | {"base": str(folder)}
    for change in changes:
        for key, value in change.items():
            plain[key] = {**plain.get(key, {}), **value}
    return plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    both: list[tuple[dict[str, Any], str, int | None]] = []
    for name, way in WAYS.items():
        train_runs([(settings(folder, way), str(folder / f"{name}-one"), None)])
        both.append((settings(folder, way), str(folder / f"{name}-ddp"), None))
    fsdp = {"parallel": {"strategy": "fsdp"}}
    for name in ("projected", "dense", "equal"):
        both.append((settings(folder, WAYS[name], fsdp), str(folder / f"{name}-fsdp"), None))
    dense = settings(folder, WAYS["dense"])
    train_runs([(dense, str(folder / "one-moved"), 7)])
    shutil.copytree(folder / "one-moved", folder / "one-moved-2")
    both.append((settings(folder, WAYS["dense"], fsdp), str(folder / "one-moved-2"), None))
    for name, way in (("ddp", {}), ("fsdp", fsdp)):
        plain = settings(folder, WAYS["dense"], way)
        both += [(plain, str(folder / f"{name}-stopped"), 5), (plain, str(folder / f"{name}-moved"), 5)]
        both.append((plain, str(folder / f"{name}-stopped"), None))
    # As many processes, which share the model in another way.
    both += [(dense, str(folder / "ddp-moved-2"), 5)]
    both += [(settings(folder, WAYS["dense"], fsdp), str(folder / "ddp-moved-2"), None)]
    in_processes(train_runs, both)
    three: list[tuple[dict[str, Any], str, int | None]] = []
    for name, way in (("ddp", {}), ("fsdp", fsdp)):
        plain = settings(folder, WAYS["dense"], way)
        for count in (1, 3):
            shutil.copytree(folder / f"{name}-moved", folder / f"{name}-moved-{count}")
        three.append((plain, str(folder / f"{name}-moved-3"), None))
        train_runs([(plain, str(folder / f"{name}-moved-1"), None)])
    in_processes(train_runs, three, count=3)
    return folder


def almost(found: Any, expected: Any, where: str = "") -> None:
    """Equal but for rounding."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            almost(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            almost(one, other, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-5), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list(WAYS))
def test_two_ranks_write_same_files_as_one(name: str, way: str, folder: Path) -> None:
    if not (folder / f"{name}-{way}").exists():
        pytest.skip("not trained so")
    almost(lines(folder / f"{name}-{way}"), lines(folder / f"{name}-one"))
    of_two, of_one = (
        json.loads((folder / f"{name}-{who}" / "mixture.json").read_text()) for who in (way, "one")
    )
    almost(of_two["weights"], of_one["weights"])
    assert of_two["rows"] == of_one["rows"]


def model(folder: Path) -> bytes:
    return (folder / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_resume_with_same_world_size_is_bit_for_bit(way: str, folder: Path) -> None:
    assert lines(folder / f"{way}-stopped") == lines(folder / f"dense-{way}")
    assert model(folder / f"{way}-stopped") == model(folder / f"dense-{way}")


@pytest.mark.parametrize("name", ["ddp-moved-1", "ddp-moved-3", "fsdp-moved-1", "fsdp-moved-3"])
def test_resume_with_other_world_size(name: str, folder: Path) -> None:
    almost(lines(folder / name), lines(folder / "dense-one"))


@pytest.mark.parametrize("name", ["one-moved-2", "ddp-moved-2"])
def test_unsharded_checkpoint_resumes_sharded(name: str, folder: Path) -> None:
    almost(lines(folder / name), lines(folder / "dense-one"))


def torchrun(folder: Path, *args: str, restarts: int = 0) -> subprocess.Popen[str]:
    launch = ["--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts), "-m", "mixwell"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *launch, *args],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def ranks_of(process: int) -> list[int]:
    """The processes that torchrun has started."""
    found: list[int] = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((one / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == process and b"\0RANK=" in (one / "environ").read_bytes():
                found.append(int(one.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
def test_killed_process_restarts_to_same_result(folder: Path, tmp_path: Path) -> None:
    write_config(tmp_path, batch={"rows": 12}, mixer={"traces": "dense"}, steps=STEPS)
    args = ("run", "tiny.yaml", "--no-report", "--out", "killed", "--set", "output.checkpoint_every=3")
    running = torchrun(tmp_path, *args, restarts=3)
    metrics, moment = tmp_path / "killed" / "metrics.jsonl", random.randint(1, STEPS // 2)
    while not metrics.exists() or metrics.read_text().count('"kind": "step"') < moment:
        assert running.poll() is None
        time.sleep(0.01)
    os.kill(random.choice(ranks_of(running.pid)), signal.SIGKILL)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, said
    # Who notices first is chance: the process that is left, or torchrun, which then stops it.
    assert "of 2 lost the others: one died, or did not answer" in said or "closing signal SIGTERM" in said
    assert "continuing killed after step" in said
    assert lines(tmp_path / "killed") == lines(folder / "dense-ddp")
    assert model(tmp_path / "killed") == model(folder / "dense-ddp")


def test_restarts_do_not_overwrite_another_run(folder: Path) -> None:
    """And the reason is told by the first process only."""
    before = lines(folder / "ddp-moved")
    running = torchrun(folder, "run", "tiny.yaml", "--out", "ddp-moved", restarts=1)
    said, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode
    assert (
        said.count("mixwell: there is a run in ddp-moved already") == 2
    )  # the first time and after the restart
    assert lines(folder / "ddp-moved") == before
