"""Options that several commands share. Importing them is quick: torch is not imported before a command runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mixwell.training.engines import Engine

Workers = Annotated[int | None, typer.Option(metavar="N", help="Runs at a time. [default: one per core]")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine", metavar="NAME", help="Where runs are done: local (processes of this machine) or ray."
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="host:port of a Ray cluster's head, or auto. [default: $RAY_ADDRESS, or a Ray of its own here]",
    ),
]


def make_engine(name: str, address: str | None) -> Engine:
    """Return the engine of ``--engine`` and ``--ray-address``."""
    from mixwell.training.engines import Engine

    return Engine(name, address)
