"""Help pages of the command line: arguments by their names, and examples at the end."""

from __future__ import annotations

from typing import Any, final

import typer
from typer.core import TyperCommand
from typing_extensions import override

CONTEXT = {"help_option_names": ["-h", "--help"]}
"""Settings of every command."""


def examples(*lines: str) -> str:
    """Return the epilog of a help page with one command per line, which is not wrapped."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


@final
class HelpCommand(TyperCommand):
    """A command whose help page shows arguments without the types of Python, as in ``RUN`` and ``[CONFIG]``."""

    @override
    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        arguments = [_argument(one) for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *arguments]

    @override
    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                rows["Arguments"].append((_argument(parameter), record[1]))
            else:
                rows["Options"].append(record)
        for title, listed in rows.items():
            if listed:
                with formatter.section(title):
                    formatter.write_dl(listed)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"
