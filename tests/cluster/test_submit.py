"""What is refused before anything is sent, and what is said of a cluster that is not there."""

import http.server
import json
import re
import threading

import pytest
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.cluster.jobs import Job, follow
from dpsweep.cluster.submit import BEGIN, FILES, drive, watch
from dpsweep.cluster.submitted import Submitted, remembered
from dpsweep.core.errors import ConnectionRefused, DpSweepError, StateError
from dpsweep.tune.state import State


@pytest.fixture
def mistake(tmp_path, sweep_file, monkeypatch):
    """The message of a command that fails and leaves nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPSWEEP_TO", raising=False)

    def run(*args):
        before = sorted(tmp_path.rglob("*"))
        result = CliRunner().invoke(app, [str(arg) for arg in args])
        assert isinstance(result.exception, DpSweepError), result.output
        assert sorted(tmp_path.rglob("*")) == before
        return str(result.exception)

    return run


@pytest.fixture
def server():
    """An HTTP server that tells a version, or anything else; its address."""
    served = []

    def serve(status, body):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args):
                pass

        one = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=one.serve_forever, daemon=True).start()
        served.append(one)
        return f"127.0.0.1:{one.server_port}"

    yield serve
    for one in served:
        one.shutdown()
        one.server_close()


TO = ["submit", "tiny.yaml", "--to"]
REFUSED = [
    (["submit", "tiny.yaml"], r"--to: no cluster is named, and DPSWEEP_TO is not set"),
    ([*TO, "head:8265"], r"head:8265: expected http://HOST:8265"),
    ([*TO, "ftp://head:21"], r"ftp://head:21: expected http://HOST:8265"),
    ([*TO, "ray://head"], r"ray://head: expected http"),
    ([*TO, "http://me:hunter2@head"], r"http://\.\.\.@head: names a user\. Ray takes a token"),
    ([*TO, "http://127.0.0.1:9"], r"http://127.0.0.1:9: nothing answers there .*dpsweep up"),
    ([*TO, "http://h", "--state", "here"], r"--state here: is relative, and a job's folder"),
    ([*TO, "http://h", "--tracking-uri", "http://a:hunter2@h"], r"--tracking-uri http://a:\*\*\*@h"),
    ([*TO, "http://h", "--storage", "postgresql://a:hunter2@h/d"], r"holds a password.*\.pgpass"),
    ([*TO, "http://h", "--set", "train.epochs=no"], r"--set train.epochs"),
    (["logs", "nobody"], r"no sweep called 'nobody' was submitted from here. Known: none"),
    (["up"], r"up: say --local"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "message"), REFUSED, ids=lambda v: None)
def test_a_mistake_is_told_before_anything_is_sent(mistake, args, message):
    told = mistake(*args)
    assert re.search(message, told), told
    assert "hunter2" not in told


def test_what_answers_and_is_no_cluster_is_told_apart(mistake, server):
    old = server(200, json.dumps({"ray_version": "2.9.3", "version": "4"}))
    assert "Ray 2.9.3 runs there, and dpsweep needs 2.60 or newer" in mistake(*TO, f"http://{old}")
    assert "no Ray dashboard" in mistake(*TO, f"https://{old}")
    other = server(404, "not found")
    assert "it is no Ray dashboard" in mistake(*TO, f"http://{other}")
    closed = server(401, "Unauthorized: Missing authentication token")
    told = mistake(*TO, f"http://{closed}")
    assert "the cluster asks for a token" in told
    assert "RAY_AUTH_TOKEN_PATH" in told


def test_a_private_selection_is_not_sent_where_logs_would_tell_it(mistake, tmp_path):
    text = (tmp_path / "tiny.yaml").read_text().replace("epsilon: 4}", "epsilon: 4, scope: sweep}")
    (tmp_path / "secret.yaml").write_text(f"{text}accounting: private_selection\n")
    told = mistake("submit", "secret.yaml", "--to", "http://127.0.0.1:9")
    assert "a cluster's own logs would tell them" in told


class Told:
    """A cluster whose jobs were all written down before; what is submitted, it keeps."""

    address = "http://told"

    def __init__(self, *moments):
        self.moments, self.sent = list(moments), []

    def find(self, prefix):
        return [job for job, _ in self.moments if job.id.startswith(prefix)]

    def output(self, job_id):
        return self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]

    def submit(self, job_id, entrypoint, files):
        self.sent.append((job_id, entrypoint))


def moment(status, said, code=None, number=1):
    return Job(f"dpsweep-me-tiny~{number}", status, "Ray's words", code), said


SWEEP = Submitted("tiny", "http://told", "/state", "me")


def test_a_job_is_followed_piece_by_piece_behind_rays_own_words(monkeypatch):
    monkeypatch.setattr("dpsweep.cluster.jobs._POLL_SECONDS", 0)
    log = f"Ray: setting up\n{BEGIN}\none\ntwo\n{FILES}" + '{"best.yaml": "x"}\n'
    cuts = [*range(0, len(log), 7)]
    jobs = Told(*(moment("RUNNING", log[:n]) for n in cuts), moment("SUCCEEDED", log, 0))
    shown = []
    ended = watch(jobs, "id", shown.append)
    assert (ended.code, ended.said, ended.files) == (0, "one\ntwo\n", {"best.yaml": "x"})
    jobs = Told(*(moment("RUNNING", log[:n]) for n in cuts), moment("SUCCEEDED", log, 0))
    pieces = []
    follow(jobs, "id", pieces.append)
    assert "".join(pieces) == log


def test_a_job_that_never_began_says_why(monkeypatch):
    with pytest.raises(ConnectionRefused, match=r"no Python module dpsweep\. Install the same"):
        watch(Told(moment("FAILED", "python: No module named dpsweep\n", 1)), "id", print)
    with pytest.raises(ConnectionRefused, match=r"did not start \(FAILED\): disk / Ray's words"):
        watch(Told(moment("FAILED", "disk\n")), "id", print)


def test_a_sweep_has_one_job_and_the_next_one_the_next_number():
    jobs = Told(moment("STOPPED", "", number=1), moment("FAILED", "", number=10))
    assert drive(jobs, SWEEP, ["resume", "tiny"]) == "dpsweep-me-tiny~11"
    (_, entrypoint) = jobs.sent[0]
    assert entrypoint.endswith("--owner me --state /state -- resume tiny")
    with pytest.raises(StateError, match=r"is being run at http://told, by job dpsweep-me-tiny~2"):
        drive(Told(moment("RUNNING", "", number=2)), SWEEP, ["resume", "tiny"])


def test_what_is_remembered_is_for_its_owner_alone_and_names_do_not_mix(tmp_path, mistake):
    here = State.at(None)
    SWEEP.remember(here)
    place = here.root / "submitted/tiny.json"
    assert place.stat().st_mode & 0o777 == 0o600
    assert remembered("tiny", here) == SWEEP
    other = mistake(*TO, "http://127.0.0.1:9")
    assert "'tiny' was submitted to http://told" in other
    assert "resume tiny --address http://127.0.0.1:9" in other
    assert "nothing answers there" in mistake("status", "tiny") or "told" in mistake(
        "status", "tiny"
    )
