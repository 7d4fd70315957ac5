"""Delivers spooled events to MLflow. The only file that imports it.

Every event may come twice, after a crash or a lost answer: runs are found by their tag before
they are made, params and tags are set to the same value, and a metric's timestamp is its
epoch, so that MLflow recognises it.
"""

import logging
import math
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from dpsweep.core.errors import ConnectionRefused
from dpsweep.track.server import without_password
from dpsweep.track.spool import Event, Undeliverable

SWEEP_TAG, TRIAL_TAG, ID_TAG = "dpsweep.sweep", "dpsweep.trial", "dpsweep.id"
_NOTE = "mlflow.note.content"
_LONGEST_PARAM = 6000
_METRICS_PER_CALL = 1000
_NOT_METRICS = ("epoch", "step")
_FOR_GOOD = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS")


class MlflowSink:
    """One sweep's experiment on one tracking server.

    Attributes:
        uri: Tracking URI.
        sweep: The sweep's name; the experiment's and the parent run's as well.
        id: Tells this sweep from others of the same name on the same server.
        artifacts: Where artifacts go if the server is a database file; None leaves it to it.
    """

    def __init__(self, uri: str, sweep: str, id: str, artifacts: Path | None) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the spool tries again
        self.uri, self.sweep, self.id, self.artifacts = uri, sweep, id, artifacts
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._runs: dict[int | None, str] = {}

    def __call__(self, events: list[Event]) -> None:
        """Delivers a batch of events.

        Raises:
            Undeliverable: If the server refuses them for good.
        """
        try:
            self._deliver(events)
        except MlflowException as e:
            if e.error_code in _FOR_GOOD:
                raise Undeliverable(str(e)) from e
            raise

    def _deliver(self, events: list[Event]) -> None:
        client = self._connected()
        metrics: dict[int | None, list[Metric]] = {}
        for event in events:
            number = event.get("number")
            match event["kind"]:
                case "row":
                    metrics.setdefault(number, []).extend(_metrics(event["row"]))
                case "sweep" | "trial":
                    self._describe(number, event)
                case "artifact":
                    if Path(event["path"]).exists():
                        client.log_artifact(self._run(number), event["path"])
                case "end":
                    self._log(number, metrics.pop(number, []), event["tags"])
                    self._log(number, _metrics({"epoch": 0, **event.get("metrics", {})}), {})
                    client.set_terminated(self._run(number), event["status"])
        for number, waiting in metrics.items():
            self._log(number, waiting, {})

    def _describe(self, number: int | None, event: Event) -> None:
        run = self._run(number)
        params = [Param(k, str(v)[:_LONGEST_PARAM]) for k, v in event["params"].items()]
        tags = [RunTag(k, v) for k, v in {**event["tags"], _NOTE: event["note"]}.items()]
        self._connected().log_batch(run, params=params, tags=tags)
        self._connected().update_run(run, status="RUNNING")

    def _log(self, number: int | None, metrics: list[Metric], tags: dict[str, str]) -> None:
        run, client = self._run(number), self._connected()
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            client.log_batch(run, metrics=metrics[start : start + _METRICS_PER_CALL])
        if tags:
            client.log_batch(run, tags=[RunTag(k, v) for k, v in tags.items()])

    def _run(self, number: int | None) -> str:
        """Id of the parent run (None) or of a trial's, found by its tag or made."""
        if number not in self._runs:
            client = self._connected()
            tag, value = self._tag(number)
            ours = f"tags.`{tag}` = '{value}' and tags.`{ID_TAG}` = '{self.id}'"
            found = client.search_runs([self._experiment], filter_string=ours, max_results=1)
            self._runs[number] = found[0].info.run_id if found else self._made(number)
        return self._runs[number]

    def _made(self, number: int | None) -> str:
        tag, value = self._tag(number)
        tags = {
            tag: value,
            ID_TAG: self.id,
            "mlflow.source.name": "dpsweep",
            "mlflow.source.type": "JOB",
        }
        name = self.sweep
        if number is not None:
            tags["mlflow.parentRunId"] = self._run(None)
            name = f"trial-{number:04d}"
        run_id: str = (
            self._connected().create_run(self._experiment, tags=tags, run_name=name).info.run_id
        )
        return run_id

    def _tag(self, number: int | None) -> tuple[str, str]:
        if number is None:
            return SWEEP_TAG, self.sweep
        return TRIAL_TAG, f"{self.sweep}/{number}"

    def _connected(self) -> MlflowClient:
        if self._client is None:
            client = MlflowClient(self.uri)
            known = client.get_experiment_by_name(self.sweep)
            self._experiment = (
                known.experiment_id
                if known
                else client.create_experiment(
                    self.sweep, self.artifacts.as_uri() if self.artifacts else None
                )
            )
            self._client = client
        return self._client


def check_reachable(uri: str) -> None:
    """Raises ConnectionRefused, with what to do, if results could not be tracked there."""
    scheme = urlsplit(uri).scheme
    if scheme in ("http", "https"):
        _check_server(uri)
    elif scheme in ("postgresql", "mysql", "mssql"):
        try:
            MlflowClient(uri).search_experiments(max_results=1)
        except Exception as e:
            raise ConnectionRefused(
                f"--tracking-uri {without_password(uri)}: the database does not answer: "
                f"{str(e).splitlines()[0]}. Check host, port, name and password"
            ) from e
    elif scheme != "sqlite":
        raise ConnectionRefused(
            f"--tracking-uri {without_password(uri)}: {scheme or 'a plain path'} is no tracking "
            f"server. Give http://HOST:5000, or sqlite:///FILE.db, or leave the option out"
        )


def _check_server(uri: str) -> None:
    try:
        answer = requests.get(f"{uri.rstrip('/')}/health", timeout=5)
    except requests.RequestException as e:
        raise ConnectionRefused(
            f"--tracking-uri {without_password(uri)}: nothing answers there "
            f"({type(e).__name__}). Start it with: mlflow server --port "
            f"{urlsplit(uri).port or 5000}, or leave the option out to track in the state folder"
        ) from e
    if answer.status_code in (401, 403):
        raise ConnectionRefused(
            f"--tracking-uri {without_password(uri)}: refused with {answer.status_code}. Set "
            f"MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, and start the server with "
            f"--allowed-hosts {urlsplit(uri).hostname}"
        )
    if not answer.ok:
        raise ConnectionRefused(
            f"--tracking-uri {without_password(uri)}: answered {answer.status_code} to /health; "
            f"is it an MLflow server? Its address looks like http://HOST:5000"
        )


def _metrics(row: dict[str, Any]) -> list[Metric]:
    """Finite figures of a row; MLflow keeps no infinity, and the note says what one means."""
    epoch = int(row["epoch"])
    return [
        Metric(name, float(value), timestamp=epoch, step=epoch)
        for name, value in row.items()
        if name not in _NOT_METRICS and math.isfinite(value)
    ]
