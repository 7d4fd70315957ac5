"""What is sent to a cluster is what the sweep needs, and no secret or rubbish."""

import pytest
import yaml

from dpsweep.cluster import package
from dpsweep.cluster.package import packed
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
    name, files = packed(sweep, None)
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
    _, files = packed(load_sweep("tiny.yaml", OWN), None)
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
        packed(load_sweep("tiny.yaml", OWN), None)
    (project / ".dpsweepignore").write_text("*.bin\n")
    packed(load_sweep("tiny.yaml", OWN), None)


def test_a_path_in_the_folder_is_sent_relative_to_it_and_any_other_is_the_clusters(project):
    for folder, sent in (
        (".", "."),
        ("sub", "sub"),
        (project / "sub", "sub"),
        ("/there", "/there"),
    ):
        model = f"model={{name: own, function: 'nets:make', folder: '{folder}'}}"
        name, files = packed(load_sweep("tiny.yaml", [model]), None)
        assert yaml.safe_load(files[name])["base"]["model"]["folder"] == sent
        assert "nets.py" in files


def test_a_folder_that_is_not_there_is_told(project):
    with pytest.raises(ConfigError, match=r"--project .*none: is no folder"):
        packed(load_sweep("tiny.yaml"), project / "none")
