"""Every method is told: in the list, in the documentation, with its paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers import commands
from mixwell import methods

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", methods.every())
def test_every_method_has_a_page_and_a_line(name: str) -> None:
    overview = (DOCS / "methods.md").read_text(encoding="utf-8")
    row = next(line for line in overview.splitlines() if line.startswith("| `") and f"`{name}`" in line)
    page = (DOCS / row.split("](")[1].split(")")[0]).read_text(encoding="utf-8")
    assert name in page
    keys = methods.find(name).options.model_fields
    missing = [key for key in keys if not re.search(rf"`{key}`|\b{key}:", page)]
    assert not missing, f"the page of {name} does not tell these settings: {missing}"


def test_list_shows_requirements_and_paper_of_each_method(tmp_path: Path) -> None:
    listed, _ = commands.mixwell("methods", cwd=tmp_path)
    for method in methods.every().values():
        assert method.line in listed
        assert method.paper in listed


@pytest.mark.parametrize("name", methods.every())
def test_details_of_one_method(name: str, tmp_path: Path) -> None:
    told, _ = commands.mixwell("methods", name, cwd=tmp_path)
    for key, field in methods.find(name).options.model_fields.items():
        assert f"  {key} = " in told
        assert field.description, f"{name}: {key} is not described"


def test_unknown_method_fails_with_suggestion(tmp_path: Path) -> None:
    _, said = commands.mixwell("methods", "dogee", cwd=tmp_path, status=2)
    assert said == "mixwell: there is no method 'dogee'; did you mean doge?\n"
