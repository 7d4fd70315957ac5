"""The total step means the same everywhere: a constant gradient in, total displacement out."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import Source, read_yaml
from dpsweep.config.sweep import parse_sweep
from dpsweep.config.trial import TrialConfig, dump_trial, load_trial
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, PerExample
from dpsweep.methods import METHODS
from dpsweep.privacy.clip import clipped_sum
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.step import Progress, Step

BATCH, LONG = 36, 1e3


@dataclass(frozen=True)
class ConstantEngine:
    """Each of BATCH examples has the same gradient, far longer than the clip norm, at any point."""

    model: torch.nn.Module
    max_physical_batch: int = BATCH

    def clipped_sum(self, points, weights, inputs_B, targets_B, clip) -> Clipped:
        gradients = {k: torch.full((BATCH, *x.shape), LONG) for k, x in points[0].items()}
        return clipped_sum(PerExample(gradients), clip)


def config(optimizer=None, method=None, clipping="flat", **privacy) -> TrialConfig:
    method = method or {"name": "dp_sgd"}
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "linear"},
            "privacy": {
                "noise_multiplier": 0.0,
                "clip_norm": 0.25,
                "clipping": clipping,
                **privacy,
            },
            "train": {"batch_size": BATCH, "epochs": 10, "device": "cpu"},
            "optimizer": {"total_step": 50.0, **(optimizer or {})},
            "method": method,
        }
    )


def run(trial: TrialConfig) -> tuple[Progress, torch.Tensor]:
    """The end of a run, and how far each weight has travelled."""
    step = assemble_step(trial, Secret.fixed("a constant gradient"), torch.device("cpu"))
    engine = ConstantEngine(step.engine.model)
    step = Step(trial, step.plan, step.data, engine, step.secret, step.geometry)
    start = initial_params(step)
    progress = step.start({k: x.clone() for k, x in start.items()})
    for _ in range(step.plan.run.steps):
        step(progress)
    return progress, torch.cat([(progress.params[k] - x).flatten() for k, x in start.items()])


LOW_PASS = {"published": "a9_b1"}
COMPOSED = {
    "query": {"name": "momentum", "points": 3},
    "filters": [{"name": "momentum", "decay": 0.5}, {"name": "ema", "gain": 0.3}],
}


@pytest.mark.parametrize(
    ("optimizer", "method"),
    [
        ({}, None),
        ({"momentum": 0.9}, None),
        ({"schedule": {"name": "cosine"}}, None),
        ({"schedule": {"name": "cosine", "warmup": 0.3, "final": 0.2}}, None),
        ({"schedule": {"name": "constant", "warmup": 0.5}}, None),
        ({}, {"name": "disk"}),
        ({}, {"name": "disk", "gain": "riccati"}),
        ({}, {"name": "fftkf"}),
        ({}, {"name": "fftkf", "predictor": "split"}),
        ({}, {"name": "innerouter"}),
        ({"momentum": 0.5}, {"name": "innerouter", "outer_decay": 0.8}),
        ({}, {"name": "doppler", "filter": LOW_PASS}),
        ({}, {"name": "dp_pmlf", "filter": LOW_PASS}),
        ({"name": "sgd"}, {"compose": COMPOSED}),
    ],
    ids=str,
)
def test_sgd_travels_the_total_step(optimizer, method):
    # momentum and filters that start at 0 lose about 1 / (1 - beta) of the 399 steps
    _, travelled = run(config(optimizer, method))
    assert float(travelled.norm()) == pytest.approx(50, rel=0.04)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer", "adaptive"])
@pytest.mark.parametrize("clip_norm", [0.1, 2.0])
def test_it_means_the_same_under_each_style_of_clipping(clipping, clip_norm):
    # once an adaptive norm has grown to the gradients', it is at times a little longer
    progress, travelled = run(config(clipping=clipping, clip_norm=clip_norm))
    assert float(travelled.norm()) == pytest.approx(50, rel=0.03)
    assert (progress.bound > 2 * clip_norm) == (clipping == "adaptive")


def test_a_learning_rate_does_not_follow_an_adaptive_norm():
    _, travelled = run(config({"total_step": None, "lr": 0.5}, clipping="adaptive"))
    assert float(travelled.norm()) > 10 * 0.5 * 0.25 * 399


@pytest.mark.parametrize(
    ("base", "method"),
    [("adam", "dp_adam"), ("adamw", "dp_adam"), ("adambc", "dp_adambc"), ("adam", "innerouter")],
)
@pytest.mark.parametrize("clip_norm", [0.25, 4.0])
def test_each_weight_travels_the_total_step_with_adams_family(base, method, clip_norm):
    trial = config({"name": base, "total_step": 3.0}, {"name": method}, clip_norm=clip_norm)
    _, travelled = run(trial)
    assert travelled.abs().numpy() == pytest.approx(3, rel=0.06)


def test_the_learning_rate_that_it_comes_to_trains_the_same():
    ours = config({"momentum": 0.5, "schedule": {"name": "cosine"}}, {"name": "innerouter"})
    theirs = config(
        {"momentum": 0.5, "schedule": {"name": "cosine"}, "lr": ours.learning_rate,
         "total_step": None},
        {"name": "innerouter"},
    )  # fmt: skip
    assert theirs.total_step == pytest.approx(50)
    assert torch.equal(run(ours)[1], run(theirs)[1])


def test_a_file_gives_one_of_the_two():
    with pytest.raises(ValueError, match=r"total_step and lr both|and lr both give the size"):
        config({"lr": 1.0})


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("doppler", "dp_pmlf")])
def test_the_methods_own_is_written_where_a_file_gives_neither(name):
    tree = config(method={"name": "dp_sgd"}).model_dump(mode="json", exclude_none=True)
    del tree["optimizer"]
    trial = TrialConfig.model_validate({**tree, "method": {"name": name}})
    adam = METHODS[name].bases[0].startswith("adam")
    assert trial.optimizer.total_step == (4.0 if adam else 1600.0)  # there is no noise


def default(**privacy):
    tree = config(**privacy).model_dump(mode="json", exclude_none=True)
    del tree["optimizer"]
    return TrialConfig.model_validate(tree).total_step


def test_the_default_grows_with_mu_where_noise_binds():
    assert default(noise_multiplier=None, epsilon=4.0) == pytest.approx(0.4 * 1437 * 1.1, rel=0.1)
    for mu in (1, 0.1):
        noise = math.log1p((mu / (BATCH / 1437)) ** 2 / 399) ** -0.5
        assert default(noise_multiplier=noise) == pytest.approx(0.4 * 1437 * mu, rel=5e-3)


@pytest.mark.parametrize("epsilon", [1, 4, 8])
def test_the_default_is_nearly_the_same_by_epsilon_and_by_its_noise(epsilon):
    given = config(noise_multiplier=None, epsilon=float(epsilon))
    noise = plan_privacy(given).run.noise_multiplier
    by_epsilon = default(noise_multiplier=None, epsilon=float(epsilon))
    assert default(noise_multiplier=noise) == pytest.approx(by_epsilon, rel=0.2)


def test_a_trial_of_a_shared_budget_has_the_default_of_its_own_noise():
    base = config(noise_multiplier=None, epsilon=4.0, scope="sweep").model_dump(
        mode="json", exclude_none=True
    )
    del base["optimizer"]
    search = {"privacy.clip_norm": {"log_uniform": [0.1, 1.0]}}
    tree = {"name": "x", "base": base, "search": search, "budget": {"trials": 16}}
    found = parse_sweep(Source("x.yaml", tree, {}), Path())
    assert found.reference_trial.total_step < 0.35 * found.written.total_step


def test_an_export_reads_back_equal(tmp_path):
    trial = config({"momentum": 0.9, "schedule": {"name": "cosine"}}, clipping="adaptive")
    (tmp_path / "x.yaml").write_text(dump_trial(trial))
    assert load_trial(read_yaml(tmp_path / "x.yaml")) == trial


def sweep(search, optimizer):
    base = config().model_dump(mode="json", exclude_none=True)
    tree = {
        "name": "x",
        "base": {**base, "optimizer": optimizer},
        "search": search,
        "budget": {"trials": 4},
    }
    return parse_sweep(Source("x.yaml", tree, {}), Path())


@pytest.mark.parametrize("key", ["lr", "total_step"])
@pytest.mark.parametrize("base", ["lr", "total_step"])
def test_what_is_searched_takes_the_place_of_what_the_base_gives(key, base):
    found = sweep({f"optimizer.{key}": {"log_uniform": [1, 4]}}, {base: 9.0})
    assert [getattr(trial.optimizer, key) for trial in found.corners] == [1, 4]


def test_it_can_be_derived_and_conditions_may_name_either():
    search = {
        "train.batch_size": {"choice": [36, 72]},
        "optimizer.total_step": {"derive": "train.batch_size"},
    }
    found = sweep(search, {})
    assert [trial.optimizer.total_step for trial in found.corners] == [36, 72]
    met = sweep({**search, "optimizer.total_step": {"log_uniform": [1, 100]}}, {})
    tree = {**met.file.tree, "where": ["optimizer.lr < 0.1", "optimizer.total_step > 1"]}
    met = parse_sweep(Source("x.yaml", tree, {}), Path())
    assert all(trial.learning_rate < 0.1 for trial in met.samples(20))


def test_both_searched_is_refused():
    both = {f"optimizer.{k}": {"log_uniform": [1, 4]} for k in ("lr", "total_step")}
    with pytest.raises(ConfigError, match="both give the size of a step"):
        sweep(both, {})
