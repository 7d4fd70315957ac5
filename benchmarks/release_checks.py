"""Check what one step of each method of a sweep releases; no data are read.

python benchmarks/release_checks.py sweeps/ten_methods.yaml
"""

import sys
import time

from dpsweep.config.sweep import load_sweep
from dpsweep.training.release_check import check_releases


def print_table(file: str) -> None:
    """Print a row for the first corner of each method in the sweep `file`."""
    print("| method | model | noise | sensitivity | divisor | sampling | seconds | |")
    print("|---|---|---|---|---|---|---|---|")
    done = set()
    for config in load_sweep(file).corners:
        if config.method.name in done:
            continue
        done.add(config.method.name)
        start = time.process_time()
        found = check_releases(config)
        seconds = time.process_time() - start  # as nobody else's work slows them
        values = " | ".join(f"{check.measured:.4g}" for check in found)
        verdict = "holds" if all(check.holds for check in found) else "**VIOLATED**"
        row = (
            f"| {config.method.name} | {config.model.name} | {values} | {seconds:.1f} | {verdict} |"
        )
        print(row, flush=True)


if __name__ == "__main__":
    print_table(sys.argv[1])
