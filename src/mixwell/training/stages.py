"""Runs that some methods train first: proxies with other mixtures, a reference model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mixwell import methods
from mixwell.data.datasets import IndexedDataset
from mixwell.methods import Outcome, Trial
from mixwell.training import builder, checkpoints, config_io, metrics, mixture_file
from mixwell.training.config import Config, drop_constraints, keys_by_domain
from mixwell.training.display import Watch
from mixwell.training.engines import Engine
from mixwell.training.models.base import Trainable
from mixwell.utils.costs import FORWARD
from mixwell.utils.regular_files import expand_user
from mixwell.utils.terminal import say

FOLDER = "stages"
STAGE = "stage:"
"""Begins the name of a trial of the same run: its path would change with the run's folder."""
PlannedTrial = tuple[Config, Path]
"""The settings of a trial, and its directory."""


def resolve_stages(
    config: Config,
    sizes: Mapping[str, int],
    folder: Path,
    run_trials: Callable[[Sequence[PlannedTrial]], None],
) -> Config:
    """Run the trials of a method, and return the config of the last run.

    Args:
        sizes: rows by domain.
        folder: the run's directory; those of the trials are in ``stages/`` there.
        run_trials: runs the trials that are not finished, each from where it stopped.
    """
    method = methods.find(config.mixer.method)
    if method.stages is None:
        return config
    stages = method.stages(builder.method_context(config, sizes))
    try:
        trials = next(stages)
        while True:
            planned = [(_config(config, trial), folder / FOLDER / trial.name) for trial in trials]
            run_trials(planned)
            trials = stages.send([_outcome(one) for _, one in planned])
    except StopIteration as end:
        plain = config.model_dump(mode="json")
        plain["mixer"] = {**plain["mixer"], **end.value}
        drop_constraints(plain["mixer"])
        return config_io.validate_config(plain, where=f"what {method.name} found")


def run_trials(
    trials: Sequence[PlannedTrial],
    *,
    method: str,
    folder: Path,
    console: Console,
    workers: int | None,
    engine: Engine,
    trainable: Trainable | None,
    given: Mapping[str, IndexedDataset],
    watch: Watch | None,
    stopping: Callable[[], bool] | None,
) -> None:
    """Run the trials that are not finished, each from where it stopped.

    They run in workers, or in this process if there is one worker, or if a model or rows are objects of it. The
    arguments are those of :class:`mixwell.training.run.Run`.

    Args:
        folder: the directory of the run that they belong to.

    Raises:
        InterruptedError: a trial was stopped, and saved.
    """
    # A run has trials, and a trial is a run.
    from mixwell.training import concurrent
    from mixwell.training.run import CONFIG, Run, expect_same, finished

    left = sum(not finished(own) for _, own in trials)
    if left:
        say(console, f"{method}: {left} of {len(trials)} runs that come first are to be done")
    try:
        if workers != 1 and len(trials) > 1 and trainable is None and not given:
            concurrent.run_all(
                [concurrent.Planned(config, own) for config, own in trials],
                workers=workers,
                unfinished=folder / FOLDER / "unfinished",
                console=console,
                engine=engine,
            )
            return
        for config, own in trials:
            expect_same(config, own)
            if finished(own):
                continue
            trial = Run(
                config,
                own,
                console=console,
                trainable=copy.deepcopy(trainable),
                given=given,
                watch=watch,
                stopping=stopping,
            )
            if (own / CONFIG).exists():
                trial.resume()
            else:
                trial.start()
    except InterruptedError as error:
        raise InterruptedError(
            f"stopped in a run that comes first, and saved; `mixwell resume {folder}` continues"
        ) from error


def computed(folder: Path, *, evaluated_rows: float = 0.0) -> float:
    """Return the compute of all trials of a run, in rows of which a gradient was taken.

    Args:
        evaluated_rows: rows of the evaluation of each trial, where the method learns from it; they count a third.
    """
    trials = (folder / FOLDER).glob(f"*/{mixture_file.FILE}")
    return sum(
        float(mixture_file.read_mixture(one)["rows"]["computed"]) + FORWARD * evaluated_rows for one in trials
    )


def reference(config: Config, folder: Path, given: Trainable | None) -> Trainable:
    """Return the model that ``mixer.options.reference`` names: of a run's last checkpoint, with its losses.

    Args:
        folder: the directory of the run that needs it.
        given: a copy of a model that Python code passed, into which the checkpoint is loaded.
    """
    from mixwell.data.tokenizer import load_tokenizer

    folder = _named(config.mixer.options["reference"], config.base, folder)
    checkpoint, _ = checkpoints.newest(folder / "checkpoints")
    if checkpoint is None:
        raise ValueError(
            f"mixer.options.reference: {folder} is not the directory of a run with a checkpoint; `mixwell run` "
            "makes one, or leave reference out, and one is trained first"
        )
    trainable = given
    if trainable is None:
        config = config_io.read_config(folder / "config.yaml")
        trainable = config.model.build(
            base=config.base, vocabulary=load_tokenizer(config.tokenizer, config.base).size
        )
    checkpoints.load_model(trainable.model, checkpoint.model_tensors({}))
    return trainable


def _named(name: str, base: Path, folder: Path) -> Path:
    if not name.startswith(STAGE):
        return base / expand_user(name)
    trial = name.removeprefix(STAGE)
    own = folder / FOLDER / trial
    # A trial names one of those next to it.
    return own if own.is_dir() else folder.parent / trial


def _config(config: Config, trial: Trial) -> Config:
    """Return the config of a trial: that of the run with its changes; only the end is evaluated and logged."""
    plain = config.model_dump(mode="json")
    kept = list(config.domains) if trial.domains is None else list(trial.domains)
    plain["steps"] = trial.steps
    plain["domains"] = {name: plain["domains"][name] for name in kept}
    plain["model"] = {**plain["model"], **trial.model}
    mixer: dict[str, Any] = {**plain["mixer"], **trial.mixer}
    drop_constraints(mixer)
    for key in keys_by_domain():
        if isinstance(mixer[key], dict):
            mixer[key] = {name: value for name, value in mixer[key].items() if name in kept}
    if isinstance(mixer["horizon"], int):
        mixer["horizon"] = min(mixer["horizon"], trial.steps)
    mixer["warmup"] = min(mixer["warmup"], trial.steps - 1)
    plain["mixer"] = mixer
    plain["test"] = None  # nothing may be learned from it
    plain["loggers"], plain["compare"] = {}, {}
    plain["output"] |= {"evaluate_every": trial.steps, "keep": 1}
    return config_io.validate_config(plain, where=f"trial {trial.name}")


def _outcome(folder: Path) -> Outcome:
    losses = list(metrics.read_metrics(folder, "evaluation"))[-1]["losses"]
    found = mixture_file.read_mixture(folder)
    loss = losses.get("validation")
    return Outcome(
        STAGE + folder.name, float("nan") if loss is None else float(loss), found["weights"]["average"]
    )
