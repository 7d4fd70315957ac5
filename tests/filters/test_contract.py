"""What every filter promises, checked once for all of them. A new filter joins FILTERS."""

import io
import math

import pytest
import torch

from dpsweep.core.types import Released
from dpsweep.filters.base import Chain, Filter, Public
from dpsweep.filters.design import COEFFICIENT_SETS, butterworth
from dpsweep.filters.iir import Iir
from dpsweep.filters.lti import Ema, Momentum, Riccati
from dpsweep.filters.spectral import Shelf

SINGLE: list[Filter] = [
    Ema(0.3),
    Ema(1.0),
    Momentum(0.8),
    Riccati(0.3, 0.2),
    *(Iir(a, b) for a, b in COEFFICIENT_SETS.values()),
    Iir(*butterworth(4, 0.2)),
    Shelf(0.5, 0.5),
    Shelf(0.2, 0.9),
    Shelf(0.3, 0.8, "exponential"),
    Shelf(0.3, 0.8, "butterworth", "tensor", 2.0),
    Shelf(0.5, 0.5, scope="tensor"),
]
FILTERS: list[Filter | Chain] = [
    *SINGLE,
    Chain(()),
    Chain((Ema(0.3), Ema(0.9))),
    Chain((Shelf(0.5, 0.6), Ema(0.7))),
    Chain((Iir((-0.7, -0.2), (0.05, 0.05)), Riccati(0.1, 0.0))),
]
every_filter = pytest.mark.parametrize("filter_", FILTERS, ids=repr)
SHAPES = {"w": (3, 2), "b": (), "v": (7, 1, 2)}


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> list[Released]:
    rng = torch.Generator().manual_seed(7)
    return [
        Released({k: torch.randn(s, generator=rng, dtype=dtype) for k, s in SHAPES.items()})
        for _ in range(steps)
    ]


def public(step: int) -> Public:
    params = {k: torch.zeros(s) for k, s in SHAPES.items()}
    return Public(step=step, params=params, noise_std=1.0)


def filtered(filter_: Filter | Chain, stream: list[Released]) -> list[Released]:
    state, out = filter_.init(public(0).params), []
    for t, grad in enumerate(stream):
        result, state = filter_.apply(grad, state, public(t))
        out.append(Released({k: x.clone() for k, x in result.items()}))
    return out


@every_filter
def test_input_is_left_unchanged(filter_):
    state = filter_.init(public(0).params)
    for t, grad in enumerate(gradients(3)):
        before = {k: g.clone() for k, g in grad.items()}
        _, state = filter_.apply(grad, state, public(t))
        assert all(torch.equal(grad[k], before[k]) for k in grad)


@every_filter
def test_a_state_is_left_unchanged_by_the_next_step(filter_):
    first, second, third = gradients(3)
    _, state = filter_.apply(first, filter_.init(public(0).params), public(0))
    once, _ = filter_.apply(second, state, public(1))
    filter_.apply(third, state, public(1))
    again, _ = filter_.apply(second, state, public(1))
    assert all(torch.equal(once[k], again[k]) for k in once)


@every_filter
def test_resuming_from_a_saved_state_changes_nothing(filter_):
    state = filter_.init(public(0).params)
    for t, grad in enumerate(gradients(6)):
        if t == 3:
            disk = io.BytesIO()
            torch.save(state, disk)
            disk.seek(0)
            state = torch.load(disk, weights_only=True)
        resumed, state = filter_.apply(grad, state, public(t))
    straight = filtered(filter_, gradients(6))[-1]
    assert all(torch.equal(resumed[k], straight[k]) for k in straight)


@every_filter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_names_order_shapes_and_precision_are_kept(dtype, filter_):
    for grad, out in zip(gradients(3, dtype), filtered(filter_, gradients(3, dtype)), strict=True):
        assert list(out) == list(grad)
        assert all(out[k].shape == g.shape and out[k].dtype == dtype for k, g in grad.items())


@every_filter
def test_output_of_a_step_does_not_depend_on_later_gradients(filter_):
    short, long = filtered(filter_, gradients(3)), filtered(filter_, gradients(6))
    for early, same in zip(short, long[:3], strict=True):
        assert all(torch.equal(early[k], same[k]) for k in early)


@every_filter
def test_filter_is_linear(filter_):
    stream = gradients(4, torch.float64)
    scaled = [Released({k: -2.5 * g for k, g in grad.items()}) for grad in stream]
    for once, more in zip(filtered(filter_, stream), filtered(filter_, scaled), strict=True):
        for k in once:
            torch.testing.assert_close(more[k], -2.5 * once[k], rtol=1e-12, atol=1e-12)


@every_filter
def test_dc_gain_is_what_becomes_of_a_constant_gradient(filter_):
    stream = [Released({k: torch.ones(s, dtype=torch.float64) for k, s in SHAPES.items()})] * 400
    settled = filtered(filter_, stream)[-1]
    assert float(settled["w"].mean()) == pytest.approx(filter_.dc_gain, rel=1e-3)


@pytest.mark.parametrize("filter_", SINGLE, ids=repr)
def test_noise_gain_is_that_of_the_steady_state(filter_):
    num_params, steps = 4096, 60
    rng = torch.Generator().manual_seed(11)
    state = filter_.init({})
    for t in range(steps):
        white = Released({"w": torch.randn(num_params, generator=rng)})
        out, state = filter_.apply(white, state, public(t))
    # The mean square of 4096 draws, correlated by Shelf at most fivefold, has a relative standard
    # deviation of at most sqrt(2 * 5 / 4096) = 5 %; five of them: one false alarm in two million.
    assert out["w"].square().mean().item() == pytest.approx(
        filter_.noise_gain, rel=5 * math.sqrt(10 / num_params)
    )
