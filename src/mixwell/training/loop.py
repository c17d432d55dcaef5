"""The training loop: step, log, evaluate, and save a checkpoint when one is due."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import final

from mixwell import distributed, methods
from mixwell.training import checkpoints, metrics, mixture_file, stages
from mixwell.training.checkpoints import Checkpoint
from mixwell.training.config import Config
from mixwell.training.data import Data
from mixwell.training.display import Watch
from mixwell.training.logging.session import RunLoggers
from mixwell.training.metrics import Journal, MetricsFile, Window
from mixwell.training.parallel import StopCoordinator
from mixwell.training.trainer import Trainer

CHECKPOINTS = "checkpoints"
CHECKPOINT_SECONDS = 120.0


@final
class TrainingLoop:
    """Trains to the end, or until it is asked to stop, and saves.

    Args:
        folder: the run's directory.
        watch: follows the progress.
        resume_from: the checkpoint that the trainer has loaded, if any.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        trainer: Trainer,
        data: Data,
        watch: Watch,
        *,
        resume_from: Checkpoint | None = None,
    ) -> None:
        self._config, self._folder, self._trainer, self._data = config, folder, trainer, data
        self._watch = watch
        self._saved: int | None = None
        self._metrics_length, self._seconds, self._window = 0, 0.0, Window()
        if resume_from is not None:
            self._saved = resume_from.step
            self._metrics_length = int(resume_from.plain["metrics_length"])
            self._seconds = float(resume_from.plain["seconds"])
            self._window = metrics.own_window([one["window"] for one in resume_from.own])

    def run(self, loggers: RunLoggers, stopping: Callable[[], bool]) -> None:
        """Train until all steps are done or ``stopping`` returns True; the last step is saved."""
        weights = self._trainer.mixer.weights.last
        with (
            nullcontext()
            if distributed.rank()
            else MetricsFile(self._folder, length=self._metrics_length) as lines,
            self._watch as watch,
        ):
            journal = Journal(lines, loggers)
            watch.start_at(self._trainer.steps_done, weights)
            if not self._metrics_length:
                journal.start(weights)
                journal.evaluation(self._evaluate())
                journal.write(0)
            self._train(journal, StopCoordinator(stopping))
            self._save(journal)

    def _train(self, journal: Journal, coordinator: StopCoordinator) -> None:
        trainer, output, steps = self._trainer, self._config.output, self._config.steps
        evaluate_every = output.evaluate_every
        if evaluate_every == "auto":
            evaluate_every = max(1, math.ceil(steps / 20))
        saved = time.monotonic()
        while not trainer.finished and not coordinator.stop_after(trainer.steps_done):
            begun = time.perf_counter()
            outcome = trainer.step()
            done = trainer.steps_done
            self._window.add(outcome.loss, outcome.losses, outcome.counts)
            self._seconds += time.perf_counter() - begun
            self._watch.step(done, outcome.loss * distributed.world_size(), outcome.losses)
            # At fixed steps only, so that a run that was stopped writes the same lines as one that was not.
            if done % output.log_every == 0 or done == steps:
                self._window.share(trainer.mixer.weights.names, trainer.device)
                journal.step(
                    self._window.take(),
                    learning_rate=outcome.learning_rate,
                    seconds=self._seconds,
                    rows=trainer.loader.taken,
                )
            record = trainer.mixer.round_ended
            if record is not None:
                self._watch.weights(record.new_weights)
                journal.round(record)
            if done % evaluate_every == 0 or done == steps:
                journal.evaluation(self._evaluate())
            journal.write(done)
            if output.checkpoint_every == "auto":
                due = coordinator.save_after(done, due=time.monotonic() - saved > CHECKPOINT_SECONDS)
            else:
                due = done % output.checkpoint_every == 0
            if due and not trainer.finished:
                self._save(journal)
                saved = time.monotonic()

    def _evaluate(self) -> dict[str, float]:
        rows = {
            "validation": self._data.validation,
            "test": self._data.test if self._trainer.finished else None,
        }
        at_most = self._config.output.evaluate_rows
        losses = {
            name: self._trainer.evaluate(one, at_most=at_most)
            for name, one in rows.items()
            if one is not None
        }
        if "validation" in losses:
            self._watch.evaluated(losses["validation"])
        return losses

    def _save(self, journal: Journal) -> None:
        """Write a checkpoint, if the last one is of an earlier step, and the mixture."""
        if self._trainer.steps_done != self._saved:
            state = self._trainer.checkpoint()
            plain = {
                **state.plain,
                "metrics_length": journal.flush(),
                "seconds": self._seconds,
                "config": self._config.model_dump(mode="json"),
            }
            own = [{**one, "window": asdict(self._window)} for one in state.own]
            checkpoints.write_checkpoint(
                self._folder / CHECKPOINTS,
                replace(state, plain=plain, own=own),
                keep=self._config.output.keep,
            )
            self._saved = state.step
        if not distributed.rank():
            described = mixture_file.describe_mixture(
                self._trainer.mixer,
                method=self._config.mixer.method,
                seed=self._config.seed,
                rows={name: len(rows) for name, rows in self._data.domains.items()},
                taken=self._trainer.loader.taken,
                computed=self._trainer.computed
                + stages.computed(self._folder, evaluated_rows=self._evaluated_rows),
                memory=self._trainer.extra_bytes,
            )
            mixture_file.write_mixture(self._folder, described)

    @property
    def _evaluated_rows(self) -> float:
        """Rows of each evaluation that a method learns from: proxies are compared by their losses."""
        if methods.find(self._config.mixer.method).has_rounds or self._data.validation is None:
            return 0.0
        return float(min(self._config.output.evaluate_rows, len(self._data.validation)))
