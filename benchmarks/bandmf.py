"""Does correlated noise pay? DP-BandMF beside DP-SGD, each at its best, against the prediction.

    python benchmarks/bandmf.py run DATA digits.json digits      # DATA: folder with the data sets
    python benchmarks/bandmf.py table FIGURE.svg digits.json     # the tables, and the figure
    python benchmarks/bandmf.py time                             # a step of CNN5 beside dp_sgd's

Both arms have the same search: batch sizes times total steps, one run each, then one more of the
best three. The best of each is trained again with fresh secrets and initial weights, in pairs. The
linear model's steps are those of benchmarks/search/linear.py, which are the trial's own. Runs are
kept as soon as they have ended, beside the results, so that a benchmark that was stopped goes on.
"""

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "search"))

from linear import LinearRun, suits  # noqa: E402

from dpsweep.config.plan import plan_privacy  # noqa: E402
from dpsweep.config.trial import TrialConfig  # noqa: E402
from dpsweep.core.inputs import one_tensor  # noqa: E402
from dpsweep.core.seeds import Secret  # noqa: E402
from dpsweep.data.datasets import ImageData  # noqa: E402
from dpsweep.data.read import Dataset, load_dataset  # noqa: E402
from dpsweep.privacy.correlated import Correlation  # noqa: E402
from dpsweep.results.significance import holm  # noqa: E402
from dpsweep.training.assemble import assemble_step_on, initial_params  # noqa: E402
from dpsweep.training.evaluate import evaluate  # noqa: E402

