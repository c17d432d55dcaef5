"""Options that several commands share. Importing them is quick: torch is not imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mixwell.training.engines import Engine

DEFAULT_CONFIG = Path("mixwell.yaml")
"""What `mixwell init` writes, and other commands read where no config is named."""
ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML or TOML file; `mixwell init` writes one.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Replace a setting, as in optimizer.lr=0.001; repeatable."
    ),
]
TrialsEngine = Annotated[
    str,
    typer.Option("--engine", metavar="NAME", help="Backend for the trials of a method: local or ray."),
]
Report = Annotated[bool, typer.Option(help="Write the report page at the end.")]
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
