"""The commands of runs: their output on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mixwell import distributed
from mixwell.data import tokenizer as tokenizers
from mixwell.reference.grades import Grade
from mixwell.training import builder, config_io, fidelity, metrics, parallel, plan, verdict
from mixwell.training.config import Config
from mixwell.training.display import Tokenizing
from mixwell.training.engines import LOCAL, Engine
from mixwell.training.models.base import Trainable
from mixwell.training.plan import Plan
from mixwell.training.run import CHECKPOINTS, CONFIG, Run, open_run
from mixwell.training.trainer import Trainer
from mixwell.training.unread import describe_unread
from mixwell.utils.memory import format_bytes
from mixwell.utils.terminal import say, show

FIDELITY_SETTINGS = (
    "In a config these are mixer.horizon, mixer.validation_rows, mixer.options.points, mixer.traces and "
    "mixer.curvature."
)
"""Where the settings are that the verdict on a hypergradient names."""
AfterRun = Callable[[Path], None]
"""Called on rank 0 with the directory of a run that has ended or stopped and has metrics."""


def run(
    path: Path,
    *,
    out: Path | None,
    overrides: Sequence[str],
    engine: Engine = LOCAL,
    after: AfterRun | None = None,
) -> None:
    """Begin a run.

    Args:
        out: the run's directory; ``None`` for ``runs/`` and the config's name.
        overrides: ``key=value``.
        engine: where the method's trials run.
    """
    folder = out or Path("runs") / path.stem
    config = config_io.read_config(path, overrides)
    with parallel.joined(config):
        if not distributed.rank():
            _show_unread(config, Console())
        # Where torchrun has restarted the processes, there is a run already.
        again = distributed.run_on_rank_zero(lambda: parallel.restarted(folder / CONFIG))
        _finish(Run(config, folder, workers=None, engine=engine), resuming=again, after=after)


def resume(folder: Path, *, engine: Engine = LOCAL, after: AfterRun | None = None) -> None:
    """Continue a run; see :func:`run`."""
    with parallel.joined(open_run(folder).config):
        # Opened again, since rank and console are known only now.
        _finish(open_run(folder, workers=None, engine=engine), resuming=True, after=after)


def show_plan(path: Path, *, overrides: Sequence[str], processes: int = 1) -> None:
    """Print the cost of a run in a number of processes."""
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    console = Console()
    config = config_io.read_config(path, overrides)
    trainable, rows = Run(config, Path(), console=console).load()
    made = plan.make_plan(config, trainable, rows)
    _show_unread(config, console)
    table = Table("domain", "rows", "tokens", "epochs at first", "epochs if alone", box=None)
    for name, domain in made.domains.items():
        tokens = "" if domain.tokens is None else f"{domain.tokens:,}"
        table.add_row(
            escape(name), f"{domain.rows:,}", tokens, f"{domain.epochs:.2f}", f"{domain.epochs_alone:.2f}"
        )
    show(console, table)
    say(console, f"parameters     {made.parameters:,}")
    say(console, f"steps          {made.steps:,} of {config.batch.rows} rows")
    if made.updates:
        say(console, f"horizon        T = {made.horizon} steps, {made.updates} weight updates")
        say(
            console,
            f"arithmetic     {made.extra_arithmetic:.1%} more than plain training (validation gradients, "
            "and what else the method computes)",
        )
        chosen = config.trace_kind if config.trace_kind in made.memory else config.mixer.method
        kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in made.memory.items())
        say(console, f"memory         {format_bytes(made.memory[chosen])} more than plain training ({kinds})")
        if made.limits:
            held = ", ".join(f"{name} {high:.0%}" for name, high in made.limits.items())
            why = "mixer.options.epochs_ahead, cap and max_epochs limit it"
            say(console, f"limits         greatest weight at first: {held} ({why})")
        if config.mixer.method == "mixwell":
            say(console, f"traces         {chosen}. For this model: {made.advice}")
    if processes > 1 and made.updates and config.mixer.method == "mixwell":
        _show_shared(console, config, trainable, made, processes)
    if made.steps_before:
        say(
            console,
            f"once           {config.mixer.method} also computes as much as {made.steps_before:,.0f} steps",
        )
    ratio = made.seconds / made.plain_seconds
    times = f"{made.seconds * 1000:.0f} ms per step, {ratio:.2f} times that of fixed weights"
    say(
        console,
        f"time           {times}, {_time(made.total_seconds)} in all (measured on {plan.TIMED_STEPS} steps)",
    )


def _show_unread(config: Config, console: Console) -> None:
    unread = describe_unread(config)
    if unread is not None:
        say(console, f"warning: {unread}")


def _show_shared(console: Console, config: Config, trainable: Trainable, made: Plan, processes: int) -> None:
    trained = [p for p in trainable.model.parameters() if p.requires_grad]
    training, held = plan.distributed_cost(config, trained, processes=processes)
    points = len(builder.hypergradient(config).validation_points(made.horizon))
    parts = math.ceil(builder.validation_rows(config, made.horizon, points=points) / config.batch.rows)
    counts = {"parts": parts, "points": points}
    kinds = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in held.items())
    say(console, f"processes      {processes}, {config.parallel.strategy}; traces in each: {kinds}")
    plain, step = (one.sent(processes) for one in (training.plain_step, training.step))
    say(
        console,
        f"exchange       each sends {format_bytes(step)} in a step (plain training {format_bytes(plain)}) and "
        f"{format_bytes(training.round(**counts).sent(processes))} for the validation of a round: "
        f"{training.ratio(made.horizon, **counts):.3f} times plain training",
    )


def measure_fidelity(folder: Path, *, steps: int, replicates: int, after: AfterRun) -> None:
    """Compare the estimated hypergradient with the exact one from the last checkpoint on, and keep the result.

    Args:
        replicates: repetitions of the steps with other rows; 0 for the exact comparison only.

    Raises:
        ValueError: there are no steps, or there is one replicate.
    """
    if steps < 1:
        raise ValueError(f"--steps must be at least 1, got {steps}")
    if replicates < 0 or replicates == 1:
        raise ValueError(f"--replicates must be 0, or at least 2 to agree with each other, got {replicates}")
    console = Console()
    trainer = open_run(folder, console=console).last()
    weights = len(trainer.mixer.weights)
    if weights < 2:
        raise ValueError(f"{folder} has one domain: its weight cannot move, so there is nothing to compare")
    times = (2 * weights + 1) * (1 + replicates)
    say(console, f"training {steps} steps {times} times, from step {trainer.steps_done} on")
    measured = trainer.fidelity(steps=steps, replicates=replicates)
    fidelity.add_measurement(folder, trainer.steps_done, measured)
    say(console, str(measured))
    if measured.grade is not Grade.GOOD:
        say(console, FIDELITY_SETTINGS)
    after(folder)


def train_tokenizer(path: Path, *, size: int, out: Path | None, overrides: Sequence[str]) -> None:
    """Train a tokenizer on the domains of a config.

    Args:
        out: the file to write; ``None`` for ``tokenizer.json`` in the folder of the config.
        overrides: ``key=value``.

    Raises:
        ValueError: no domain is text, or the file already exists.
    """
    config = config_io.read_config(path, overrides)
    out = out or path.parent / "tokenizer.json"
    if out.exists():
        raise ValueError(f"{out} already exists, and runs may need it; give another --out")
    documents = [one.documents(config.base) for one in config.domains.values()]
    sources = [one for one in documents if one is not None]
    if not sources:
        raise ValueError(f"{path}: no domain is text, so there is nothing to train a tokenizer on")
    sizes = [one.size() for one in sources]
    total = None if None in sizes else sum(n or 0 for n in sizes)
    console = Console()
    with Tokenizing(console) as bar:
        made = tokenizers.train_tokenizer(
            sources, size=size, path=out, progress=bar.track("(training)", total)
        )
    written = out.resolve()
    named = written.relative_to(config.base) if written.is_relative_to(config.base) else written
    say(console, f"{out} has {made.size} tokens; put `tokenizer: {named}` into {path}")


def _finish(run: Run, *, resuming: bool, after: AfterRun | None) -> None:
    try:
        trainer = run.resume() if resuming else run.start()
        if not distributed.rank():
            _show_result(run, trainer, Console())
    except InterruptedError:
        # The live display is gone from the terminal; what it showed last must not be.
        if run.trainer is not None and not distributed.rank():
            _show_result(run, run.trainer, Console())
        raise
    finally:
        if after and not distributed.rank() and run.begun and (run.folder / metrics.FILE).exists():
            after(run.folder)


def _show_result(run: Run, trainer: Trainer, console: Console) -> None:
    weights = trainer.mixer.weights
    table = Table("domain", "last weight", "average weight", "rows seen", "epochs", box=None)
    seen, epochs = trainer.loader.taken, trainer.loader.sampler.epochs
    for name in weights.names:
        last, average = weights.last[name], weights.average[name]
        table.add_row(escape(name), f"{last:.4f}", f"{average:.4f}", f"{seen[name]:,}", f"{epochs[name]:.2f}")
    show(console, table)
    losses = [line["losses"] for line in metrics.read_metrics(run.folder, "evaluation")]
    for name, loss in losses[-1].items():
        first = f" (from {losses[0][name]:.4f})" if name in losses[0] else ""
        say(console, f"{name} loss {loss:.4f}{first}")
    say(console, "")
    for paragraph in verdict.read_verdict(run.folder).paragraphs():
        say(console, paragraph)
    say(console, f"{run.folder}: mixture.json, metrics.jsonl, {CHECKPOINTS}/")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
