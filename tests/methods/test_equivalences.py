"""Through the real step, each method is the algorithm its paper says, written here a second time.

Without noise, and with no clipping in effect, a step moves by what the filters make of plain
gradients; `World.gradient` has those from autograd, at any point, over the step's own batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import signal
from torch import Tensor, nn

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Tensors
from dpsweep.data.read import Dataset
from dpsweep.filters.design import COEFFICIENT_SETS, butterworth
from dpsweep.methods import PUBLISHED, build_method
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.correlated import PublicSettings
from dpsweep.privacy.engine import make_engine
from dpsweep.privacy.geometry import make_geometry
from dpsweep.training.step import Step

STEPS = 16
NOISE_STEPS = 400
LR = 0.4
BATCH_SIZE = 5  # B; a batch holds 6 of the 12 examples on average
NUM_EXAMPLES = 12
SHAPE = (1, 4, 4)

NETS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 4)),
    "blocks": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.Tanh(),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2, bias=False),
        nn.Flatten(),
        CirculantLinear(4, 4, block=4),
    ),
}


def network(net: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return NETS[net]().double()


def examples() -> Dataset:
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 17, (NUM_EXAMPLES, *SHAPE), generator=rng, dtype=torch.uint8)
    targets = torch.randint(0, 4, (NUM_EXAMPLES,), generator=rng)
    return Dataset(inputs, targets, inputs[:0], targets[:0], brightest=16)


@dataclass(frozen=True)
class World:
    """A step, and the plain gradients over its batches."""

    step: Step

    @classmethod
    def of(
        cls,
        method: dict[str, Any],
        *,
        net: str = "dense",
        sigma: float = 0.0,
        clip_norm: float = 1e9,
        clipping: object = "flat",
        **optimizer: object,
    ) -> "World":
        config = TrialConfig.model_validate(
            {
                "data": {"name": "digits"},
                "model": {"name": "cnn_small"},
                "privacy": {
                    "noise_multiplier": sigma,
                    "clip_norm": clip_norm,
                    "clipping": clipping,
                },
                "train": {"batch_size": BATCH_SIZE, "epochs": 1, "dtype": "float64"},
                "optimizer": {"lr": LR, **optimizer},
                "method": method,
            }
        )
        settings = PublicSettings(NUM_EXAMPLES, NUM_EXAMPLES / 2, STEPS / 2, noise_multiplier=sigma)
        rounds, rate = config.noise.schedule(settings)
        run = Run(rate, sigma, rounds)
        model = network(net)
        geometry = make_geometry(build_method(config.method).geometry, model, SHAPE)
        engine = make_engine(model, nn.functional.cross_entropy, geometry, 4, SHAPE)
        correlation = config.noise.correlate(settings)
        budget = PrivacyPlan(NUM_EXAMPLES, run, math.inf, 1e-5, correlation)
        secret = Secret.fixed("equivalences")
        return cls(Step(config, budget, examples(), engine, secret, geometry))

    @property
    def start(self) -> Tensors:
        """x_0."""
        return {k: p.detach().clone() for k, p in self.step.engine.model.named_parameters()}

    def path(self) -> np.ndarray:
        """x_0 to x_STEPS, shape (STEPS + 1, P)."""
        progress = self.step.start(self.start)
        iterates = [flat(progress.params)]
        for _ in range(STEPS):
            self.step(progress)
            iterates.append(flat(progress.params))
        return np.stack(iterates)

    def gradient(self, t: int, x: np.ndarray) -> np.ndarray:
        """(1/B) sum over the batch of step t of grad f(x), shape (P,)."""
        batch, data = self.step.batch(t), self.step.data
        model = self.step.engine.model
        params = unflat(x, self.start)
        inputs = data.scaled(data.inputs[batch], torch.float64)
        for p in params.values():
            p.requires_grad_()
        logits = torch.func.functional_call(model, params, (inputs,))
        loss = nn.functional.cross_entropy(logits, data.targets[batch], reduction="sum")
        return flat(dict(enumerate(torch.autograd.grad(loss, list(params.values()))))) / BATCH_SIZE


def flat(tree: dict[Any, Tensor]) -> np.ndarray:
    return torch.cat([x.detach().flatten() for x in tree.values()]).numpy().copy()


def unflat(x: np.ndarray, like: Tensors) -> Tensors:
    parts = torch.split(torch.from_numpy(x.copy()), [p.numel() for p in like.values()])
    return {k: part.view(p.shape) for (k, p), part in zip(like.items(), parts, strict=True)}


def assert_same(found: np.ndarray, expected: np.ndarray | list[np.ndarray]) -> None:
    """Equal to rounding, and neither stands still."""
    assert np.abs(found[-1] - found[0]).max() > 0.05
    np.testing.assert_allclose(found, np.stack(expected), rtol=0, atol=1e-10)


def test_dp_sgd_is_gradient_descent_on_its_batches():
    world = World.of({"name": "dp_sgd"})
    x = [flat(world.start)]
    for t in range(STEPS):
        x.append(x[-1] - LR * world.gradient(t, x[-1]))
    assert_same(world.path(), x)
    assert len({len(world.step.batch(t)) for t in range(STEPS)}) > 3


# DOPPLER and DP-PMLF.

FILTERS = {
    **{
        name: ({"published": name}, *COEFFICIENT_SETS[name])
        for name in COEFFICIENT_SETS
        if name != "none"
    },
    "butterworth": (
        {"design": {"family": "butterworth", "order": 3, "cutoff": 0.3}},
        *butterworth(3, 0.3),
    ),
}


@pytest.mark.parametrize(("form", "a", "b"), FILTERS.values(), ids=FILTERS)
def test_doppler_is_scipys_filter_over_the_gradients_with_its_bias_corrected(form, a, b):
    world = World.of({"name": "doppler", "filter": form})
    found = world.path()
    stream = np.stack([world.gradient(t, found[t]) for t in range(STEPS)])
    m = signal.lfilter(b, [1, *a], stream, axis=0)
    c = signal.lfilter(b, [1, *a], np.ones(STEPS))
    moves = -LR * m / c[:, None]
    assert_same(found, found[0] + np.concatenate([0 * moves[:1], moves.cumsum(0)]))


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_dp_pmlf_is_the_same_over_gradients_averaged_at_the_last_iterates(k, beta):
    a, b = COEFFICIENT_SETS["a6_b4"]
    world = World.of({"name": "dp_pmlf", "k": k, "beta": beta, "filter": {"published": "a6_b4"}})
    found = world.path()
    stream = np.stack([momentum(world, found, t, k, beta) for t in range(STEPS)])
    m = signal.lfilter(b, [1, *a], stream, axis=0)
    c = signal.lfilter(b, [1, *a], np.ones(STEPS))
    moves = -LR * m / c[:, None]
    assert_same(found, found[0] + np.concatenate([0 * moves[:1], moves.cumsum(0)]))


def momentum(world: World, x: Any, t: int, k: int, beta: float) -> np.ndarray:
    """Sum_j beta^j g(x_{t-j}) / sum_j beta^j over the iterates that exist, all on batch t."""
    ages = range(min(k, t + 1))
    whole = sum(beta**j for j in ages)
    return sum(beta**j / whole * world.gradient(t, x[t - j]) for j in ages)


@pytest.mark.parametrize("outer", [0.0, 0.6])
def test_innerouter_is_a_heavy_ball_over_the_same_averages(outer):
    world = World.of(
        {"name": "innerouter", "k": 3, "beta": 0.7, "outer_decay": outer}, lr=LR * (1 - outer)
    )
    x, m = [flat(world.start)], np.zeros_like(flat(world.start))
    for t in range(STEPS):
        m = outer * m + momentum(world, x, t, 3, 0.7)
        x.append(x[-1] - LR * (1 - outer) * m)
    assert_same(world.path(), x)


# DiSK, Nesterov and STORM: the paper's equations (16) to (18).


@pytest.mark.parametrize("kappa", [0.3, 0.7, 0.95])
def test_disk_with_one_point_is_nesterovs_recursion_with_mu_one_less_kappa(kappa):
    # (16) is m_t = mu m_{t-1} + eta grad F(x_t - nu m_{t-1}), x_{t+1} = x_t - m_t, with nu = mu.
    # DiSK at gamma = (1 - kappa) / kappa is that in m = lr g~ with mu = 1 - kappa, eta = kappa lr
    # and nu = mu / kappa: the momentum of Nesterov, and a look-ahead 1 / kappa times as far. (The
    # paper's A.4 has nu = mu because its m_t does not move x by m_t but by eta m_t.)
    world = World.of({"name": "disk", "kappa": kappa, "gamma": "one_point"})
    mu, eta = 1 - kappa, kappa * LR
    x = [flat(world.start)]
    m = LR * world.gradient(0, x[0])  # g~_0 = r_0
    x.append(x[0] - m)
    for t in range(1, STEPS):
        m = mu * m + eta * world.gradient(t, x[t] - mu / kappa * m)
        x.append(x[t] - m)
    assert_same(world.path(), x)


@pytest.mark.parametrize("kappa", [0.3, 0.7])
def test_disk_with_one_point_is_the_papers_own_step_to_nesterov(kappa):
    # A.4, after (18), eta = kappa = lr: g~_t = mu g~_{t-1} + eta grad F(x_t - mu g~_{t-1}), the
    # first line of (16) word for word, and x_{t+1} = x_t - eta g~_t.
    world = World.of({"name": "disk", "kappa": kappa, "gamma": "one_point"}, lr=kappa)
    mu = 1 - kappa
    x = [flat(world.start)]
    g = world.gradient(0, x[0])
    x.append(x[0] - kappa * g)
    for t in range(1, STEPS):
        g = mu * g + kappa * world.gradient(t, x[t] - mu * g)
        x.append(x[t] - kappa * g)
    assert_same(world.path(), x)


@pytest.mark.parametrize("mu", [0.3, 0.7])
def test_nesterovs_method_itself_is_composed_of_a_point_ahead_and_a_heavy_ball(mu):
    # (16) to the letter: one point x_t + mu d_{t-1} = x_t - mu m_{t-1}, and m_{-1} = 0.
    query = {"name": "look_ahead", "kappa": 1 / (1 + mu), "gamma": "one_point"}
    parts = {"query": query, "filters": [{"name": "momentum", "decay": mu}]}
    world = World.of({"compose": parts}, lr=0.2)
    x, m = [flat(world.start)], np.zeros_like(flat(world.start))
    for t in range(STEPS):
        m = mu * m + 0.2 * world.gradient(t, x[t] - mu * m)
        x.append(x[t] - m)
    assert_same(world.path(), x)


@pytest.mark.parametrize("kappa", [0.3, 0.7, 0.95])
def test_disk_that_looks_back_is_storm(kappa):
    # (17), both gradients on the batch of step t.
    world = World.of({"name": "disk", "kappa": kappa, "gamma": -1})
    x = [flat(world.start)]
    m = world.gradient(0, x[0])
    x.append(x[0] - LR * m)
    for t in range(1, STEPS):
        now, before = world.gradient(t, x[t]), world.gradient(t, x[t - 1])
        m = (1 - kappa) * m + kappa * now + (1 - kappa) * (now - before)
        x.append(x[t] - LR * m)
    assert_same(world.path(), x)


GAMMAS = [0.5, -1, 2.0]


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("kappa", [0.4, 0.7])
def test_disk_is_prediction_and_correction(kappa, gamma):
    # A.3: g~_{t|t-1} = g~_{t-1} + (g(x_t + gamma d) - g(x_t)) / gamma, then the correction.
    world = World.of({"name": "disk", "kappa": kappa, "gamma": gamma})
    x, estimate = [flat(world.start)], world.gradient(0, flat(world.start))
    x.append(x[0] - LR * estimate)
    for t in range(1, STEPS):
        here, d = world.gradient(t, x[t]), x[t] - x[t - 1]
        predicted = estimate + (world.gradient(t, x[t] + gamma * d) - here) / gamma
        estimate = predicted + kappa * (here - predicted)
        x.append(x[t] - LR * estimate)
    assert_same(world.path(), x)


def test_riccati_gain_that_has_no_trust_in_the_past_is_dp_sgd():
    riccati = {"name": "disk", "gain": "riccati", "process": 1e6, "hessian": 0.0}
    found = World.of(riccati, sigma=1.0, clip_norm=0.5).path()
    expected = World.of({"name": "dp_sgd"}, sigma=1.0, clip_norm=0.5).path()
    assert_same(found, expected)
    assert not np.array_equal(found, expected)  # k_t is not 1


def test_disk_with_a_riccati_gain_is_the_printed_recursion_of_gain_and_estimate():
    # docs/concepts/methods.md: k_t and p from the step before, variances in units of the noise's.
    world = World.of({"name": "disk", "gain": "riccati", "process": 0.5, "hessian": 0.1})
    v, h = 0.5**2, 0.1**2
    x, p, estimate = [flat(world.start)], 1.0, world.gradient(0, flat(world.start))
    for t in range(STEPS):
        k, p = (p + v + h) / (p + v + 1), (1 - h) * (p + v + h) / (p + v + 1)
        if t:
            here, d = world.gradient(t, x[t]), x[t] - x[t - 1]
            predicted = estimate + (world.gradient(t, x[t] + 0.5 * d) - here) / 0.5
            estimate = predicted + k * (here - predicted)
        x.append(x[t] - LR * estimate)
    assert_same(world.path(), x)


# FFTKF.


def shelf(g: np.ndarray, cut: float, depth: float) -> np.ndarray:
    """FFTKF's shelf: phi = 1 below k0 = floor(lambda (floor(P/2) + 1)), 1 - rho from there on."""
    spectrum = np.fft.rfft(g)
    spectrum[int(cut * (len(g) // 2 + 1)) :] *= 1 - depth
    return np.fft.irfft(spectrum, n=len(g))


@pytest.mark.parametrize("predictor", ["joint", "split", "none"])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_fftkf_is_disk_over_gradients_behind_the_shelf(gamma, predictor):
    # Without noise and clipping `split` is `none` plus the exact finite difference, as `joint` is.
    kappa, cut, depth = 0.4, 0.3, 0.6
    gains = {"kappa": kappa, "gamma": gamma, "cut": cut, "depth": depth}
    world = World.of({"name": "fftkf", "predictor": predictor, **gains})
    x = [flat(world.start)]
    estimate = shelf(world.gradient(0, x[0]), cut, depth)
    x.append(x[0] - LR * estimate)
    for t in range(1, STEPS):
        r, d = world.gradient(t, x[t]), x[t] - x[t - 1]
        if predictor != "none":
            difference = world.gradient(t, x[t] + gamma * d) - r
            r = r + (1 - kappa) / (kappa * gamma) * difference
        estimate = (1 - kappa) * estimate + kappa * shelf(r, cut, depth)
        x.append(x[t] - LR * estimate)
    assert_same(world.path(), x)


@pytest.mark.parametrize("gamma", [*GAMMAS, "one_point"])
@pytest.mark.parametrize("noisy", [False, True])
def test_fftkf_without_depth_is_disk(noisy, gamma):
    effect = {"sigma": 1.0, "clip_norm": 0.5} if noisy else {}
    gains = {"kappa": 0.4, "gamma": gamma}
    found = World.of({"name": "fftkf", "depth": 0.0, **gains}, **effect).path()
    assert_same(found, World.of({"name": "disk", **gains}, **effect).path())


@pytest.mark.parametrize("gamma", [*GAMMAS, "one_point"])
def test_fftkf_without_depth_whose_prediction_is_split_is_disk_where_nothing_is_clipped(gamma):
    gains = {"kappa": 0.4, "gamma": gamma}
    found = World.of({"name": "fftkf", "depth": 0.0, "predictor": "split", **gains}).path()
    assert_same(found, World.of({"name": "disk", **gains}).path())


@pytest.mark.parametrize("noisy", [False, True])
def test_fftkf_without_depth_and_prediction_is_an_average_of_dp_sgds_releases(noisy):
    effect = {"sigma": 1.0, "clip_norm": 0.5} if noisy else {}
    found = World.of(
        {"name": "fftkf", "depth": 0.0, "predictor": "none", "kappa": 0.4}, **effect
    ).path()
    average = {"compose": {"filters": [{"name": "ema", "gain": 0.4}]}}
    assert_same(found, World.of(average, **effect).path())


# Methods that are others at the end of a range; under noise, bit for bit.

NOISY = {"sigma": 1.0, "clip_norm": 0.5}
LOW = {"filter": {"published": "a9_b15_m05"}}
SAME = {
    "doppler without a filter": (
        {"name": "doppler", "filter": {"published": "none"}},
        {"name": "dp_sgd"},
    ),
    "dp_pmlf of one point": (
        {"name": "dp_pmlf", "points": 1, **LOW},
        {"name": "doppler", **LOW},
    ),
    "innerouter of one point without momentum": (
        {"name": "innerouter", "points": 1, "outer_decay": 0.0},
        {"name": "dp_sgd"},
    ),
    "bandmf of one band": ({"name": "bandmf", "bands": 1}, {"name": "dp_sgd"}),
    "disk of full gain": ({"name": "disk", "kappa": 1.0}, {"name": "dp_sgd"}),
    "disk at the one point's own distance": (
        {"name": "disk", "kappa": 0.5, "gamma": 1.0},
        {"name": "disk", "kappa": 0.5, "gamma": "one_point"},
    ),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_method_at_the_end_of_its_range_is_another_bit_for_bit(one, other):
    found = World.of(one, **NOISY).path()
    assert np.array_equal(found, World.of(other, **NOISY).path())
    assert np.abs(found[-1] - found[0]).max() > 0.05


PER_LAYER = {**NOISY, "net": "blocks", "clipping": "per_layer"}
KALMAN = {"kappa": 0.4, "gamma": -1}
COMPOSED = {
    "dp_sgd": ({"name": "dp_sgd"}, {}, NOISY),
    "dp_adam": ({"name": "dp_adam"}, {"base": "adam"}, NOISY),
    "dp_adambc": ({"name": "dp_adambc"}, {"base": "adambc"}, NOISY),
    "doppler": (
        {"name": "doppler", **LOW},
        {"filters": [{"name": "low_pass", "published": "a9_b15_m05"}]},
        NOISY,
    ),
    "disk": (
        {"name": "disk", **KALMAN},
        {"query": {"name": "look_ahead", **KALMAN}, "filters": [{"name": "ema", "gain": 0.4}]},
        NOISY,
    ),
    "disk-riccati": (
        {"name": "disk", "gain": "riccati", "process": 0.3},
        {
            "query": {"name": "look_ahead", "gain": "riccati", "process": 0.3},
            "filters": [{"name": "riccati", "process": 0.3}],
        },
        NOISY,
    ),
    "fftkf": (
        {"name": "fftkf", **KALMAN, "cut": 0.3, "depth": 0.6, "scope": "tensor"},
        {
            "query": {"name": "look_ahead", **KALMAN},
            "filters": [
                {"name": "shelf", "cut": 0.3, "depth": 0.6, "scope": "tensor"},
                {"name": "ema", "gain": 0.4},
            ],
        },
        NOISY,
    ),
    "innerouter": (
        {"name": "innerouter", "k": 3, "beta": 0.7, "beta_o": 0.5},
        {
            "query": {"name": "momentum", "k": 3, "beta": 0.7},
            "filters": [{"name": "momentum", "decay": 0.5}],
        },
        NOISY,
    ),
    "dp_pmlf": (
        {"name": "dp_pmlf", "k": 3, "beta": 0.7, **LOW},
        {
            "query": {"name": "momentum", "k": 3, "beta": 0.7},
            "filters": [{"name": "low_pass", "published": "a9_b15_m05"}],
        },
        NOISY,
    ),
    "bandmf": (
        {"name": "bandmf", "bands": 2, "coefficients": "sqrt"},
        {"noise": {"name": "banded", "bands": 2, "coefficients": "sqrt"}},
        NOISY,
    ),
    "dp_ftrl": (
        {"name": "dp_ftrl", "buffers": 2},
        {"noise": {"name": "buffered", "buffers": 2}},
        NOISY,
    ),
    "spectral_dp": (
        {"name": "spectral_dp", "keep": 0.6},
        {"geometry": {"name": "spectral", "keep": 0.6, "keep_circulant": 0.6}},
        PER_LAYER,
    ),
    "block_spectral_dp": (
        {"name": "block_spectral_dp", "keep": 0.6, "keep_circulant": 0.5},
        {"geometry": {"name": "spectral", "keep": 0.6, "keep_circulant": 0.5}},
        PER_LAYER,
    ),
}


@pytest.mark.parametrize(("named", "parts", "effect"), COMPOSED.values(), ids=COMPOSED)
def test_named_method_is_its_parts_bit_for_bit(named, parts, effect):
    lr = {"lr": 0.02} if "base" in parts else {}
    found = World.of(named, **effect, **lr).path()
    assert np.array_equal(found, World.of({"compose": parts}, **effect, **lr).path())
    assert np.abs(found[-1] - found[0]).max() > 0.05


def test_every_published_method_is_composed_here():
    assert {named["name"] for named, _, _ in COMPOSED.values()} == set(PUBLISHED)


# Spectral-DP.


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", ["spectral_dp", "block_spectral_dp"])
def test_spectral_dp_that_keeps_all_frequencies_is_dp_sgd_where_nothing_is_clipped(name, clipping):
    whole = {"name": name, "keep": 1.0}
    whole |= {"keep_circulant": 1.0} if name == "block_spectral_dp" else {}
    found = World.of(whole, net="blocks", clipping=clipping).path()
    assert_same(found, World.of({"name": "dp_sgd"}, net="blocks").path())


def noise(method: dict[str, Any], clipping: str) -> Tensors:
    """Moves with nobody in the batch, at lr 1, shape (NOISE_STEPS, *param.shape)."""
    world = World.of(method, net="blocks", sigma=1.3, clip_norm=0.4, clipping=clipping, lr=1.0)
    run = replace(world.step.plan.run, sampling_rate=1e-300)
    step = replace(world.step, plan=replace(world.step.plan, run=run))
    progress, moves = step.start(world.start), []
    for _ in range(NOISE_STEPS):
        before = {k: x.clone() for k, x in progress.params.items()}
        step(progress)
        moves.append({k: x - before[k] for k, x in progress.params.items()})
    return {k: torch.stack([move[k] for move in moves]) for k in world.start}


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("method", [{"name": "spectral_dp", "keep": 1.0}, {"name": "dp_sgd"}])
def test_noise_of_all_frequencies_has_the_variance_of_dp_sgds_in_every_parameter(method, clipping):
    for moves in noise(method, clipping).values():
        measured = moves.square().mean().item()
        # Independent normal draws, n of them: relative standard deviation sqrt(2 / n); five are
        # passed by chance once in two million times for each of seven parameters.
        tolerance = 5 * math.sqrt(2 / moves.numel())
        assert measured == pytest.approx((1.3 * 0.4 / BATCH_SIZE) ** 2, rel=tolerance)


def test_noise_of_half_the_frequencies_has_a_quarter_of_the_variance_in_a_kernel():
    moves = noise({"name": "spectral_dp", "keep": 0.5}, "per_layer")
    # Nine entries of a kernel are correlated: n is at the least the number of kernels drawn.
    for k, share in {"0.weight": 0.25, "4.weight": 0.25, "6.weight": 0.5}.items():
        tolerance = 5 * math.sqrt(2 / (len(moves[k]) * math.prod(moves[k].shape[1:3])))
        white = (1.3 * 0.4 / BATCH_SIZE) ** 2
        assert moves[k].square().mean().item() == pytest.approx(share * white, rel=tolerance)
