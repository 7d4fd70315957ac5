"""DiSK asks with the printed weights, and without noise its prediction is exact on a quadratic."""

import math
import re
from collections import deque
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.data.read import Dataset
from dpsweep.filters.lti import Ema
from dpsweep.methods import disk
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.query import NEWEST_ITERATE, EvaluationPoint
from dpsweep.training.step import Progress, Step

GAINS = [(0.7, 0.5), (0.3, 0.5), (0.5, -1.0), (0.9, 3.0), (0.4, 1.5), (0.6, 0.2), (1.0, 0.5)]
every_gain = pytest.mark.parametrize(("kappa", "gamma"), GAINS)

STEPS = 25
LR = 0.3


@pytest.mark.parametrize(
    ("kappa", "gamma", "weights"),
    [
        (0.7, 0.5, [1 - 6 / 7, 6 / 7]),  # the printed pair: c = 0.3 / 0.35
        (0.3, 0.5, [1 - 14 / 3, 14 / 3]),
        (0.5, -1.0, [2.0, -1.0]),  # the point behind: variance reduction
        (0.8, 2.0, [0.875, 0.125]),
    ],
)
def test_weights_are_one_minus_c_here_and_c_ahead(kappa, gamma, weights):
    here, ahead = disk.Config(kappa=kappa, gamma=gamma).query.evaluation_points(1)
    assert (here.ahead, ahead.ahead) == (0.0, gamma)
    assert [here.weight, ahead.weight] == pytest.approx(weights, rel=1e-12)


