"""Tables read back what was written, and files are written whole or not at all."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixwell.lab import tables
from mixwell.utils import environment, files

plain = st.text(alphabet="abc12_,\"'; \n-", max_size=8).filter(lambda t: t.strip() == t and not _number(t))


def _number(text: str) -> bool:
    if "_" in text:
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


@given(st.lists(st.tuples(st.integers(), st.floats(allow_nan=False), plain), min_size=1, max_size=5))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, float, str]]) -> None:
    path = tmp_path_factory.mktemp("tables") / "table.csv"
    written = [{"whole": a, "real": b, "text": c} for a, b, c in rows]
    tables.write(path, written)
    assert tables.read(path) == written


def test_nan_round_trips(tmp_path: Path) -> None:
    tables.write(tmp_path / "t.csv", [{"x": math.nan}])
    assert math.isnan(tables.column(tables.read(tmp_path / "t.csv"), "x")[0])


def test_invalid_tables_raise(tmp_path: Path) -> None:
    assert tables.read(tmp_path / "none.csv") == []
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match="line 3 has 1 values for 2 columns"):
        tables.read(tmp_path / "bad.csv")
    with pytest.raises(ValueError, match="a row has"):
        tables.write(tmp_path / "t.csv", [{"a": 1}, {"b": 2}])
    with pytest.raises(ValueError, match="no rows"):
        tables.write(tmp_path / "t.csv", [])


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    files.write_atomically(path, "old")
    with pytest.raises(RuntimeError), files.replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_environment_has_command_without_paths() -> None:
    described = environment.describe(["mixwell", "reproduce", "mnist", "--out", str(Path.home() / "a b")])
    assert described["commands"] == ["mixwell reproduce mnist --out 'a b'"]
    assert str(Path.home()) not in str(described)


def test_environment_keeps_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["run", "one"], ["run", "two"], ["run", "one"]):
        monkeypatch.setattr("sys.argv", ["mixwell", *words])
        environment.write(tmp_path)
    lines = environment.facts([tmp_path, tmp_path])
    assert lines[:2] == [("made by", "mixwell run one"), ("made by", "mixwell run two")]
    assert len(lines) == 4
    with pytest.raises(ValueError, match="cannot read the environment of the results"):
        environment.read(tmp_path / "none")
