"""A sweep that is killed at any moment goes on as if it had not been."""

import contextlib
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from servers import python
from tracked import tracked_runs
from waiting import CEILING_SECONDS, wait_for

pytestmark = pytest.mark.ray

SECRET = {"DPSWEEP_TEST_SECRET": "kills"}
SWEEP = """\
name: killed
base:
  data: {name: digits}
  model: {name: cnn_small, width: 8}
  privacy: {epsilon: 4}
  train: {batch_size: 128, epochs: 12, evaluate_every: 2}
  optimizer: {lr: 1.0}
  method: {name: disk}
search:
  method.kappa: {uniform: [0.3, 1.0]}
  optimizer.lr: {log_uniform: [0.3, 3]}
pruner: {name: median, warmup_epochs: 4}
sampler: {name: tpe, startup_trials: 3}
keep_weights: 99
"""


@pytest.fixture
def killed(tmp_path, verb):
    (tmp_path / "killed.yaml").write_text(SWEEP)
    return Killed(tmp_path, verb)


class Killed:
    """A sweep whose processes are killed, and what must be true of it at the end."""

    def __init__(self, folder: Path, verb: Callable[..., str]) -> None:
        self.folder, self.state, self.verb = folder, folder / ".dpsweep", verb
        self.trial_dirs = self.state / "sweeps/killed/trials"

    def start(self, trials: int) -> subprocess.Popen:
        known = (self.state / "sweeps/killed/sweep.json").exists()
        what = ["resume", "killed"] if known else ["launch", "killed.yaml"]
        settings = [] if known else ["--set", f"budget.trials={trials}"]
        with (self.folder / "out.txt").open("a") as out:
            return subprocess.Popen(
                python("dpsweep", *what, *settings),
                cwd=self.folder,
                env={**os.environ, **SECRET},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def finished(self) -> dict[int, tuple[str, str]]:
        """State and weights of the trials that the study holds for finished."""
        if not (self.state / "study.db").exists():
            return {}
        with sqlite3.connect(self.state / "study.db", timeout=60) as db:
            rows = db.execute(
                "select number, state from trials where state in ('COMPLETE', 'PRUNED', 'FAIL')"
            ).fetchall()
        return {number: (state, self.weights(number)) for number, state in rows}

    def num_reports(self) -> int:
        """Of all trials so far; a trial that is run again reports again what it had reported."""
        files = self.trial_dirs.glob("*/metrics.json")
        return sum(len(json.loads(file.read_text())) for file in files)

    def weights(self, number: int) -> str:
        place = self.trial_dirs / f"{number:04d}/weights.pt"
        return hashlib.sha256(place.read_bytes()).hexdigest() if place.exists() else ""

    def check(self, trials: int) -> None:
        told = json.loads(self.verb("status", "killed", "--json"))
        assert [t["trial"] for t in told] == list(range(trials))
        assert {t["state"] for t in told} <= {"complete", "pruned"}, told
        runs, steps = tracked_runs(f"sqlite:///{self.state}/mlflow.db", "killed")
        assert sorted(runs) == ["killed", *(f"trial-{i:04d}" for i in range(trials))]
        assert runs["killed"].info.status == "FINISHED"
        for trial in told:
            name = f"trial-{trial['trial']:04d}"
            assert runs[name].info.status == "FINISHED", name
            assert len(steps[name]) == trial["epoch"] // 2, name
            assert steps[name] == sorted({*steps[name]}), f"{name}: a report came twice"
            assert steps[name][-1] == trial["step"], name
        for name in ("secret", "checkpoint.pt"):
            assert not list(self.trial_dirs.glob(f"*/{name}"))

    def check_weights(self, number: int) -> None:
        """Those of a trial that nobody disturbed, bit for bit."""
        config = next((self.folder / "all").glob(f"*trial-{number:04d}.yaml"))
        self.verb("train", config, "-q", "-o", f"again-{number}", **SECRET)
        one = torch.load(self.trial_dirs / f"{number:04d}/weights.pt", weights_only=True)
        two = torch.load(self.folder / f"again-{number}/weights.pt", weights_only=True)
        assert all(torch.equal(one[k], two[k]) for k in one)


def workers_of(driver: subprocess.Popen) -> list[int]:
    """Ids of the Ray workers under a driver."""
    table = subprocess.run(
        ["ps", "-eo", "pid,ppid,args", "--no-headers"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    rows = [line.split(None, 2) for line in table]
    family = {driver.pid}
    for _ in range(4):
        family |= {int(pid) for pid, parent, _ in rows if int(parent) in family}
    return [int(pid) for pid, _, args in rows if int(pid) in family and "ray::" in args]


def unchanged(before: dict, after: dict) -> bool:
    """True if no finished trial ended otherwise later; weights of the lesser ones may go."""
    return all(
        after[number][0] == state and after[number][1] in (weights, "")
        for number, (state, weights) in before.items()
    )


def kill(driver: subprocess.Popen, what: str, rng: random.Random) -> None:
    if what in ("worker", "both"):
        for pid in rng.sample(found := workers_of(driver), min(1, len(found))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if what in ("driver", "both"):
        driver.kill()
        driver.wait()


def test_a_sweep_whose_driver_and_worker_are_killed_ends_as_if_they_were_not(killed):
    _through_kills(killed, trials=3, kills=["worker", "both"], seed=0, compared=1)


@pytest.mark.slow
def test_a_sweep_killed_at_25_random_moments_ends_as_if_it_was_not(killed):
    rng = random.Random(os.environ.get("DPSWEEP_KILL_SEED", "25"))
    kills = [rng.choice(["driver", "driver", "worker", "both"]) for _ in range(25)]
    _through_kills(killed, trials=40, kills=kills, seed=rng.random(), compared=3)


def _through_kills(
    killed: Killed, trials: int, kills: list[str], seed: float, compared: int
) -> None:
    rng, driver, before = random.Random(seed), killed.start(trials), {}
    for what in kills:
        wait_for(lambda: training(driver), "a trial in training", driver)  # noqa: B023
        later = killed.num_reports() + rng.randrange(4)
        wait_for(lambda: killed.num_reports() >= later, "another report", driver)  # noqa: B023
        time.sleep(rng.uniform(0, 0.5))  # between two reports, not only after one
        assert driver.poll() is None, "the sweep ended before it was killed often enough"
        kill(driver, what, rng)
        if driver.poll() is not None:
            after = killed.finished()
            assert unchanged(before, after), "a finished trial was run again"
            before, driver = after, killed.start(trials)
    assert driver.wait(CEILING_SECONDS) == 0, (killed.folder / "out.txt").read_text()[-4000:]
    assert unchanged(before, killed.finished()), "a finished trial was run again"
    killed.check(trials)
    best = json.loads(killed.verb("best", "killed", "--top", "99", "--json"))
    killed.verb("export", "killed", "--top", "99", "-o", "all")
    for trial in rng.sample(best, min(compared, len(best))):
        killed.check_weights(trial["trial"])


def training(driver: subprocess.Popen) -> bool:
    table = subprocess.run(
        ["ps", "-eo", "pid,args", "--no-headers"], capture_output=True, text=True, check=True
    ).stdout
    workers = set(workers_of(driver))
    return any(
        int(line.split(None, 1)[0]) in workers and "ImplicitFunc" in line
        for line in table.splitlines()
    )
