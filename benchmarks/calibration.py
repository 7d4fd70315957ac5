"""Speed and error of the calibration: python benchmarks/calibration.py."""

import itertools
import platform
import statistics
import time

from dpsweep.privacy.accounting import Run, calibrate_noise

NUM_EXAMPLES = (1437, 50_000, 60_000)
BATCHES = (64, 256, 1024, 4096)
EPOCHS = (5, 20, 60)
EPSILONS = (0.5, 1.0, 4.0, 8.0)


def main() -> None:
    """Prints a Markdown table and the spread of time and shortfall."""
    rows = []
    for n, b, e, epsilon in itertools.product(NUM_EXAMPLES, BATCHES, EPOCHS, EPSILONS):
        rate, delta = min(1.0, b / n), n**-1.1
        steps = max(1, round(e / rate))
        start = time.perf_counter()
        run, spent = calibrate_noise(epsilon, delta, rate, steps)
        seconds = time.perf_counter() - start
        finer = Run(rate, run.noise_multiplier, steps).epsilon_on_grid(delta, 1e-4)
        rows.append(
            (seconds, steps, rate, epsilon, run.noise_multiplier, epsilon - min(spent, finer))
        )
        assert spent <= epsilon
    times = sorted(row[0] for row in rows)
    shorts = sorted(row[-1] for row in rows)
    print(f"{len(rows)} runs on {platform.machine()}, {platform.python_version()}, uncached\n")
    print("| | median | 95 % | worst |\n|---|---|---|---|")
    print(
        f"| seconds | {statistics.median(times):.2f} | {times[int(0.95 * len(times))]:.2f} "
        f"| {times[-1]:.2f} |"
    )
    fast, long = sum(s < 0.5 for s in times), [row for row in rows if row[1] > 10_000]
    print(
        f"| epsilon left unspent | {statistics.median(shorts):.4f} "
        f"| {shorts[int(0.95 * len(shorts))]:.4f} | {shorts[-1]:.4f} |"
    )
    print(f"\n{fast} of {len(rows)} under 0.5 s; {len(long)} have more than 10,000 steps, ", end="")
    print(f"{sum(row[0] >= 0.5 for row in rows if row[1] <= 10_000)} of the others took longer.")
    print(
        "\nThe slowest five:\n\n| seconds | steps | rate | epsilon | sigma |\n|---|---|---|---|---|"
    )
    for row in sorted(rows, reverse=True)[:5]:
        print(f"| {row[0]:.2f} | {row[1]} | {row[2]:.5f} | {row[3]:g} | {row[4]:.3f} |")


if __name__ == "__main__":
    main()
