"""A real MLflow store has each trial once, however often and in whatever pieces it is told."""

import sqlite3
import warnings
from collections import Counter
from contextlib import closing

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

from dpsweep.tracking import mlflow as trial_dir
from dpsweep.tracking.mlflow import MlflowSink
from dpsweep.tracking.spool import Undeliverable

pytestmark = pytest.mark.filterwarnings("ignore")

SWEEP = {"kind": "sweep", "params": {"sampler": "tpe"}, "tags": {}, "note": "n"}


def trial(number):
    return {"kind": "trial", "number": number, "params": {"lr": 1}, "tags": {"v": "1"}, "note": "n"}


def row(number, epoch):
    return {"kind": "row", "number": number, "row": {"epoch": epoch, "step": epoch, "acc": 0.5}}


def end(number, status="FINISHED"):
    return {"kind": "end", "number": number, "status": status, "tags": {"dpsweep.state": "done"}}


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def calls(monkeypatch):
    """How often each of the server's verbs was used."""
    counted = Counter()

    def count(verb):
        real = getattr(MlflowClient, verb)

        def counting(self, *args, **kwargs):
            counted[verb] += 1
            return real(self, *args, **kwargs)

        monkeypatch.setattr(MlflowClient, verb, counting)

    for verb in ("get_experiment_by_name", "search_runs", "create_run", "log_batch"):
        count(verb)
    for verb in ("set_terminated", "update_run", "get_run"):
        count(verb)
    return counted


@pytest.fixture
def sink(uri, request, tmp_path):
    def make():
        return MlflowSink(uri, request.node.name[-40:], "id", tmp_path)

    return make


def runs(sink):
    client = MlflowClient(sink.uri)
    experiment = client.get_experiment_by_name(sink.sweep).experiment_id
    found = client.search_runs([experiment])
    names = [run.info.run_name for run in found]
    assert len(set(names)) == len(names), "a trial has two runs"
    return {run.info.run_name: run for run in found}, client


def test_a_trial_in_one_batch_takes_three_calls(sink, calls):
    tell = sink()
    tell([SWEEP])
    calls.clear()
    tell([trial(0), row(0, 1), row(0, 2), end(0)])
    assert calls == {"create_run": 1, "log_batch": 1, "set_terminated": 1}
    found, client = runs(tell)
    run = found["trial-0000"]
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "1"})
    assert run.data.tags["dpsweep.state"] == "done"
    assert run.data.tags["mlflow.parentRunId"] == found[tell.sweep].info.run_id
    history = client.get_metric_history(run.info.run_id, "acc")
    assert [(m.step, m.value) for m in history] == [(1, 0.5), (2, 0.5)]


def test_everything_may_be_said_again_by_another_driver_at_two_calls_a_trial(sink, calls):
    events = [SWEEP, trial(0), row(0, 1), end(0), trial(1), row(1, 1)]
    sink()(events)
    calls.clear()
    again = sink()
    again(events)
    assert calls == {"get_experiment_by_name": 1, "search_runs": 1, "log_batch": 6}
    found, client = runs(again)
    assert len(found) == 3
    assert found["trial-0000"].info.status == "FINISHED"
    assert len(client.get_metric_history(found["trial-0000"].info.run_id, "acc")) == 1


def test_a_trial_that_goes_on_is_running_again(sink):
    tell = sink()
    tell([trial(0), end(0, "KILLED")])
    again = sink()
    again([trial(0)])
    assert runs(again)[0]["trial-0000"].info.status == "RUNNING"
    again([end(0)])
    assert runs(again)[0]["trial-0000"].info.status == "FINISHED"


