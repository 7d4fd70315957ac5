"""Share of a trial's time that is steps: python benchmarks/trial.py CONFIG [KEY=VALUE ...].

Everything else is reading data, assembling, evaluating, checkpoints. The second of two trials in
one process is told, as workers train many.
"""

import sys
import tempfile
import time
from pathlib import Path

from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.training import loop
from dpsweep.training.step import Progress, Step
from dpsweep.training.trial_dir import TrialDir


class Timed:
    """The seconds that all steps took."""

    seconds = 0.0


def main(file: str, settings: list[str]) -> None:
    """Trains the config twice and prints the share of the second one."""
    config = load_trial(resolve_trial_source(read_yaml(file), settings))
    take = Step.__call__

    def timed(self: Step, progress: Progress) -> None:
        start = time.perf_counter()
        take(self, progress)
        Timed.seconds += time.perf_counter() - start

    Step.__call__ = timed  # type: ignore[method-assign]
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            trial_dir = TrialDir(Path(folder) / "trial")
            Timed.seconds, start = 0.0, time.perf_counter()
            with trial_dir.lock():
                trial_dir.make_secret()
                loop.train(config, trial_dir, lambda row: None)
            whole = time.perf_counter() - start
    print(
        f"{whole:.2f} s, of which steps {Timed.seconds:.2f} s, else {1 - Timed.seconds / whole:.1%}"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
