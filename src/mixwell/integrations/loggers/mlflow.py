"""MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, cast, final

from mixwell.training.loggers.base import Logger, Outcome, tool
from mixwell.training.loggers.names import portable

# What MLflow takes in one call, and the characters of a parameter.
_METRICS, _PARAMETERS, _LONGEST_PARAMETER = 1000, 100, 6000
_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@final
class MlflowLogger(Logger):
    """Logs to a run of MLflow, on a server or in a local store.

    What is not given is as MLflow's environment variables and its own defaults say. MLflow's process-wide state
    (the active run, the tracking URI) is neither used nor changed. Names that MLflow does not allow are made
    :func:`~mixwell.training.loggers.names.portable`.

    MLflow cannot take numbers back. A run that goes on is given its ``id``, and with ``after`` the last step that
    MLflow has been told, so that no step is there twice.

    Args:
        uri: of the store: ``"http://localhost:5000"``, ``"sqlite:///mlflow.db"``.
        experiment: its name; made if it is missing.
        name: of the run.
        id: of a run of one's own to go on with.
        settings: what a new run is made with, which become its parameters.
        run: the id of a run that is open already, in place of the others but ``uri``. It is left open at the end.
        after: the last step that the run has been told already.

    Raises:
        ValueError: MLflow is not installed or cannot begin the run, or a run is given together with settings of
            another.
    """

    forgets = False

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
                "a run is given, which has its own experiment, name and settings; give the run alone"
            )
        self._own = run is None
        mlflow = self.load()
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
            where = f" in {uri}" if uri else ""
            reason = " ".join(str(error).split())
            raise ValueError(
                f"MLflow cannot begin a run{where} ({reason}); try `mlflow server` and its address, or a local "
                "store such as sqlite:///mlflow.db"
            ) from error

    @staticmethod
    def load() -> Any:
        """MLflow's package."""
        return tool("mlflow", name="MLflow", extra="mlflow")

    @property
    def place(self) -> str:
        """The store, and the run in it."""
        return f"MLflow, run {self._run.info.run_id} in {self._client.tracking_uri}"

    @property
    def identity(self) -> dict[str, str]:
        """The id of the run, and its store."""
        return {"id": str(self._run.info.run_id), "uri": str(self._client.tracking_uri)}

    def _begin(self, experiment: str | None, name: str | None, settings: Mapping[str, Any]) -> Any:
        experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run = self._client.create_run(place, run_name=name)
        parameter = self._entities.Param
        params = [
            parameter(portable(key), value[:_LONGEST_PARAMETER]) for key, value in _flat(settings).items()
        ]
        for first in range(0, len(params), _PARAMETERS):
            self._client.log_batch(run.info.run_id, params=params[first : first + _PARAMETERS])
        return run

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self._entities.Metric
        metrics = [metric(portable(name), float(value), now, step) for name, value in values.items()]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._run.info.run_id, metrics=metrics[first : first + _METRICS])

    def _end(self, outcome: Outcome) -> None:
        if self._own:
            self._client.set_terminated(self._run.info.run_id, status=_STATUS[outcome])


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Nested settings as text, with dots in their keys."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(cast("Mapping[str, Any]", value), f"{before}{key}.")
        else:
            found[before + str(key)] = str(value)
    return found
