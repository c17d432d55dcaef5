"""The life cycle of a run's directory: started, stopped at any moment, resumed bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

from rich.console import Console

from mixwell import distributed, methods
from mixwell.data.datasets import IndexedDataset
from mixwell.data.tokenizer import load_tokenizer
from mixwell.training import (
    builder,
    checkpoints,
    config_io,
    data,
    feasibility,
    fidelity,
    metrics,
    mixture_file,
    parallel,
    randomness,
    stages,
)
from mixwell.training.checkpoints import Checkpoint, DamagedError
from mixwell.training.config import Config
from mixwell.training.data import Data
from mixwell.training.display import Display, Tokenizing, Watch
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.interrupts import stop_signals
from mixwell.training.logging import session as loggers
from mixwell.training.logging.base import Logger, LoggerContext, ResumePoint
from mixwell.training.logging.session import RunLoggers
from mixwell.training.loop import CHECKPOINTS, TrainingLoop
from mixwell.training.models.base import ModelSize, Trainable
from mixwell.training.trainer import Trainer
from mixwell.utils import environment
from mixwell.utils.files import lock_folder, refuse_links_out
from mixwell.utils.terminal import say

CONFIG = "config.yaml"
FILES = (CONFIG, environment.FILE, metrics.FILE, mixture_file.FILE)
"""Files of a run in addition to its checkpoints."""
MAY_CHANGE_ON_RESUME = ("output", "loggers", "compare", "device", "compile", "parallel", "base")
"""Settings that may change when a run is resumed."""


@final
class Run:
    """One training run in a directory of its own.

    The directory holds ``config.yaml`` (with all defaults), ``environment.json``, ``metrics.jsonl``,
    ``mixture.json`` and ``checkpoints/``; ``loggers.json`` and the outputs of loggers, where the config has some.

    Args:
        trainable: a model and its loss, in place of the config's.
        given: rows that Python code passes, by key: ``domains.NAME``, ``validation``, ``test``.
        watch: follows the progress; by default a display on the console.
        stopping: called after each step, returns whether to save and stop; by default on Ctrl-C and SIGTERM.
        loggers: in addition to those of the config; they stay open.
        workers: number of concurrent trials of the method, where it has some and the model is the config's;
            ``None`` for one per core.
        engine: where trials run, if there are several workers.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        console: Console | None = None,
        trainable: Trainable | None = None,
        given: Mapping[str, IndexedDataset] | None = None,
        watch: Watch | None = None,
        stopping: Callable[[], bool] | None = None,
        loggers: Sequence[Logger] = (),
        workers: int | None = 1,
        engine: Engine = LOCAL,
    ) -> None:
        self.config, self.folder = config, folder
        self._workers, self._engine = workers, engine
        self._console = Console(quiet=True) if distributed.rank() else console or Console()
        self._trainable, self._given = trainable, given or {}
        self._own_model = trainable is not None
        self._rows: Data | None = None
        self._watch, self._stopping, self._given_loggers = watch, stopping, loggers
        self.trainer: Trainer | None = None
        """The trainer, from the moment training begins: also that of a run that was stopped."""

    @property
    def begun(self) -> bool:
        """Whether training began, so that the directory has metrics."""
        return self.trainer is not None

    def start(self) -> Trainer:
        """Begin a new run, train to the end, and return the trainer.

        Raises:
            OSError: there is a run in the directory already, or it cannot be written to.
        """
        distributed.run_on_rank_zero(self._expect_no_run)
        loggers.check_installed(self.config.loggers)
        # Before anything is written, so that a bad config leaves nothing behind.
        trainer = None
        if self._has_stages:
            _, rows = self.load()
            builder.check_feasible(self.config, {name: len(own) for name, own in rows.domains.items()})
        else:
            trainer = self._prepare()
        with self._locked():
            distributed.run_on_rank_zero(self._expect_no_run)
            try:
                if trainer is None:
                    # So that it can be resumed from here on.
                    config_io.write_config(self.config, self.folder / CONFIG)
                    trainer = self._prepare()
                with self._begin_loggers() as opened:
                    distributed.run_on_rank_zero(self._describe)
                    return self._train(trainer, opened)
            except BaseException as error:
                # Such as a model that does not fit its data: the same --out can be used again.
                begun = (self.folder / CONFIG).exists()
                failed = isinstance(error, Exception) and not isinstance(error, InterruptedError)
                untouched = failed and (trainer is None or not trainer.steps_done)
                if not distributed.rank() and (not begun or untouched):
                    loggers.remove_outputs(self.config.loggers, self.folder)
                    for name in FILES:
                        (self.folder / name).unlink(missing_ok=True)
                raise

    def resume(self) -> Trainer:
        """Continue from the newest checkpoint that can be read, or from the beginning where there is none."""
        with self._locked():
            checkpoint, wrong = checkpoints.newest(self.folder / CHECKPOINTS)
            for problem in wrong:
                self._say(f"{problem}; continuing from the checkpoint before it")
            self._expect_same_settings(checkpoint)
            loggers.check_installed(self.config.loggers)
            trainer = self._prepare()
            saved = -1 if checkpoint is None else checkpoint.step
            distributed.run_on_rank_zero(
                lambda: checkpoints.tidy(self.folder / CHECKPOINTS, after=max(saved, 0))
            )
            if checkpoint is not None:
                _load(trainer, checkpoint)
            distributed.run_on_rank_zero(lambda: environment.write(self.folder))
            self._say(f"continuing {self.folder} after step {trainer.steps_done} of {self.config.steps}")
            with self._begin_loggers(
                ResumePoint(saved=saved, logged=metrics.last_step(self.folder))
            ) as opened:
                return self._train(trainer, opened, checkpoint)

    def load(self) -> tuple[Trainable, Data]:
        """Load model and data, without writing anything into the directory."""
        methods.find(self.config.mixer.method).expect_installed()
        if self._has_stages:
            self._engine.check()
        randomness.seed(self.config.seed)
        tokenizer = load_tokenizer(self.config.tokenizer, self.config.base)
        feasibility.check_memory(self.config, self.config.model.size(tokenizer.size))
        if self._trainable is None:
            self._trainable = self.config.model.build(base=self.config.base, vocabulary=tokenizer.size)
            known = sum(p.numel() for p in self._trainable.model.parameters())
            feasibility.check_memory(self.config, ModelSize(known))
        if self._rows is None:
            with distributed.rank_zero_first(), Tokenizing(self._console) as bar:
                self._rows = data.load(
                    self.config,
                    tokenizer,
                    self._trainable,
                    given=self._given,
                    announce=self._say,
                    track=bar.track,
                )
        for concern in self._rows.warnings:
            self._say(f"warning: {concern}")
        return self._trainable, self._rows

    def last(self) -> Trainer:
        """Return the trainer of the newest checkpoint."""
        self._refuse_links_out()
        checkpoint, _ = checkpoints.newest(self.folder / CHECKPOINTS)
        if checkpoint is None:
            raise ValueError(f"{self.folder} has no checkpoint yet")
        trainer = self._prepare()
        _load(trainer, checkpoint)
        return trainer

    # ------------------------------------------------------------------------------------------- inside

    def _prepare(self) -> Trainer:
        trainable, rows = self.load()
        parallel.check_possible(self.config, validation=0)
        sizes = {name: len(own) for name, own in rows.domains.items()}
        config = stages.resolve_stages(self.config, sizes, self.folder, self._run_trials)
        reference = None
        if methods.find(config.mixer.method).needs.reference and config.mixer.options.get("reference"):
            given = copy.deepcopy(trainable) if self._own_model else None
            reference = stages.reference(config, self.folder, given)
        if self._has_stages:
            # The trials have drawn random numbers: without them the run would be the same.
            randomness.seed(self.config.seed)
        return Trainer(config, trainable, rows.domains, rows.validation, reference=reference)

    @property
    def _has_stages(self) -> bool:
        return methods.find(self.config.mixer.method).stages is not None

    def _run_trials(self, trials: Sequence[stages.PlannedTrial]) -> None:
        stages.run_trials(
            trials,
            method=self.config.mixer.method,
            folder=self.folder,
            console=self._console,
            workers=self._workers,
            engine=self._engine,
            trainable=self._trainable if self._own_model else None,
            given=self._given,
            watch=self._watch,
            stopping=self._stopping,
        )

    def _expect_no_run(self) -> None:
        if (self.folder / CONFIG).exists():
            raise OSError(
                f"there is a run in {self.folder} already: `mixwell resume {self.folder}` continues it; for a new "
                "one give another --out"
            )
        for name in (*FILES, CHECKPOINTS, *loggers.outputs(self.config.loggers)):
            if (self.folder / name).exists():
                raise OSError(
                    f"{self.folder / name} already exists and would be overwritten; give another --out"
                )

    def _expect_same_settings(self, checkpoint: Checkpoint | None) -> None:
        """Raise ValueError if settings other than those in :data:`MAY_CHANGE_ON_RESUME` have changed."""
        if checkpoint is None:
            before, there = config_io.read_config(self.folder / CONFIG), CONFIG
        else:
            saved = checkpoint.plain.get("config")
            if not isinstance(saved, dict):
                raise DamagedError(f"{checkpoint.folder} is damaged: it has no config")
            before, there = config_io.validate_config(saved, where="the checkpoint"), "the checkpoint"
        changed = config_io.differences(self.config, before, except_keys=MAY_CHANGE_ON_RESUME)
        if changed:
            raise ValueError(
                f"the settings of the run in {self.folder} have changed: {'; '.join(changed)} (in {there}). It "
                "continues with those that it began with; give them, or begin another run"
            )

    def _refuse_links_out(self) -> None:
        # Folders of loggers are left out: W&B links to its logs from there.
        own = (*FILES, fidelity.FILE, CHECKPOINTS, stages.FOLDER, loggers.FILE)
        refuse_links_out(self.folder, own)

    @contextmanager
    def _locked(self) -> Generator[None]:
        """Lock the folder against other runs; rank 0 does it for all."""
        with ExitStack() as stack:

            def hold() -> None:
                self._refuse_links_out()
                stack.enter_context(lock_folder(self.folder))

            distributed.run_on_rank_zero(hold)
            yield

    def _describe(self) -> None:
        config_io.write_config(self.config, self.folder / CONFIG)
        environment.write(self.folder)

    def _begin_loggers(self, resume: ResumePoint | None = None) -> RunLoggers:
        if distributed.rank():  # rank 0 logs for all
            return RunLoggers({}, ())
        settings = self.config.model_dump(mode="json")
        run = LoggerContext(self.folder, self.config.base, settings, resume)
        begun = loggers.open_all(self.config.loggers, run, given=self._given_loggers)
        for place in begun.places:
            self._say(f"logging to {place}")
        return begun

    def _train(self, trainer: Trainer, opened: RunLoggers, resume_from: Checkpoint | None = None) -> Trainer:
        self.trainer = trainer
        names, rows = trainer.mixer.weights.names, self._rows
        assert rows is not None
        watch = self._watch or Display(self.config.steps, names, console=self._console)
        loop = TrainingLoop(self.config, self.folder, trainer, rows, watch, resume_from=resume_from)
        with stop_signals() if self._stopping is None else nullcontext(self._stopping) as stopping:
            loop.run(opened, stopping)
        if not trainer.finished:
            raise InterruptedError(
                f"stopped after step {trainer.steps_done} of {self.config.steps} and saved; "
                f"`mixwell resume {self.folder}` continues"
            )
        return trainer

    def _say(self, text: str) -> None:
        say(self._console, text)


