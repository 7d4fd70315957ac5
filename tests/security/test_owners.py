# ruff: noqa: RUF001 - letters that look alike are what is tested
"""Two people in one state folder: the same names, nobody's sweep touched by mistake."""

import json
import os
import stat
import sys
import traceback

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.cli.verbs import route, run
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, DpSweepError, StateError
from dpsweep.store.owner import split_sweep_name, whoami
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.storage import check_storage, choose_study_name
from dpsweep.store.study import Study, open_study
from dpsweep.tracking.mlflow import MlflowSink
from dpsweep.tracking.spool import Undeliverable


@pytest.fixture
def be(monkeypatch):
    """Sets who is at work."""
    return lambda name: monkeypatch.setenv("DPSWEEP_OWNER", name)


@pytest.fixture
def launch(tmp_path, monkeypatch, sweep_file, be):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPSWEEP_STORAGE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(owner, name="tiny"):
        be(owner)
        sweep, state = load_sweep(sweep_file, [f"name={name}"]), StateFolder.at(None)
        folder = state.sweep(name)
        folder.create(sweep.file, sweep.base, None)
        Study.create(folder.storage_uri, sweep, folder.id, owner=owner)
        return folder

    return make


def typed(*args, code=0):
    result = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})
    if code == 2:
        assert isinstance(result.exception, DpSweepError), result.output
        return str(result.exception)
    assert result.exit_code == code, result.output
    return result.output


