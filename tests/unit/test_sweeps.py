"""Sweeps in real processes: order, failure, interruption, and continuing where they stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from mixwell import tables
from mixwell.data.mnist import Mnist
from mixwell.sweeps import Job, StoppedError, run_sweep

QUIET = Console(quiet=True)


def count(setting: int, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Work that counts to its setting, and can continue."""
    done = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0
    while done < setting:
        done += 1
        report(done)
        if stopping():
            checkpoint.write_text(json.dumps(done))
            raise StoppedError
    return done, os.environ["OMP_NUM_THREADS"], os.getpid()


def fail(setting: int, /, *, checkpoint: Path, report: Callable[[int], None], stopping: Callable[[], bool]):
    """Work that fails, or dies, or waits to be stopped."""
    if setting == 0:
        raise ValueError("this one is broken")
    if setting == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not stopping():
        time.sleep(0.01)
    checkpoint.write_text("saved")
    raise StoppedError


def test_every_job_is_done_in_processes_with_one_thread(tmp_path: Path) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    found: dict[str, tuple[int, str, int]] = {}
    jobs = [Job(f"job{n}", n, n) for n in (3, 1, 2)]
    run_sweep(
        count,
        jobs,
        workers=2,
        checkpoints=tmp_path / "c",
        on_done=lambda job, result: found.update({job.name: result}),
        console=QUIET,
    )
    assert {name: result[0] for name, result in found.items()} == {"job3": 3, "job1": 1, "job2": 2}
    assert {result[1] for result in found.values()} == {"1"}
    assert os.getpid() not in {result[2] for result in found.values()}
    assert os.environ.get("OMP_NUM_THREADS") == before
    assert not (tmp_path / "c").exists()


def test_a_job_continues_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "job.safetensors").write_text("4")
    seen: list[int] = []
    run_sweep(
        count,
        [Job("job", 5, 5)],
        workers=1,
        checkpoints=tmp_path,
        on_done=lambda job, result: seen.append(result[0]),
        console=QUIET,
    )
    assert seen == [5]
    assert not tmp_path.exists()


@pytest.mark.parametrize(
    ("setting", "message"), [(0, "ValueError: this one is broken"), (1, "its process died")]
)
def test_a_failure_names_the_job(tmp_path: Path, setting: int, message: str) -> None:
    with pytest.raises(ChildProcessError, match=f"the run bad failed .{message}"):
        run_sweep(
            fail,
            [Job("waits", 1, 2), Job("bad", 1, setting)],
            workers=2,
            checkpoints=tmp_path,
            on_done=lambda job, result: pytest.fail("nothing can be done"),
            console=QUIET,
        )
    if setting == 0:
        assert (tmp_path / "waits.safetensors").read_text() == "saved"


def test_no_workers_are_refused_and_no_jobs_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        run_sweep(count, [], workers=0, checkpoints=tmp_path, on_done=lambda job, result: None)
    run_sweep(count, [], workers=1, checkpoints=tmp_path / "c", on_done=lambda job, result: None)
    assert not (tmp_path / "c").exists()


def mnist_command(out: Path) -> list[str]:
    words = "reproduce mnist --budget 400 --horizons 7,400 --seeds 1 --workers 2 --no-figures"
    small = "--channels 2 --batch-size 8 --train-size 200 --validation-size 100"
    return [sys.executable, "-m", "mixwell", *words.split(), *small.split(), "--out", str(out)]


def without_seconds(path: Path) -> list[tables.Row]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in tables.read(path)]


@pytest.fixture(scope="module")
def undisturbed(mnist_images: Mnist, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(mnist_command(folder), check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_sweep_continues_to_the_same_result(
    undisturbed: Path, tmp_path: Path, kind: signal.Signals
) -> None:
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(mnist_command(stopped), stderr=subprocess.PIPE, text=True)
    while not (stopped / "unfinished").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(3.0)  # workers begin; wherever they are, the result must be the same
    process.send_signal(kind)
    _, error = process.communicate(timeout=60)
    if process.returncode != 0:  # it may have been done already, on a fast machine
        if kind == signal.SIGKILL:
            time.sleep(2.0)  # workers see that their parent is gone, save and end
        else:
            assert process.returncode == 130
            assert "the same command continues" in error
    again = subprocess.run(mnist_command(stopped), check=True, capture_output=True, text=True)
    assert "2 runs" in again.stdout
    assert without_seconds(stopped / "runs.csv") == without_seconds(undisturbed / "runs.csv")
    assert tables.read(stopped / "weights.csv") == tables.read(undisturbed / "weights.csv")
    assert not (stopped / "unfinished").exists()
