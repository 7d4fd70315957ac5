"""AdamBC is the printed formula, and what it takes off is the noise that is really there."""

import io
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.optim.adam import AdamBC
from dpsweep.optim.eager import NOISE_VARIANCES
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.step import Step

STEPS = 30
LR = 0.01


def gradients(size: float = 1.0) -> np.ndarray:
    """Gradients of five parameters over STEPS steps, of lengths that differ, shape (T, 5)."""
    rng = np.random.default_rng(0)
    return size * rng.standard_normal((STEPS, 5)) * np.logspace(-3, 1, 5)


def printed(
    grads: np.ndarray, phi: float, *, beta1: float = 0.9, beta2: float = 0.999, floor: float = 1e-7
) -> np.ndarray:
    """AdamBC: theta -= lr m^ / sqrt(max(v^ - Phi, floor)) from theta = 1."""
    theta, m, v = np.ones(5), np.zeros(5), np.zeros(5)
    path = []
    for t, g in enumerate(grads, start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        theta = theta - LR * m_hat / np.sqrt(np.maximum(v_hat - phi, floor))
        path.append(theta)
    return np.stack(path)


def stepped(
    optimizer: torch.optim.Optimizer,
    param: Tensor,
    grads: np.ndarray,
    variances: list[float] | None,
) -> np.ndarray:
    """The parameter after each step; `variances`, one a step, for AdamBC alone."""
    path = []
    for t, g in enumerate(grads):
        param.grad = torch.from_numpy(g)
        if variances is not None:
            optimizer.param_groups[0][NOISE_VARIANCES] = [variances[t]]
        optimizer.step()
        path.append(param.numpy().copy())
    return np.stack(path)


def run(config: AdamBC, grads: np.ndarray, variances: list[float]) -> np.ndarray:
    param = torch.ones(5, dtype=torch.float64)
    return stepped(config.build([param], LR), param, grads, variances)


@pytest.mark.parametrize("phi", [0.0, 1e-4, 0.05, 100.0])
@pytest.mark.parametrize("moments", [{}, {"beta1": 0.0, "beta2": 0.9}, {"floor": 1e-2}], ids=repr)
def test_iterates_are_those_of_the_printed_formula(moments, phi):
    found = run(AdamBC(lr=LR, **moments), gradients(), [phi] * STEPS)
    np.testing.assert_allclose(found, printed(gradients(), phi, **moments), rtol=1e-9, atol=0)


def test_noise_of_changing_variance_is_averaged_as_the_second_moment_averages_it():
    beta2, variances = 0.9, np.linspace(0.5, 0.01, STEPS).tolist()
    grads = gradients() + 2  # so that nothing falls to the floor
    v = phi = np.zeros(5)
    m, theta, expected = np.zeros(5), np.ones(5), []
    for t, g in enumerate(grads, start=1):
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g**2
        phi = beta2 * phi + (1 - beta2) * variances[t - 1]
        clean = np.maximum((v - phi) / (1 - beta2**t), 1e-7)
        theta = theta - LR * m / (1 - 0.9**t) / np.sqrt(clean)
        expected.append(theta)
    found = run(AdamBC(lr=LR, beta2=beta2), grads, variances)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_without_noise_and_floor_it_is_torchs_adam(weight_decay):
    tiny = 1e-30
    config = AdamBC(lr=LR, floor=tiny, weight_decay=weight_decay)
    param = torch.ones(5, dtype=torch.float64)
    adam = torch.optim.Adam([param], lr=LR, eps=tiny, weight_decay=weight_decay)
    expected = stepped(adam, param, gradients(), None)
    np.testing.assert_allclose(run(config, gradients(), [0.0] * STEPS), expected, rtol=1e-9)


@pytest.mark.parametrize("floor", [1e-8, 1e-4])
def test_second_moment_below_the_noise_steps_by_the_floor(floor):
    grads = gradients(1e-6)
    found = run(AdamBC(lr=LR, floor=floor), grads, [1.0] * STEPS)
    m, theta, expected = np.zeros(5), np.ones(5), []
    for t, g in enumerate(grads, start=1):
        m = 0.9 * m + 0.1 * g
        theta = theta - LR * m / (1 - 0.9**t) / math.sqrt(floor)
        expected.append(theta)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_corrected_second_moment_finds_the_clean_one_under_noise():
    # Signal 0.3 at every step, noise of standard deviation 1: v^ is about 1.09, v^ - 1 about 0.09.
    num, steps, beta2 = 2000, 400, 0.99
    rng, param = torch.Generator().manual_seed(0), torch.zeros(2000, dtype=torch.float64)
    optimizer = AdamBC(lr=LR, beta2=beta2).build([param], LR)
    for _ in range(steps):
        param.grad = 0.3 + torch.randn(num, generator=rng, dtype=torch.float64)
        optimizer.param_groups[0][NOISE_VARIANCES] = [1.0]
        optimizer.step()
    state = optimizer.state[param]
    clean = (state["square"] - state["noise"]) / (1 - beta2**steps)
    # g^2 has variance 2 + 4 * 0.09; its average over steps has (1 - beta2) / (1 + beta2) of that,
    # and its mean over 2000 parameters a standard deviation of 0.0024. Five of them.
    deviation = math.sqrt((2 + 4 * 0.09) * (1 - beta2) / (1 + beta2) / num)
    assert clean.mean().item() == pytest.approx(0.09, abs=5 * deviation)


def test_resuming_from_a_saved_state_changes_nothing():
    config, grads, variances = AdamBC(lr=LR), gradients(), np.linspace(0.1, 1, STEPS).tolist()
    param = torch.ones(5, dtype=torch.float64)
    first = config.build([param], LR)
    stepped(first, param, grads[:11], variances[:11])
    disk = io.BytesIO()
    torch.save({"x": param, "optimizer": first.state_dict()}, disk)
    disk.seek(0)
    saved = torch.load(disk, weights_only=True)
    resumed = config.build([saved["x"]], LR)
    resumed.load_state_dict(saved["optimizer"])
    found = stepped(resumed, saved["x"], grads[11:], variances[11:])
    assert np.array_equal(found, run(config, grads, variances)[11:])


def test_single_precision_stays_single():
    param = torch.ones(3)
    param.grad = torch.ones(3)
    optimizer = AdamBC(lr=LR).build([param], LR)
    optimizer.param_groups[0][NOISE_VARIANCES] = [0.5]
    optimizer.step()
    assert param.dtype == torch.float32
    assert optimizer.state[param]["square"].dtype == torch.float32


def test_forgotten_variances_are_an_error_and_not_zero():
    param = torch.ones(3)
    param.grad = torch.ones(3)
    with pytest.raises(ValueError, match="zip"):
        AdamBC(lr=LR).build([param], LR).step()


@pytest.mark.parametrize("floor", [0.0, -1e-7])
def test_floor_of_zero_or_below_is_refused(floor):
    with pytest.raises(ValidationError, match=r"floor\n  Input should be greater than 0"):
        AdamBC(lr=LR, floor=floor)


# What the step tells it.

SIGMA, C, B = 1.3, 0.4, 64


def step_of(method: dict[str, object], clipping: object = "flat", **model: object) -> Step:
    config = TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 5, **model},
            "privacy": {"noise_multiplier": SIGMA, "clip_norm": C, "clipping": clipping},
            "train": {"batch_size": B, "epochs": 1, "dtype": "float64"},
            "optimizer": {"name": "adambc", "lr": LR},
            "method": method,
        }
    )
    return assemble_step(config, Secret.fixed("adambc"), torch.device("cpu"))


