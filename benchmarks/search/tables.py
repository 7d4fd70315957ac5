"""Tables of training runs that benchmarks/search/regret.py searches in place of training.

    python benchmarks/search/tables.py [NAME ...] [--mnist ROOT] [--minutes M]
    python benchmarks/search/tables.py NAME ... --show     # the means of a table that is made

Each table is a grid of configs, each trained several times in one process: data, calibration and
the checks of an engine are made once for all. Steps are the trial's own, those of linear models in
NumPy (linear.py). Secrets are fixed and named by table, cell and repeat, so that the same command
makes the same table, and nothing in it is private: digits and MNIST are public. A table that is
begun goes on where it was left off.

tables/NAME.npz holds `spec`, the table's axes and base config as JSON, and `right`, the number of
test examples classified rightly, uint16, one axis a key and the repeats last; 65535 is not run yet.
"""

import argparse
import itertools
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsweep.config.trial import TrialConfig

FOLDER = Path(__file__).parent / "tables"
MISSING = 65535
STEP = "optimizer.total_step"

Tree = dict[str, Any]


def octaves(low: float, count: int, factor: float = 2.0) -> list[float]:
    """`count` values from `low`, each `factor` times the one before."""
    return [low * factor**i for i in range(count)]


CLIP = {"privacy.clip_norm": [0.1, 0.3, 1.0, 3.0]}
COSINE = {"schedule": {"name": "cosine"}}


def _digits(method: Tree, model: Tree, epochs: float, epsilon: float = 4.0) -> Tree:
    return {
        "data": {"name": "digits"},
        "model": model,
        "privacy": {"epsilon": epsilon, "clip_norm": 0.5},
        "train": {"batch_size": 128, "epochs": epochs, "threads": 1, "device": "cpu"},
        "optimizer": COSINE,
        "method": method,
    }


@dataclass(frozen=True)
class Spec:
    """Content of a table.

    Attributes:
        base: The trial config that is varied.
        axes: Dotted key -> its values, ascending. Between them a search reads interpolated means.
        repeats: Runs of each config.
    """

    base: Tree
    axes: dict[str, list[float]]
    repeats: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of `right`."""
        return (*(len(values) for values in self.axes.values()), self.repeats)

    def to_json(self) -> str:
        """For the table's file."""
        return json.dumps({"base": self.base, "axes": self.axes, "repeats": self.repeats})


LINEAR, CNN = {"name": "linear"}, {"name": "cnn_small", "width": 8}
BATCH: dict[str, list[float]] = {"train.batch_size": [128, 256, 512]}

SPECS = {
    "digits_linear": Spec(
        _digits({"name": "dp_sgd"}, LINEAR, 30.0),
        {STEP: octaves(10, 11), **CLIP, **BATCH},
        repeats=8,
    ),
    "mnist14": Spec(
        {
            **_digits({"name": "dp_sgd"}, LINEAR, 3.0, epsilon=1.0),
            "data": {
                "name": "npz",
                "shape": [1, 14, 14],
                "num_classes": 10,
                "num_train": 60_000,
                "num_test": 10_000,
            },
        },
        {STEP: octaves(20, 9), **CLIP, "train.batch_size": [1000, 2000, 4000]},
        repeats=3,
    ),
    "digits_epsilon": Spec(
        _digits({"name": "dp_sgd"}, LINEAR, 30.0),
        {STEP: octaves(1.25, 13), "privacy.epsilon": [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]},
        repeats=5,
    ),
    "digits_cnn": Spec(
        _digits({"name": "dp_sgd"}, CNN, 15.0),
        {STEP: octaves(10, 11), **CLIP, **BATCH},
        repeats=3,
    ),
    "digits_adam": Spec(
        _digits({"name": "dp_adam"}, LINEAR, 30.0),
        {STEP: octaves(0.5, 7), **BATCH, "privacy.epsilon": [1.0, 4.0]},
        repeats=2,
    ),
    "digits_fftkf": Spec(
        _digits({"name": "fftkf"}, LINEAR, 30.0),
        {
            STEP: octaves(80, 7),
            "privacy.clip_norm": [0.1, 1.0],
            "method.kappa": [0.3, 0.65, 1.0],
            "method.depth": [0.0, 0.45, 0.9],
        },
        repeats=3,
    ),
    "digits_innerouter": Spec(
        _digits({"name": "innerouter", "decay": 0.9}, LINEAR, 30.0),
        {
            STEP: octaves(80, 7),
            "privacy.clip_norm": [0.1, 1.0],
            "method.points": [1, 2, 4],
            "method.outer_decay": [0.0, 0.5, 0.9],
        },
        repeats=3,
    ),
}


@dataclass(frozen=True)
class Table:
    """A table as its file has it.

    Attributes:
        spec: Its grid.
        right: Test examples classified rightly; MISSING where not run yet.
        num_test: Test examples.
    """

    spec: Spec
    right: NDArray[np.uint16]
    num_test: int

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """In percent, NaN where a run is missing, shape of `right`."""
        percent = self.right * (100 / self.num_test)
        return np.where(self.right == MISSING, math.nan, percent)


def read_table(name: str, folder: Path = FOLDER) -> Table:
    """The table of a name."""
    with np.load(folder / f"{name}.npz") as file:
        spec = json.loads(str(file["spec"]))
        return Table(Spec(**spec), file["right"], int(file["num_test"]))


