"""`dpsweep train`: what an interrupted run is bound to."""

import numpy as np
import pytest

from dpsweep.cli.verbs import trial
from dpsweep.core.errors import StateError
from dpsweep.data.read import load_dataset

FILE = """\
data: {{name: npz, root: {root}, shape: [1, 4, 4], num_classes: 2, num_train: 40, num_test: 10}}
model: {{name: linear}}
privacy: {{epsilon: 4}}
train: {{batch_size: 10, epochs: 2, device: cpu}}
optimizer: {{lr: 0.1}}
method: {{name: dp_sgd}}
"""


class Killed(BaseException):
    """What a test does to a run; nothing may catch it."""


def test_an_interrupted_run_goes_on_with_its_own_data_alone(tmp_path, monkeypatch):
    """The same secret on others would draw the same noise, which cancels between the two."""
    root, file, out = tmp_path / "data.npz", tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(FILE.format(root=root))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 4, 4), dtype=np.uint8)
    labels = np.arange(50) % 2

    def lay_out() -> None:
        load_dataset.cache_clear()  # as another process begins
        np.savez(
            root, x_train=images[:40], y_train=labels[:40], x_test=images[40:], y_test=labels[40:]
        )

    def die(row: object) -> str:
        raise Killed

    lay_out()
    with monkeypatch.context() as patched:
        patched.setattr(trial, "_line", die)
        with pytest.raises(Killed):
            trial.train(file, [], out, fetch=False, quiet=False)
    images[7] = 255 - images[7]
    lay_out()
    with pytest.raises(StateError, match=r"checkpoint of another config or other data\. Train"):
        trial.train(file, [], out, fetch=False, quiet=True)
    images[7] = 255 - images[7]
    lay_out()
    trial.train(file, [], out, fetch=False, quiet=True)
    assert (out / "privacy.txt").exists()