def test_a_run_whose_making_was_not_answered_is_found_and_not_made_twice(sink, monkeypatch):
    tell, real = sink(), MlflowClient.create_run
    tell([SWEEP])

    def lost(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise MlflowException("the answer was lost")

    monkeypatch.setattr(MlflowClient, "create_run", lost)
    with pytest.raises(MlflowException):
        tell([trial(0), end(0)])
    monkeypatch.setattr(MlflowClient, "create_run", real)
    tell([trial(0), end(0)])
    assert set(runs(tell)[0]) == {tell.sweep, "trial-0000"}


def test_all_runs_are_found_on_many_pages(sink, monkeypatch):
    sink()([SWEEP, *map(trial, range(5))])
    monkeypatch.setattr(trial_dir, "_RUNS_PER_PAGE", 2)
    again = sink()
    again([SWEEP, *map(end, range(5))])
    found, _ = runs(again)
    assert len(found) == 6
    assert {run.info.status for name, run in found.items() if name != again.sweep} == {"FINISHED"}


def test_a_namesakes_runs_are_left_alone(sink):
    ours, theirs = sink(), sink()
    theirs.id = "other"
    ours([trial(0)])
    theirs([trial(0), end(0)])
    client = MlflowClient(ours.uri)
    experiment = client.get_experiment_by_name(ours.sweep).experiment_id
    states = Counter(run.info.status for run in client.search_runs([experiment]))
    assert states == {"RUNNING": 3, "FINISHED": 1}


def test_what_the_server_refuses_is_undeliverable(sink):
    tell = sink()
    tell([trial(0)])
    with pytest.raises(Undeliverable, match=r"a\?b"):
        tell([{**trial(0), "params": {"a?b": 2}}])  # no name of a param
    with pytest.raises(Undeliverable, match=r"a\?b"):
        tell([{**trial(0), "tags": {"a?b": "2"}}])


def test_a_changed_param_keeps_nothing_else_back_and_is_told_once(sink, caplog):
    launched = {**SWEEP, "params": {"sampler": "tpe", "trials": 1}}
    sink()([launched])
    caplog.clear()
    grown = {**SWEEP, "params": {"sampler": "tpe", "trials": 9, "new": 1}, "note": "of nine"}
    for tell in (sink(), sink()):  # and the next driver
        tell([grown, trial(0), row(0, 1)])
    found, _ = runs(tell)
    parent = found[tell.sweep].data
    assert parent.tags["mlflow.note.content"] == "of nine"
    assert parent.params == {"sampler": "tpe", "trials": "1", "new": "1"}
    assert parent.tags["dpsweep.param.trials"] == "9"
    assert "dpsweep.param.sampler" not in parent.tags
    assert found["trial-0000"].data.metrics == {"acc": 0.5}
    (said,) = [r.getMessage() for r in caplog.records if "first value" in r.getMessage()]
    assert "trials of run" in said
    assert "stays 1. What it is now, 9, is in the tag dpsweep.param.trials" in said


def test_tags_arrive_although_params_do_not(sink, monkeypatch):
    real = MlflowClient.log_batch

    def broken(self, run_id, metrics=(), params=(), tags=()):
        if params:
            raise MlflowException("the server is out of order")
        return real(self, run_id, metrics, params, tags)

    sink()([SWEEP])
    monkeypatch.setattr(MlflowClient, "log_batch", broken)
    tell = sink()
    with pytest.raises(MlflowException, match="out of order"):
        tell([trial(0), {**SWEEP, "note": "of nine"}])
    found, _ = runs(tell)
    assert found[tell.sweep].data.tags["mlflow.note.content"] == "of nine"


def test_an_artifact_that_cannot_be_stored_keeps_no_statement_and_no_status_back(
    sink, monkeypatch, tmp_path
):
    def away(self, run_id, path, artifact_path=None):
        raise ConnectionError("the artifact store is away")

    tell = sink()
    tell([SWEEP, trial(0)])
    monkeypatch.setattr(MlflowClient, "log_artifact", away)
    place = tmp_path / "privacy.md"
    place.write_text("statement")
    artifact = {"kind": "artifact", "number": None, "path": str(place)}
    with pytest.raises(ConnectionError):
        tell([{**SWEEP, "note": "of nine"}, artifact, end(0)])
    found, _ = runs(tell)
    assert found[tell.sweep].data.tags["mlflow.note.content"] == "of nine"
    assert found["trial-0000"].info.status == "FINISHED"


def test_the_file_is_written_ahead_and_only_this_one(sink, uri, tmp_path):
    tell = sink()
    tell([SWEEP])
    with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as file:
        assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    engine = tell._client._tracking_client.store.engine
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1  # NORMAL
