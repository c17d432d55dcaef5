"""JSON Lines: a file for any program to read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

from typing_extensions import override

from mixwell.training.logging.base import LOGGERS, Logger, LoggerConfig, LoggerContext, Outcome
from mixwell.utils import files

FILE = "logged.jsonl"


@final
@LOGGERS.register("jsonl")
class JsonlConfig(LoggerConfig):
    """Lines of JSON with the same names as elsewhere; the run has its `metrics.jsonl` in any case."""

    path: str | None = None
    """The file; by default `logged.jsonl` in the run's directory."""

    @property
    @override
    def outputs(self) -> tuple[str, ...]:
        return () if self.path else (FILE,)

    @override
    def open(self, run: LoggerContext) -> JsonlLogger:
        return JsonlLogger(run.path(self.path) if self.path else run.folder / FILE, after=run.saved)


@final
class JsonlLogger(Logger):
    r"""Appends one line for each call: ``{"step": 84, "mixwell/weight/web": 0.31, ...}``.

    A number that is not finite becomes ``null``, since JSON has none.

    Args:
        path: the file; its folder is made if it is missing. An existing file is continued.
        after: where a run is resumed: lines of later steps are removed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with JsonlLogger(folder + "/log.jsonl") as logger:
        ...         logger.log(84, {"mixwell/weight/web": 0.31})
        ...     Path(folder, "log.jsonl").read_text()
        '{"step": 84, "mixwell/weight/web": 0.31}\n'
    """

    def __init__(self, path: str | os.PathLike[str], *, after: int | None = None) -> None:
        super().__init__(after=after)
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._remove_later(after)
        self._file = self.path.open("a", encoding="utf-8")

    @property
    @override
    def place(self) -> str:
        return str(self.path)

    @override
    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    @override
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, **plain}, ensure_ascii=False) + "\n")
        self._file.flush()

    @override
    def _end(self, outcome: Outcome) -> None:
        self._file.close()

    def _remove_later(self, after: int | None) -> None:
        """Remove lines of later steps, and a last one that a dead process left half-written."""
        before = self.path.read_text(encoding="utf-8")
        kept: list[str] = []
        for number, line in enumerate(before.splitlines(keepends=True), start=1):
            if not line.endswith("\n"):
                break
            try:
                step = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self.path}:{number} is not a line of this logger, so the file is left as it is; give "
                    "another path"
                ) from error
            if after is None or step <= after:
                kept.append(line)
        if "".join(kept) != before:
            files.write_atomically(self.path, "".join(kept))
