"""The storm: some 1,800 malformed configs, data files, run folders and command lines; `make storm` prints the counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helpers.storm import command_lines, configs, data_files, python_entries, run_folders, tokenizer_files
from helpers.storm.cases import BAD, Result, table
from helpers.storm.runner import Runner

SEED = int(os.environ.get("MIXWELL_STORM_SEED", "0"))


@pytest.mark.storm
def test_no_input_ends_in_traceback_or_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    made.mkdir()
    run_folders.make_run(made)
    cases = [
        *configs.cases(SEED), *data_files.cases(SEED), *run_folders.cases(SEED, made), *command_lines.cases(SEED), *python_entries.cases(SEED), *tokenizer_files.cases(SEED),
    ]  # fmt: skip
    results: list[Result] = []
    with Runner(tmp_path / "cases") as runner:
        for number, case in enumerate(cases, start=1):
            results.append(runner.run(case))
            if results[-1].outcome in BAD:
                with capsys.disabled():
                    print(f"\n{number}/{len(cases)} {results[-1]}", flush=True)
    with capsys.disabled():
        print(f"\nseed {SEED}, {len(cases)} cases\n{table(results)}", flush=True)
    assert not [f"{one.outcome}: {one.case.kind}: {one.case.name}" for one in results if one.outcome in BAD]
