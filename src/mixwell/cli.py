"""The command line: parse, call, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="mixwell",
    help="Learn how much of each training domain a model should see, while it trains.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reproduce = typer.Typer(
    name="reproduce", help="Regenerate the paper's results and look at them.", no_args_is_help=True
)
app.add_typer(reproduce)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from mixwell import __version__

        typer.echo(f"mixwell {__version__}")
        raise typer.Exit


@reproduce.command("quadratic")
def quadratic_command(
    radius: Annotated[
        list[float] | None, typer.Option("--radius", "-R", help="Start at theta = -R. [default: 150, 1000]")
    ] = None,
    step_size: Annotated[
        list[float] | None, typer.Option("--step-size", "-a", help="alpha of the weights. [default: 1, 5]")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="eta of the model.")] = 0.1,
    budget: Annotated[int, typer.Option("--budget", "-N", help="Training steps.")] = 1000,
    horizons: Annotated[
        str, typer.Option("--horizons", "-T", help="Steps per weight update, with commas.")
    ] = "1,2,5,10,20,50,100,200,500,1000",
    margin: Annotated[float, typer.Option("--margin", "-c", help="The theorem's c.")] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder for the table and the figure.")] = Path("runs/quadratic"),
    figures: Annotated[bool, typer.Option(help="Draw the figure.")] = True,
) -> None:
    """The motivating example: two quadratics, where T=1 fails. Prints, checks and draws it."""
    from mixwell.experiments import quadratic_command as command

    ok = command.main(
        radii=radius or [150.0, 1000.0],
        step_sizes=step_size or [1.0, 5.0],
        learning_rate=learning_rate,
        budget=budget,
        horizons=_whole_numbers("--horizons", horizons),
        margin=margin,
        out=out,
        figures=figures,
    )
    if not ok:
        raise typer.Exit(1)


def _whole_numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{option} must be whole numbers of at least 1 with commas between, got {text!r}")
    return numbers


def main() -> None:
    """Run the command line; what a user did wrong becomes one line and exit status 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"mixwell: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
