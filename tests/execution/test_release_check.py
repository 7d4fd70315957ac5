"""A sweep checks what its step releases before its first trial, and keeps the result."""

import gc
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

import dpsweep.training.step
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.execution import release_check
from dpsweep.execution.release_check import is_checked, store_release_checks
from dpsweep.execution.tracking import CHECKS
from dpsweep.store.state_dir import StateFolder


@pytest.fixture
def ray_here():
    """A Ray instance in a folder of its own, whose name is short enough for its sockets."""
    import ray  # after dpsweep, which chooses how Ray's processes trust each other

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            "local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        yield
        ray.shutdown()
        with warnings.catch_warnings():  # of processes that Ray does not wait for
            warnings.simplefilter("ignore")
            gc.collect()


def test_result_is_kept_beside_the_privacy_statement(sweep_file, tmp_path):
    sweep, folder = load_sweep(sweep_file), StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    store_release_checks(sweep, folder)
    text = (folder.path / CHECKS).read_text()
    for name in ("noise", "sensitivity", "divisor", "sampling"):
        assert f"| {name} |" in text
    assert "VIOLATED" not in text


@pytest.mark.parametrize(("settings", "threads"), [([], 2), (["train.threads=1"], 1)])
def test_checks_have_the_threads_of_a_trial(sweep_file, tmp_path, monkeypatch, settings, threads):
    """Sums depend on them in the last bits; and two threads on a busy core wait for each other."""
    seen, before = [], torch.get_num_threads()
    real = release_check.check_releases

    def noting(*args):
        seen.append(torch.get_num_threads())
        return real(*args)

    monkeypatch.setattr(release_check, "check_releases", noting)
    sweep = load_sweep(sweep_file, ["resources.cpu=2", *settings])
    folder = StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    store_release_checks(sweep, folder)
    assert (seen, torch.get_num_threads()) == ([threads], before)


def test_sweep_whose_noise_is_too_weak_is_refused(sweep_file, tmp_path, monkeypatch):
    sound = dpsweep.training.step.release

    def weakened(total, *, noise_multiplier, **rest):
        return sound(total, noise_multiplier=0.9 * noise_multiplier, **rest)

    monkeypatch.setattr(dpsweep.training.step, "release", weakened)
    sweep, folder = load_sweep(sweep_file), StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"does not release what.*noise .* standard errors"):
        store_release_checks(sweep, folder)
    assert not (folder.path / CHECKS).exists(), "checked again by the next launch"


def test_step_that_fails_stops_the_sweep_before_its_first_trial(sweep_file, tmp_path, monkeypatch):
    """Until 2026-11-22 the sweep went on, NOT CHECKED, and was never checked later."""

    def failing(self, batch, progress):
        raise RuntimeError("fewer than 64 rows")

    monkeypatch.setattr(dpsweep.training.step.Step, "sum_clipped", failing)
    sweep, folder = load_sweep(sweep_file), StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    with pytest.raises(StateError, match=r"fewer than 64 rows\. Every trial would fail so"):
        store_release_checks(sweep, folder)
    assert not is_checked(folder)


@pytest.mark.slow
@pytest.mark.ray
def test_without_a_worker_the_sweep_goes_on_and_is_checked_by_the_next_launch(
    sweep_file, tmp_path, ray_here, monkeypatch
):
    monkeypatch.setattr(release_check, "_TIMEOUT_SECONDS", 1.0)
    text = sweep_file.read_text()
    sweep_file.write_text(text + "resources: {cpu: 1, gpu: 1}\n")
    sweep, folder = load_sweep(sweep_file), StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    store_release_checks(sweep, folder)
    assert "NOT CHECKED: no worker" in (folder.path / CHECKS).read_text()
    assert not is_checked(folder)


@pytest.mark.slow
@pytest.mark.ray
def test_model_that_no_engine_can_train_stops_the_sweep_before_its_first_trial(
    sweep_file, tmp_path, ray_here
):
    """In the worker, that is: on a cluster its package may be another than here."""
    folder = StateFolder(tmp_path / "state").sweep("tiny")
    models = Path(__file__).parent.parent / "models"
    own = f"{{name: own, function: 'own_net:mixing', folder: {models}}}"
    text = sweep_file.read_text()
    sweep_file.write_text(text.replace("{name: cnn_small, width: 4}", own))
    sweep = load_sweep(sweep_file)
    folder.path.mkdir(parents=True)
    with pytest.raises(StateError, match=r"own_net:mixing cannot be trained privately: exam"):
        store_release_checks(sweep, folder)
    assert not (folder.path / CHECKS).exists()


@pytest.mark.slow
@pytest.mark.ray
def test_on_a_cluster_the_step_is_checked_on_a_node_that_is_not_the_drivers(
    sweep_file, tmp_path, monkeypatch
):
    """Its processor and packages may be others; until 2026-11-22 the driver's alone was checked."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder = StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "gcs_server_port": 0, "include_dashboard": False},
    )
    try:
        other = cluster.add_node(num_cpus=1)
        ray.init(cluster.address, log_to_driver=False)
        store_release_checks(load_sweep(sweep_file), folder)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert f"on node {other.node_id[:8]}." in (folder.path / CHECKS).read_text()


@pytest.mark.slow
@pytest.mark.ray
def test_on_a_bad_node_the_step_is_checked_on_another_and_both_are_named(
    sweep_file, tmp_path, monkeypatch, caplog
):
    """Until 2026-11-23 one bad node stopped the sweep: "Every trial would fail so"."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    folder = StateFolder(tmp_path / "state").sweep("tiny")
    folder.path.mkdir(parents=True)
    own = f"{{name: own, function: 'faulty_net:make', folder: {Path(__file__).parent}}}"
    text = sweep_file.read_text().replace("{name: cnn_small, width: 4}", own)
    text = text.replace("{name: fftkf}", "{name: dp_sgd}")
    sweep_file.write_text(text.replace("  method.kappa: {uniform: [0.3, 1.0]}\n", ""))
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "gcs_server_port": 0, "include_dashboard": False},
    )
    try:
        bad = cluster.add_node(num_cpus=1, env_vars={"DPSWEEP_TEST_BAD_NODE": "1"})
        ray.init(cluster.address, log_to_driver=False)
        store_release_checks(load_sweep(sweep_file), folder)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert is_checked(folder)
    assert f"on node {bad.node_id[:8]}." not in (folder.path / CHECKS).read_text()
    assert f"failed on node {bad.node_id[:8]}, and ran on another: " in caplog.text
    assert "lost its device" in caplog.text