def _load(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load a checkpoint whose values may be of any kind, although its checksums are right."""
    try:
        trainer.load(checkpoint)
    except (
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        RuntimeError,
        OverflowError,
        AssertionError,
    ) as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DamagedError(
            f"{checkpoint.folder} is damaged: its values are not those of a checkpoint of this run ({problem}); "
            "remove it to resume from the one before"
        ) from error


def open_run(folder: Path, **options: Any) -> Run:
    """Return the run in a directory, to be resumed; the options are those of :class:`Run`."""
    if not (folder / CONFIG).is_file():
        raise ValueError(f"there is no run in {folder}: it has no {CONFIG}; `mixwell run CONFIG` begins one")
    return Run(config_io.read_config(folder / CONFIG), folder, **options)


def finished(folder: Path) -> bool:
    """Return whether a run is done and saved, by its ``mixture.json``, which is written last."""
    return (folder / mixture_file.FILE).exists() and bool(mixture_file.read_mixture(folder)["finished"])


def expect_same(config: Config, folder: Path) -> None:
    """Raise ValueError if the folder holds a run that was trained with other settings."""
    if not (folder / CONFIG).exists():
        return
    changed = config_io.differences(
        config_io.read_config(folder / CONFIG), config, except_keys=MAY_CHANGE_ON_RESUME
    )
    if changed:
        raise ValueError(
            f"in {folder} is a run with other settings ({'; '.join(changed)}); choose another folder, or delete "
            "that one"
        )
