"""Sweeps on every engine: order, failure, interruption, and continuing where they stopped."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from helpers.commands import PATIENCE, mixwell
from helpers.sweep_jobs import count, descend, fail
from mixwell.lab import tables
from mixwell.lab.mnist.mnist_data import Mnist
from mixwell.training.engines import Engine, Job
from mixwell.training.engines.connection import connected
from mixwell.training.interrupts import interruptible
from mixwell.training.sweeps import run_sweep
from mixwell.utils.files import lock_folder

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def ray_here(ray_cluster: str) -> Iterator[None]:
    """One connection to Ray for all tests of this module."""
    with connected(ray_cluster, cpus=2):
        yield


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "ray":
        request.getfixturevalue("ray_here")
    return Engine(request.param)


def test_jobs_run_in_processes_with_one_thread(tmp_path: Path, engine: Engine) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    found: dict[str, tuple[int, str, int]] = {}
    jobs = [Job(f"job{n}", n, n) for n in (3, 1, 2)]
    run_sweep(
        count,
        jobs,
        workers=2,
        folder=tmp_path / "c",
        on_done=lambda job, result: found.update({job.name: result}),
        console=QUIET,
        engine=engine,
    )
    assert {name: result[0] for name, result in found.items()} == {"job3": 3, "job1": 1, "job2": 2}
    assert {result[1] for result in found.values()} == {"1"}
    assert os.getpid() not in {result[2] for result in found.values()}
    assert os.environ.get("OMP_NUM_THREADS") == before
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [(0, "ValueError: this one is broken; see .*bad.failed.txt"), (1, "its process died")],
)
def test_failed_job_is_named_and_others_finish(
    tmp_path: Path, engine: Engine, setting: int, message: str
) -> None:
    done: list[str] = []
    with pytest.raises(ChildProcessError, match=f"the run bad failed .{message}"):
        run_sweep(
            fail,
            [
                Job(name, 1, (steps, tmp_path))
                for name, steps in {"one": 2, "bad": setting, "two": 2, "three": 2}.items()
            ],
            workers=2,
            folder=tmp_path,
            on_done=lambda job, result: done.append(job.name),
            console=QUIET,
            engine=engine,
        )
    assert sorted(done) == ["one", "three", "two"]
    if setting == 0:
        assert "raise ValueError" in (tmp_path / "bad.failed.txt").read_text()


def test_result_error_saves_other_runs(tmp_path: Path, engine: Engine) -> None:
    def full(job: Job[tuple[int, Path]], result: int) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        run_sweep(
            fail,
            [Job("long", 1, (10**6, tmp_path)), Job("short", 1, (3, tmp_path))],
            workers=2,
            folder=tmp_path,
            on_done=full,
            console=QUIET,
            engine=engine,
        )
    assert (tmp_path / "long.txt").read_text() == "saved"  # it did not run to its end


def interrupt_when_begun(folder: Path, over: threading.Event) -> None:
    while not over.wait(0.01):
        if (folder / "begun").exists():
            os.kill(os.getpid(), signal.SIGINT)
            return


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(("first", "then"), [("local", "ray"), ("ray", "local")])
def test_sweep_continues_on_other_engine(tmp_path: Path, first: str, then: str) -> None:
    def sweep(engine: str) -> None:
        run_sweep(
            descend,
            [Job("job", 300, (300, tmp_path))],
            workers=1,
            folder=tmp_path / "c",
            on_done=lambda job, result: found.append(result),
            console=QUIET,
            engine=Engine(engine),
        )

    found: list[tuple[int, list[float], int]] = []
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    (tmp_path / "hold").touch()
    over = threading.Event()
    thread = threading.Thread(target=interrupt_when_begun, args=(tmp_path, over))
    thread.start()
    try:
        with pytest.raises(InterruptedError, match="the same command continues where this one left off"):
            sweep(first)
    finally:
        over.set()
        thread.join()
    (tmp_path / "hold").unlink()
    assert not found
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before
    assert list((tmp_path / "c").iterdir()) == []
    sweep(then)
    begun, place, threads = found[0]
    assert 0 < begun < 300
    assert threads == 1
    (tmp_path / "alone").mkdir()
    alone = descend((300, tmp_path / "alone"), report=lambda steps: None, stopping=lambda: False)
    assert place == alone[1]  # bit for bit
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_workers_start_has_the_same_message(kind: signal.Signals) -> None:
    # A shell that starts the tests in the background lets them ignore SIGINT.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(InterruptedError, match="the same command continues"), interruptible():
            os.kill(os.getpid(), kind)
            time.sleep(PATIENCE)
        assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGINT, outside)


def test_two_sweeps_cannot_share_folder(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(OSError, match="another run is at work"), lock_folder(tmp_path):
        pytest.fail("both are in")
    with lock_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_zero_workers_raise_and_zero_jobs_pass(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 worker, got 0"):
        run_sweep(count, [], workers=0, folder=tmp_path, on_done=lambda job, result: None)
    run_sweep(count, [], workers=1, folder=tmp_path / "c", on_done=lambda job, result: None)
    assert not (tmp_path / "c").exists()


def test_leftover_folder_after_last_job_is_removed(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    run_sweep(count, [], workers=1, folder=tmp_path / "c", on_done=lambda job, result: None)
    assert not (tmp_path / "c").exists()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.failed.txt").write_text("of another sweep")
    run_sweep(count, [], workers=1, folder=tmp_path / "c", on_done=lambda job, result: None)
    assert (tmp_path / "c" / "a.failed.txt").exists()


def mnist_command(
    out: Path, *, budget: int = 400, horizons: str = "7,400", engine: str = "local"
) -> list[str]:
    words = (
        f"reproduce mnist --budget {budget} --horizons {horizons} --seeds 1 --no-figures --engine {engine}"
    )
    small = "--channels 2 --batch-size 8 --train-size 200 --validation-size 100"
    return [*words.split(), *small.split(), "--out", str(out)]


def begin(words: list[str], *, workers: int) -> tuple[subprocess.Popen[str], TextIO]:
    """Begin a sweep in a process of its own, and show its progress on a terminal that can be read."""
    terminal, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mixwell", *words, "--workers", str(workers)],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"},
        stdout=slave,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(slave)
    return process, os.fdopen(terminal, errors="replace")


def wait_for_steps(terminal: TextIO) -> None:
    """Return when the progress bar shows that a step was done, or the process ended."""
    shown = ""
    while not re.search(r"[1-9]\d*/\d+ steps", shown):
        try:
            read = os.read(terminal.fileno(), 4096).decode(errors="replace")
        except OSError:  # nobody writes to the terminal any more
            return
        shown = shown[-200:] + re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", read)


def end(process: subprocess.Popen[str], terminal: TextIO) -> str:
    """Wait for the end of a process, so that it never waits to write; return its errors."""
    reader = threading.Thread(target=_read_all, args=(terminal,))
    reader.start()
    _, error = process.communicate(timeout=PATIENCE)  # ends when the workers do: they hold the pipe, too
    reader.join()
    terminal.close()
    return error


def _read_all(terminal: TextIO) -> None:
    with suppress(OSError):
        while os.read(terminal.fileno(), 4096):
            pass


def without_seconds(path: Path) -> list[tables.Row]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in tables.read(path)]


@pytest.fixture(scope="module")
def undisturbed(mnist_images: Mnist, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    mixwell(*mnist_command(folder), "--workers", "1", cwd=folder, cache=None)
    return folder


@pytest.mark.parametrize(
    ("kind", "when", "engine"),
    [
        pytest.param(
            *(signal.SIGINT, "starting", "local"),
            marks=pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc"),
        ),
        pytest.param(
            *(signal.SIGTERM, "starting", "local"),
            marks=pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc"),
        ),
        (signal.SIGINT, "training", "local"),
        (signal.SIGTERM, "training", "local"),
        (signal.SIGKILL, "training", "local"),
        (signal.SIGTERM, "training", "ray"),
    ],
)
def test_interrupted_sweep_resumes_to_same_result(
    undisturbed: Path, tmp_path: Path, kind: signal.Signals, when: str, engine: str
) -> None:
    """As by Ctrl-C in a terminal, the signal goes to the workers too."""
    process, terminal = begin(mnist_command(tmp_path, engine=engine), workers=2)
    if when == "training":
        wait_for_steps(terminal)
    else:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while process.poll() is None and not children.read_text():
            time.sleep(0.01)
    if kind == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, kind)
    error = end(process, terminal)
    if kind != signal.SIGKILL and process.returncode != 0:  # 0: done already, on a fast machine
        assert process.returncode == 130, error
        assert error.strip() == "mixwell: stopped; the same command continues where this one left off"
    mixwell(*mnist_command(tmp_path), "--workers", "1", cwd=tmp_path, cache=None)
    assert without_seconds(tmp_path / "runs.csv") == without_seconds(undisturbed / "runs.csv")
    assert tables.read(tmp_path / "weights.csv") == tables.read(undisturbed / "weights.csv")
    assert not (tmp_path / "unfinished").exists()
