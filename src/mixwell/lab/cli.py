"""``mixwell reproduce ...``. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, final

import typer

from mixwell.training.command_options import EngineName, RayAddress, Workers, make_engine
from mixwell.training.interrupts import interruptible
from mixwell.utils.command_help import HelpCommand, examples

Given = TypeVar("Given")
reproduce = typer.Typer(
    name="reproduce",
    help="Regenerate the paper's results and look at them.",
    epilog=examples("mixwell reproduce quadratic", "mixwell reproduce mnist --quick"),
    no_args_is_help=True,
)


@final
@dataclass(frozen=True)
class Reproduced:
    """The outcome of a command.

    Args:
        folder: the folder of its tables.
        figures: whether to draw them.
        passed: whether all checks hold.
        examples: loads the images of which examples are drawn.
    """

    folder: Path
    figures: bool
    passed: bool = True
    examples: Callable[[], Any] | None = None


@reproduce.command(
    "quadratic",
    cls=HelpCommand,
    epilog=examples("mixwell reproduce quadratic", "mixwell reproduce quadratic -R 150 -a 1 -T 1,10,100"),
)
def quadratic_command(
    radius: Annotated[
        list[float] | None,
        typer.Option("--radius", "-R", metavar="NUMBER", help="Start at theta = -R. [default: 150, 1000]"),
    ] = None,
    step_size: Annotated[
        list[float] | None,
        typer.Option("--step-size", "-a", metavar="NUMBER", help="alpha of the weights. [default: 1, 5]"),
    ] = None,
    learning_rate: Annotated[float, typer.Option(metavar="NUMBER", help="eta of the model.")] = 0.1,
    budget: Annotated[int, typer.Option("--budget", "-N", metavar="N", help="Training steps.")] = 1000,
    horizons: Annotated[
        str, typer.Option("--horizons", "-T", metavar="N,N,...", help="Steps per weight update, with commas.")
    ] = "1,2,5,10,20,50,100,200,500,1000",
    margin: Annotated[float, typer.Option("--margin", "-c", metavar="NUMBER", help="The theorem's c.")] = 1.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the table and the figure.")] = Path(
        "runs/quadratic"
    ),
    figures: Annotated[bool, typer.Option(help="Draw the figure.")] = True,
) -> Reproduced:
    """The motivating example: two quadratics, where T=1 fails. Prints, checks and draws it."""
    from mixwell.lab.quadratic import command

    ok = command.main(
        radii=radius or [150.0, 1000.0],
        step_sizes=step_size or [1.0, 5.0],
        learning_rate=learning_rate,
        budget=budget,
        horizons=_whole_numbers("--horizons", horizons),
        margin=margin,
        out=out,
    )
    return Reproduced(out, figures, passed=ok)


@reproduce.command(
    "bounds",
    cls=HelpCommand,
    epilog=examples("mixwell reproduce bounds --quick", "mixwell reproduce bounds --seeds 16 --workers 4"),
)
def bounds_command(
    seeds: Annotated[
        int | None, typer.Option(metavar="N", help="Problems of each kind. [default: 8]")
    ] = None,
    copies: Annotated[
        int | None, typer.Option(metavar="N", help="Runs of noise to average. [default: 16]")
    ] = None,
    decades: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Of budgets N. [default: 3]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="3 seeds, 4 copies, 2 decades.")] = False,
    workers: Workers = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for tables, figures and report.")
    ] = Path("runs/bounds"),
    figures: Annotated[bool, typer.Option(help="Draw the figures and the report.")] = True,
) -> Reproduced:
    """The theorems compared with measurements, and the best T. On problems with known constants; resumable."""
    with interruptible():
        from mixwell.lab.bounds import command

        ok = command.main(
            seeds=_given(seeds, 3 if quick else 8),
            copies=_given(copies, 4 if quick else 16),
            decades=_given(decades, 2.0 if quick else 3.0),
            workers=workers,
            engine=make_engine(engine, ray_address),
            out=out,
        )
    return Reproduced(out, figures, passed=ok)


@reproduce.command(
    "mnist",
    cls=HelpCommand,
    epilog=examples(
        "mixwell reproduce mnist --quick", "mixwell reproduce mnist -N 1000,4000 -T 1,10,84 --seeds 5"
    ),
)
def mnist_command(
    budget: Annotated[
        str, typer.Option("--budget", "-N", metavar="N,N,...", help="Training steps; several with commas.")
    ] = "1000",
    horizons: Annotated[
        str | None,
        typer.Option(
            "--horizons",
            "-T",
            metavar="N,N,...",
            help="Steps per weight update. [default: 1,2,5,10,... and sqrt(N log N)]",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="N", help="How many seeds, from 0.")] = 2,
    workers: Workers = None,
    engine: EngineName = "local",
    ray_address: RayAddress = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small network and batch: c=8, batch 32.")] = False,
    channels: Annotated[
        int | None, typer.Option("--channels", "-c", metavar="N", help="Width. [default: 32]")
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            "--batch-size", metavar="N,N,...", help="Images per domain; several with commas. [default: 256]"
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(metavar="NUMBER", help="eta of the network.")] = 0.05,
    step_size: Annotated[float, typer.Option(metavar="NUMBER", help="alpha of the weights.")] = 0.5,
    curvature: Annotated[float, typer.Option(metavar="NUMBER", help="gamma of H = gamma I.")] = 0.01,
    train_size: Annotated[int, typer.Option(metavar="N", help="Training images per domain.")] = 12_000,
    validation_size: Annotated[int, typer.Option(metavar="N", help="Validation images.")] = 3_000,
    rotation: Annotated[
        float, typer.Option(metavar="NUMBER", help="Angles of the rotated domain: +- this, in degrees.")
    ] = 90.0,
    validation_angle: Annotated[
        float, typer.Option(metavar="NUMBER", help="Angle of the validation images.")
    ] = 45.0,
    noise_rate: Annotated[
        float, typer.Option(metavar="NUMBER", help="Share of wrong labels in the noisy domain.")
    ] = 0.5,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for tables, figures and report.")
    ] = Path("runs/mnist"),
    figures: Annotated[bool, typer.Option(help="Draw the figures and the report.")] = True,
) -> Reproduced:
    """The paper's MNIST experiment. Final loss, accuracy and weights against the horizon; resumable."""
    with interruptible():
        from mixwell.lab.mnist import command

        settings = command.main(
            budgets=_whole_numbers("--budget", budget),
            horizons=None if horizons is None else _whole_numbers("--horizons", horizons),
            batch_sizes=_whole_numbers("--batch-size", _given(batch_size, "32" if quick else "256")),
            seeds=seeds,
            workers=workers,
            engine=make_engine(engine, ray_address),
            channels=_given(channels, 8 if quick else 32),
            learning_rate=learning_rate,
            step_size=step_size,
            curvature=curvature,
            train_size=train_size,
            validation_size=validation_size,
            rotation=rotation,
            validation_angle=validation_angle,
            noise_rate=noise_rate,
            out=out,
        )
    return Reproduced(out, figures, examples=lambda: command.examples(settings))


def _given(value: Given | None, default: Given) -> Given:
    return default if value is None else value


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option} must be whole numbers of at least 1 with commas between, got {text!r}")
    return numbers
