"""``metrics.jsonl``: one line of JSON for everything that happens in a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np
import torch

from mixwell import distributed
from mixwell.mixer.records import RoundRecord
from mixwell.training import artifacts
from mixwell.training.logging.names import named, named_evaluation, named_step, named_weights
from mixwell.utils.parsing import parse_json
from mixwell.utils.regular_files import regular_opener

if TYPE_CHECKING:
    from mixwell.training.logging.session import RunLoggers

FILE = "metrics.jsonl"


@final
class MetricsFile:
    """Appends lines; when a run resumes, those written after its checkpoint are removed.

    Every line has a ``kind`` (``"step"``, ``"round"`` or ``"evaluation"``) and the ``step`` after which it was
    written. Numbers that are not finite are written as ``null``, which JSON has.

    Args:
        folder: the run's directory.
        length: bytes of the file at the checkpoint; the rest is cut off.
    """

    def __init__(self, folder: Path, *, length: int = 0) -> None:
        self.path = folder / FILE
        self._file = open(self.path, "ab", opener=regular_opener)  # noqa: SIM115
        if self._file.tell() < length:
            self._file.close()
            raise ValueError(
                f"{self.path} is shorter than at the checkpoint ({length} bytes); was it edited? "
                "Put it back, or start the run anew"
            )
        self._file.truncate(length)
        self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, kind: str, *, step: int, **values: Any) -> None:
        """Append a line."""
        line = json.dumps({"kind": kind, "step": step, **finite_json(values)}) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def flush(self) -> int:
        """Write all lines to the disk; return the length of the file in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()


@final
class Journal:
    """Collects the events of a step, then calls the loggers and writes the lines.

    Loggers come first, so that the lines of a run that died say up to which step its loggers have logged.

    Args:
        lines: the run's own record; ``None`` on ranks other than 0.
    """

    def __init__(self, lines: MetricsFile | None, loggers: RunLoggers) -> None:
        self._lines, self._loggers = lines, loggers
        self._happened: dict[str, dict[str, Any]] = {}
        self._values: dict[str, float] = {}

    def start(self, weights: Mapping[str, float]) -> None:
        """Log the initial weights, which have no line of their own."""
        self._values |= named_weights(weights)

    def step(
        self, means: Mapping[str, Any], *, learning_rate: float, seconds: float, rows: Mapping[str, int]
    ) -> None:
        """Record a step.

        Args:
            means: :meth:`Window.take` since the last recorded step.
            rows: rows trained on so far, by domain.
        """
        self._happened["step"] = {"lr": learning_rate, "seconds": round(seconds, 3), **means}
        self._values |= named_step(
            losses=means["losses"], rows=rows, loss=means["loss"], learning_rate=learning_rate
        )

    def round(self, record: RoundRecord) -> None:
        """Record the end of a round."""
        self._happened["round"] = record.to_json()
        self._values |= named(record)

    def evaluation(self, losses: Mapping[str, float]) -> None:
        """Record the losses of an evaluation."""
        self._happened["evaluation"] = {"losses": dict(losses)}
        self._values |= named_evaluation(losses)

    def write(self, step: int) -> None:
        """Log and write what was recorded at this step."""
        if self._values:
            self._loggers.log(step, self._values)
        if self._lines is not None:
            for kind, values in self._happened.items():
                self._lines.write(kind, step=step, **values)
        self._happened, self._values = {}, {}

    def flush(self) -> int:
        """Flush loggers and lines; return the length of the metrics file in bytes."""
        self._loggers.flush()
        return 0 if self._lines is None else self._lines.flush()


@final
@dataclass
class Window:
    """Sums over the steps since the last line, for their means.

    Args:
        total: the sum of the steps' losses.
        sums: the sum of loss times rows, by domain.
    """

    steps: int = 0
    total: float = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    rows: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, loss: float, losses: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """Add a step."""
        self.steps += 1
        self.total += loss
        for name, mean in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * counts[name]
            self.rows[name] = self.rows.get(name, 0) + counts[name]

    def share(self, names: Sequence[str], device: torch.device) -> None:
        """Sum over the ranks, all of which must call it."""
        if distributed.is_single_process():
            return
        own = [self.total, *(self.sums.get(n, 0.0) for n in names), *(self.rows.get(n, 0) for n in names)]
        total, *rest = distributed.all_reduce_sum(np.array(own, dtype=np.float64), device).tolist()
        seen = [
            (n, s, int(r)) for n, s, r in zip(names, rest[: len(names)], rest[len(names) :], strict=True) if r
        ]
        self.total, self.sums = total, {name: summed for name, summed, _ in seen}
        self.rows = {name: rows for name, _, rows in seen}

    def take(self) -> dict[str, Any]:
        """Return the mean loss of the steps and by domain, and the rows by domain; the next window begins."""
        losses = {name: total / self.rows[name] for name, total in self.sums.items()}
        taken: dict[str, Any] = {"loss": self.total / self.steps, "losses": losses, "counts": self.rows}
        self.steps, self.total, self.sums, self.rows = 0, 0.0, {}, {}
        return taken


def own_window(saved: Sequence[Mapping[str, Any]]) -> Window:
    """Return the window with which this rank resumes.

    Args:
        saved: the windows of all ranks at the checkpoint, as plain values.

    Returns:
        Its own where the world size is the same; otherwise rank 0 resumes with the sum of all.
    """
    if len(saved) == distributed.world_size():
        return Window(**saved[distributed.rank()])
    window = Window(steps=int(saved[0]["steps"]))
    if distributed.rank() == 0:
        window.total = sum(one["total"] for one in saved)
        for one in saved:
            for name, rows in one["rows"].items():
                window.rows[name] = window.rows.get(name, 0) + rows
                window.sums[name] = window.sums.get(name, 0.0) + one["sums"][name]
    return window


def read_metrics(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the values of each line of a run's metrics, without a last one that a dead process left unfinished."""
    path = folder / FILE
    with open(path, "rb", opener=regular_opener) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            where = f"{path}:{number}"
            try:
                plain = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON ({error})") from error
            values = artifacts.check_line(plain, where=where)
            if kind is None or values["kind"] == kind:
                yield values


def last_step(folder: Path) -> int:
    """Return the last step that a run has logged, also beyond its last checkpoint; -1 if there is none."""
    if not (folder / FILE).exists():
        return -1
    return max((int(line["step"]) for line in read_metrics(folder)), default=-1)


def finite_json(value: Any) -> Any:
    """Return plain values with ``None`` for numbers that are not finite, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(inside) for inside in value]
    return value
