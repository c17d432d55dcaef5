"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from pydantic import Field
from typing_extensions import override

from mixwell.training.logging.base import LOGGERS, Logger, LoggerConfig, LoggerContext, Outcome, import_tool
from mixwell.training.logging.names import PREFIX

STEP = f"{PREFIX}/step"
"""The axis of all charts; other numbers of the same run may be logged at steps that are counted otherwise."""
# 255 is what W&B takes for a run that its user has stopped.
_EXIT_CODES: dict[Outcome, int] = {"finished": 0, "stopped": 255, "failed": 1}


@final
@LOGGERS.register("wandb")
class WandbConfig(LoggerConfig):
    """A run of Weights & Biases. Settings that are left out are those of its environment variables."""

    remote = True

    project: str | None = None
    """The project of the run."""
    entity: str | None = None
    """The team or user."""
    name: str | None = None
    """The name of the run; by default that of the run's directory."""
    group: str | None = None
    """The group of runs to which it belongs."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` sends nothing; `wandb sync` does it later."""
    folder: str | None = None
    """The folder in which W&B makes its folder `wandb`; by default the run's directory."""

    @property
    @override
    def outputs(self) -> tuple[str, ...]:
        return () if self.folder else ("wandb",)

    @override
    def check_installed(self) -> None:
        _wandb()

    @override
    def open(self, run: LoggerContext) -> WandbLogger:
        options = self.model_dump(exclude={"name", "folder"})
        folder = run.path(self.folder) if self.folder else run.folder
        known = bool(run.identity)
        return WandbLogger(
            name=self.name or run.name,
            folder=folder,
            **options,
            id=run.identity.get("id"),
            settings=None if known else run.settings,
            after=run.logged if known else None,
        )


@final
class WandbLogger(Logger):
    """Logs to a run of Weights & Biases.

    W&B's environment variables and its own defaults apply to arguments that are left out.

    W&B cannot remove numbers. Resume a run with its ``id`` and, as ``after``, the last step that was logged, so
    that no step is there twice. Offline, each process writes a folder of its own under the same id; send them in
    their order, all but the first by ``wandb sync --append``. W&B's own process writes every fifteen seconds; what
    it has not written when a run is killed is lost to it.

    Args:
        folder: in which W&B makes its folder ``wandb``; made if it is missing.
        id: of a run to resume, or for a new one.
        settings: of the run, for W&B's tables.
        run: a run that is open already, in place of all other settings. It is left open at the end.
        after: the last step that was logged to the run before.
        options: further arguments of ``wandb.init``: ``project``, ``entity``, ``name``, ``group``, ``tags``,
            ``mode``.
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None = None,
        id: str | None = None,
        settings: Mapping[str, Any] | None = None,
        run: Any = None,
        after: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(after=after)
        wandb = _wandb()
        options |= {
            "id": id,
            "tags": list(options.get("tags") or ()) or None,
            "config": None if settings is None else dict(settings),
        }
        options |= {"dir": None if folder is None else str(Path(folder).resolve())}
        self._own = run is None
        given = [key for key, value in options.items() if value is not None]
        if not self._own and given:
            raise ValueError(f"a run is given, which has its own {', '.join(given)}; give only the run")
        if self._own:
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)  # W&B would else take one for temporary files
            try:
                # Another run that is open in this process stays what it is.
                run = wandb.init(**options, resume=None if id is None else "allow", reinit="create_new")
            except Exception as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"Weights & Biases cannot begin a run ({reason}); try `wandb login`, or mode: offline"
                ) from error
        self._run: Any = run
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric(f"{PREFIX}/*", step_metric=STEP)

    @property
    @override
    def place(self) -> str:
        return f"Weights & Biases, run {self._run.id} of {self._run.project}"

    @property
    @override
    def identity(self) -> dict[str, str]:
        return {"id": str(self._run.id)}

    @override
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        # W&B's own count of steps must be the same for everything in a run, which we know of our own runs only.
        self._run.log({STEP: step, **values}, step=step if self._own else None)

    @override
    def _end(self, outcome: Outcome) -> None:
        if self._own:
            self._run.finish(exit_code=_EXIT_CODES[outcome])


def _wandb() -> Any:
    return import_tool("wandb", name="Weights & Biases", extra="wandb")
