"""MkDocs hooks: pages generated from the sources (command line, config keys), formulas, and figures of results."""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads hooks by path

from formulas import Formulas, fence

from mixwell.cli import app
from mixwell.data.sources.base import SOURCES
from mixwell.training import config
from mixwell.training.logging.base import LOGGERS
from mixwell.training.models.base import MODELS
from mixwell.training.models.python import GivenModelConfig
from mixwell.training.optimization import OPTIMIZERS

ROOT = Path(__file__).parents[2]
RESULTS = "assets/results"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add formulas to the Markdown extensions."""
    config.markdown_extensions.append(Formulas())  # pyright: ignore[reportArgumentType]
    fences = {"name": "math", "class": "formulas", "format": fence}
    config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", []).append(fences)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the figures and reports in results/, which is outside the docs directory."""
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix == ".png" or path.name == "report.html":
            uri = f"{RESULTS}/{path.relative_to(ROOT / 'results').as_posix()}"
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Insert generated content, and rewrite links to results/ so that they point into the site."""
    here = posixpath.dirname(page.file.src_uri) or "."
    up = "../" + "../" * (0 if here == "." else here.count("/") + 1)
    markdown = markdown.replace(f"]({up}results/", f"]({posixpath.relpath(RESULTS, here)}/")
    for mark, lines in (("command-line", commands), ("settings", sections)):
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", "\n".join(lines()))
    return markdown


# ------------------------------------------------------------------------------------------- command line


def commands() -> Iterator[str]:
    """Yield the commands with their arguments and options, as lines of Markdown."""
    yield from _command(typer.main.get_command(app), ["mixwell"])


def _command(command: Any, words: list[str]) -> Iterator[str]:
    inside = getattr(command, "commands", None)
    if inside is not None:
        if len(words) > 1:
            yield from ("", f"## {' '.join(words)}", "", command.help or "")
        for name, one in inside.items():
            yield from _command(one, [*words, name])
        return
    # The commands of a group are listed below it.
    yield from ("", f"{'#' * len(words)} {' '.join(words)}", "", " ".join((command.help or "").split()), "")
    arguments = [_shown(p) for p in command.params if p.param_type_name == "argument"]
    yield from ("```text", " ".join([*words, *arguments, "[OPTIONS]"]), "```", "")
    for parameter in command.params:
        if parameter.name == "help":
            continue
        text, _, default = (parameter.help or "").partition(" [default: ")
        if default:
            default = default.removesuffix("]")
        elif parameter.default is True:
            default = f"`{parameter.opts[0]}`"
        elif parameter.default not in (None, False):
            default = f"`{parameter.default}`"
        if parameter.param_type_name == "argument":
            names = [_shown(parameter)]
        else:
            names = [*parameter.opts, *parameter.secondary_opts]
        yield from _item(names, [f"default {default}"] if default else [], text)
    shown = (command.epilog or "").partition("Examples:\n")[2].partition("\n\n")[0]
    yield from ("", "```sh", *(line.strip() for line in shown.splitlines()), "```")


def _shown(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _item(names: Sequence[str], facts: Sequence[str], text: str) -> Iterator[str]:
    # A definition list is readable on a phone too, unlike a table.
    shown = ", ".join(f"`{name}`" for name in names)
    about = f" <small>{' · '.join(facts)}</small>" if facts else ""
    yield from (f"{shown}{about}", f":   {' '.join(text.split())}", "")


# ---------------------------------------------------------------------------------------------- settings


def sections() -> Iterator[str]:
    """Yield the keys of a config file, section by section, as lines of Markdown."""
    yield from ("## Top level", "")
    yield from _fields(config.Config)
    yield from (
        "## Domains, `validation` and `test`",
        "",
        "Each is exactly one of these sources.",
        "",
    )
    for name in sorted(SOURCES.names()):
        yield from _registered(f"`{name}`", SOURCES.get(name), level=3)
    for name, registry in (("model", MODELS), ("optimizer", OPTIMIZERS)):
        for kind in registry.names():
            yield from _registered(f"`{name}`: `kind: {kind}`", registry.get(kind), level=2)
    plain = {
        "batch": config.BatchConfig,
        "mixer": config.mixer_section(),
        "output": config.OutputConfig,
        "parallel": config.ParallelConfig,
    }
    for name, section in plain.items():
        yield from _registered(f"`{name}`", section, level=2)
    yield from ("", "## `loggers`", "", "Each logger is `true`, `false` or a section.", "")
    for name in LOGGERS.names():
        yield from _registered(f"`loggers.{name}`", LOGGERS.get(name), level=3)


def _registered(title: str, section: type[BaseModel], *, level: int) -> Iterator[str]:
    if "given" in section.model_fields or section is GivenModelConfig:  # written by Python code, not by users
        return
    yield from ("", f"{'#' * level} {title}", "", " ".join((section.__doc__ or "").split()), "")
    yield from _fields(section)


def _fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        values = _values(field.annotation)
        if field.is_required():
            facts = [values, "required"]
        elif isinstance(default, BaseModel):
            facts = [values]
        else:
            facts = [values, f"default `{_yaml(default)}`"]
        yield from _item([name], facts, field.description or _DESCRIPTIONS.get(name, ""))


_DESCRIPTIONS = {
    "kind": "The kind of model, or of optimizer.",
    "model": "The model.",
    "optimizer": "The optimizer.",
    "batch": "The batches.",
    "mixer": "The method that learns the weights of the domains.",
    "output": "Intervals of logging, evaluation and checkpoints.",
    "parallel": "Distributed training.",
    "layers": "Number of blocks.",
    "heads": "Number of attention heads.",
    "width": "Width of the residual stream.",
    "dropout": "Dropout rate.",
    "channels": "Channels of the first layer; the second has twice the number.",
    "classes": "Number of classes.",
}
"""Descriptions of fields that have none in the sources."""


_WORDS = {int: "integer", float: "number", str: "text", bool: "`true`, `false`", Path: "path"}


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def _values(kind: Any) -> str:
    """Return the possible values of a setting, in words."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _values(get_args(kind)[0])
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in get_args(kind))
    if origin in (Union, UnionType):
        parts = [_values(one) for one in get_args(kind) if one is not type(None)]
        return "section" if any(part == "section" for part in parts) else " or ".join(dict.fromkeys(parts))
    if origin is dict:
        inside = _values(get_args(kind)[1])
        return "by name: " + inside if inside != "any" else "by name"
    if origin in (list, tuple):
        return "list"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "section"
    return _WORDS.get(kind, "any")