def cells(spec: Spec) -> list[tuple[tuple[int, ...], dict[str, float]]]:
    """(Index, values by key) of each config of a grid."""
    indices = itertools.product(*(range(len(values)) for values in spec.axes.values()))
    return [
        (index, {k: v[i] for (k, v), i in zip(spec.axes.items(), index, strict=True)})
        for index in indices
    ]


def make_table(name: str, root: Path | None, deadline: float) -> bool:
    """Trains what the table lacks, repeat by repeat; False if the deadline came first."""
    from dpsweep.config.source import with_value

    spec = SPECS[name]
    base = spec.base
    if base["data"]["name"] == "npz":
        assert root is not None, "mnist14 needs --mnist ROOT, where MNIST/raw lies"
        base = with_value(base, ("data", "root"), str(pooled_mnist(root)))
    path = FOLDER / f"{name}.npz"
    right = np.full(spec.shape, MISSING, dtype=np.uint16)
    if path.exists() and (known := read_table(name)).spec.axes == spec.axes:
        shared = min(known.spec.repeats, spec.repeats)
        right[..., :shared] = known.right[..., :shared]
    saved, began, trained = time.monotonic(), time.monotonic(), 0
    num_test = 0
    for repeat in range(spec.repeats):
        for index, values in cells(spec):
            if right[(*index, repeat)] != MISSING:
                continue
            tree = base
            for key, value in values.items():
                tree = with_value(tree, tuple(key.split(".")), value)
            config = TrialConfig.model_validate(tree)
            right[(*index, repeat)], num_test = train_once(config, f"{name}/{index}/{repeat}")
            trained += 1
            if time.monotonic() - saved > 30 or time.time() > deadline:
                _save(path, spec, right, num_test)
                saved = time.monotonic()
                left = int((right == MISSING).sum())
                seconds = (saved - began) / trained
                print(f"{name}: {left} runs left, {seconds:.2f} s each", flush=True)
            if time.time() > deadline:
                return False
    if trained:
        _save(path, spec, right, num_test)
    return True


def train_once(config: TrialConfig, text: str) -> tuple[int, int]:
    """Test examples classified rightly after one run, and how many there are.

    The secret is that of `text`. A run that diverged counts as one that guesses the class.
    """
    import torch
    from linear import LinearRun, suits

    from dpsweep.core.seeds import Secret
    from dpsweep.training.assemble import assemble_step, initial_params
    from dpsweep.training.evaluate import evaluate

    step = assemble_step(config, Secret.fixed(text), torch.device("cpu"))
    if suits(step):
        run = LinearRun(step, initial_params(step))
        run.train()
        return run.count_right(), len(step.data.valid_targets)
    progress = step.start(initial_params(step))
    for _ in range(step.plan.steps):
        step(progress)
    num_test = len(step.data.valid_targets)
    score = evaluate(step.engine.model, progress.result, step.data, step.dtype)
    if not math.isfinite(score["loss"]):
        return num_test // config.data.spec.num_classes, num_test
    return round(score["accuracy"] * num_test), num_test


def pooled_mnist(root: Path) -> Path:
    """MNIST with each 2 x 2 pixels averaged, as an npz file beside the cache of data."""
    import tempfile

    from dpsweep.core.inputs import one_tensor
    from dpsweep.data.datasets import ImageData
    from dpsweep.data.read import load_dataset

    path = Path(tempfile.gettempdir()) / "dpsweep-search-mnist14.npz"
    if not path.exists():
        data = load_dataset(ImageData(name="mnist", root=str(root)), 0)

        def pooled(images: Any) -> Any:
            parts = images[:, 0].reshape(-1, 14, 2, 14, 2).float().mean((2, 4))
            return parts.round().byte().numpy()

        np.savez(
            path, x_train=pooled(data.inputs), y_train=one_tensor(data.targets).numpy(),
            x_test=pooled(data.valid_inputs), y_test=data.valid_targets.numpy(),
        )  # fmt: skip
    return path


def show(table: Table) -> None:
    """Print the means over the repeats; rows are the first key's values, columns all others'."""
    step, *others = table.spec.axes.items()
    columns = cells(Spec({}, dict(others), 0)) if others else [((), {})]
    names = [", ".join(f"{k.split('.')[-1]} {v:g}" for k, v in one.items()) for _, one in columns]
    print(f"| {step[0]} |" + "".join(f" {name} |" for name in names))
    print("|---|" + "---|" * len(names))
    means = np.nanmean(table.accuracy, -1)
    for i, value in enumerate(step[1]):
        print(f"| {value:g} |" + "".join(f" {means[(i, *index)]:.1f} |" for index, _ in columns))


def _save(path: Path, spec: Spec, right: NDArray[np.uint16], num_test: int) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, spec=np.array(spec.to_json()), right=right, num_test=num_test)
    partial.replace(path)


if __name__ == "__main__":
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(SPECS))
    parser.add_argument("--mnist", type=Path, help="data.root of MNIST, for mnist14")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--show", action="store_true", help="print tables in place of making them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.names:
        if given.show:
            show(read_table(name))
        elif not make_table(name, given.mnist, time.time() + 60 * given.minutes):
            break
