"""``metrics.jsonl``: one line of JSON for everything that happens in a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, final

FILE = "metrics.jsonl"


@final
class MetricsFile:
    """Appends lines, and forgets those that were written after a checkpoint when a run goes on from it.

    Every line has a ``kind`` (``"step"``, ``"round"`` or ``"evaluation"``) and the ``step`` after which it was
    written. Numbers that are not finite are written as ``null``, which JSON has.

    Args:
        folder: of the run.
        length: bytes that the file had at the checkpoint; what comes after them is cut off.
    """

    def __init__(self, folder: Path, *, length: int = 0) -> None:
        self.path = folder / FILE
        self._file = self.path.open("ab")
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
        """Append a line.

        Args:
            kind: of what happened.
            step: training steps done.
            values: plain values.
        """
        line = json.dumps({"kind": kind, "step": step, **_finite(values)}) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def flush(self) -> int:
        """Make sure that all lines are on the disk.

        Returns:
            The length of the file in bytes.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()


@final
@dataclass
class Window:
    """Means over the steps since the last line.

    Args:
        steps: since then.
        total: the sum of their losses.
        sums: of loss times rows, by domain.
        rows: by domain.
    """

    steps: int = 0
    total: float = 0.0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    rows: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, loss: float, losses: Mapping[str, float], counts: Mapping[str, int]) -> None:
        """A step was done.

        Args:
            loss: of the step.
            losses: mean loss by domain.
            counts: rows by domain.
        """
        self.steps += 1
        self.total += loss
        for name, mean in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * counts[name]
            self.rows[name] = self.rows.get(name, 0) + counts[name]

    def take(self) -> dict[str, Any]:
        """The means for a line; the next window begins.

        Returns:
            The mean loss of the steps and by domain, and the rows by domain.
        """
        losses = {name: total / self.rows[name] for name, total in self.sums.items()}
        taken: dict[str, Any] = {"loss": self.total / self.steps, "losses": losses, "counts": self.rows}
        self.steps, self.total, self.sums, self.rows = 0, 0.0, {}, {}
        return taken


def read(folder: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics. A last line that a dead process left half-written is left out.

    Args:
        folder: of the run.
        kind: only lines of this kind.

    Yields:
        Each line's values.

    Raises:
        ValueError: a line is not JSON.
    """
    path = folder / FILE
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                return
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if kind is None or values["kind"] == kind:
                yield values


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return value
