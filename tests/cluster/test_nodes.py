"""Nodes are asked before the first trial, and what is missing is told of all of them at once."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

import dpsweep
from dpsweep.cli.verbs.doctor import elsewhere
from dpsweep.cluster import nodes
from dpsweep.cluster.nodes import NodeReport, check_nodes, facts, faults, survey
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.data.read import fingerprint_images
from dpsweep.execution.gpu_probe import decide_packing

KEY = b"k" * 32


@pytest.fixture
def sweep(sweep_file):
    return load_sweep(sweep_file)


@pytest.fixture
def token(tmp_path):
    (tmp_path / "name").write_text("content")
    return str(tmp_path), "name", "content"


def asked(sweep, **model):
    tree = sweep.written.model_dump(mode="json")
    return {**tree, "model": {**tree["model"], **model}}


def test_a_machine_that_has_everything_has_no_fault(sweep, token):
    trial = sweep.written
    said = facts(asked(sweep), (KEY, fingerprint_images(trial.data, trial.seed, KEY)), token)
    assert (said["data_ok"], said["state_ok"], said["faults"]) == (True, True, [])
    assert (said["dpsweep"], said["torch"]) == (dpsweep.__version__, torch.__version__)
    assert abs(said["clock"] - time.time()) < 5
    assert [p.name for p in Path(token[0]).iterdir() if p.name.startswith("name")] == ["name"]


def test_what_is_not_asked_is_neither_right_nor_wrong():
    said = facts(None, None, None)
    assert (said["data_ok"], said["state_ok"], said["faults"]) == (None, None, [])


def test_other_data_and_a_missing_weights_file_are_faults(sweep, token):
    said = facts(asked(sweep, weights="/nowhere/x.pth"), (KEY, "another"), token)
    assert said["data_ok"] is False
    assert said["faults"] == [
        "data.root: None holds other data than the driver's. Copy them afresh from there",
        "model.weights: /nowhere/x.pth is not there. Copy it there from the driver's node",
    ]


def test_missing_data_are_a_fault_with_the_folder_it_should_be_in(sweep_file):
    there = load_sweep(sweep_file, ["data={name: mnist, root: /nowhere}"])
    (words,) = facts(asked(there), (KEY, "x"), None)["faults"]
    assert words.startswith(
        "data.root: '/nowhere' does not hold mnist: /nowhere/MNIST/raw is not a"
    )


@pytest.mark.parametrize(
    ("folder", "name", "content", "words"),
    [
        ("{}/away", "name", "content", "does not see the state folder .*/away. Put the state"),
        ("{}", "another", "content", "does not see the state folder"),
        ("{}", "name", "other", "is not the driver's file. Put the state folder where every node"),
    ],
)
def test_a_state_folder_that_is_not_the_drivers_is_a_fault(
    token, tmp_path, folder, name, content, words
):
    said = facts(None, None, (folder.format(tmp_path), name, content))
    assert said["state_ok"] is False
    (told,) = said["faults"]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(told)


def test_versions_and_gpus_that_do_not_go_with_the_drivers_are_faults():
    node = {"NodeID": "ab" * 28, "Resources": {"GPU": 4.0}}
    said = {**facts(None, None, None), "dpsweep": "0.0.1", "torch": "1.0", "cuda": None}
    report = nodes._report(node, said, time.time())
    first, second, third = report.faults
    assert first.startswith(f"has dpsweep 0.0.1, and the driver {dpsweep.__version__}. Install the")
    assert second.startswith("has torch 1.0, and the driver ")
    assert third.startswith("Ray assigns 4 GPUs there, and its torch is built without CUDA")
    assert abs(report.clock_offset_s) < 5


def test_nodes_at_fault_are_named_and_those_that_run_no_trials_are_not():
    well = NodeReport("a", "0" * 56, dpsweep="1")
    ill = replace(well, host="b", faults=("lacks x", "lacks y"))
    idle = replace(ill, host="c", runs_trials=False)
    assert faults([well, ill, idle]) == ["b (node 00000000): lacks x; lacks y."]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ModuleNotFoundError("No module named 'dpsweep'"),
            "has no dpsweep. Install it in the Python",
        ),
        (
            TimeoutError("it did not answer in time"),
            r"does not run our tasks \(TimeoutError: it did",
        ),
    ],
)
def test_a_node_that_cannot_run_our_task_is_at_fault_itself(error, words):
    node = {"NodeID": "ab" * 28, "NodeManagerHostname": "there"}
    report = nodes._silent(node, error)
    assert not report.answered
    with pytest.raises(AssertionError, match=rf"there \(node abababab\): {words}"):
        raise AssertionError(*faults([report]))


@pytest.mark.slow
def test_one_of_two_real_nodes_is_refused_and_named(sweep, tmp_path, monkeypatch):
    """It keeps copies of private data where others can read them."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")
    open_to_all, state = tmp_path / "open", tmp_path / "state"
    open_to_all.mkdir(mode=0o755)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "gcs_server_port": 0, "include_dashboard": False},
    )
    try:
        node = cluster.add_node(num_cpus=1, env_vars={"DPSWEEP_CACHE": str(open_to_all)})
        ray.init(address=cluster.address, log_to_driver=False)
        words = rf"1 of the cluster's 2 nodes .*node {node.node_id[:8]}\): {open_to_all}: is meant"
        with pytest.raises(StateError, match=words):
            check_nodes(sweep, state)
        assert not state.exists(), "the token is gone, and the folder that was made for it"
        first, second = survey(sweep, state)
        assert (first.faults, first.data_ok, first.state_ok) == ((), True, True)
        assert (second.data_ok, second.state_ok) == (False, True)
        assert all(abs(report.clock_offset_s) < 5 for report in (first, second))
        assert {report.data_ok for report in survey(None, None)} == {None}
        large = load_sweep(tmp_path / "tiny.yaml", ["resources.cpu=2"])
        assert not any(report.runs_trials for report in survey(large, state))
        ray.shutdown()
        with pytest.raises(StateError, match=words):
            dpsweep.launch(tmp_path / "tiny.yaml", state=state, address=cluster.address, quiet=True)
        assert not (state / "sweeps").exists()
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.slow
def test_a_gpu_that_torch_cannot_use_is_a_fault_of_its_node(sweep_file, tmp_path, monkeypatch):
    """Ray assigns as many GPUs as it is told of: such a node was "ok, 2 GPUs"."""
    if torch.cuda.is_available():
        pytest.skip("torch can use a GPU here")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = {"num_cpus": 1, "gcs_server_port": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        node = cluster.add_node(num_cpus=1, num_gpus=2)
        words = rf"node {node.node_id[:8]}\): .*torch cannot compute on a GPU that Ray assigns"
        for gpu in ("1", "auto"):
            with pytest.raises(StateError, match=words):
                dpsweep.launch(
                    sweep_file, settings=[f"resources.gpu={gpu}"], state=tmp_path / "state",
                    address=cluster.address, quiet=True,
                )  # fmt: skip
        ray.init(address=cluster.address, log_to_driver=False)
        at_fault = [bool(report.faults) for report in survey(None, None)]
        assert sum(at_fault) == 1
        with pytest.raises(ConfigError, match="auto: the costliest trial did not run on a GPU"):
            decide_packing(load_sweep(sweep_file, ["resources.gpu=auto"]), [{"GPU": 2, "CPU": 1}])
        assert not any(report.faults for report in survey(load_sweep(sweep_file), None))
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_doctor_names_the_gpus_that_torch_computed_on():
    report = NodeReport("a", "0" * 56, dpsweep="1", num_gpus=3.0, cards=("H100, 85 GB",) * 2)
    (found,) = elsewhere._node(report)
    assert found.words.endswith(
        "torch computed on 2 x H100, 85 GB; 1 not tried, as other jobs hold them"
    )
