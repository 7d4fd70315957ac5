"""Delivers spooled events to MLflow. Only this file, run_update.py and registry.py import it.

Every event may come twice, after a crash or a lost answer: a run carries its tag from its first
moment, and all runs are looked up by it on connecting, and again after any failure; params and
tags are set to the same value, and a metric's time follows from the study, so that MLflow
recognises it. The server is called once to make a run with its tags, or once for the tags of an
older one, once for what else a batch says of it, and once if its status changes.
"""

import logging
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import requests
from mlflow import MlflowClient
from mlflow.entities import Param
from mlflow.exceptions import MlflowException
from sqlalchemy import event

from dpsweep.compat import EXPERIMENT_KIND, VIEW_TAG, database_engine
from dpsweep.core.errors import ConnectionRefused, summarize_error
from dpsweep.core.sqlite import use_write_ahead_log
from dpsweep.tracking.access import check_rights
from dpsweep.tracking.run_update import RUNNING, RunUpdate, group_by_run
from dpsweep.tracking.server import add_driver, is_server, redact_password
from dpsweep.tracking.spool import Event, Undeliverable

SWEEP_TAG, TRIAL_TAG, ID_TAG = "dpsweep.sweep", "dpsweep.trial", "dpsweep.id"
OWNER_TAG = "dpsweep.owner"
log = logging.getLogger(__name__)

_SOURCE = {"mlflow.source.name": "dpsweep", "mlflow.source.type": "JOB"}
CHANGED = "dpsweep.param."
"""Before a param's name: the tag with its value, where the param itself has an older one."""

_RUNS_PER_PAGE = 1000
_PERMANENT_ERRORS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS")


class MlflowSink:
    """One sweep's experiment on one tracking server.

    `sweep` names the experiment and the parent run; `id` tells it from others of that name.
    `artifacts` is where they go if the server is a database file; None leaves it to it. Of two
    owners' sweeps of one name, the later one's experiment is called OWNER/SWEEP.
    """

    def __init__(
        self, uri: str, sweep: str, id: str, artifacts: Path | None, owner: str | None = None
    ) -> None:
        _silence_mlflow()
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the spool tries again
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        self.uri, self.sweep, self.id, self.artifacts = uri, sweep, id, artifacts
        self.owner = owner
        self._client: MlflowClient | None = None
        self._experiment = ""
        self._runs: dict[int | None, _Run] = {}

    def __call__(self, events: list[Event]) -> None:
        """Deliver a batch of events, those of a run in as few calls as they fit.

        Raises:
            Undeliverable: If the server refuses them for good.
        """
        found = group_by_run(events)
        try:
            for number, update in found.items():
                self._log(number, update)
            for number, update in sorted(found.items(), key=lambda item: bool(item[1].artifacts)):
                self._end(number, update)  # an artifact store that is away keeps nobody else back
        except MlflowException as e:
            if e.error_code in _PERMANENT_ERRORS:
                raise Undeliverable(str(e)) from e
            self._client = None  # what it did before it failed is asked for again
            raise
        except Exception:
            self._client = None
            raise

    def _log(self, number: int | None, update: RunUpdate) -> None:
        """Tags first, and by themselves: no param that the server refuses may keep them back.

        Among them is the privacy statement. A new run has them from its first moment on.
        """
        client = self._get_client()
        run = self._runs.get(number)
        if run is None:
            run = self._make(number, update.name, update.tags)
        else:
            for tags in update.tag_batches():
                client.log_batch(run.id, tags=tags)
        if update.view:
            client.set_experiment_tag(self._experiment, VIEW_TAG, update.view)
        for params, metrics in update.batches():
            try:
                client.log_batch(run.id, params=params, metrics=metrics)
            except MlflowException as e:
                if e.error_code not in _PERMANENT_ERRORS:
                    raise
                new = self._drop_changed_params(run, params)
                if len(new) == len(params):
                    raise
                client.log_batch(run.id, params=new, metrics=metrics)

    def _drop_changed_params(self, run: "_Run", params: list[Param]) -> list[Param]:
        """Those params that the server has not with another value; the others become tags.

        MLflow keeps a param's first value for good. A sweep that is given more trials has another
        budget.trials than it was launched with.
        """
        known = self._get_client().get_run(run.id).data
        changed = [p for p in params if known.params.get(p.key, p.value) != p.value]
        for param in changed:
            tag = f"{CHANGED}{param.key}"
            if known.tags.get(tag) != param.value:
                self._get_client().set_tag(run.id, tag, param.value)
                log.warning(
                    "MLflow keeps a parameter's first value: %s of run %s stays %s. What it is "
                    "now, %s, is in the tag %s",
                    *(param.key, run.id, known.params[param.key], param.value, tag),
                )
        return [param for param in params if param not in changed]

    def _end(self, number: int | None, update: RunUpdate) -> None:
        """Artifacts, and the status once they are there."""
        client, run = self._get_client(), self._runs[number]
        for path in update.artifacts:
            if Path(path).is_dir():
                client.log_artifacts(run.id, path, Path(path).name)
            elif Path(path).exists():
                client.log_artifact(run.id, path)
        if update.status and update.status != run.status:
            if update.status == RUNNING:
                client.update_run(run.id, status=RUNNING)
            else:
                client.set_terminated(run.id, update.status)
            run.status = update.status

    def _make(
        self, number: int | None, called: str | None = None, more: Mapping[str, str] | None = None
    ) -> "_Run":
        """A new run with these tags and the one that it is found by, from its first moment on."""
        tags, name = {**_SOURCE, **(more or {}), ID_TAG: self.id}, self.sweep
        if self.owner:
            tags |= {OWNER_TAG: self.owner, "mlflow.user": self.owner}
        if number is None:
            tags[SWEEP_TAG] = self.sweep
        else:
            parent = self._runs.get(None) or self._make(None)
            name = called or f"trial-{number:04d}"
            tags |= {TRIAL_TAG: f"{self.sweep}/{number}", "mlflow.parentRunId": parent.id}
        made = self._get_client().create_run(self._experiment, tags=tags, run_name=name)
        self._runs[number] = _Run(made.info.run_id, RUNNING)
        return self._runs[number]

    def _get_client(self) -> MlflowClient:
        if self._client is None:
            client = MlflowClient(self.uri)
            if self.uri.startswith("sqlite"):
                _enable_wal(client)
            self._experiment = self._get_experiment(client)
            self._runs = self._find_runs(client)
            self._client = client
        return self._client

    def _get_experiment(self, client: MlflowClient) -> str:
        """The sweep's experiment, made if it is not there; never one that is another owner's.

        It is the same each time: OWNER/SWEEP once that is there, and SWEEP as long as it is free
        or this owner's (or nobody's, as before owners were noted).
        """
        own = f"{self.owner}/{self.sweep}"
        if self.owner and (known := client.get_experiment_by_name(own)):
            if known.tags.get(OWNER_TAG) != self.owner:
                raise Undeliverable(
                    f"experiment {own!r} is not {self.owner}'s: it was made by somebody else, or "
                    f"by hand. Rename it there, and resume"
                )
            return str(known.experiment_id)
        try:
            known = client.get_experiment_by_name(self.sweep)
        except MlflowException as e:
            if e.error_code != "PERMISSION_DENIED" or not self.owner:
                raise
            known, name = None, own  # there, and another's
        else:
            name = self.sweep
        if known:
            if known.tags.get(OWNER_TAG, self.owner) == self.owner:
                return str(known.experiment_id)
            name = own
        place = self.artifacts.as_uri() if self.artifacts else None
        tags = EXPERIMENT_KIND | ({OWNER_TAG: self.owner} if self.owner else {})
        return str(client.create_experiment(name, place, tags))

    def _find_runs(self, client: MlflowClient) -> "dict[int | None, _Run]":
        """The runs that are there, by number; of two for one trial the older one."""
        runs: dict[int | None, _Run] = {}
        page: str | None = None
        while True:
            found = client.search_runs(
                [self._experiment],
                filter_string=f"tags.`{ID_TAG}` = '{self.id}'",
                order_by=["attributes.start_time ASC"],
                max_results=_RUNS_PER_PAGE,
                page_token=page,
            )
            for run in found:
                tags, known = run.data.tags, _Run(run.info.run_id, run.info.status)
                if TRIAL_TAG in tags:
                    runs.setdefault(int(tags[TRIAL_TAG].rpartition("/")[2]), known)
                elif SWEEP_TAG in tags:
                    runs.setdefault(None, known)
            page = found.token
            if not page:
                return runs


