"""Short trainings of the whole product with fixed seeds give the results that were recorded.

The record is a scaffold for changes of structure: code may move and names may change, but not what is
computed. ``scaffold.json`` has names of its own. After a renaming, update the cases (``helpers/golden_*.py``)
and the code that reads their results (``helpers/golden_outcomes.py``); the record stays as it is. A change of
an algorithm changes the record on purpose, in the commit that makes it::

    MIXWELL_RECORD=1 python -m pytest tests/golden/test_scaffold.py             # all cases
    MIXWELL_RECORD=1 python -m pytest tests/golden/test_scaffold.py -k images   # some of them

Numbers are compared up to rounding, because they are not the same bit for bit on every machine: BLAS and
vectorized kernels choose the order of a sum by processor and version, and training amplifies the difference.
On the machine that recorded them they are, and ``MIXWELL_EXACT=1`` compares every bit, including the digests
of the parameters. Use it after a step that only moves code. That a run that was stopped and resumed equals
the uninterrupted one is always compared bit for bit.

Not covered: accelerators, ``torch.compile``, more than two processes, downloads (the images are a stand-in,
and the demo's texts are not those of the Python installation), tokenizers other than bytes, data other than
text files, tensors and Python functions, checkpoints of earlier versions (runs resume from their own) and
those of integrations, comparisons, sweeps and their engines, reports, loggers, exporters, the command line,
messages, memory and time. A change smaller than the tolerance goes unnoticed without ``MIXWELL_EXACT=1``, and
nothing here says that a recorded value is right: the other tests do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import golden_integrations, golden_loops, golden_processes, golden_runs
from helpers.golden_outcomes import differences
from mixwell import methods

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance\\(treespec, LeafSpec\\).*",
    "ignore:.*does not have many workers.*",
    "ignore:Checkpoint directory .* exists and is not empty.*",
    # Its steps are not known to the library, which says so.
    "ignore:.*RMSprop.*:UserWarning",
)
RECORD = Path(__file__).with_name("scaffold.json")
RECORDING = os.environ.get("MIXWELL_RECORD") == "1"
EXACT = os.environ.get("MIXWELL_EXACT") == "1"
# Relative. Kernels without AVX change results by up to 1e-5 in float32, and by 4e-6 in float64, since most data
# are drawn in float32 and the last bits of normal random numbers depend on the processor as well.
TOLERANCES = {"float32": 3e-5, "float64": 1e-5}
LOOSE = {
    # Projections on more directions than the gradients have include some that consist of rounding errors.
    "demo": 1e-3,
    "text: rank above that of the gradients": 1e-2,
    # One unit in the last place of bfloat16 is 0.4%.
    "text: dropout, bfloat16 autocast": 1e-3,
}
HERE = {**golden_runs.CASES, **golden_loops.CASES, **golden_integrations.CASES}
RESUMED = {**golden_runs.RESUMED, **golden_loops.RESUMED}
# A law that is fitted to a few losses of short trials: the last bits of the processor decide which minimum is
# found (tests/conformance has the rule). Compared only with MIXWELL_EXACT=1.
SENSITIVE = {"method: mixing-laws"}
# Recorded results of features that are gone.
REMOVED = {"loader by domain: counts by noise", "text: counts by noise"}
needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


def read() -> dict[str, Any]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(name: str, outcome: dict[str, Any]) -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ, "record in one process: without -n"
    record = read() | {name: outcome}
    # One line for each value of a case, so that a change of one is a change of a line.
    cases = [
        f"{json.dumps(case)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record[case].items())
        + "\n}"
        for case in sorted(record)
    ]
    RECORD.write_text("{\n" + ",\n".join(cases) + "\n}\n")


def check(name: str, outcome: dict[str, Any]) -> None:
    outcome = json.loads(json.dumps(outcome))  # tuples are lists there
    if RECORDING:
        write(name, outcome)
        return
    if name in SENSITIVE and not EXACT:
        pytest.skip("depends on the processor; compared with MIXWELL_EXACT=1")
    recorded = read()
    assert name in recorded, f"{name} is not in {RECORD.name}; record it"
    precision = outcome.get("parameters", {}).get("precision", "float64")
    tolerance = LOOSE.get(name, TOLERANCES[precision])
    found = list(differences(outcome, recorded[name], tolerance=tolerance, exact=EXACT))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", HERE)
def test_run_matches_record(name: str, tmp_path: Path) -> None:
    check(name, HERE[name](tmp_path))


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_matches_bit_for_bit(name: str, tmp_path: Path) -> None:
    for folder in ("whole", "resumed"):
        (tmp_path / folder).mkdir()
    whole, resumed = HERE[name](tmp_path / "whole"), RESUMED[name](tmp_path / "resumed")
    found = list(differences(resumed, whole, tolerance=0.0, exact=True))
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return golden_processes.train_all(tmp_path_factory.mktemp("processes"))


@needs_gloo
@pytest.mark.parametrize("name", golden_processes.NAMES)
def test_two_ranks_match_record(name: str, of_two_processes: dict[str, dict[str, Any]]) -> None:
    check(name, of_two_processes[name])


def test_every_method_is_recorded() -> None:
    assert set(golden_runs.METHODS.values()) == set(methods.every())


def test_every_record_is_compared() -> None:
    assert set(read()) == {*HERE, *golden_processes.NAMES, *REMOVED}
