"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, cast, final

from typing_extensions import override

from mixwell.training.logging.base import LOGGERS, Logger, LoggerConfig, LoggerContext, Outcome, import_tool
from mixwell.training.logging.names import portable

# What MLflow takes in one call, and the characters of a parameter.
_METRICS, _PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 6000
_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_SQLITE = "sqlite:///"


@final
@LOGGERS.register("mlflow")
class MlflowConfig(LoggerConfig):
    """A run of MLflow. Settings that are left out are those of its environment variables."""

    remote = True

    uri: str | None = None
    """The store: `http://localhost:5000`, `sqlite:///mlflow.db`."""
    experiment: str | None = None
    """The name of the experiment; made if it is missing."""
    name: str | None = None
    """The name of the run; by default that of the run's directory."""

    @override
    def check_installed(self) -> None:
        _mlflow()

    @override
    def open(self, run: LoggerContext) -> MlflowLogger:
        uri = self.uri or run.identity.get("uri")
        if uri is not None and uri.startswith(_SQLITE):
            uri = _SQLITE + str(run.base / uri.removeprefix(_SQLITE))
        if run.identity and run.identity["uri"] == uri:
            return MlflowLogger(uri=uri, id=run.identity["id"], after=run.logged)
        name = self.name or run.name
        return MlflowLogger(uri=uri, experiment=self.experiment, name=name, settings=run.settings)


@final
class MlflowLogger(Logger):
    """Logs to a run of MLflow, on a server or in a local store.

    MLflow's environment variables and its own defaults apply to arguments that are left out. MLflow's process-wide
    state (the active run, the tracking URI) is neither used nor changed. Names that MLflow does not allow are made
    :func:`~mixwell.training.logging.names.portable`.

    MLflow cannot remove numbers. Resume a run with its ``id`` and, as ``after``, the last step that was logged, so
    that no step is there twice.

    Args:
        uri: the store: ``"http://localhost:5000"``, ``"sqlite:///mlflow.db"``.
        experiment: its name; made if it is missing.
        id: of a run to resume.
        settings: the parameters of a new run.
        run: the id of a run that is open already, in place of the others but ``uri``. It is left open at the end.
        after: the last step that was logged to the run before.
    """

    def __init__(
        self,
        *,
        uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        id: str | None = None,
        settings: Mapping[str, Any] | None = None,
        run: str | None = None,
        after: int | None = None,
    ) -> None:
        super().__init__(after=after)
        if run is not None and (experiment, name, id, settings) != (None, None, None, None):
            raise ValueError(
                "a run is given, which has its own experiment, name and settings; give only the run"
            )
        self._own = run is None
        mlflow = _mlflow()
        self._entities = mlflow.entities
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
            if run is not None or id is not None:
                self._run: Any = self._client.get_run(run or id)
                if self._own:
                    self._client.update_run(id, status="RUNNING")
            else:
                self._run = self._begin(experiment, name, settings or {})
        except Exception as error:
            where, reason = f" in {uri}" if uri else "", " ".join(str(error).split())
            raise ValueError(
                f"MLflow cannot begin a run{where} ({reason}); try `mlflow server` and its address, or a local "
                "store such as sqlite:///mlflow.db"
            ) from error

    @property
    @override
    def place(self) -> str:
        return f"MLflow, run {self._run.info.run_id} in {self._client.tracking_uri}"

    @property
    @override
    def identity(self) -> dict[str, str]:
        return {"id": str(self._run.info.run_id), "uri": str(self._client.tracking_uri)}

    def _begin(self, experiment: str | None, name: str | None, settings: Mapping[str, Any]) -> Any:
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run = self._client.create_run(place, run_name=name)
        params = [
            self._entities.Param(portable(key), value[:_LONGEST_PARAMETER])
            for key, value in _flat(settings).items()
        ]
        for first in range(0, len(params), _PARAMETERS):
            self._client.log_batch(run.info.run_id, params=params[first : first + _PARAMETERS])
        return run

    @override
    def _write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self._entities.Metric
        metrics = [metric(portable(name), float(value), now, step) for name, value in values.items()]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run.info.run_id, metrics=metrics[first : first + _METRICS])

    @override
    def _end(self, outcome: Outcome) -> None:
        if self._own:
            self._client.set_terminated(self._run.info.run_id, status=_STATUS[outcome])


def _mlflow() -> Any:
    return import_tool("mlflow", name="MLflow", extra="mlflow")


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Return nested settings as text, with dots in their keys."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(cast("Mapping[str, Any]", value), f"{before}{key}.")
        else:
            found[before + str(key)] = str(value)
    return found