FINALISTS, MORE = 3, 1


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        data: Name of the data set. Those of 28 x 28 pixels are averaged to 14 x 14.
        epochs: E.
        epsilon: Of each trial.
        sizes: Batch sizes that both arms choose from.
        fresh: Pairs of fresh runs.
        factors: Total steps that both arms choose from, in units of the default.
        features: True for scattering features of the 28 x 28 pixels, normalised in 27 groups.
        model: Name of the model.
    """

    data: str
    epochs: int
    epsilon: float
    sizes: tuple[int, ...]
    fresh: int
    factors: tuple[float, ...]
    features: bool = False
    model: str = "linear"


LARGE, SMALL = (128, 512, 2048), (16, 64, 256)
FINE = (0.06, 0.12, 0.25, 0.5, 1.0)
WIDE = (0.5, 1.0, 2.0, 4.0, 8.0)
SETTINGS = [
    *(Setting("digits", e, eps, SMALL, 24, FINE) for e, eps in product((1, 5), (1.0, 4.0))),
    *(
        Setting(data, epochs, eps, LARGE, 6, WIDE)
        for data, epochs, eps in product(("fashion_mnist", "mnist"), (1, 5), (1.0, 4.0))
    ),
    *(Setting("mnist", 1, eps, LARGE, 6, WIDE, features=True) for eps in (1.0, 4.0)),
    *(Setting("mnist", 1, eps, (512,), 5, FINE[1:], model="cnn5") for eps in (4.0, 1.0)),
]
GAINS = (0.5, 0.2)
"""Of the moving averages behind banded noise."""


def make_config(
    setting: Setting, method: dict[str, Any], size: int, factor: float, seed: int, root: str
) -> TrialConfig:
    """Make one trial, its total step `factor` times the default."""
    data: dict[str, Any] = {"name": "digits"}
    if setting.features:
        features = {"name": "scattering", "groups": 27}
        data = {"name": setting.data, "root": root, "features": features}
    elif setting.data != "digits":
        data = pool_images(setting.data, root)
    config = TrialConfig.model_validate(
        {
            "data": data,
            "model": {"name": setting.model},
            "privacy": {"epsilon": setting.epsilon, "clip_norm": 1.0},
            "train": {"batch_size": size, "epochs": setting.epochs, "device": "cpu"},
            "optimizer": {"schedule": {"name": "cosine"}},
            "method": method,
            "seed": seed,
        }
    )
    return config.with_total_step(factor * config.total_step)


@cache
def pool_images(name: str, root: str) -> dict[str, Any]:
    """Average each 2 x 2 pixels of a data set, once, beside its files; return the config."""
    place = Path(root) / f"{name}-14.npz"
    if not place.exists():
        data = load_dataset(ImageData.model_validate({"name": name, "root": root}), 0)
        arrays: dict[str, Any] = {}
        for part, images, targets in (
            ("train", data.inputs, one_tensor(data.targets)),
            ("test", data.valid_inputs, data.valid_targets),
        ):
            means = one_tensor(images)[:, 0].reshape(-1, 14, 2, 14, 2).float().mean((2, 4))
            arrays |= {f"x_{part}": means.round().byte().numpy(), f"y_{part}": targets.numpy()}
        np.savez(place, **arrays)
    sizes = {"num_classes": 10, "num_train": 60_000, "num_test": 10_000}
    return {"name": "npz", "root": str(place), "shape": [1, 14, 14], **sizes}


def train_once(config: TrialConfig, data: Dataset, kept: Path) -> float:
    """Test accuracy in percent after one run with a fresh secret; `kept` has those that ended."""
    key = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    done = dict(json.loads(line) for line in kept.read_text().splitlines()) if kept.exists() else {}
    if key in done:
        return float(done[key])
    step = assemble_step_on(data, plan_privacy(config), config, Secret.draw())
    if suits(step):
        run = LinearRun(step, initial_params(step))
        run.train()
        accuracy = run.count_right() / len(data.valid_targets)
    else:
        progress = step.start(initial_params(step))
        for _ in range(step.plan.steps):
            step(progress)
        found = evaluate(step.engine.model, progress.result, step.data, step.dtype)
        accuracy = found["accuracy"]
    with kept.open("a") as file:
        print(json.dumps([key, 100 * accuracy]), file=file)
    return 100 * accuracy


def compute_error(config: TrialConfig) -> tuple[int, float]:
    """Bands, and the predicted error sqrt(loss) sigma in units of C / B.

    With the same total step it compares runs of any batch size: the noise in the weights is
    r error / (N E).
    """
    plan = plan_privacy(config)
    found = plan.correlation or Correlation(plan.steps, 1, plan.sampling_rate, (1.0,))
    return found.cycle, found.error() * plan.run.noise_multiplier


def search_arm(
    setting: Setting, method: dict[str, Any], data: Dataset, root: str, kept: Path
) -> dict[str, Any]:
    """Search one arm, and train its best config again."""

    def train(size: int, factor: float, seed: int) -> float:
        return train_once(make_config(setting, method, size, factor, seed, root), data, kept)

    tried = {
        (size, factor): [train(size, factor, 100)]
        for size, factor in product(setting.sizes, setting.factors)
    }
    best = sorted(tried, key=lambda key: -mean(tried[key]))[:FINALISTS]
    for key, again in product(best, range(MORE)):
        tried[key].append(train(*key, 101 + again))
    size, factor = max(best, key=lambda key: mean(tried[key]))
    fresh = [train(size, factor, seed) for seed in range(setting.fresh)]
    bands, error = compute_error(make_config(setting, method, size, factor, 0, root))
    plain = compute_error(make_config(setting, {"name": "dp_sgd"}, size, factor, 0, root))[1]
    return {
        "batch_size": size,
        "factor": factor,
        "bands": bands,
        "error": error,
        "ratio": error / plain,
        "fresh": fresh,
        "searched": {f"{size} {factor:g}": values for (size, factor), values in tried.items()},
    }


def run_all(root: str, place: Path, names: list[str]) -> None:
    """Run every setting with one of these names that has no result yet, one after the other."""
    torch.set_num_threads(1)
    results = json.loads(place.read_text()) if place.exists() else []
    done, kept = [r["setting"] for r in results], place.with_suffix(".runs")
    for setting in SETTINGS:
        written = json.loads(json.dumps(asdict(setting)))
        if _name(written) not in names or written in done:
            continue
        start = time.time()
        first = make_config(setting, {"name": "dp_sgd"}, setting.sizes[0], 1.0, 0, root)
        data = load_dataset(first.data, 0)
        arms = {
            "dp_sgd": search_arm(setting, {"name": "dp_sgd"}, data, root, kept),
            "bandmf": search_arm(setting, {"name": "bandmf"}, data, root, kept),
        }
        if setting.data == "digits" and setting.epochs == 5:
            for gain in GAINS:
                parts = {"noise": {"name": "banded"}, "filters": [{"name": "ema", "gain": gain}]}
                arms[f"ema {gain}"] = search_arm(setting, {"compose": parts}, data, root, kept)
        results.append({"setting": asdict(setting), "arms": arms, "seconds": time.time() - start})
        place.write_text(json.dumps(results, indent=1))
        print(f"{setting}: {time.time() - start:.0f} s", flush=True)


@dataclass(frozen=True)
class Line:
    """One line of the table: a setting, and the results of its arms."""

    setting: dict[str, Any]
    arms: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Predicted error of DP-BandMF over DP-SGD's, each with the batch size it chose."""
        return float(self.arms["bandmf"]["error"] / self.arms["dp_sgd"]["error"])

    @property
    def gains(self) -> list[float]:
        """Gain of each pair of fresh runs, in points of accuracy."""
        sgd, band = (self.arms[name]["fresh"] for name in ("dp_sgd", "bandmf"))
        return [b - a for a, b in zip(sgd, band, strict=True)]

    @property
    def gain(self) -> float:
        """Mean gain."""
        return mean(self.gains)

    @property
    def error(self) -> float:
        """Standard error of the mean gain."""
        return float(stdev(self.gains) / len(self.gains) ** 0.5)

    @property
    def p(self) -> float:
        """P-value of a paired t-test."""
        from scipy.stats import ttest_1samp

        return float(ttest_1samp(self.gains, 0.0).pvalue)


