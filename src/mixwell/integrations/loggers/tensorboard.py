"""TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from mixwell.training.loggers.base import Logger, Outcome, tool


@final
class TensorBoardLogger(Logger):
    """Writes scalars for ``tensorboard --logdir folder``.

    Args:
        folder: of the event files; made if it is missing.
        after: where a run goes on in the same folder: TensorBoard no longer shows what is there of later steps.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    forgets = True

    def __init__(self, folder: str | os.PathLike[str], *, after: int | None = None) -> None:
        super().__init__(after=after)
        self.folder = Path(folder)
        purge = None if after is None else after + 1
        # Thirty seconds, so that a chart follows the training.
        self._writer = self.load().SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    @staticmethod
    def load() -> Any:
        """PyTorch's writer, which needs TensorBoard."""
        return tool("torch.utils.tensorboard", name="TensorBoard", extra="tensorboard")

    @property
    def place(self) -> str:
        """How to look at it."""
        return f"tensorboard --logdir {self.folder}"

    def flush(self) -> None:
        """All events are in the file; a process that is killed would otherwise take the last ones along."""
        self._writer.flush()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _end(self, outcome: Outcome) -> None:
        self._writer.close()
