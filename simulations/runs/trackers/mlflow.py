"""MLflow, with one MLflow run per run folder, at the tracking server that MLFLOW_TRACKING_URI
names, or in the run folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from simulations.runs.trackers import RunStart, scalars
from simulations.runs.trackers.values import flat, run_identifier, summary_figures

_FORBIDDEN = re.compile(r"[^\w\-. /]")  # characters that names of metrics may not hold
_BATCH = 1000  # metrics that the server takes at once


class MlflowTracker:
    """Logs the recipe as parameters, rounds as metrics, and guarantee and ledger head as tags.

    A resumed run continues the same MLflow run.

    The experiment is $MLFLOW_EXPERIMENT_NAME, otherwise "fedlgm". $MLFLOW_TRACKING_URI or
    `mlflow.set_tracking_uri` names the server; the default is `mlflow.db` in the run folder.
    """

    def start(self, run: RunStart) -> None:
        """Create the MLflow run, or find the MLflow run of a resumed run."""
        # not MLflow's fluent functions, whose state belongs to one thread
        from mlflow import MlflowClient, is_tracking_uri_set
        from mlflow.entities import Metric, Param

        own = f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(None if is_tracking_uri_set() else own)
        self._metric = Metric
        self._layers = tuple(run.layers)

        def create() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedlgm")
            existing = self._client.get_experiment_by_name(name)
            experiment = (
                existing.experiment_id if existing else self._client.create_experiment(name)
            )
            run_id: str = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
            parameters = flat(run.recipe) | {"noise_multiplier": run.facts.noise_multiplier}
            self._client.log_batch(
                run_id, params=[Param(name, str(value)) for name, value in parameters.items()]
            )
            return run_id

        self._run = run_identifier(run.folder, "mlflow", create)
        self._client.update_run(self._run, status="RUNNING")

    def round(self, row: Mapping[str, Any]) -> None:
        """Log one metric per figure, with the round as its step."""
        now = 1000 * row["round"]  # real times between rounds would show how many clients took part
        metrics = [
            self._metric(_FORBIDDEN.sub("_", name), value, now, row["round"])
            for name, value in scalars(row, self._layers).items()
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run, metrics=metrics[first : first + _BATCH])

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Set the tags and the status, which is FINISHED, or KILLED for an interrupted run."""
        for name, value in summary_figures(summary).items():
            self._client.set_tag(self._run, f"fedlgm.{name}", str(value))
        self._client.set_terminated(self._run, "FINISHED" if summary is not None else "KILLED")