def print_table(results: list[dict[str, Any]], figure: Path) -> None:
    """Print the tables in Markdown, and draw the figure."""
    lines = [Line(result["setting"], result["arms"]) for result in results]
    corrected = holm([line.p for line in lines])
    print(
        "| data | epochs | eps | DP-SGD: B | accuracy | DP-BandMF: B, b | accuracy | "
        "ratio at this B | ratio at each B | gain | p (Holm) |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for line, p in zip(lines, corrected, strict=True):
        sgd, band = line.arms["dp_sgd"], line.arms["bandmf"]
        print(
            f"| {_name(line.setting)} | {line.setting['epochs']} | {line.setting['epsilon']:g} "
            f"| {sgd['batch_size']} | {_spread(sgd['fresh'])} "
            f"| {band['batch_size']}, {band['bands']} | {_spread(band['fresh'])} "
            f"| {band['ratio']:.2f} | {line.ratio:.2f} "
            f"| {line.gain:+.2f} ± {line.error:.2f} | {p:.2g} |"
        )
    print("\n| data | epochs | eps | arm | B, b | accuracy |\n|---|---|---|---|---|---|")
    for line in lines:
        if len(line.arms) > 2:
            for name, arm in line.arms.items():
                print(
                    f"| {_name(line.setting)} | {line.setting['epochs']} | "
                    f"{line.setting['epsilon']:g} | {name} | {arm['batch_size']}, {arm['bands']} | "
                    f"{_spread(arm['fresh'])} |"
                )
    figure.write_text(draw_figure(lines))


def time_steps(bands: int = 8, rounds: int = 11) -> None:
    """Print the CPU seconds of a step of CNN5 with banded noise, in turns with dp_sgd's."""
    torch.set_num_threads(1)
    runs = {}
    for name, method in (
        ("dp_sgd", {"name": "dp_sgd"}),
        ("bandmf", {"name": "bandmf", "bands": bands}),
    ):
        config = TrialConfig.model_validate(
            {
                "data": {"name": "cifar10", "root": "data"},
                "model": {"name": "cnn5"},
                "privacy": {"noise_multiplier": 1.0},
                "train": {"batch_size": 256, "epochs": 1, "device": "cpu"},
                "method": method,
            }
        )
        plan = replace(plan_privacy(config), num_examples=1024)
        # everybody is in every batch's group, so that both have batches of the same size
        correlation = plan.correlation and replace(plan.correlation, cycle=1, sampling_rate=0.25)
        run = replace(plan.run, sampling_rate=0.25)
        images = torch.randint(0, 256, (1024, *config.data.spec.shape), dtype=torch.uint8)
        targets = torch.arange(1024) % 10
        data = Dataset(images, targets, images[:1], targets[:1], brightest=255)
        step = assemble_step_on(
            data, replace(plan, run=run, correlation=correlation), config, Secret.fixed("time")
        )
        progress = step.start(initial_params(step))
        progress.step = bands  # under way, so that each band is added; the same batches for both
        if progress.history is not None:
            progress.history.step = bands
        runs[name] = step, progress
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for n in range(rounds + 1):
        for name, (step, progress) in runs.items():
            start = time.process_time()
            step(progress)
            if n:  # the first one chooses kernels
                seconds[name].append(time.process_time() - start)
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    kept = runs["bandmf"][1].history
    assert kept is not None
    size = kept.state_dict()["kept"].nbytes
    medians = {name: round(median(values), 4) for name, values in seconds.items()}
    print(f"{medians} CPU seconds, median ratio {median(ratios):.3f}, history {size} bytes")


def _name(setting: dict[str, Any]) -> str:
    """Name the data, and features and model where they are not the plain ones."""
    words = [str(setting["data"]).replace("_", "-")]
    words += ["features"] if setting["features"] else []
    words += [setting["model"]] if setting["model"] != "linear" else []
    return "-".join(words)


def _spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}"


