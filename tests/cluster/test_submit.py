"""What is refused before anything is sent, and what is said of a cluster that is not there."""

import http.server
import json
import re
import threading

import pytest
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.cli.verbs import remote
from dpsweep.cluster.jobs import ClusterLost, Job, _refusal, _translate_errors, follow
from dpsweep.cluster.submit import BEGIN, FILES, drive, watch
from dpsweep.cluster.submitted import Submitted, read_submitted
from dpsweep.core.errors import ConfigError, ConnectionRefused, DpSweepError, StateError
from dpsweep.store.owner import is_name, is_owner
from dpsweep.store.state_dir import StateFolder


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
    (["resume", "x", "--address", "http://h", "--storage", "postgresql://a:hunter2@h/d"],
     r"--storage postgresql://a:\*\*\*@h/d: holds a password, and a job's command line"),
    (["resume", "x", "--address", "http://h", "-o", "tiny.yaml"], r"-o tiny.yaml: exists and is"),
    (["launch", "tiny.yaml", "--address", "ray://h:1", "-o", "tiny.yaml"], r"is not one of our"),
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
    assert told.startswith("--to http://127.0.0.1:9: accounting: private_selection")
    assert "a cluster's own logs on every node would tell them" in told


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
    return Job(f"dpsweep-me~tiny~{number}", status, "Ray's words", code), said


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


def test_logs_show_what_the_verb_said_and_nothing_of_rays_or_ours(monkeypatch, capsys):
    log = f"Ray: setting up\n{BEGIN}\none\n{FILES}" + '{"best.yaml": "x"}\n'
    SWEEP.remember(StateFolder.at(None))
    for moments, shown in [
        (moment("SUCCEEDED", log, 0), "one\n"),
        (moment("PENDING", "Ray: setting up\n"), "Job dpsweep-me~tiny~1 has said nothing yet"),
    ]:
        monkeypatch.setattr(remote, "jobs_at", lambda address, told=moments: Told(told))
        remote.logs("tiny", None, following=False)
        assert capsys.readouterr().out.startswith(shown)


def test_a_cluster_that_is_lost_while_a_job_is_followed_says_how_to_go_on(monkeypatch):
    class Lost(Told):
        def output(self, job_id):
            raise ConnectionRefused("http://told: nothing answers there")

    monkeypatch.setattr("dpsweep.cluster.jobs._POLL_SECONDS", 0)
    monkeypatch.setattr("dpsweep.cluster.jobs._PATIENCE_SECONDS", 0)
    with pytest.raises(ClusterLost, match=r"nothing answers there\. It has not .* logs tiny --fol"):
        remote._follow(Lost(), SWEEP, "id", None)


def test_what_cannot_be_fetched_at_the_end_is_told_and_fails(tmp_path, monkeypatch, capsys):
    done = moment("SUCCEEDED", f"{BEGIN}\nran\n", 0)
    failed = moment("FAILED", f"{BEGIN}\nerror: disk full\n", 2)
    monkeypatch.setattr("dpsweep.cluster.jobs._POLL_SECONDS", 0)
    with pytest.raises(SystemExit) as ended:
        remote._follow(Told(done, failed), SWEEP, "id", tmp_path / "b.yaml")
    assert ended.value.code == 2
    assert "error: disk full" in capsys.readouterr().out
    files = {f"0{n}-trial-000{n}-epsilon-{n}.yaml": f"# dpsweep export {n}" for n in (1, 2)}
    several = moment("SUCCEEDED", f"{BEGIN}\n{FILES}{json.dumps(files)}\n", 0)
    remote._follow(Told(done, several), SWEEP, "id", tmp_path / "b.yaml")
    assert sorted(p.name for p in tmp_path.glob("b*")) == ["b-epsilon-1.yaml", "b-epsilon-2.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "tiny"], "`report` is not answered from here"),
        (["watch", "tiny"], "`watch` is not answered"),
        (["gc", "tiny"], "`gc` is not answered"),
        (["compare", "tiny"], "`compare` is not answered"),
        (["export", "tiny", "-o", "x", "--format", "torch"], "`export --format torch` is not"),
        (["export", "tiny", "--register", "m"], "`export --register` is not answered"),
    ],
)
def test_a_verb_that_a_submitted_sweep_has_not_says_where_it_has(mistake, words, message):
    SWEEP.remember(StateFolder.at(None))
    told = mistake(*words)
    assert message in told
    assert "sweep 'tiny' runs at http://told" in told
    assert "dpsweep export tiny -o FOLDER" in told


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        (
            "Request failed with status code 404: Job x-404 does not exist.",
            StateError,
            "x-404 does",
        ),
        ("Request failed with status code 404: nothing", ConnectionRefused, "is no Ray dashboard"),
        ("job 404 is broken", ConnectionRefused, "Ray says: job 404"),
    ],
)
def test_what_ray_says_in_words_alone_is_told_apart(message, kind, words):
    told = _refusal("http://h", message)
    assert type(told) is kind
    assert words in str(told)


