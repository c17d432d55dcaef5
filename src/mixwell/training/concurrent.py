"""Several runs at once, by workers with one thread each; stopped and continued together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.console import Console
from typing_extensions import override

from mixwell.training import config_io
from mixwell.training.config import Config
from mixwell.training.display import Watch
from mixwell.training.engines import LOCAL, Engine, Job, StoppedError
from mixwell.training.run import CONFIG, Run, expect_same, finished, open_run
from mixwell.training.sweeps import run_sweep


@final
@dataclass(frozen=True)
class Planned:
    """A run to be done.

    Args:
        folder: its directory.
        work: its amount in training steps, for the progress bar; by default the steps of the run.
    """

    config: Config
    folder: Path
    work: int | None = None


def run_all(
    runs: Sequence[Planned],
    *,
    workers: int | None,
    unfinished: Path,
    console: Console,
    engine: Engine = LOCAL,
) -> None:
    """Do the runs that are not finished, each from where it stopped.

    The other arguments are those of :func:`mixwell.training.sweeps.run_sweep`.

    Args:
        unfinished: a folder for the tracebacks of runs that failed.

    Raises:
        ValueError: one of the folders has a run with other settings.
    """
    for run in runs:
        expect_same(run.config, run.folder)
    jobs = [
        Job(
            str(run.folder.name),
            run.work or run.config.steps,
            (run.config.model_dump(mode="json"), str(run.folder.absolute())),
        )
        for run in runs
        if not finished(run.folder)
    ]
    run_sweep(
        _work,
        jobs,
        workers=workers,
        folder=unfinished,
        on_done=lambda job, result: None,
        console=console,
        engine=engine,
    )


@final
class _Forward(Watch):
    """Reports the steps of a run and of the trials before it."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self._report = report
        self._done = 0

    @override
    def start_at(self, step: int, weights: Mapping[str, float]) -> None:
        self._done += step

    @override
    def step(self, done: int, loss: float, losses: Mapping[str, float]) -> None:
        self._done += 1
        self._report(self._done)


def _work(
    setting: tuple[dict[str, Any], str],
    /,
    *,
    report: Callable[[int], None],
    stopping: Callable[[], bool],
) -> None:
    """Do one run; its checkpoints are in its own directory."""
    plain, folder = setting
    options: dict[str, Any] = {
        "console": Console(quiet=True),
        "watch": _Forward(report),
        "stopping": stopping,
    }
    try:
        if (Path(folder) / CONFIG).exists():
            open_run(Path(folder), **options).resume()
        else:
            Run(config_io.validate_config(plain), Path(folder), **options).start()
    except InterruptedError as error:
        raise StoppedError from error