@dataclass
class _Run:
    """A run on the server, and the status it was last seen in."""

    id: str
    status: str


def _enable_wal(client: MlflowClient) -> None:
    """Sets up the connections of this client's SQLite file; it can be told again, so not synced."""
    engine = database_engine(client)
    if not event.contains(engine, "connect", _set_pragmas):
        event.listen(engine, "connect", _set_pragmas)
        engine.dispose()  # those opened before are not set up


def _set_pragmas(connection: sqlite3.Connection, record: object) -> None:
    use_write_ahead_log(connection, "NORMAL")


def _silence_mlflow() -> None:
    """Let MLflow say nothing of tables that it makes, nor twice what it raises.

    It inserts params that may be there already and catches the database's refusal, of which
    psycopg warns.
    """
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def check_reachable(uri: str) -> None:
    """Raise ConnectionRefused, with what to do, if results could not be tracked there."""
    _silence_mlflow()
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if is_server(uri):
        _check_server(uri)
    elif scheme in ("postgres", "postgresql", "mysql", "mssql"):
        try:
            MlflowClient(add_driver(uri)).search_experiments(max_results=1)
        except Exception as e:
            raise ConnectionRefused(
                f"--tracking-uri {redact_password(uri)}: the database does not answer: "
                f"{summarize_error(e)}. Check host, port, name and password"
            ) from e
    elif scheme != "sqlite":
        raise ConnectionRefused(
            f"--tracking-uri {redact_password(uri)}: {scheme or 'a plain path'} is no tracking "
            f"server. Give http://HOST:5000, or sqlite:///FILE.db, or leave the option out"
        )


def _check_server(uri: str) -> None:
    try:
        answer = requests.get(f"{uri.rstrip('/')}/health", timeout=5)
    except requests.RequestException as e:
        raise ConnectionRefused(
            f"--tracking-uri {redact_password(uri)}: nothing answers there "
            f"({type(e).__name__}). Start it with: mlflow server --port "
            f"{urlsplit(uri).port or 5000}, or leave the option out to track in the state folder"
        ) from e
    if answer.status_code in (401, 403):
        raise ConnectionRefused(
            f"--tracking-uri {redact_password(uri)}: refused with {answer.status_code}. Set "
            f"MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, and start the server with "
            f"--allowed-hosts {urlsplit(uri).hostname}"
        )
    if not answer.ok:
        raise ConnectionRefused(
            f"--tracking-uri {redact_password(uri)}: answered {answer.status_code} to /health; "
            f"is it an MLflow server? Its address looks like http://HOST:5000"
        )
    check_rights(uri)