def test_a_head_that_starts_no_client_for_us_is_not_taken_for_another_service():
    said = "Initialization failure from server:\nTraceback ...\nRuntimeError: too late"
    with (
        pytest.raises(ConnectionRefused, match=r"for us \(RuntimeError: too late\)"),
        _translate_errors("x"),
    ):
        raise ConnectionAbortedError(said)


def test_a_job_that_never_began_says_why(monkeypatch):
    with pytest.raises(ConnectionRefused, match=r"no Python module dpsweep\. Install the same"):
        watch(Told(moment("FAILED", "python: No module named dpsweep\n", 1)), "id", print)
    with pytest.raises(ConnectionRefused, match=r"did not start \(FAILED\): disk / Ray's words"):
        watch(Told(moment("FAILED", "disk\n")), "id", print)


def test_a_sweep_has_one_job_and_the_next_one_the_next_number():
    jobs = Told(moment("STOPPED", "", number=1), moment("FAILED", "", number=10))
    assert drive(jobs, SWEEP, ["resume", "tiny"]) == "dpsweep-me~tiny~11"
    (_, entrypoint) = jobs.sent[0]
    assert entrypoint.endswith("--owner me --state /state -- resume tiny")
    with pytest.raises(StateError, match=r"is being run at http://told, by job dpsweep-me~tiny~2"):
        drive(Told(moment("RUNNING", "", number=2)), SWEEP, ["resume", "tiny"])


def test_what_is_remembered_is_for_its_owner_alone_and_names_do_not_mix(tmp_path, mistake):
    here = StateFolder.at(None)
    SWEEP.remember(here)
    place = here.root / "submitted/tiny.json"
    assert place.stat().st_mode & 0o777 == 0o600
    assert read_submitted("tiny", here) == SWEEP
    other = mistake(*TO, "http://127.0.0.1:9")
    assert "'tiny' was submitted to http://told" in other
    assert "resume tiny --address http://127.0.0.1:9" in other
    assert "nothing answers there" in mistake("status", "tiny") or "told" in mistake(
        "status", "tiny"
    )


@pytest.mark.parametrize(
    "name", ["../b.yaml", "/tmp/b.yaml", "a/b.yaml", "..", ".", "", "b\0", "b.yaml/"]
)
def test_a_file_that_a_job_names_stays_in_the_folder_it_is_written_to(tmp_path, monkeypatch, name):
    monkeypatch.setattr("dpsweep.cluster.jobs._POLL_SECONDS", 0)
    files = json.dumps({"good.yaml": "x", name: "# dpsweep export"})
    told = Told(moment("SUCCEEDED", f"{BEGIN}\n{FILES}{files}\n", 0))
    monkeypatch.setattr(remote, "jobs_at", lambda address: told)
    with pytest.raises(ConnectionRefused, match=r"names a file .* no plain name, so nothing is"):
        remote.export(SWEEP, [], tmp_path / "deep/best")
    assert list(tmp_path.iterdir()) == []


def test_what_a_verb_prints_is_not_taken_for_its_files(monkeypatch):
    monkeypatch.setattr("dpsweep.cluster.jobs._POLL_SECONDS", 0)
    forged = f"{FILES}" + '{"evil.yaml": "x"}\n'
    real = FILES + json.dumps({"best.yaml": f"a\n{FILES}b"}) + "\n"
    ended = watch(Told(moment("SUCCEEDED", f"{forged}{BEGIN}\n{forged}{real}", 0)), "id", print)
    assert (ended.said, ended.files) == (forged, {"best.yaml": f"a\n{FILES}b"})
    with pytest.raises(ConnectionRefused, match=r"job dpsweep-me~tiny~1: its list of files cannot"):
        watch(Told(moment("SUCCEEDED", f"{BEGIN}\n{FILES}[]\n", 0)), "id", print)
    assert watch(Told(moment("SUCCEEDED", f"{forged}{BEGIN}\none", 0)), "id", print).files == {}


@pytest.mark.parametrize(
    "words",
    [
        ["--storage", "postgresql://a:hunter2@h/d"],
        ["--any=postgresql://a:hunter2@h/d"],
        ["https://h/?token=hunter2"],
    ],
)
def test_no_password_is_in_any_word_of_a_job(words):
    jobs = Told()
    with pytest.raises(ConfigError, match=r"holds a password") as refused:
        drive(jobs, SWEEP, ["resume", "tiny", *words])
    assert "hunter2" not in str(refused.value)
    assert jobs.sent == []


def test_no_two_sweeps_share_the_ids_of_their_jobs():
    pairs = [("a-b", "c"), ("a", "b-c"), ("a-b-c", "d")]
    prefixes = [Submitted(name, "http://h", None, owner).job_prefix for owner, name in pairs]
    assert len(set(prefixes)) == 3
    assert not is_owner("a~b")
    assert not is_name("a~b")
