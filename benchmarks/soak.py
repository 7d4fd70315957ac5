"""A sweep of many small trials while nodes die, beside the same sweep in peace.

    python benchmarks/soak.py [--trials 300] [--nodes 3] [--every 30] [--epochs 12]

Each run has a Ray cluster of its own on this machine (`dpsweep up --local` makes such ones). In the
second run, every EVERY seconds one node that is not the head is killed with all of its processes,
and another one joins. What both runs left behind is compared: every trial once, in the study and
in MLflow, with all of its epochs, and charged once. Prints a line of JSON for each run.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import optuna
from mlflow import MlflowClient

from dpsweep.cluster.local import Local, running
from dpsweep.search.charge import make_ledger_entry
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study
from dpsweep.training.trial_dir import TrialDir

SWEEP = """\
name: soak
base:
  data: {{name: digits}}
  model: {{name: cnn_small, width: 4}}
  privacy: {{epsilon: 4}}
  train: {{batch_size: 128, epochs: {epochs}, evaluate_every: 2}}
  optimizer: {{lr: 1.0}}
  method: {{name: dp_sgd}}
search:
  optimizer.lr: {{log_uniform: [0.3, 3]}}
sampler: {{name: random}}
budget: {{trials: {trials}}}
"""


@dataclass
class Outcome:
    """One run.

    Attributes:
        kills: Nodes that were killed.
        seconds: From the launch to the driver's end; the cluster was up before.
        trials: Of the study.
        complete: Of those.
        interrupted: Trials that lay on a node when it was killed.
        lost: Trials of which anything is missing, or that are told twice.
    """

    kills: int
    seconds: float
    trials: int
    complete: int
    interrupted: int
    lost: list[str]


def run(trials: int, epochs: int, nodes: int, every: float | None, seed: int) -> Outcome:
    """The sweep on a cluster of its own; with `every`, nodes die."""
    with tempfile.TemporaryDirectory(prefix="dpsweep-soak-") as place:
        folder = Path(place)
        (folder / "soak.yaml").write_text(SWEEP.format(trials=trials, epochs=epochs))
        with running(folder / "local", nodes=nodes) as local:
            began = time.monotonic()
            driver = subprocess.Popen(
                [
                    *(sys.executable, "-m", "dpsweep", "launch", folder / "soak.yaml", "-q"),
                    *("--address", local.address, "--state", folder / "state"),
                    *("-o", folder / "best.yaml"),
                ],
                env={**local.node_environment(), "DPSWEEP_PICTURES": "0"},
                cwd=folder,
            )
            try:
                kills, hit = _harass(local, driver, every, seed, folder / "state")
            finally:
                driver.send_signal(signal.SIGTERM)
                code = driver.wait(120)
            seconds = time.monotonic() - began
            if code:
                sys.exit(f"the driver ended with {code}")
        state = StateFolder(folder / "state")
        records = open_study("soak", state).records()
        done = sum(record.state == "complete" for record in records)
        return Outcome(kills, seconds, len(records), done, hit, _lost(state, records, epochs))


def _harass(
    local: Local, driver: "subprocess.Popen[bytes]", every: float | None, seed: int, state: Path
) -> tuple[int, int]:
    """Kills a node and adds one, again and again to the driver's end; how many, and trials hit."""
    rng, kills, hit = random.Random(seed), 0, 0
    while True:
        try:
            driver.wait(every)
            return kills, hit
        except subprocess.TimeoutExpired:
            number = rng.choice([i for i, n in enumerate(local.nodes) if i and n.is_alive])
            victims = set(local.nodes[number].members())
            hit += len(_trained_by(victims, state / "sweeps/soak/trials"))
            local.kill_node(number)
            local.add_node()
            kills += 1


def _trained_by(pids: set[int], trial_dirs: Path) -> set[str]:
    """Trials whose trial_dirs these processes have open."""
    found = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                place = Path(os.readlink(link))
            except OSError:
                continue
            if place.parent == trial_dirs:
                found.add(place.name)
    return found


def _lost(state: StateFolder, records: list[Record], epochs: int) -> list[str]:
    """Describe each trial that differs from one of an undisturbed sweep."""
    full, faults = list(range(2, epochs + 1, 2)), list[str]()
    stored = optuna.load_study(study_name="soak", storage=state.storage_uri).get_trials()
    client = MlflowClient(state.tracking_uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "soak"]
    runs = client.search_runs([experiment.experiment_id], max_results=5000)
    tagged = [r.data.tags.get("dpsweep.trial", "/").rpartition("/")[2] for r in runs]
    for record in records:
        rows = [
            row["epoch"] for row in TrialDir(state.sweep("soak").trial_dir(record.number)).rows()
        ]
        own = [run for run, tag in zip(runs, tagged, strict=True) if tag == str(record.number)]
        history = [
            metric.step
            for run in own
            for metric in client.get_metric_history(run.info.run_id, "valid/accuracy")
        ]
        checks = {
            "state": record.state == "complete",
            "charge": record.charged == make_ledger_entry(record.config),
            "rows": rows == full,
            "study": sorted(stored[record.number].intermediate_values) == full,
            "runs": [run.info.status for run in own] == ["FINISHED"],
            "MLflow": history == full,
        }
        faults += [f"{record.number}: {name}" for name, well in checks.items() if not well]
    secrets = state.root.glob("sweeps/soak/trials/*/secret")
    return [*faults, *(f"{place} is left" for place in secrets)]


def main() -> None:
    """Both runs, and how much longer the second one took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    outcomes = []
    for name, every in (("quiet", None), ("nodes killed", told.every)):
        outcomes.append(run(told.trials, told.epochs, told.nodes, every, told.seed))
        print(name, json.dumps(asdict(outcomes[-1])), flush=True)
    peace, war = outcomes
    print(f"{war.seconds / peace.seconds:.2f} times the quiet run's time")
    sys.exit(bool(peace.lost or war.lost))


if __name__ == "__main__":
    main()