def draw_figure(lines: list[Line]) -> str:
    """Draw measured gain over predicted ratio, with two standard errors, as an SVG."""
    width, height, left, base = 560, 340, 60, 290
    top = max(line.gain + 2 * line.error for line in lines) + 0.1
    low = min(0.0, *(line.gain - 2 * line.error for line in lines)) - 0.1

    def x(ratio: float) -> float:
        return left + (ratio - 0.3) / 0.8 * (width - left - 20)

    def y(gain: float) -> float:
        return base - (gain - low) / (top - low) * (base - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{left} 20V{base}H{width - 20}" fill="none" stroke="#333"/>',
        f'<path d="M{left} {y(0):.1f}H{width - 20}" stroke="#bbb" stroke-dasharray="4 3"/>',
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">predicted error of DP-BandMF '
        f"over independent noise's, same batch</text>",
        f'<text x="16" y="{base / 2}" transform="rotate(-90 16 {base / 2})" '
        f'text-anchor="middle">measured gain in accuracy, points</text>',
    ]
    for tick in (0.4, 0.6, 0.8, 1.0):
        parts.append(f'<text x="{x(tick):.1f}" y="{base + 18}" text-anchor="middle">{tick}</text>')
    step = 0.5 if top - low < 4 else 1.0
    for n in range(int(low / step), int(top / step) + 1):
        parts.append(
            f'<text x="{left - 8}" y="{y(n * step) + 4:.1f}" text-anchor="end">{n * step:g}</text>'
        )
    for line in lines:
        color = "#d1495b" if line.setting["epsilon"] == 1 else "#00798c"
        fill = color if line.setting["epochs"] == 1 else "white"
        at = x(line.arms["bandmf"]["ratio"])
        up, down = y(line.gain + 2 * line.error), y(line.gain - 2 * line.error)
        parts.append(f'<path d="M{at:.1f} {up:.1f}V{down:.1f}" stroke="{color}"/>')
        parts.append(
            f'<circle cx="{at:.1f}" cy="{y(line.gain):.1f}" r="4.5" stroke="{color}" '
            f'fill="{fill}"><title>{_name(line.setting)}</title></circle>'
        )
    for n, (color, words) in enumerate((("#d1495b", "epsilon 1"), ("#00798c", "epsilon 4"))):
        parts.append(f'<circle cx="{width - 190}" cy="{34 + 18 * n}" r="4.5" fill="{color}"/>')
        parts.append(f'<text x="{width - 180}" y="{38 + 18 * n}">{words}; hollow: 5 epochs</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", root, place, *names]:
            run_all(root, Path(place), names)
        case ["table", figure, *places]:
            results = [r for place in places for r in json.loads(Path(place).read_text())]
            print_table(results, Path(figure))
        case ["time"]:
            time_steps()
        case _:
            sys.exit(__doc__)
