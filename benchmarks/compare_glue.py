"""dpsweep beside a glue script: the same search, trials per hour.

    python benchmarks/compare_glue.py TRIALS [ROUNDS]

Takes turns: the search of sweeps/digits_fftkf.yaml without early stopping and repeats through
dpsweep, then through benchmarks/glue.py, each in processes of its own. Seconds count from when
Ray is up to when everything is in MLflow; imports and Ray's start come on top for both.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
SWEEP = HERE.parent / "sweeps/digits_fftkf.yaml"


def ours(trials: int, folder: Path) -> tuple[float, float]:
    """Seconds of the trials, and of the whole command."""
    settings = [f"budget.trials={trials}", "pruner.name=none", "confirm=null"]
    command = [sys.executable, "-m", "dpsweep", "launch", str(SWEEP)]
    began = time.perf_counter()
    told = _run([*command, *(f"--set={s}" for s in settings)], folder)
    whole = time.perf_counter() - began
    seconds = re.search(rf"^{trials} trials in ([0-9.]+) s$", told, re.MULTILINE)
    assert seconds, told
    return float(seconds[1]), whole


def theirs(trials: int, folder: Path) -> tuple[float, float]:
    """Time the glue script: seconds of its trials, and of the whole command."""
    began = time.perf_counter()
    told = _run([sys.executable, str(HERE / "glue.py"), str(trials), str(folder)], folder)
    whole = time.perf_counter() - began
    return float(json.loads(told.strip().splitlines()[-1])["seconds"]), whole


def main(trials: int, rounds: int) -> None:
    """Prints a line a run, and the ratio of the sums."""
    sums = {"dpsweep": 0.0, "glue": 0.0}
    for _ in range(rounds):
        for name, run in (("dpsweep", ours), ("glue", theirs)):
            with tempfile.TemporaryDirectory(prefix="sweep-bench-") as folder:
                seconds, whole = run(trials, Path(folder))
            sums[name] += seconds
            rate = 3600 * trials / seconds
            print(f"{name:8} {seconds:7.1f} s  {rate:7.0f} trials/h  ({whole:.1f} s in all)")
    print(f"dpsweep / glue: {sums['glue'] / sums['dpsweep']:.2f} times the trials an hour")


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
