"""metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixwell.training import metrics
from mixwell.training.metrics import MetricsFile

STEP = {"loss": 1.0, "losses": {}, "counts": {"a": 1}, "lr": 0.1, "seconds": 1.0}


def test_lines_after_checkpoint_are_dropped(tmp_path: Path) -> None:
    with MetricsFile(tmp_path) as file:
        file.write(
            "step", **STEP | {"step": 1, "loss": float("nan"), "losses": {"a": 1.5, "b": float("inf")}}
        )
        length = file.flush()
        file.write("step", **STEP | {"step": 2})
    with (tmp_path / metrics.FILE).open("a") as raw:
        raw.write('{"kind": "step", "st')  # a process died here
    assert [line["step"] for line in metrics.read_metrics(tmp_path)] == [1, 2]
    with MetricsFile(tmp_path, length=length) as file:
        file.write("evaluation", step=2, losses={})
    read = list(metrics.read_metrics(tmp_path))
    assert read[0]["loss"] is None
    assert read[0]["losses"] == {"a": 1.5, "b": None}
    assert [line["kind"] for line in read] == ["step", "evaluation"]
    assert [line["kind"] for line in metrics.read_metrics(tmp_path, "evaluation")] == ["evaluation"]


def test_truncated_file_raises(tmp_path: Path) -> None:
    (tmp_path / metrics.FILE).write_text("")
    with pytest.raises(ValueError, match="is shorter than at the checkpoint"):
        MetricsFile(tmp_path, length=10)


def test_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / metrics.FILE).write_text('{"kind": "evaluation", "step": 1, "losses": {}}\nnot json\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not JSON"):
        list(metrics.read_metrics(tmp_path))
