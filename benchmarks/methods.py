"""All methods under the same small search, and their best configs trained again.

    dpsweep launch sweeps/digits_methods.yaml --state STATE
    python benchmarks/methods.py STATE digits-methods > docs/benchmarks/methods.md

Prints one line a method: trials and seconds of its search, the best of them, and three fresh
runs of that config.
"""

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

from dpsweep.privacy.statement import format_epsilon
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import open_study
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

RUNS = 3


def again(record: Record) -> list[float]:
    """Final accuracies of the config, each time with a fresh secret."""
    accuracies = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            trial_dir = TrialDir(Path(folder) / "trial")
            trial_dir.make_secret()
            result = train(record.config, trial_dir, lambda row: None)
            accuracies.append(result.rows[-1]["valid/accuracy"])
    return accuracies


def main(state: str, sweep: str) -> None:
    """Prints the table of one sweep."""
    study = open_study(sweep, StateFolder.at(state))
    by_method: dict[str, list[Record]] = {}
    for record in study.records():
        by_method.setdefault(record.config.method.name, []).append(record)
    lines = []
    for method, records in by_method.items():
        done = [(r.value, r) for r in records if r.state == "complete" and r.value is not None]
        if not done:
            continue
        value, best = max(done, key=lambda pair: pair[0])
        runs = again(best)
        lines.append(
            (
                max(runs),
                f"| {method} | {len(records)} | {sum(r.seconds for r in records):.0f} | "
                f"{value:.3f} | {max(runs):.3f} | {mean(runs):.3f} ± {stdev(runs):.3f} |",
            )
        )
    promise = study.sweep.reference_trial
    print(
        f"# All methods at epsilon {promise.privacy.epsilon:g} on {promise.data.name}\n\n"
        f"{len(study.records())} trials, `dpsweep launch` of the sweep {sweep}, one CPU core a "
        f"trial; then the best\nconfig of each method {RUNS} times with fresh noise "
        f"(`benchmarks/methods.py`). {promise.data.spec.num_test} test images.\nEach run is "
        f"({format_epsilon(promise.privacy.epsilon or 0)}, delta)-DP alone; the search is not "
        f"counted in that.\n\n"
        f"| method | trials | seconds | best of the search | best of {RUNS} | mean ± std |\n"
        f"|---|---|---|---|---|---|"
    )
    print("\n".join(line for _, line in sorted(lines, reverse=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
