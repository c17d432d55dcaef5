"""Problems that need no files from the user: ``mixwell compare NAME``.

Their data come from this Python installation or from package registries (npm, PyPI, Debian) and are cached.
Nothing heavy is imported before a problem is used, so that ``--help`` can list them quickly.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.console import Console


@final
@dataclass(frozen=True)
class EmbeddedProblem:
    """A problem that can be compared by its name; its config is ``NAME.yaml`` in this package.

    Args:
        description: one line.
        prepare: ``module:function`` in this package; called with a folder and a function that prints a line, it
            writes the data that the config names into the folder, or fetches them into the cache, unless they
            exist.
    """

    description: str
    prepare: str


PROBLEMS = {
    "mnist": EmbeddedProblem(
        "digits turned by 45 degrees, from turned, straight and mislabeled ones", "mnist:prepare"
    ),
    "fashion": EmbeddedProblem(
        "clothes, from few good images and many with wrong labels or spoiled pixels", "fashion:prepare"
    ),
    "demo": EmbeddedProblem("docstrings, from code, a manual, names and noise", "demo:prepare"),
    "drama": EmbeddedProblem("plays, from little drama and five other kinds of text", "text:prepare_drama"),
    "repetition": EmbeddedProblem(
        "scripture, from very little of it, which can be seen too often, and many speeches",
        "text:prepare_repetition",
    ),
    "manuals": EmbeddedProblem(
        "Italian manual pages, from few of them and those in five languages", "manuals:prepare"
    ),
    "finetune": EmbeddedProblem(
        "a small model fine-tuned on questions and answers, with one wrong source", "finetune:prepare"
    ),
    "synthetic": EmbeddedProblem(
        "linear regression with a best mixture known in closed form", "synthetic:prepare"
    ),
}


def list_problems() -> str:
    """Return the names and descriptions for a help page, behind other text."""
    lines = (
        textwrap.fill(
            f"{name:<12}{problem.description}", width=76, initial_indent=" " * 2, subsequent_indent=" " * 14
        )
        for name, problem in PROBLEMS.items()
    )
    return "\n\n\b\nEmbedded problems:\n" + "\n".join(lines)


def find(name: str, out: Path, console: Console) -> Path:
    """Return the path of a config; that of an embedded problem is written to ``out``, with its data.

    Raises:
        ValueError: There is neither a config nor a problem of this name.
        OSError: The data cannot be fetched.
    """
    from mixwell.utils import files
    from mixwell.utils.terminal import say

    if Path(name).is_file():
        return Path(name)
    if name not in PROBLEMS:
        raise ValueError(
            f"there is no config {name}; give the path of one (`mixwell init` writes one to start from), or the "
            f"name of an embedded problem: {', '.join(PROBLEMS)}"
        )
    module, _, function = PROBLEMS[name].prepare.partition(":")
    prepare = getattr(import_module(f"{__name__}.{module}"), function)
    prepare(out / "data", lambda line: say(console, line))
    path = out / f"{name}.yaml"
    if not path.exists():
        files.write_atomically(path, read_config(name) + _resource("variants.yaml"))
    return path


def read_config(name: str) -> str:
    """Return the YAML config of an embedded problem, without the variants of methods."""
    return _resource(f"{name}.yaml")


def _resource(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")
