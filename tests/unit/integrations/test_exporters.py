"""Mixtures for other tools. Their own code reads them in tests/peers; here, parsers of the same rules do."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import jsonschema
import numpy as np
import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from helpers.commands import mixwell
from helpers.mixture_files import mixture
from mixwell.integrations.exporters import EXPORTERS, export, formats
from mixwell.integrations.exporters.axolotl import TOLERANCE, fraction
from mixwell.integrations.exporters.base import DIGITS, shares
from mixwell.training import mixture_file

WEIGHTS = {"web": 0.2, "code": 0.5, "books": 0.3}
PATHS = {"web": "/data/web", "code": "/data/code", "books": "/data/books"}
UNIT = 10.0**-DIGITS

Pairs = list[tuple[str, float]]


def from_datasets(text: str) -> Pairs:
    mix = json.loads(text)
    return list(zip(mix.get("paths", mix["domains"]), mix["probabilities"], strict=True))


def from_words(words: list[str]) -> Pairs:
    return [(words[i + 1].strip(), float(words[i])) for i in range(0, len(words), 2)]


def from_torchtitan(text: str) -> Pairs:
    (sources,) = (
        node.value for node in ast.parse(text).body if isinstance(node, ast.Assign) and _is_sources(node)
    )
    return [(path or name, weight) for name, path, weight in ast.literal_eval(sources)]


def _is_sources(node: ast.Assign) -> bool:
    return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "SOURCES"


def from_llama_factory(text: str) -> Pairs:
    settings = yaml.safe_load(text)
    names = [name.strip() for name in settings["dataset"].split(",")]
    return list(zip(names, map(float, settings["interleave_probs"].split(",")), strict=True))


def from_csv(text: str) -> Pairs:
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    return [(row["domain"], float(row["weight"])) for row in rows]


PARSERS: dict[str, Callable[[str], Pairs]] = {
    "datasets": from_datasets,
    "megatron": lambda text: from_words(text.split()),
    "megatron-per-split": lambda text: from_words(json.loads(text)["train"]),
    "torchtitan": from_torchtitan,
    "llama-factory": from_llama_factory,
    "json": lambda text: list(json.loads(text).items()),
    "csv": from_csv,
    "yaml": lambda text: list(yaml.safe_load(text).items()),
}
"""All formats but axolotl, which has no weights."""


def taken(text: str, rows: dict[str, int]) -> dict[str, float]:
    """The rows of each path that axolotl would put together."""
    found: Counter[str] = Counter()
    entries = yaml.safe_load(text)["datasets"]
    assert len({tuple(sorted(entry.items())) for entry in entries}) == len(entries)
    for entry in entries:
        found[entry["path"]] += rows[entry["path"]] / entry.get("shards", 1)
    return dict(found)


ODD = [
    "a b",
    "a,b",
    "a: b",
    "# a",
    "'",
    '"',
    "null",
    "1e3",
    "${a}",
    "???",
    "-",
    "é",
    "\u200d",
    "{",
    "%s",
    " a",
    "a\n",
]
friendly = st.text("abcXYZ019_./-é字", min_size=1, max_size=8)
awkward = st.one_of(st.sampled_from(ODD), friendly, st.text(min_size=1, max_size=8))
simplex = st.lists(st.floats(0, 1), min_size=1, max_size=12).filter(lambda w: math.fsum(w) > 1e-300)


@st.composite
def any_mixture(draw: st.DrawFn) -> dict[str, Any]:
    weights = draw(simplex)
    kind = draw(st.sampled_from([friendly, awkward]))
    names = draw(st.lists(kind, min_size=len(weights), max_size=len(weights), unique=True))
    total = math.fsum(weights)
    return mixture({name: weight / total for name, weight in zip(names, weights, strict=True)})


def quiet(note: str) -> None:
    """Ignore the notes of an export."""


def exported(made: dict[str, Any], to: str) -> str | None:
    """The text, or nothing where a name is refused; only an awkward one may be, and the message has it."""
    awkward_names = [name for name in made["domains"] if not re.fullmatch(r"[\w./-]+", name)]
    try:
        return export(made, to=to, note=quiet)
    except ValueError as error:
        if any(repr(name) in str(error) for name in awkward_names):
            return None
        raise


def test_every_format_has_a_parser() -> None:
    assert {*PARSERS, "axolotl"} == set(EXPORTERS.names())


@pytest.mark.parametrize("to", PARSERS)
@given(made=any_mixture())
@example(made=mixture({"a, b": 0.5, "c: 'd'": 0.5}))
@example(made=mixture({"yes": 1 / 3, "é 字": 1 / 3, "=": 1 / 3}))
@settings(deadline=None)
def test_mixture_round_trips_or_is_rejected(made: dict[str, Any], to: str) -> None:
    if (text := exported(made, to)) is None:
        return
    parsed = PARSERS[to](text)
    expected = made["weights"]["average"]
    found = dict(parsed)
    assert len(found) == len(parsed)
    assert set(found) <= set(expected)
    assert [name for name in expected if name in found] == list(found)
    for name, weight in expected.items():
        assert abs(found.get(name, 0) - weight) < UNIT * 1.001
    assert sum(round(weight / UNIT) for weight in found.values()) == 10**DIGITS
    # what `interleave_datasets` draws with checks the sum itself
    np.random.default_rng(0).choice(len(parsed), p=[weight for _, weight in parsed])
    if to.startswith("megatron"):
        assert min(found.values()) > 0


@given(made=any_mixture(), data=st.data())
@settings(deadline=None)
def test_axolotl_row_counts_match_mixture(made: dict[str, Any], data: st.DataObject) -> None:
    rows = {name: data.draw(st.integers(1, 10**7)) for name in made["domains"]}
    made["rows"]["available"] = rows
    if (text := exported(made, "axolotl")) is None:
        return
    found = taken(text, rows)
    expected = dict(zip(made["domains"], shares(list(made["weights"]["average"].values())), strict=True))
    total = math.fsum(found.values())
    assert {name for name, share in expected.items() if share} == set(found)
    for name, number in found.items():
        assert number <= rows[name]
        assert number / total == pytest.approx(expected[name], rel=2.2 * TOLERANCE)
    assert any(number == rows[name] for name, number in found.items())


@given(st.floats(1e-9, 1))
def test_fractions_are_accurate_with_small_denominators(value: float) -> None:
    numerator, denominator = fraction(value)
    assert 1 <= numerator <= min(denominator, 20)
    assert numerator / denominator == pytest.approx(value, rel=TOLERANCE)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_weights_sum_to_one(weights: list[float]) -> None:
    total = math.fsum(weights)
    assume(total > 1e-200)
    rounded = shares(weights)
    assert sum(round(share / UNIT) for share in rounded) == 10**DIGITS
    assert math.fsum(rounded) == pytest.approx(1, abs=1e-12)
    for share, weight in zip(rounded, weights, strict=True):
        assert abs(share - weight / total) < UNIT * 1.001


def test_interleave_datasets_samples_by_weights() -> None:
    mix = json.loads(
        export(mixture({**WEIGHTS, "code": 0.4999999, "unused": 1e-7}), to="datasets", note=quiet)
    )
    assert mix["domains"] == list(WEIGHTS)
    sets = [datasets.Dataset.from_dict({"n": [number] * 3000}) for number in range(3)]
    for strategy in ("first_exhausted", "all_exhausted"):  # the second would never end with a weight of zero
        mixed = datasets.interleave_datasets(
            sets, probabilities=mix["probabilities"], seed=0, stopping_strategy=strategy
        )
        counts = Counter(mixed["n"])
        found = [counts[number] / len(mixed) for number in range(3)]
        # 3 standard deviations of a frequency in at least 4000 draws
        assert found == pytest.approx(list(WEIGHTS.values()), abs=0.024)


def test_datasets_format_includes_given_paths() -> None:
    assert set(json.loads(export(mixture(WEIGHTS), to="datasets"))) == {"domains", "probabilities"}
    with pytest.warns(UserWarning, match="no path was given or found for code, books"):
        mix = json.loads(export(mixture(WEIGHTS), to="datasets", paths={"web": "org/web"}))
    assert mix["paths"] == ["org/web", "code", "books"]


@pytest.mark.parametrize(
    ("to", "text"),
    [
        ("megatron", "0.2 /data/web\n0.5 /data/code\n0.3 /data/books\n"),
        (
            "llama-factory",
            "# For LLaMA-Factory's training file. The names are those of dataset_info.json; examples are drawn.\n"
            "dataset: /data/web,/data/code,/data/books\n"
            "mix_strategy: interleave_under\ninterleave_probs: 0.2,0.5,0.3\n",
        ),
        ("csv", "domain,weight\n/data/web,0.2\n/data/code,0.5\n/data/books,0.3\n"),
        ("yaml", "/data/web: 0.2\n/data/code: 0.5\n/data/books: 0.3\n"),
    ],
)
def test_output_of_every_format(to: str, text: str) -> None:
    assert export(mixture(WEIGHTS), to=to, paths=PATHS) == text


def test_axolotl_reduces_large_domains() -> None:
    rows = {"web": 1000, "code": 1000, "books": 300}
    with pytest.warns(UserWarning, match="right for the data that the run had"):
        text = export(mixture(WEIGHTS, rows=rows), to="axolotl", paths=PATHS)
    # books is scarcest for its weight (.3/300); web needs a fifth of it per row, code a half
    assert yaml.safe_load(text)["datasets"] == [
        {"path": "/data/web", "type": "completion", "shards": 5, "shards_idx": 0},
        {"path": "/data/code", "type": "completion", "shards": 2, "shards_idx": 0},
        {"path": "/data/books", "type": "completion"},
    ]
    with pytest.raises(ValueError, match="'books' has no rows"):
        export(mixture(WEIGHTS, rows={**rows, "books": 0}), to="axolotl", note=quiet)


def test_axolotl_rejects_streams() -> None:
    made = mixture(WEIGHTS, rows={"web": 1000})
    assert json.loads(export(made, to="json")) == WEIGHTS
    with pytest.raises(ValueError, match="'code' has rows that nobody has counted; take --to datasets"):
        export(made, to="axolotl", note=quiet)


def test_average_or_last_weights() -> None:
    last = {"web": 0.0, "code": 1.0, "books": 0.0}
    made = mixture(WEIGHTS, last=last)
    assert json.loads(export(made, to="json")) == WEIGHTS
    assert json.loads(export(made, to="json", weights="last")) == last
    with pytest.warns(UserWarning, match="left out, for their weight rounds to zero: web, books"):
        assert export(made, to="megatron", weights="last", paths=PATHS) == "1 /data/code\n"
    with pytest.raises(ValueError, match="weights must be average or last, got 'best'"):
        export(made, to="json", weights="best")


@pytest.mark.parametrize(
    ("to", "name", "message"),
    [
        ("llama-factory", "a,b", "by commas, so 'a,b' cannot be one"),
        ("llama-factory", " a", "white space off both ends"),
        ("llama-factory", "${a}", "OmegaConf"),
        ("megatron", "web text", "'web text' cannot have white space"),
        ("megatron-per-split", "web ", "white space off both ends of 'web '"),
        ("json", "a\nb", "has a control character"),
        ("csv", "a\u2028b", "has a line break"),
        ("yaml", "\ud800", "has half a character"),
    ],
)
def test_invalid_names_raise(to: str, name: str, message: str) -> None:
    for made, paths in ((mixture({name: 1.0}), {}), (mixture({"web": 1.0}), {"web": name})):
        with pytest.raises(ValueError, match=message.replace("$", r"\$")):
            export(made, to=to, paths=paths, note=quiet)


def test_invalid_paths_raise() -> None:
    with pytest.raises(ValueError, match="'web' and 'books' have the same path, '/data'"):
        export(mixture(WEIGHTS), to="json", paths={"web": "/data", "books": "/data"})
    with pytest.raises(ValueError, match="must not be empty"):
        export(mixture(WEIGHTS), to="json", paths={"web": ""})
    with pytest.raises(ValueError, match="unknown domain 'wbe'; did you mean web?"):
        export(mixture(WEIGHTS), to="json", paths={"wbe": "/data"})


def broken(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**mixture(WEIGHTS), **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[1]", "is not a mixture: expected an object with weights, got [1]"),
        ({"accuracy": 1}, "is not a mixture that mixwell wrote: it has no format, domains, weights"),
        (broken(rows=...), "it has no rows"),
        (broken(format=2), "has format 2, and this mixwell reads up to 1: it was written by a newer one"),
        ({"format": 2}, "written by a newer one"),
        (broken(format="1"), "format must be 1, got '1'"),
        (broken(domains=[]), "domains must be a list of different names, got []"),
        (broken(domains=["web", "web"]), "domains must be a list of different names"),
        (broken(domains=["web", "code"]), "weights.last must name each domain once (web, code)"),
        (broken(weights={"last": WEIGHTS}), "weights.average must name each domain once"),
        (broken(weights=7), "weights.last must name each domain once"),
        (broken(weights={"last": {**WEIGHTS, "web": 0.3}}), "weights.last must sum to one, got 1.1"),
        (
            broken(weights={"last": {**WEIGHTS, "web": -0.2}}),
            "the weight of 'web' must be a number of at least 0, got -0.2",
        ),
        (broken(weights={"last": {**WEIGHTS, "web": math.nan}}), "must be a number of at least 0, got nan"),
        (broken(weights={"last": {**WEIGHTS, "web": "0.2"}}), "must be a number of at least 0, got '0.2'"),
        (broken(rows={"available": {"web": "1"}}), "rows.available must have whole numbers by domain"),
        (broken(rows=[]), "rows.available must have whole numbers by domain, got None"),
    ],
)
def test_invalid_mixture_is_rejected(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mixture.json"
    text = json.dumps(content) if isinstance(content, dict) else content
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    _, err = mixwell("export", file.name, "--to", "json", cwd=tmp_path, status=2)
    assert message in err
    assert err.startswith("mixwell: mixture.json")
    assert len(err.strip().splitlines()) == 1


def test_written_files_read_back(tmp_path: Path) -> None:
    made = mixture(WEIGHTS)
    jsonschema.validate(made, mixture_file.schema())
    mixture_file.write_mixture(tmp_path, made)
    assert mixture_file.read_mixture(tmp_path) == mixture_file.read_mixture(tmp_path / "mixture.json") == made
    assert export(str(tmp_path), to="json") == export(made, to="json")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder in which `run` is the directory of a run."""
    mixture_file.write_mixture(tmp_path / "run", mixture(WEIGHTS, finished=False))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["run", "--to", "megatorn"],
            "unknown format 'megatorn'; did you mean megatron? available: json, csv, ",
        ),
        (["run", "--to", "xyz"], "unknown format 'xyz'; available: json, csv, "),
        (["run"], "give a mixture and a format"),
        (["--to", "json"], "give a mixture and a format"),
        (["nowhere", "--to", "json"], "there is no nowhere; give a mixture.json, or the directory of a run"),
        (["empty", "--to", "json"], "empty has no mixture.json: the run has not saved anything yet"),
        (
            ["run", "--to", "json", "--path", "wob=/x"],
            "unknown domain 'wob'; did you mean web? the domains are web, code",
        ),
        (
            ["run", "--to", "json", "--path", "web"],
            "--path takes NAME=PATH, such as --path web=/data/web; got 'web'",
        ),
        (["run", "--to", "json", "--path", "web="], "got 'web='"),
        (["run", "--to", "json", "--path", "web=a", "--path", "web=b"], "given twice for 'web': 'a' and 'b'"),
        (["run", "--to", "json", "--paths", "none.yaml"], "cannot read the paths in none.yaml"),
        (["run", "--to", "json", "--paths", "list.yaml"], "list.yaml must have a line `domain: path`"),
        (["run", "--to", "json", "--paths", "bad.yaml"], "bad.yaml is not YAML"),
        (["run", "--to", "json", "--paths", "wrong.yaml"], "names and paths must be text, got 'web': 1"),
        (
            ["run", "--to", "json", "--paths", "other.yaml"],
            "other.yaml: unknown domain 'cod'; did you mean code?",
        ),
        (["run", "--to", "json", "--weights", "best"], "weights must be average or last, got 'best'"),
        (["run", "--to", "json", "--out", "list.yaml"], "list.yaml is there already"),
        (["run", "--to", "json", "--out", "empty", "--force"], "empty"),
    ],
)
def test_invalid_input_prints_one_line_with_status_2(args: list[str], message: str, run: Path) -> None:
    (run / "empty").mkdir()
    for name, text in {"list": "[web]", "bad": "{", "wrong": "web: 1", "other": "cod: /x"}.items():
        (run / f"{name}.yaml").write_text(text)
    before = sorted(run.rglob("*"))
    out, err = mixwell("export", *args, cwd=run, status=2)
    lines = [line for line in err.splitlines() if "the run is not finished" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("mixwell: ")
    assert message in lines[0]
    assert out == ""
    assert sorted(run.rglob("*")) == before
    assert (run / "list.yaml").read_text() == "[web]"


def test_prints_or_writes_file(run: Path) -> None:
    mixture_file.write_mixture(run / "run", mixture(WEIGHTS))
    words = ("export", "run", "--to", "megatron", "--path", "web=/w", "--path", "code=/c")
    out, err = mixwell(*words, cwd=run)
    assert out == "0.2 /w\n0.5 /c\n0.3 books\n"
    assert err == "mixwell: no path was given or found for books; the domain's name is used in its place\n"
    said, err = mixwell(*words, "--path", "books=/b", "--out", "new/mix.txt", cwd=run)
    assert said == "new/mix.txt is written (Megatron-LM: a blend for --data-args-path)\n"
    assert err == ""
    assert (run / "new" / "mix.txt").read_text() == "0.2 /w\n0.5 /c\n0.3 /b\n"
    mixwell(*words, "--out", "new/mix.txt", cwd=run, status=2)
    assert (run / "new" / "mix.txt").read_text() == "0.2 /w\n0.5 /c\n0.3 /b\n"
    mixwell(*words, "--out", "new/mix.txt", "--force", cwd=run)
    assert (run / "new" / "mix.txt").read_text() == out


def test_unfinished_run_is_exported_with_note(run: Path) -> None:
    out, err = mixwell("export", "run/mixture.json", "--to", "json", cwd=run)
    assert json.loads(out) == WEIGHTS
    assert err == "mixwell: the run is not finished (120 of 1000 steps): these are its weights so far\n"
    made = {
        **mixture(WEIGHTS, finished=False),
        "budget": None,
    }  # a loop that was not told how long it will be
    notes: list[str] = []
    export(made, to="json", note=notes.append)
    assert notes == ["the run is not finished (120 steps): these are its weights so far"]


def test_paths_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    mixture_file.write_mixture(tmp_path, mixture({"a": 0.5, "a=b": 0.25, "c": 0.25}))
    (tmp_path / "paths.yaml").write_text("a: /file/a\nc: /file/c\n")
    words = ("export", tmp_path, "--to", "json", "--paths", "paths.yaml")
    out, _ = mixwell(*words, "--path", "a=b=/x=y", "--path", "a=/line/a", cwd=tmp_path)
    assert json.loads(out) == {"/line/a": 0.5, "/x=y": 0.25, "/file/c": 0.25}


@pytest.fixture
def configured(tmp_path: Path) -> Path:
    """A run with a config of one source of each kind; `books` was preprocessed by Megatron."""
    made = mixture(dict.fromkeys(("web", "code", "books", "more"), 0.25), rows={})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mixture.json").write_text(json.dumps(made))
    (tmp_path / "data").mkdir()
    for suffix in ("bin", "idx"):
        (tmp_path / "data" / f"books.{suffix}").write_bytes(b"")
    domains = {
        "web": {"files": "data/web"},
        "code": {"dataset": "owner/code"},
        "books": {"tokens": "data/books.bin", "dtype": "uint16"},
        "more": {"files": ["data/a", "data/b"]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump({"base": str(tmp_path), "domains": domains}))
    return folder


def test_torchtitan_loads_files_and_patterns(tmp_path: Path) -> None:
    """The function of the module that is written, without torchtitan around it."""
    (tmp_path / "names.txt").write_text("ARROW\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "of a row"}) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("in a folder\n")
    (load,) = (
        node
        for node in ast.parse(formats.TORCHTITAN % "").body
        if isinstance(node, ast.FunctionDef) and node.name == "load_text"
    )
    names: dict[str, Any] = {"os": os, "load_dataset": datasets.load_dataset}
    exec(ast.unparse(load), names)
    for path, text in {
        "names.txt": "ARROW",
        "code/**/*.py": "x = 1",
        "rows.jsonl": "of a row",
        "folder": "in a folder",
    }.items():
        assert [row["text"] for row in names["load_text"](str(tmp_path / path))] == [text]


def test_paths_are_those_of_the_config(configured: Path) -> None:
    data = configured.parent / "data"
    out, err = mixwell("export", "run", "--to", "datasets", "--path", "more=/more", cwd=configured.parent)
    assert json.loads(out)["paths"] == [str(data / "web"), "owner/code", str(data / "books.bin"), "/more"]
    assert not err
    out, err = mixwell("export", "run/mixture.json", "--to", "torchtitan", cwd=configured.parent)
    assert f"('web', {str(data / 'web')!r}, 0.25)" in out
    assert "('code', 'owner/code', 0.25)" in out
    assert "no path was given or found for more; the domain's name is used in its place" in err
    out, err = mixwell("export", "run", "--to", "torchtitan", "--path", "web=/other", cwd=configured.parent)
    assert "('web', '/other', 0.25)" in out


def test_megatron_prefix_is_that_of_preprocessed_data(configured: Path) -> None:
    out, err = mixwell("export", "run", "--to", "megatron", cwd=configured.parent)
    assert out.split()[1::2] == ["web", "code", str(configured.parent / "data" / "books"), "more"]
    assert "no path was given or found for web, code, more" in err


@pytest.mark.parametrize("content", ["domains: [", "- a", "domains: {web: {nothing: 1}}", "\x00"])
def test_unreadable_config_leaves_names(content: str, configured: Path) -> None:
    (configured / "config.yaml").write_text(content)
    out, err = mixwell("export", "run", "--to", "torchtitan", cwd=configured.parent)
    assert "('web', None, 0.25)" in out
    assert "no path was given or found for web, code, books, more" in err


def test_formats_are_listed(tmp_path: Path) -> None:
    out, _ = mixwell("export", "--list", cwd=tmp_path)
    assert [line.split()[0] for line in out.splitlines()] == list(EXPORTERS.names())
    assert all(len(line.split()) > 1 for line in out.splitlines())


NO_TORCH = """
import sys
from mixwell.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code
assert "mixwell.integrations.exporters" in sys.modules
assert "torch" not in sys.modules
"""


def test_export_does_not_import_torch(run: Path) -> None:
    words = [sys.executable, "-c", NO_TORCH, "export", "run", "--to", "yaml"]
    done = subprocess.run(words, cwd=run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout) == WEIGHTS


def test_export_of_configured_run_does_not_import_torch(configured: Path) -> None:
    words = [sys.executable, "-c", NO_TORCH, "export", "run", "--to", "datasets"]
    done = subprocess.run(words, cwd=configured.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "owner/code" in done.stdout
