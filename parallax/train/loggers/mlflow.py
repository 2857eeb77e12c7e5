"""Send figures to MLflow. ``MLFLOW_TRACKING_URI`` names the server, database or folder; by default MLflow chooses."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parallax.common.documents import leaves
from parallax.train.loggers.destination import LoggedRun, Point

_ID = "parallax.id"  # the tag by which a resumed run is found
_LONGEST = 6000  # characters of a parameter's value
_MOST_PARAMETERS, _MOST_METRICS = 100, 1000  # in one request
_REQUEST = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def load() -> None:
    """Import the package mlflow."""
    from mlflow.tracking import MlflowClient  # noqa: F401


def open_run(run: LoggedRun, id: str, *, new: bool, last: int) -> MlflowRun:
    """Return the run in the experiment ``run.project`` that is tagged with ``id``; it is created if there is none."""
    del last
    from mlflow.tracking import MlflowClient

    for name, level in (("mlflow", "WARNING"), ("alembic", "WARNING"), ("urllib3", "ERROR")):
        logging.getLogger(name).setLevel(level)  # a failure is reported once, by the caller
    for name, value in _REQUEST.items():
        os.environ.setdefault(name, value)
    client: Any = MlflowClient()
    found = client.get_experiment_by_name(run.project)
    experiment = found.experiment_id if found else client.create_experiment(run.project)
    known = None if new else _find(client, experiment, id)
    if known is None:
        tags = {_ID: id, **dict.fromkeys(run.tags, "true")}
        known = client.create_run(experiment, run_name=run.name, tags=tags)
    else:
        client.update_run(known.info.run_id, status="RUNNING")
    latest = getattr(known.data, "_metric_objs", [])  # no public name has the steps
    tracked = MlflowRun(client, known.info.run_id, {each.key: each.step for each in latest})
    tracked.set_parameters(leaves(dict(run.parameters)), known.data.params)
    return tracked


def _find(client: Any, experiment: str, id: str) -> Any:
    found = client.search_runs([experiment], f"tags.`{_ID}` = '{id}'", max_results=1)
    return found[0] if found else None


class MlflowRun:
    """One run of MLflow. ``latest``: figure → the last step for which MLflow has this figure. These steps may differ
    between figures, because a process may be killed after it has written only some figures of a step."""

    replaces = False

    def __init__(self, client: Any, id: str, latest: Mapping[str, int]) -> None:
        self._client, self._id, self._latest = client, id, latest
        self.held = min(latest.values(), default=0)

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, number, now, step)
            for step, figures in points
            for name, number in figures.items()
            if step > self._latest.get(name, 0)
        ]
        for some in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=some)

    def set_parameters(self, given: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Write the parameters ``given``. MLflow cannot change a ``known`` parameter, so a new value is written as a
        tag."""
        from mlflow.entities import Param, RunTag

        values = {key: text[:_LONGEST] for key, text in given.items()}
        new = [Param(key, text) for key, text in values.items() if key not in known]
        for some in _parts(new, _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=some)
        changed = [
            RunTag(key, text) for key, text in values.items() if known.get(key, text) != text
        ]
        for some in _parts(changed, _MOST_PARAMETERS):
            self._client.log_batch(self._id, tags=some)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _parts(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]
