"""Trials at shares of cards on a real Ray with `--num-gpus 2`, whose workers see virtual cards."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from servers import answers, end_group, free_port
from waiting import wait_for

WORKERS = Path(__file__).with_name("workers")
SWEEP = """\
name: shares
base:
  data: {name: digits}
  model: {name: cnn_small, width: 4}
  privacy: {epsilon: 4}
  train: {batch_size: 300, epochs: 1}
  method: {name: dp_sgd}
search:
  optimizer.lr: {choice: [0.05, 0.1, 0.2, 0.4]}
sampler: {name: random}
budget: {trials: 4}
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def two_gpus(tmp_path):
    """Starts `ray start --head --num-gpus 2` with workers' environment; returns its address."""
    started = []

    def start(**env):
        port = free_port()
        folder = Path(tempfile.gettempdir()) / f"ray-{port}"  # short: it holds sockets
        command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block"]
        options = ["--num-cpus=4", "--num-gpus=2", "--include-dashboard=false"]
        with (tmp_path / "ray.log").open("w") as log:
            head = subprocess.Popen(
                [*command, *options, f"--port={port}", f"--temp-dir={folder}"],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(head)
        wait_for(lambda: answers(port), "the head's port", head)
        return f"127.0.0.1:{port}"

    yield start
    for head in started:
        end_group(head)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("share", [0.5, 2])
def test_trials_at_shares_of_cards_run_at_once_and_each_sees_its_own(
    tmp_path, two_gpus, dpsweep, share
):
    notes, file = tmp_path / "notes", tmp_path / "shares.yaml"
    notes.mkdir()
    file.write_text(f"{SWEEP}resources: {{gpu: {share}}}\n")
    at_once = 4 if share == 0.5 else 1
    path = os.pathsep.join([str(WORKERS), str(ROOT), *os.environ.get("PYTHONPATH", "").split(":")])
    address = two_gpus(
        PYTHONPATH=path, DPSWEEP_TEST_NOTES=str(notes), DPSWEEP_TEST_TRIALS=str(at_once)
    )
    said = dpsweep("launch", file, "--address", address, timeout=600)
    assert "failed" not in said
    found = [json.loads(note.read_text()) for note in notes.iterdir()]
    assert all(note["launches"] > 0 and note["mixed"] == [] for note in found)
    if share == 0.5:  # four trials, two on each card, in processes of their own
        assert sorted(note["visible"] for note in found) == ["0", "0", "1", "1"]
        assert {f for note in found for f in note["fractions"]} == {0.45}
    else:
        assert {note["visible"] for note in found} == {"0,1"}
        assert {len(note["fractions"]) for note in found} == {2}


@pytest.mark.slow
@pytest.mark.ray
def test_launch_refuses_gpus_that_ray_hands_out_and_no_driver_has(tmp_path, two_gpus, dpsweep):
    """Without a card, `ray start --num-gpus 2` sets CUDA_VISIBLE_DEVICES all the same."""
    file = tmp_path / "shares.yaml"
    file.write_text(f"{SWEEP}resources: {{gpu: 0.5}}\n")
    said = dpsweep("launch", file, "--address", two_gpus(), code=2, timeout=300)
    assert "1 of the cluster's 1 nodes cannot run this sweep's trials" in said
    assert "start its Ray with --num-gpus 0" in said
