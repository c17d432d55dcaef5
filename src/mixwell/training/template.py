"""The config file that a user starts from. It needs no torch, so that `mixwell init` is quick."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rich.console import Console

from mixwell.utils import files
from mixwell.utils.terminal import say


def write_template(path: Path) -> None:
    """Write a commented config.

    Raises:
        ValueError: there is a file already, or it would not be YAML.
    """
    if path.suffix == ".toml":
        raise ValueError(f"the config is written as YAML; give it a name such as {path.with_suffix('.yaml')}")
    if path.exists():
        raise ValueError(f"{path} already exists; remove it, or give another name")
    template = resources.files("mixwell.training").joinpath("templates/config.yaml").read_text("utf-8")
    files.write_atomically(path, template.replace("FILE", str(path)))
    say(
        Console(),
        f"{path} is written: put in your domains and your validation set, then `mixwell plan {path}`",
    )
