"""What the documentation shows is so: Python runs, YAML is a config, commands and files exist, messages are real.

Every page in docs/ is tested, also those that are added. The blocks of a page are taken in order:

- ```` ```python ```` runs, all blocks of a page in one namespace that is empty at first: a page defines its names.
  `docs_setup.py` writes the files that a page takes for granted, and checks the outcome.
- ```` ```yaml ```` is read as a config. One without `domains` is a part: it is put into the last whole one of the
  page. With `title="name.yaml"` it is also written to that file. After `<!-- not a config -->` any YAML will do.
- ```` ```text title="name" ````, likewise JSON, and YAML that is no config: what the file of that name reads; the
  blocks before have made it.
- ```` ```sh ````: commands of mixwell must parse, with values for `--set` that fit; files and targets of other
  commands must exist. After `<!-- run -->` the commands of mixwell run, with a tiny model.
- Commands and files in `code` of a line exist too.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer.main
import yaml

from examples.docs_setup import SETUPS, nothing
from helpers import commands
from helpers.text_configs import TINY
from mixwell.cli import app
from mixwell.integrations.exporters import EXPORTERS
from mixwell.training import config_io
from mixwell.training.logging import names as log_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "../README.md",
    *sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")),
]
FENCE = re.compile(r"^(?:<!-- ([\w ]+) -->\n)?( *)```(\w*)([^\n]*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
OTHER_TOOLS = {"accelerate", "mlflow", "ray", "tensorboard", "torchrun", "wandb"}
"""Commands of others, of which nothing is checked."""
PART = {"domains": {"web": "web.txt", "code": "code.txt"}, "validation": "validation.txt"}
"""What a part of a config is put into where the page has no whole one."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line in the page, `mark` the comment before it."""

    page: str
    line: int
    language: str
    title: str | None
    mark: str | None
    text: str

    @property
    def place(self) -> str:
        return f"docs/{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    found: list[Block] = []
    for match in FENCE.finditer(text):
        mark, _, language, options, inside = match.groups()
        title = re.search(r'title="([^"]+)"', options)
        line = text.count("\n", 0, match.start(5)) + 1
        found.append(Block(page, line, language, title and title[1], mark, dedent(inside)))
    return found


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", read(page))


# ------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config: dict[str, Any] = PART
    names: dict[str, Any] = {}
    with contextmanager(SETUPS.get(page, nothing))(tmp_path, names):
        assert not names, "a page defines its names itself, so that a reader can paste it"
        names["__name__"] = "__main__"
        for block in blocks(page, read(page)):
            if block.language == "python":
                run_python(block, names)
            elif block.language == "yaml":
                config = check_yaml(block, config, tmp_path)
            elif block.language in ("sh", "bash", "console"):
                check_shell(block, config, tmp_path)
            if block.title and (block.language in ("text", "json") or block.mark == "not a config"):
                assert (tmp_path / block.title).read_text(encoding="utf-8") == block.text, block.place


def test_every_setup_has_a_page() -> None:
    assert set(SETUPS) <= set(PAGES)


def run_python(block: Block, names: dict[str, Any]) -> None:
    # Empty lines before it, so that a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(DOCS / block.page), "exec")
    exec(code, names)