def test_two_owners_have_sweeps_of_one_name_in_one_folder(launch, be, tmp_path):
    mine, theirs = launch("alice"), launch("bob")
    assert mine.path == tmp_path / ".dpsweep/sweeps/tiny", "as for one user alone"
    assert theirs.path == tmp_path / ".dpsweep/owners/bob/sweeps/tiny"
    assert (mine.owner_name, theirs.owner_name) == ("alice", "bob")
    assert mine.storage_uri != theirs.storage_uri
    assert StateFolder.at(None).sweep("tiny") == theirs, "NAME is one's own"
    assert StateFolder.at(None).sweep("alice/tiny") == mine
    be("alice")
    assert StateFolder.at(None).sweep("tiny") == mine
    assert StateFolder.at(None).sweep("bob/tiny") == theirs
    assert open_study("bob/tiny", StateFolder.at(None)).sweep.name == "tiny"
    for folder in (mine.path, theirs.path, theirs.state.root, theirs.state.root.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_status_lists_everyones_and_says_whose(launch, be):
    launch("alice"), launch("bob")
    rows = json.loads(typed("status", "--json"))
    assert [(row["sweep"], row["owner"]) for row in rows] == [
        ("tiny", "bob"),
        ("alice/tiny", "alice"),
    ]
    be("carol")
    assert {row["sweep"] for row in json.loads(typed("status", "--json"))} == {
        "alice/tiny",
        "bob/tiny",
    }
    assert "bob/tiny" in typed("status")
    assert "bob/tiny: stopped" in typed("status", "bob/tiny")
    said = typed("status", "tiny", code=2)
    assert "Of this name there is alice/tiny, bob/tiny." in said


def test_only_the_owners_sweeps_are_stopped_resumed_and_tidied(launch, be):
    launch("alice")
    theirs = launch("bob")
    (theirs.path / "ray").mkdir()
    be("alice")
    for verb in (["stop", "bob/tiny"], ["resume", "bob/tiny"], ["gc", "bob/tiny", "--remove"]):
        said = typed(*verb, code=2)
        assert "sweep 'bob/tiny' is bob's, not yours (alice)" in said
        assert "add --force" in said
    with theirs.lease():
        said = typed("stop", "bob/tiny", "--force", "--wait", "0.1", code=2)
        assert "was asked to stop" in said
        assert theirs.stop_request.exists()
    assert "nothing is left over" in typed("gc"), "one's own alone"
    assert "Ray's folder" in typed("gc", "bob/tiny")
    assert (theirs.path / "ray").exists()
    typed("gc", "bob/tiny", "--remove", "--force")
    assert not (theirs.path / "ray").exists()


def test_a_folder_from_before_owners_is_its_launchers(launch, be, monkeypatch):
    folder = launch("alice")
    (folder.state.root / "owner").unlink()
    stored = folder.path / "sweep.json"
    old = {k: v for k, v in json.loads(stored.read_text()).items() if k not in ("owner", "study")}
    stored.write_text(json.dumps(old))
    monkeypatch.delenv("DPSWEEP_OWNER")
    assert StateFolder.at(None).sweep("tiny") == folder
    assert folder.owner_name == whoami()
    assert folder.study == "tiny"
    be("bob")
    assert StateFolder.at(None).root.parts[-2:] == ("owners", "bob")


def test_a_folder_prepared_for_a_group_belongs_to_nobody(launch, tmp_path):
    place = tmp_path / ".dpsweep/owners"
    place.mkdir(parents=True)
    place.chmod(0o3770)
    assert launch("alice").path == place / "alice/sweeps/tiny"
    assert launch("bob").path == place / "bob/sweeps/tiny"
    rows = json.loads(typed("doctor", "--json"))
    assert not [row for row in rows if row["check"] == "permissions" and row["level"] != "ok"]
    place.chmod(0o777)
    rows = json.loads(typed("doctor", "--json", code=1))
    assert "is not sticky" in str(rows)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to work as somebody else")
def test_another_accounts_sweeps_are_listed_and_stay_closed(launch, be, tmp_path):
    for place in (*tmp_path.parents, tmp_path):
        if place.owner() == "root" and str(place).startswith("/tmp/pytest"):
            place.chmod(place.stat().st_mode | 0o055)
    assert route, run  # imported here: the other account may not read our Python
    owners = tmp_path / ".dpsweep/owners"
    owners.mkdir(parents=True)
    owners.parent.chmod(0o755)
    owners.chmod(0o3777)
    launch("alice")
    be("bob")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgid(65534)
            os.setuid(65534)
            rows = json.loads(typed("status", "--json"))
            assert [(row["owner"], row["state"]) for row in rows] == [
                ("alice", "private to their owner")
            ]
            for verb in ("status", "stop", "best"):
                assert "alone" in typed(verb, "alice/tiny", *FORCED[verb], code=2)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


FORCED = {"status": [], "best": [], "stop": ["--force"]}


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "/etc/passwd", "a/../../x", "a/b/c", "..", ".", "", "a/", "/a", "a\nb", "a\0b"),
        *(
            "a" * 81,
            "o" * 81 + "/a",
            "ｔｉｎｙ",
            "tіny",
            "ti\u202eny",
            "~root",
            "-rf",
            "a b",
            "%2e%2e/a/b",
        ),
    ],
)
def test_no_name_leaves_its_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StateError, match="is no sweep's name"):
        StateFolder.at(None).sweep(name)
    for verb in (["status"], ["stop"], ["best"], ["gc"], ["export", "-o", "out"]):
        if name.startswith("-") or "\0" in name:
            continue
        assert "is no sweep's name" in typed(*verb, name, code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("owner", ["", "../x", "a/b", ".", "..", "a\n", "аlice", "x" * 81, "~"])
def test_an_owner_that_is_no_folders_name_is_refused(owner, be):
    be(owner)
    with pytest.raises(ConfigError, match="DPSWEEP_OWNER="):
        whoami()


def test_own_and_others_names_are_told_apart():
    assert split_sweep_name("tiny") == (None, "tiny")
    assert split_sweep_name("al.ice@lab/tiny-2") == ("al.ice@lab", "tiny-2")


def test_studies_of_one_name_on_one_server_get_names_of_their_own(tmp_path, sweep_file):
    uri, sweep = f"sqlite:///{tmp_path}/shared.db", load_sweep(sweep_file)
    for owner, name in (("alice", "tiny"), ("bob", "bob/tiny"), ("carol", "carol/tiny")):
        check_storage(uri, "tiny", owner)
        assert choose_study_name(uri, "tiny", owner) == name
        Study.create(uri, sweep, f"folder of {owner}", name=name, owner=owner)
        assert Study.open(uri, sweep, f"folder of {owner}", name=name).num_asked() == 0
        with pytest.raises(StateError, match=rf"already has a study called '{name}'"):
            check_storage(uri, "tiny", owner)


@pytest.mark.filterwarnings("ignore")  # MLflow's own, on its first import
def test_experiments_of_one_name_on_one_server_do_not_meet(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"

    def experiment(owner, id_):
        sink = MlflowSink(uri, "tiny", id_, tmp_path / "artifacts", owner)
        client = sink._get_client()
        made = client.get_experiment(sink._experiment)
        return made.name, made.tags.get("dpsweep.owner")

    assert experiment("alice", "1") == ("tiny", "alice"), "as for one user alone"
    assert experiment("bob", "2") == ("bob/tiny", "bob")
    assert experiment("alice", "3") == ("tiny", "alice")
    assert experiment("bob", "2") == ("bob/tiny", "bob")
    for tags in ({}, {"dpsweep.owner": "alice"}):
        name = f"carol{len(tags)}/tiny"
        MlflowClient(uri).create_experiment(name, tags=tags)  # by alice, to see what comes
        with pytest.raises(Undeliverable, match=f"experiment '{name}' is not carol"):
            experiment(name.partition("/")[0], "4")


HOSTILE = [
    (b"[]", "holds no mapping"),
    (b"{", "is no JSON"),
    (b"[" * 100_000, "is no JSON"),
    (b"\xff\xfe", "is no JSON"),
    (b'{"id": {}, "sources": [], "tracking_uri": null}', "id must be text"),
    (b'{"id": "1", "sources": [], "tracking_uri": null}', "sources must be"),
    (b'{"id": "1", "sources": [1, 2], "tracking_uri": null}', "sources must be"),
    (b'{"id": "1", "tracking_uri": null, "storage_uri": 7}', "storage_uri must be text"),
]


@pytest.mark.parametrize(("content", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_sweep_json_is_one_message(launch, content, words):
    folder = launch("alice")
    (folder.path / "sweep.json").write_bytes(content)
    for verb in (["status", "tiny"], ["resume", "tiny"], ["best", "tiny"], ["stop", "tiny"]):
        said = typed(*verb, code=2)
        assert words in said
        assert "sweep.json" in said
    assert words in typed("status"), "and the others are listed all the same"
    assert words in typed("doctor", code=1)
    typed("gc")


def test_a_sweep_json_that_names_another_sweep_touches_neither(launch):
    one, two = launch("alice", "one"), launch("alice", "two")
    (one.path / "sweep.json").write_bytes((two.path / "sweep.json").read_bytes())
    assert "is of another sweep than 'one'" in typed("resume", "one", code=2)
    stored = json.loads((two.path / "sweep.json").read_text())
    stored["sources"][0]["tree"]["name"] = "../../evil"
    (two.path / "sweep.json").write_text(json.dumps(stored))
    assert "is of another sweep than 'two'" in typed("resume", "two", code=2)