def variances_told(step: Step) -> dict[str, float]:
    """By parameter, at the first step, in units of (sigma C / B)^2."""
    progress = step.start(initial_params(step))
    step(progress)
    (group,) = progress.optimizer.param_groups
    names = [k for k, _ in step.engine.model.named_parameters()]
    white = (SIGMA * C / B) ** 2
    return dict(zip(names, (x / white for x in group[NOISE_VARIANCES]), strict=True))


SPLIT = {"name": "fftkf", "predictor": "split", "split_share": 0.2, "depth": 0.0, "kappa": 0.7}


@pytest.mark.parametrize(
    ("method", "gain"),
    [
        ({"name": "dp_adambc"}, 1.0),
        ({"name": "doppler", "filter": {"coefficients": {"a": [-0.9], "b": [0.1]}}}, 0.1 / 1.9),
        ({"name": "disk", "kappa": 0.7}, 0.7 / 1.3),
        ({"name": "fftkf", "kappa": 0.7, "depth": 0.6}, (0.5 + 0.5 * 0.4**2) * 0.7 / 1.3),
        ({"name": "innerouter", "outer_decay": 0.5}, 1 / (1 - 0.25)),
        (
            {"compose": {"base": "adambc", "filters": [{"name": "ema", "gain": 0.5}]}},
            1 / 3,
        ),
        # r_t + c h_t with c = 0.3 / 0.35, on noises 1 / sqrt(1-s) and 2 / sqrt(s), then the average
        (SPLIT, (1 / 0.8 + 4 * (0.3 / 0.35) ** 2 / 0.2) * 0.7 / 1.3),
    ],
    ids=str,
)
def test_variance_taken_off_is_that_behind_the_query_and_the_filters(method, gain):
    told = variances_told(step_of(method))
    assert told == pytest.approx(dict.fromkeys(told, gain), rel=1e-9)


def test_variance_of_two_averages_in_a_row_is_not_the_product_of_theirs():
    filters = [{"name": "ema", "gain": 0.5}, {"name": "ema", "gain": 0.5}]
    told = variances_told(step_of({"compose": {"base": "adambc", "filters": filters}}))
    # h_t = (t + 1) / 4 * 0.5^t; the sum of its squares is 5 / 27.
    assert told == pytest.approx(dict.fromkeys(told, 5 / 27), rel=1e-9)


def test_variance_taken_off_is_that_behind_the_geometry():
    step = step_of({"name": "spectral_dp", "keep": 0.5}, "per_layer", block=5)
    told = variances_told(step)
    assert {k for k, gain in told.items() if gain == 1} == {"0.bias", "3.bias", "7.bias"}
    for k in ("0.weight", "3.weight", "7.weight"):
        assert told[k] == pytest.approx(step.geometry.noise_gain(k), rel=1e-12)
        assert told[k] == pytest.approx(0.5 if k == "7.weight" else 0.25, rel=0.01)


def test_variance_grows_by_what_adaptive_clipping_spends_on_its_count():
    share = (SIGMA / (2 * 3.0)) ** 2
    told = variances_told(step_of({"name": "dp_adambc"}, {"name": "adaptive", "count_noise": 3.0}))
    assert told == pytest.approx(dict.fromkeys(told, 1 / (1 - share)), rel=1e-9)
