"""A frozen part that is computed once trains the same weights as one computed at every step."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import dpsweep.training.frozen as frozen
from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import Secret
from dpsweep.data.read import load_dataset
from dpsweep.models.frozen import find_cut
from dpsweep.models.transfer import freeze
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step, assemble_step_on, initial_params
from dpsweep.training.evaluate import evaluate
from dpsweep.training.loop import collect_weights

CPU = torch.device("cpu")
NETS = str(Path(__file__).parent.parent / "models")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()
    yield tmp_path / "cache"
    load_dataset.cache_clear()


def trial(model, method="dp_sgd", **train) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": model,
            "privacy": {"epsilon": 8},
            "train": {"batch_size": 128, "epochs": 0.5, "dtype": "float64", **train},
            "optimizer": {"lr": 1.0},
            "method": {"name": method},
        }
    )


SMALL = {"name": "cnn_small", "width": 4, "train": ["7"]}
OWN = {"name": "own", "function": "own_net:make", "folder": NETS, "train": ["head"]}


@pytest.mark.parametrize("method", ["dp_sgd", "disk", "fftkf"])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (SMALL, (32,)),
        ({**SMALL, "train": ["3", "7"]}, (4, 4, 4)),
        (OWN, (4,)),
    ],
    ids=["last layer", "last two", "own"],
)
def test_cached_and_uncached_runs_give_equal_weights(model, shape, method):
    config, secret = trial(model, method), Secret.fixed("frozen")
    cached = assemble_step(config, secret, CPU)
    plain = assemble_step_on(load_dataset(config.data, 0), plan_privacy(config), config, secret)
    assert cached.data.inputs.shape[1:] == shape
    assert cached.uncut_model is not None
    assert plain.uncut_model is None
    told = []
    for step in (cached, plain):
        progress = step.start(initial_params(step))
        for _ in range(step.plan.run.steps):
            step(progress)
        score = evaluate(step.engine.model, progress.result, step.data, step.dtype)
        told.append((collect_weights(step, progress), score))
    (ours, score), (theirs, expected) = told
    assert list(ours) == list(theirs)  # the file of weights is that of the whole model
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-9, atol=1e-11)
    assert score["accuracy"] == expected["accuracy"]
    assert score["loss"] == pytest.approx(expected["loss"], rel=1e-9)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_last_bits_of_what_crosses_do_not_depend_on_the_number_of_examples(num):
    """Of one to three rows, kernels for vectors were chosen: 7e-8 in float32 on this processor."""
    config = trial({"name": "mlp4", "train": ["7"]}, dtype="float32")
    step = assemble_step_on(
        load_dataset(config.data, 0), plan_privacy(config), config, Secret.draw()
    )
    found = find_cut(step.engine.model, (1, 8, 8))
    few, more, later = (
        frozen._compute_outputs(found, step.data, step.data.inputs[rows], step)
        for rows in (slice(256 + num), slice(266), slice(num, 266))
    )
    assert torch.equal(few, more[: 256 + num])
    assert torch.equal(later, more[num:])


def test_what_crosses_is_computed_once_a_node_and_anew_for_other_frozen_weights(cache):
    config = trial(SMALL)
    assemble_step(config, Secret.draw(), CPU)
    kept = {p.name: p.stat().st_mtime_ns for p in cache.glob("*.pt")}
    assert len(kept) == 2  # the images, and what crosses
    assemble_step(config, Secret.draw(), CPU)
    assert {p.name: p.stat().st_mtime_ns for p in cache.glob("*.pt")} == kept
    other = assemble_step(config.model_copy(update={"seed": 1}), Secret.draw(), CPU)
    assert len(list(cache.glob("*.pt"))) == 3
    again = assemble_step_on(
        load_dataset(config.data, 0), plan_privacy(config), other.config, Secret.draw()
    )
    found = find_cut(again.engine.model, (1, 8, 8))
    some = again.data.scaled(again.data.inputs[:9], torch.float64)
    torch.testing.assert_close(other.data.inputs[:9], found.features(some))


def test_of_ever_more_frozen_weights_the_last_two_copies_stay(cache):
    """As repeats have them, each from another public seed."""
    config, made = trial(SMALL), []
    for seed in (0, 1, 2, 3, 2):
        step = assemble_step(config.model_copy(update={"seed": seed}), Secret.draw(), CPU)
        assert step.data.inputs.isfinite().all()
        made.append({p.name for p in cache.glob("made-*.pt")})
    assert [len(names) for names in made] == [1, 2, 2, 2, 2]
    assert made[2] - made[1]
    assert made[4] == made[3], "it was among the last, and is not made again"
    assert len(list(cache.glob("*.pt"))) == 3  # the images stay


def test_making_what_crosses_is_no_silence_of_the_trials(cache, monkeypatch):
    told, crossed = [], frozen._compute_outputs

    @contextmanager
    def excused():
        told.append("begins")
        yield
        told.append("ends")

    def cross(*args):
        told.append("makes")
        return crossed(*args)

    monkeypatch.setattr(frozen, "_compute_outputs", cross)
    assemble_step(trial(SMALL), Secret.draw(), CPU, allowance=Allowance(excused=excused))
    assert told == ["begins", "makes", "makes", "ends"]


def test_a_frozen_part_that_remembers_an_image_stops_the_trial():
    """Its buffers would be saved with the weights."""
    model = {"name": "own", "function": "own_net:remembering", "folder": NETS, "train": ["head"]}
    with pytest.raises(
        ConfigError, match=r"model: buffer 'seen' of module 'peak' \(Peak\) changes when"
    ):
        assemble_step(trial(model), Secret.draw(), CPU)


def test_own_code_is_never_kept_since_it_may_change(cache):
    assert assemble_step(trial(OWN), Secret.draw(), CPU).uncut_model is not None
    assert len(list(cache.glob("*.pt"))) == 1  # the images


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({"name": "cnn_small", "width": 4}, {}),
        ({**SMALL, "train": ["0"]}, {}),
        (SMALL, {"augment": {"flips": True}}),
        (SMALL, {"engine": "vmap"}),
    ],
    ids=["all is trained", "the first layer is trained", "augmented", "engine not tried"],
)
def test_models_are_computed_whole_where_a_cut_is_not_certain(model, train):
    assert assemble_step(trial(model, **train), Secret.draw(), CPU).uncut_model is None


def test_more_than_fits_is_computed_at_every_step(monkeypatch):
    monkeypatch.setattr(frozen, "_MOST_BYTES", 1797 * 32 * 8 - 1)
    assert assemble_step(trial(SMALL), Secret.draw(), CPU).uncut_model is None
    monkeypatch.setattr(frozen, "_MOST_BYTES", 1797 * 32 * 8)
    assert assemble_step(trial(SMALL), Secret.draw(), CPU).uncut_model is not None


class Skips(nn.Module):
    """Images go past the body to the logits, so no cut before the head has all."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        match self.kind:
            case "residual":
                return x + self.head(self.body(x))
            case "twice":
                return self.head(self.head(self.body(x)))
            case "tied":
                return self.head(self.body(x) @ self.head.weight)
            case "by its weight":
                return self.body(x) @ self.head.weight
        return self.head(self.body(x))


