"""Time the verbs that should be instant, each in its own process: python benchmarks/verbs.py.

Prints the least wall time and the least CPU time (user and system, children included) of several
runs. On a machine with other load compare the CPU times.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SWEEP = ROOT / "sweeps" / "quickstart.yaml"
MISTAKE = "train.epochs=-1"

GOALS = {
    "--help": 0.7,
    "space fftkf": 0.7,
    "schema": 0.7,
    "models": 0.7,
    "check none.yaml": 0.7,
    f"check {SWEEP} --set {MISTAKE}": 0.7,
    f"check {SWEEP}": 1.0,
    "status": 1.5,
    "status quickstart": 1.5,
    "best quickstart": 1.5,
    f"plan {SWEEP}": 5.0,
}
"""Verb -> seconds of wall time it may take on two idle cores."""

FILL_STATE = """
import sys
from dpsweep.config.sweep import load_sweep
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study

sweep = load_sweep(sys.argv[1])
folder = StateFolder.at(None).sweep(sweep.name)
folder.create(sweep.file, sweep.base, None)
study = Study.create(folder.storage_uri, sweep, folder.id)
for i in range(sweep.config.budget.trials):
    number = study.ask().number
    study.report(number, {
        "epoch": 1, "step": 11, "valid/accuracy": 0.5 + i / 100, "valid/loss": 1.0,
        "noise_multiplier": 1.2, "privacy/epsilon_spent": 3.9, "seconds": 1.0,
    })
    study.tell(number, "complete")
"""


def measure(command: list[str], runs: int, cwd: str, env: dict[str, str]) -> tuple[float, float]:
    """Return the least wall time and the least CPU time of `runs` runs, in seconds."""
    times = []
    for _ in range(runs):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, cwd=cwd, env=env, capture_output=True, check=False)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((wall, cpu))
    return min(w for w, _ in times), min(c for _, c in times)


def main() -> None:
    """Print one line for each verb."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each verb [default: 5]")
    parser.add_argument("--only", default="", help="only verbs that begin so")
    parser.add_argument("--code", type=Path, default=ROOT, help="checkout whose code is timed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        env = {
            **os.environ,
            "PYTHONPATH": str(options.code.resolve()),
            "DPSWEEP_STATE": f"{scratch}/state",
        }
        subprocess.run([sys.executable, "-c", FILL_STATE, SWEEP], cwd=scratch, env=env, check=True)
        print(f"{'verb':<42} {'wall s':>7} {'CPU s':>7} {'goal s':>7}")
        for args, goal in GOALS.items():
            if not args.startswith(options.only):
                continue
            command = [sys.executable, "-m", "dpsweep", *args.split()]
            wall, cpu = measure(command, options.runs, scratch, env)
            shown = args.replace(f"{SWEEP.parent}/", "")
            print(f"{shown:<42} {wall:7.2f} {cpu:7.2f} {goal:7.1f}", flush=True)


if __name__ == "__main__":
    main()
