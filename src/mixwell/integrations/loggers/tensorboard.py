"""TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from typing_extensions import override

from mixwell.training.logging.base import LOGGERS, Logger, LoggerConfig, LoggerContext, Outcome, import_tool

FOLDER = "tensorboard"


@final
@LOGGERS.register("tensorboard")
class TensorBoardConfig(LoggerConfig):
    """Scalars for TensorBoard."""

    folder: str | None = None
    """The folder of the event files; by default `tensorboard` in the run's directory."""

    @property
    @override
    def outputs(self) -> tuple[str, ...]:
        return () if self.folder else (FOLDER,)

    @override
    def check_installed(self) -> None:
        _tensorboard()

    @override
    def open(self, run: LoggerContext) -> TensorBoardLogger:
        return TensorBoardLogger(
            run.path(self.folder) if self.folder else run.folder / FOLDER, after=run.saved
        )


@final
class TensorBoardLogger(Logger):
    """Writes scalars for ``tensorboard --logdir folder``.

    Args:
        folder: of the event files; made if it is missing.
        after: where a run is resumed in the same folder: TensorBoard no longer shows later steps.
    """

    def __init__(self, folder: str | os.PathLike[str], *, after: int | None = None) -> None:
        super().__init__(after=after)
        self.folder = Path(folder)
        purge = None if after is None else after + 1
        # Less than the default of two minutes, so that a chart follows the training.
        self._writer = _tensorboard().SummaryWriter(str(folder), purge_step=purge, flush_secs=30)

    @property
    @override
    def place(self) -> str:
        return f"tensorboard --logdir {self.folder}"

    @override
    def flush(self) -> None:
        self._writer.flush()

    @override
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    @override
    def _end(self, outcome: Outcome) -> None:
        self._writer.close()


def _tensorboard() -> Any:
    return import_tool("torch.utils.tensorboard", name="TensorBoard", extra="tensorboard")
