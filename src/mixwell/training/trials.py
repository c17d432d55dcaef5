"""Runs the trials of a method: in other processes, or in this one where a model or rows are objects of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rich.console import Console

from mixwell.training import stages
from mixwell.training.engines import Engine
from mixwell.utils.terminal import say


@final
@dataclass(frozen=True)
class TrialRunner:
    """Runs trials that are not finished, each from where it stopped.

    Args:
        folder: the directory of the run that they belong to.
        console: for the progress.
        workers: how many run at a time; ``None`` for one per core.
        engine: where they run, if more than one may.
        options: of :class:`mixwell.training.run.Run`, for trials in this process.
    """

    folder: Path
    console: Console
    workers: int | None
    engine: Engine
    options: Mapping[str, Any]

    def run(self, trials: Sequence[stages.PlannedTrial], *, method: str) -> None:
        """Run those that are not finished.

        Raises:
            InterruptedError: a trial was stopped, and saved.
        """
        from mixwell.training.run import finished  # a run has trials, and a trial is a run

        left = sum(not finished(folder) for _, folder in trials)
        if left:
            say(self.console, f"{method}: {left} of {len(trials)} runs that come first are to be done")
        in_memory = self.options["trainable"] is not None or self.options["given"]
        try:
            if self.workers != 1 and len(trials) > 1 and not in_memory:
                self._run_in_workers(trials)
            else:
                self._run_here(trials)
        except InterruptedError as error:
            raise InterruptedError(
                f"stopped in a run that comes first, and saved; `mixwell resume {self.folder}` continues"
            ) from error

    def _run_in_workers(self, trials: Sequence[stages.PlannedTrial]) -> None:
        from mixwell.training import concurrent

        concurrent.run_all(
            [concurrent.Planned(config, folder) for config, folder in trials],
            workers=self.workers,
            unfinished=self.folder / stages.FOLDER / "unfinished",
            console=self.console,
            engine=self.engine,
        )

    def _run_here(self, trials: Sequence[stages.PlannedTrial]) -> None:
        from mixwell.training.run import CONFIG, Run, expect_same, finished

        for config, folder in trials:
            expect_same(config, folder)
            if finished(folder):
                continue
            options = {**self.options, "trainable": copy.deepcopy(self.options["trainable"])}
            trial = Run(config, folder, console=self.console, **options)
            if (folder / CONFIG).exists():
                trial.resume()
            else:
                trial.start()