def check_yaml(block: Block, whole: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read a config; gives what the parts that follow it are put into."""
    plain = yaml.safe_load(block.text)
    if block.mark == "not a config":
        return whole
    merged = plain if "domains" in plain else {**whole, **plain}
    path = folder / "of-the-page.yaml"
    path.write_text(yaml.safe_dump(merged), encoding="utf-8")
    try:
        config_io.read_config(path)
    except ValueError as error:
        pytest.fail(f"{block.place}: {error}")
    if block.title:
        (folder / block.title).write_text(block.text, encoding="utf-8")
    return merged if "domains" in plain else whole


def check_shell(block: Block, config: dict[str, Any], folder: Path) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        if words:
            check_command(words, block.place)
            check_overrides(words, config, folder)
            if block.mark == "run" and words[0] == "mixwell":
                tiny = tiny_settings() if words[1] in ("plan", "run") else []
                commands.mixwell(*words[1:], *tiny, cwd=folder)


def tiny_settings() -> list[str]:
    """Options that make a run small."""
    changes = [(key, value) for key, value in TINY.items() if not isinstance(value, dict)]
    changes += [
        (f"{section}.{key}", value)
        for section, inside in TINY.items()
        if isinstance(inside, dict)
        for key, value in inside.items()
    ]
    return [word for key, value in changes for word in ("--set", f"{key}={value}")]


def check_overrides(words: list[str], config: dict[str, Any], folder: Path) -> None:
    overrides = [after for word, after in pairwise(words) if word == "--set"]
    if overrides:
        path = folder / "overridden.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        config_io.read_config(path, overrides)


# ----------------------------------------------------------------------------------------------- commands


def check_command(words: list[str], place: str, *, whole: bool = True) -> None:
    """Fail where a command of mixwell has no such option, or a file or target is not there.

    With `whole` its arguments must be there too; in a line of text they may be left out.
    """
    tool, *rest = words
    if tool == "mixwell":
        command: Any = typer.main.get_command(app)
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        if getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
            pytest.fail(f"{place}: there is no command {' '.join(words)}")
        try:
            command.make_context("mixwell", list(rest))
        except typer.Exit:
            pass  # --help or --version
        except Exception as error:
            if whole or type(error).__name__ != "MissingParameter":
                said = getattr(error, "format_message", error.__str__)()
                pytest.fail(f"{place}: {' '.join(words)}: {said}")
    elif tool == "python":
        files = [word for word in rest if word.endswith(".py")]
        missing = [word for word in files if not (ROOT / word).exists()]
        assert not missing, f"{place}: {missing} are not there"
    elif tool == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(rest) <= set(targets), f"{place}: the Makefile has no {rest}"
    elif tool == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = [
            one for word in rest for part in re.findall(r"\[([\w,]+)\]", word) for one in part.split(",")
        ]
        assert set(named) <= set(extras), f"{place}: there is no extra {named}"
    elif tool not in OTHER_TOOLS:
        pytest.fail(f"{place}: {tool} is not known here; add it to OTHER_TOOLS if it is another's")


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_files_in_prose_exist(page: str) -> None:
    headings = re.compile(r"^#.*$", re.MULTILINE)
    for code in INLINE.findall(headings.sub("", prose(page))):
        code = " ".join(code.split())
        if re.match(r"(mixwell|python|make) [\w-]", code):
            check_command(shlex.split(code), f"docs/{page}", whole=False)
        elif re.fullmatch(r"(examples|bench|docs|tests)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"docs/{page}: there is no {code}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mixwell run mixwell.yaml --outt x", "No such option"),
        ("mixwell runn mixwell.yaml", "there is no command"),
        ("mixwell resume", "Missing"),
        ("cargo build", "cargo is not known"),
    ],
)
def test_wrong_command_is_detected(line: str, said: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=said):
        check_command(line.split(), "here")


def test_wrong_blocks_are_detected(tmp_path: Path) -> None:
    text = "# Page\n\n```python\nx = 1\n\ny = x / 0\n```\n\n```yaml\nmixer: {horizn: 3}\n```\n"
    python, config = blocks("page.md", text)
    with pytest.raises(ZeroDivisionError) as caught:
        run_python(python, {})
    assert caught.traceback[-1].lineno + 1 == 6  # as the page counts
    with pytest.raises(pytest.fail.Exception, match="did you mean horizon"):
        check_yaml(config, PART, tmp_path)


# ----------------------------------------------------------------------------------------- words and numbers

FIGURES = (
    "../README.md",
    "index.md",
    "idea.md",
    "guides/choosing-t.md",
    "guides/images.md",
    "guides/many-domains.md",
)
SOURCES = ("docs/results.md", "results/README.md", "bench/results/fidelity.txt")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d*\.\d+(?![\w.]*\w)")


def numbers(text: str) -> set[float]:
    return {abs(float(number)) for number in NUMBER.findall(text)}


@pytest.mark.parametrize("page", FIGURES)
def test_numbers_are_from_the_results(page: str) -> None:
    """No figure is on these pages that the results do not have."""
    known = numbers("\n".join((ROOT / name).read_text(encoding="utf-8") for name in SOURCES))
    told = numbers(INLINE.sub("", prose(page)))
    assert not told - known, f"docs/{page} has figures that {', '.join(SOURCES)} do not have"


def messages() -> list[str]:
    """All texts in the sources, with … for what is filled in."""
    found: list[str] = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted_messages(text: str) -> list[str]:
    """The headings, or terms of a list of definitions, that stand below "Messages"."""
    _, _, below = text.partition("\n## Messages\n")
    return re.findall(r"^(?:### )?`(.+)`\n(?=\n|:   )", below, flags=re.MULTILINE)


QUOTING = [page for page in PAGES if quoted_messages(read(page))]


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_messages_exist_in_sources(page: str) -> None:
    known = messages()
    for message in quoted_messages(read(page)):
        assert any(message in one for one in known), f"docs/{page}: no message reads {message!r}"


def test_pages_quote_messages() -> None:
    assert len(quoted_messages(read("guides/troubleshooting.md"))) > 10
    for page in ("trainer", "datasets", "lightning", "accelerate", "loggers", "export"):
        assert f"guides/{page}.md" in QUOTING
    text = "# Page\n\n## Messages\n\n`one …`\n:   Why.\n\n### `two`\n\nWhy.\n"
    assert quoted_messages(text) == ["one …", "two"]


# ----------------------------------------------------------------------------------------------------- tables


def test_metric_names_match_sources() -> None:
    told = re.findall(r"^``(mixwell/.+?)`` +(\w+) +(.+)$", log_names.__doc__ or "", flags=re.MULTILINE)
    assert len(told) > 10
    terms = re.compile(r"^`(mixwell/.+)` <small>(\w+)</small>\n:   (.+)\.$", re.MULTILINE)
    shown = [(name, when, what.lower()) for name, when, what in terms.findall(read("guides/loggers.md"))]
    assert shown == [(name, when, what.replace("``", "`").lower()) for name, when, what in told]


def test_export_formats_match_sources() -> None:
    _, _, below = read("guides/export.md").partition("\n| `--to` |")
    rows = below.split("\n\n")[0]
    listed = re.findall(r"^\| `([\w-]+)` \|", rows, flags=re.MULTILINE)
    assert sorted(listed) == sorted(EXPORTERS.names())


def test_figures_can_be_drawn(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DOCS / "figures.py"), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {"short-horizons.png", "long-horizons.png"}
    assert all((DOCS / "assets" / name).exists() for name in drawn)
