"""The storm: some 1,500 malformed configs, data files, run folders and command lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from helpers.storm import command_lines, configs, data_files, python_entries, run_folders, tokenizer_files
from helpers.storm.cases import BAD, Case, Result, table
from helpers.storm.runner import Runner

SEED = int(os.environ.get("MIXWELL_STORM_SEED", "0"))
SCALE = int(os.environ.get("MIXWELL_STORM_SCALE", "1"))
"""Multiplies the number of random cases."""
OUT = os.environ.get("MIXWELL_STORM_OUT")
"""A file for the outcomes, one JSON array per line."""

# Each of them once ended in a traceback, a hang, silence or an abort.
ONCE_BAD = """
configs: plan model.layers=1e+12
configs: run model.width=1e+12
configs: plan model.context=1e+30
configs: run batch.rows=1e+12
configs: run mixer.sketch_size=1e+30
configs: plan optimizer.lr=1e300
data files: gzip bomb, one line
data files: gzip bomb, a document
data files: npy with nested header
data files: npy with a long header
data files: npz named npy
data files: npy, fifo
data files: tensors double
data files: tensors flat
data files: tensors class 3
data files: tensors class -100
data files: tensors float targets
data files: tensors huge class
data files: cnn channels=1000000000
data files: tensors for a gpt
run folders: resume, checkpoints/step-00000002/state.json is a loop
command lines: reproduce quadratic --margin 1e308 --budget 20
command lines: tokenizer tiny.yaml --size 1000000000000
command lines: run tiny.yaml --set tokenizer=fifo
command lines: run tiny.yaml --set device=meta
python entries: import syntax
python entries: model import exits
python entries: import keyboard
python entries: data mapping
python entries: data rows of none
python entries: data ragged rows
python entries: data class range
python entries: data wrong shape
python entries: data text length
python entries: data sparse
python entries: data meta
python entries: model loss of none
python entries: model loss of a number
python entries: model loss without graph
python entries: model loss of no arguments
python entries: model meta
python entries: entry '..:x'
tokenizers: exploding lines
tokenizers: word level
tokenizers: doubling
tokenizers: run, folder with a fifo
""".strip().splitlines()


def all_cases(folder: Path, *, scale: int = 1) -> list[Case]:
    """The cases of every kind; those of run folders begin with a run in a folder."""
    run_folders.make_run(folder)
    return [
        *configs.cases(SEED, values=200 * scale, mutations=60 * scale),
        *data_files.cases(SEED, mutations=10 * scale),
        *run_folders.cases(SEED, folder, values=110 * scale, mutations=30 * scale),
        *command_lines.cases(SEED, random_lines=50 * scale),
        *python_entries.cases(SEED),
        *tokenizer_files.cases(SEED, values=25 * scale, mutations=10 * scale),
    ]


@pytest.mark.storm
def test_no_input_ends_in_traceback_or_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    made.mkdir()
    cases, results = all_cases(made, scale=SCALE), list[Result]()
    with Runner(tmp_path / "cases") as runner, open(OUT or os.devnull, "w") as out, capsys.disabled():
        for number, case in enumerate(cases, start=1):
            found = runner.run(case)
            results.append(found)
            line = [case.kind, case.name, found.outcome, found.status, found.output[-2000:]]
            print(json.dumps(line), file=out, flush=True)
            if found.outcome in BAD:
                print(f"\n{number}/{len(cases)} {found}", flush=True)
        print(f"\nseed {SEED}, {len(cases)} cases\n{table(results)}", flush=True)
    assert not [f"{one.outcome}: {one.case.kind}: {one.case.name}" for one in results if one.outcome in BAD]


def test_what_once_was_bad_gets_a_message(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    cases = {f"{case.kind}: {case.name}": case for case in all_cases(made)}
    with Runner(tmp_path / "cases") as runner:
        results = [runner.run(cases[name]) for name in ONCE_BAD]
    assert [
        str(one) for one in results if one.outcome != "message" and "is a loop" not in one.case.name
    ] == []
