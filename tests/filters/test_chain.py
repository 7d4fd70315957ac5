"""A chain is its filters one after the other."""

import torch

from dpsweep.core.types import Released
from dpsweep.filters.base import Chain, Public
from dpsweep.filters.lti import Ema
from dpsweep.filters.spectral import Shelf

NOWHERE = Public(step=0, params={}, noise_std=0.0)


def gradients(steps: int) -> list[Released]:
    rng = torch.Generator().manual_seed(7)
    return [Released({"w": torch.randn(5, 2, generator=rng)}) for _ in range(steps)]


def test_links_filter_in_the_order_they_are_given():
    first, second = Shelf(0.3, 0.6), Ema(0.4)
    chain = Chain((first, second))
    state = chain.init({})
    ours, theirs = first.init({}), second.init({})
    for grad in gradients(4):
        out, state = chain.apply(grad, state, NOWHERE)
        between, ours = first.apply(grad, ours, NOWHERE)
        expected, theirs = second.apply(between, theirs, NOWHERE)
        assert torch.equal(out["w"], expected["w"])


def test_each_link_has_its_own_memory():
    twice, once = Chain((Ema(0.4), Ema(0.4))), Chain((Ema(0.4),))
    state_of_two, state_of_one = twice.init({}), once.init({})
    for grad in gradients(3):
        out, state_of_two = twice.apply(grad, state_of_two, NOWHERE)
        single, state_of_one = once.apply(grad, state_of_one, NOWHERE)
    assert torch.equal(state_of_two[0]["w"], state_of_one[0]["w"])
    assert torch.equal(single["w"], state_of_two[0]["w"])
    assert not torch.equal(out["w"], single["w"])


def test_empty_chain_hands_the_gradient_through():
    (grad,) = gradients(1)
    out, state = Chain(()).apply(grad, Chain(()).init({}), NOWHERE)
    assert out is grad
    assert state == ()