@every_gain
def test_weights_sum_to_one(kappa, gamma):
    query = disk.Config(kappa=kappa, gamma=gamma).query
    assert sum(ask.weight for ask in query.evaluation_points(1)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("kappa", [0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_one_point_ahead_is_enough_where_gamma_is_one_over_kappa_less_one(kappa):
    gamma = (1 - kappa) / kappa
    for given in (gamma, "one_point"):
        query = disk.Config(kappa=kappa, gamma=given).query
        assert query.evaluation_points(1) == (EvaluationPoint(weight=1.0, ahead=gamma),)


@pytest.mark.parametrize("gamma", [0.5, -1.0, 3.0])
def test_full_gain_asks_at_the_newest_iterate_alone(gamma):
    assert disk.Config(kappa=1.0, gamma=gamma).query == NEWEST_ITERATE


def test_releases_are_averaged_with_gain_kappa():
    assert disk.build(disk.Config(kappa=0.3, gamma=0.5)).filters == (Ema(gain=0.3),)


@pytest.mark.parametrize("gamma", [0, 0.0, -0.0])
def test_gamma_zero_is_refused(gamma):
    with pytest.raises(ValidationError, match=r"must not be 0, got 0: .* kappa: 1"):
        disk.Config(kappa=0.7, gamma=gamma)


@pytest.mark.parametrize("kappa", [0.0, -0.1, 1.1])
def test_kappa_outside_the_unit_interval_is_refused(kappa):
    with pytest.raises(ValidationError, match=r"kappa\n  Input should be (greater|less) than"):
        disk.Config(kappa=kappa)


@pytest.mark.parametrize("key", ["kappa", "gamma"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_tunables_that_are_not_finite_are_refused(key, number):
    with pytest.raises(ValidationError, match=rf"{key}(\.float)?\n  Input should be a finite"):
        disk.Config(**{key: number})


# One parameter vector x, and examples i with f_i(x) = (x - a_i)' H (x - a_i) / 2.


class Offset(nn.Module):
    """x - a_i for each image a_i of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-2, 2, 6, dtype=torch.float64))

    def forward(self, inputs_B: Tensor) -> Tensor:
        return self.x - inputs_B.flatten(1)


def hessian() -> Tensor:
    """Symmetric, eigenvalues 0.2 to 3, no axis one of its own; shape (6, 6)."""
    rng = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=rng, dtype=torch.float64))
    return basis @ torch.diag(torch.linspace(0.2, 3, 6, dtype=torch.float64)) @ basis.T


HESSIAN = hessian()


def quadratic(offset_1P: Tensor, target_1: Tensor) -> Tensor:
    return 0.5 * (offset_1P[0] @ HESSIAN @ offset_1P[0])


def examples() -> Dataset:
    rng = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 17, (8, 1, 2, 3), generator=rng, dtype=torch.uint8)
    targets = torch.zeros(8, dtype=torch.int64)
    return Dataset(inputs, targets, inputs[:0], targets[:0], brightest=16)


def middle() -> Tensor:
    """Where the mean loss is least: the mean of all a_i, shape (P,)."""
    data = examples()
    return data.scaled(data.inputs, torch.float64).flatten(1).mean(0)


def quiet_step(**method: object) -> Step:
    """Every example in every batch, B = N, no noise and no clipping in effect."""
    config = TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small"},
            "privacy": {"noise_multiplier": 0, "clip_norm": 1e9},
            "train": {"batch_size": 8, "epochs": 1, "dtype": "float64"},
            "optimizer": {"name": "sgd", "lr": LR},
            "method": method,
        }
    )
    run = Run(sampling_rate=1.0, noise_multiplier=0.0, steps=100)
    budget = PrivacyPlan(num_examples=8, run=run, epsilon=math.inf, delta=1e-5)
    engine = VmapEngine(Offset(), quadratic, max_physical_batch=5)
    return Step(config, budget, examples(), engine, Secret.fixed("quadratic"))


def beginning(step: Step) -> Progress:
    return step.start({"x": Offset().x.detach().clone()})


def path(step: Step, progress: Progress) -> Tensor:
    """The iterates after each of STEPS steps, shape (STEPS, P)."""
    iterates = []
    for _ in range(STEPS):
        step(progress)
        iterates.append(progress.params["x"].clone())
    return torch.stack(iterates)


@every_gain
@pytest.mark.parametrize("name", ["disk", "fftkf"])
def test_quadratic_is_descended_as_by_exact_gradients(name, kappa, gamma):
    # The look-ahead pair is H (x_t - a) + (1 - kappa)/kappa H d_{t-1}. With it, and m_0 = g_0, the
    # average m_t = H (x_t - a) for ever: x_t - a = (I - lr H)^t (x_0 - a) at every gain.
    extra = {"cut": 0.5, "depth": 0.0} if name == "fftkf" else {}
    step = quiet_step(name=name, kappa=kappa, gamma=gamma, **extra)
    progress = beginning(step)
    away, closed_form = progress.params["x"] - middle(), []
    for _ in range(STEPS):
        away = away - LR * HESSIAN @ away
        closed_form.append(middle() + away)
    torch.testing.assert_close(path(step, progress), torch.stack(closed_form), rtol=0, atol=1e-10)


@every_gain
def test_any_start_follows_the_linear_recursion(kappa, gamma):
    # From an average that is not the gradient: with e = x_t - a and d = x_t - x_{t-1} = -lr m,
    #   d' = -lr kappa H e + (1 - kappa) (I - lr H) d,      e' = e + d'
    step = quiet_step(name="disk", kappa=kappa, gamma=gamma)
    progress = beginning(step)
    rng = torch.Generator().manual_seed(4)
    x = progress.params["x"]
    d = 0.4 * torch.randn(6, generator=rng, dtype=torch.float64)
    progress.iterates = deque([{"x": x - d}, progress.params], maxlen=progress.iterates.maxlen)
    progress.filter_state = ({"x": -d / LR},)
    e, recursion = x - middle(), []
    for _ in range(STEPS):
        shrunk = d - LR * HESSIAN @ d
        d = -LR * kappa * HESSIAN @ e + (1 - kappa) * shrunk
        e = e + d
        recursion.append(middle() + e)
    torch.testing.assert_close(path(step, progress), torch.stack(recursion), rtol=0, atol=1e-10)


def test_full_gain_is_dp_sgd_bit_for_bit_under_noise():
    paths = []
    for method in ({"name": "disk", "kappa": 1.0, "gamma": 0.5}, {"name": "dp_sgd"}):
        step = noisy(quiet_step(**method))
        paths.append(path(step, beginning(step)))
    assert torch.equal(*paths)


def test_depth_zero_makes_fftkf_disk_under_noise():
    gains = {"kappa": 0.3, "gamma": 0.5}
    paths = []
    for method in ({"name": "disk"}, {"name": "fftkf", "cut": 0.3, "depth": 0.0}):
        step = noisy(quiet_step(**method, **gains))
        paths.append(path(step, beginning(step)))
    torch.testing.assert_close(*paths, rtol=0, atol=1e-12)


def noisy(step: Step) -> Step:
    """The same at q = 1/2, sigma = 1, and a clip norm that has effect."""
    privacy = step.config.privacy.model_copy(update={"clip_norm": 0.8})
    config = step.config.model_copy(update={"privacy": privacy})
    run = Run(sampling_rate=0.5, noise_multiplier=1.0, steps=100)
    return replace(step, config=config, plan=replace(step.plan, run=run))


@pytest.mark.parametrize(
    ("tunables", "key"),
    [
        ({"gamma": 1e-300}, "gamma"),
        ({"gamma": -1e-17}, "gamma"),
        ({"kappa": 1e-16}, "kappa"),
        ({"kappa": 1e-5, "gamma": "one_point"}, "kappa"),
        ({"kappa": 0.0009, "gamma": 0.05}, "kappa"),
        ({"kappa": 0.0075, "gamma": 0.05}, "gamma"),
        ({"gain": "riccati", "process": 1e-6, "hessian": 0.0}, "process"),
    ],
)
def test_weights_that_float32_cannot_tell_apart_are_refused(tunables, key):
    with pytest.raises(ValidationError, match="rounding is all that is left") as caught:
        disk.Config(**tunables)
    assert caught.value.errors()[0]["ctx"]["error"].key == key
    if found := re.search(rf"Give {key}: ([0-9.e-]+) or more", str(caught.value)):
        disk.Config(**{**tunables, key: float(found[1])})