@pytest.mark.parametrize("kind", ["residual", "twice", "tied", "by its weight"])
def test_a_way_around_the_cut_is_found(kind):
    models = [Skips(kind), Skips("plain")]
    for model in models:
        freeze(model, ["head"])
    assert find_cut(models[0], (1, 2, 2)) is None
    found = find_cut(models[1], (1, 2, 2))
    assert [name for name, _ in found.tail.named_parameters()] == ["head.weight", "head.bias"]


def test_step_behind_a_cut_keeps_nothing_else_of_the_step():
    config, secret = trial(SMALL), Secret.fixed("x")
    cached = assemble_step(config, secret, CPU)
    plain = assemble_step_on(load_dataset(config.data, 0), plan_privacy(config), config, secret)
    same = replace(cached, data=plain.data, engine=plain.engine, uncut_model=None)
    assert same == plain


def test_layer_that_no_engine_supports_is_told_by_its_name(tmp_path):
    (tmp_path / "keeps_a_mean.py").write_text(
        "from torch import nn\n"
        "def make(shape, num_classes):\n"
        "    norm = nn.InstanceNorm2d(1, track_running_stats=True)\n"
        "    return nn.Sequential(norm, nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    model = {"name": "own", "function": "keeps_a_mean:make", "folder": str(tmp_path)}
    message = r"^model: buffer 'running_mean' of module '0' \(InstanceNorm2d\) depends on"
    with pytest.raises(ConfigError, match=message):
        assemble_step(trial(model), Secret.draw(), CPU)
