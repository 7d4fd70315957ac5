"""What is sent to a cluster is what the sweep needs, and no secret or rubbish."""

import pytest
import yaml

from dpsweep.cluster import package
from dpsweep.cluster.package import pack_sweep, summary
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError

OWN = ["model={name: own, function: 'nets:make', folder: .}"]
NETS = """\
from torch import nn

def make(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], num_classes))
"""


@pytest.fixture
def project(tmp_path, sweep_file, monkeypatch):
    """The user's folder: code, and what nobody wants to send."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    for name in (
        ".git/config",
        ".venv/lib.py",
        ".dpsweep/sweeps/x/secret",
        "sub/__pycache__/a.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "sub/kept.py").write_text("x")
    for secret in (".env", "server.key", "auth_token", ".pgpass"):
        (tmp_path / secret).write_text("hunter2")
    (tmp_path / "outside").symlink_to("/etc/hostname")
    return tmp_path


def test_a_model_of_ours_needs_the_sweep_alone_with_its_base_in_it(project):
    (project / "base.yaml").write_text(yaml.safe_dump(load_sweep("tiny.yaml").base.tree))
    tree = yaml.safe_load((project / "tiny.yaml").read_text())
    (project / "apart.yaml").write_text(yaml.safe_dump({**tree, "base": "base.yaml"}))
    sweep = load_sweep("apart.yaml", ["train.epochs=3"])
    name, files = pack_sweep(sweep, None)
    assert list(files) == [name] == ["tiny.submitted.yaml"]
    (project / name).write_bytes(files[name])
    again = load_sweep(name)
    assert again.base.tree == sweep.base.tree
    assert again.base.tree["train"]["epochs"] == 3
    assert again.config.search == sweep.config.search


def test_a_model_of_the_users_brings_the_project_but_no_secret_and_no_rubbish(project):
    (project / ".dpsweepignore").write_text("# mine\n*.csv\n!kept.csv\n")
    (project / "big.csv").write_text("x")
    (project / "kept.csv").write_text("x")
    _, files = pack_sweep(load_sweep("tiny.yaml", OWN), None)
    assert sorted(files) == [
        ".dpsweepignore", "kept.csv", "nets.py", "sub/kept.py", "tiny.submitted.yaml", "tiny.yaml",
    ]  # fmt: skip
    assert not any(b"hunter2" in content for content in files.values())


def test_too_much_names_the_largest_files_and_the_ignore_list(project, monkeypatch):
    monkeypatch.setattr(package, "MOST_BYTES", 5000)
    (project / "weights.bin").write_bytes(bytes(9000))
    with pytest.raises(
        ConfigError, match=r"\d+\.\d kB in .* at most 5\.0 kB .*weights\.bin \(9\.0 kB\)"
    ):
        pack_sweep(load_sweep("tiny.yaml", OWN), None)
    (project / ".dpsweepignore").write_text("*.bin\n")
    pack_sweep(load_sweep("tiny.yaml", OWN), None)


def test_a_path_in_the_folder_is_sent_relative_to_it_and_any_other_is_the_clusters(project):
    for folder, there in (
        (".", "."),
        ("sub", "sub"),
        (project / "sub", "sub"),
        ("/there", "/there"),
    ):
        model = f"model={{name: own, function: 'nets:make', folder: '{folder}'}}"
        name, files = pack_sweep(load_sweep("tiny.yaml", [model]), None)
        assert yaml.safe_load(files[name])["base"]["model"]["folder"] == there
        assert ("nets.py" in files) == (there != "/there")


def test_a_folder_that_is_not_there_is_told(project):
    with pytest.raises(ConfigError, match=r"--project .*none: is no folder"):
        pack_sweep(load_sweep("tiny.yaml"), project / "none")


SECRETS = (
    ".env", ".env.local", ".envrc", "sub/.ENV", ".git-credentials", "credentials.json",
    "sub/credentials-prod.json", "secrets.json", "sub/secret", "ray_token", "a.pem", "Server.KEY",
    "id_rsa", ".netrc", ".pgpass", "sub/checkpoint.pt", "sub/error.txt",
    "state/study.db", "state/sweeps/x/weights.txt", "state/trials/0000/metrics.json",
    "lab/up.json", "lab/pgpass.txt", "old/x/sweep.json", "old/x/trials/0000/rows",
    "mine/sweeps/notes", ".dpsweep/owner", "data/private.npz",
    "scans/p1.png", "scans/.gitignore", "deep/er/a.dump",
)  # fmt: skip


@pytest.fixture
def hospital(project):
    """A folder of code with all around it that must not leave the machine."""
    for name in SECRETS:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("hunter2")
    (project / "scans/.gitignore").write_text("*")
    (project / "deep/.dpsweepignore").write_text("/er/*.dump\n/er/*.txt\n")
    (project / "deep/er/.gitignore").write_text("!kept.txt\n")
    for kept in ("deep/er/kept.txt", "data/more.csv"):
        (project / kept).write_text("x")
    (project / ".gitignore").write_text("".join(f"!{name}\n!/**/{name}\n" for name in SECRETS))
    for link, to in (("a.txt", ".env"), ("b.txt", "data/private.npz"), ("nets2.py", "nets.py")):
        (project / link).symlink_to(project / to)
    return project


NPZ = ["data={name: npz, root: data/private.npz, num_train: 1000, num_test: 10, shape: [1, 8, 8], "
       "num_classes: 2}"]  # fmt: skip


def test_no_ignore_list_brings_back_a_secret_a_state_folder_or_data(hospital):
    _, files = pack_sweep(load_sweep("tiny.yaml", [*OWN, *NPZ]), None, str(hospital / "mine"))
    assert not [name for name, content in files.items() if b"hunter2" in content]
    assert sorted(files) == [
        ".gitignore", "data/more.csv", "deep/.dpsweepignore", "deep/er/.gitignore",
        "deep/er/kept.txt", "nets.py", "nets2.py", "sub/kept.py", "tiny.submitted.yaml",
        "tiny.yaml",
    ]  # fmt: skip
    _, files = pack_sweep(load_sweep("tiny.yaml", [*OWN, "data={name: mnist, root: data}"]), None)
    assert not [name for name in files if name.startswith("data/")]


def test_the_ignore_lists_of_the_repository_around_a_project_count(hospital):
    (hospital / ".gitignore").write_text("/sub/*.py\n!/sub/kept.py\n*.dat\n")
    for name in ("gone.py", "a.dat"):
        (hospital / "sub" / name).write_text("x")
    _, files = pack_sweep(load_sweep("tiny.yaml"), hospital / "sub")
    assert sorted(files) == ["kept.py", "tiny.submitted.yaml"]


def test_language_model_in_the_folder_brings_its_files_and_no_other(hospital):
    (hospital / "bert").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "notes.md"):
        (hospital / "bert" / name).write_text("{}")
    model = "model={name: huggingface, folder: bert}"
    name, files = pack_sweep(load_sweep("tiny.yaml", [model]), None)
    sent = {"bert/config.json", "bert/model.safetensors", "bert/tokenizer.json"}
    assert set(files) == {name, *sent}
    assert yaml.safe_load(files[name])["base"]["model"]["folder"] == "bert"


def test_weights_alone_bring_their_file_and_no_other(hospital):
    (hospital / ".gitignore").write_text("*.pt\n")
    (hospital / "sub/w.pt").write_bytes(b"w")
    for path in ("sub/w.pt", str(hospital / "sub/w.pt")):
        name, files = pack_sweep(load_sweep("tiny.yaml", [f"model.weights={path}"]), None)
        assert sorted(files) == ["sub/w.pt", "tiny.submitted.yaml"]
        assert yaml.safe_load(files[name])["base"]["model"]["weights"] == "sub/w.pt"
    with pytest.raises(ConfigError, match=r"model\.weights: .*none\.pt is no file"):
        pack_sweep(load_sweep("tiny.yaml", ["model.weights=none.pt"]), None)


def test_code_among_data_or_in_a_state_folder_is_not_sent(hospital, monkeypatch):
    for root in (".", ".."):
        data = NPZ[0].replace("npz", "folder", 1).replace("data/private.npz", root)
        with pytest.raises(ConfigError, match=r"is in .* \(data\.root\), and nothing of that is"):
            pack_sweep(load_sweep("tiny.yaml", [*OWN, data]), None)
    with pytest.raises(ConfigError, match=r"holds study\.db, so it is a state folder"):
        pack_sweep(load_sweep("tiny.yaml"), hospital / "state")
    with pytest.raises(ConfigError, match=r"is in .*mine \(--state\)"):
        pack_sweep(load_sweep("tiny.yaml"), hospital / "mine/sweeps", str(hospital / "mine"))
    monkeypatch.setenv("DPSWEEP_STATE", str(hospital))
    assert "kept.py" in pack_sweep(load_sweep("tiny.yaml"), hospital / "sub")[1]  # nobody's yet
    (hospital / "sweeps").mkdir()
    with pytest.raises(ConfigError, match=r"\(the state folder\)"):
        pack_sweep(load_sweep("tiny.yaml", OWN), None)


def test_a_line_that_is_no_pattern_is_told(project):
    (project / "sub/.gitignore").write_text("*.csv\n!\n")
    with pytest.raises(ConfigError, match=r"sub/\.gitignore: .*Mend that line"):
        pack_sweep(load_sweep("tiny.yaml", OWN), None)


def test_what_is_sent_is_told_in_a_line():
    names = ["one.yaml", *(f"sub/{n}.py" for n in range(3)), *(f"x{n:02}" for n in range(12))]
    told = summary(dict.fromkeys(names, bytes(100)))
    assert told.startswith("Sent: 16 files, 1.6 kB: one.yaml, sub/ (3), x00, ")
    assert told.endswith("x09 and 2 more")
    assert summary({"a": b""}) == "Sent: 1 file, 0 B: a"
