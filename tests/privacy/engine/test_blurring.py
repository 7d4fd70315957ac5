"""One example whose terms cancel does not take the low bits of the others, in any form of a sum.

In float32 a partial sum of size S loses 2^-24 S of all that is added to it. An example that is
within the clip norm may have terms of 5e5 clip norms that cancel. The tests search for the order
and the size of such terms that move the sum the most beyond the exact sum.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpsweep.core.circulant import CirculantLinear
from dpsweep.privacy.clip import Flat, compute_factors
from dpsweep.privacy.engine import BookkeepingEngine
from dpsweep.privacy.engine.bookkeeping import MappedGradients
from dpsweep.privacy.engine.conv import PhaseLayout
from dpsweep.privacy.engine.gradients import OuterProducts
from dpsweep.privacy.engine.layers import circulant, conv2d, embedding, linear
from dpsweep.privacy.engine.records import LayerCall
from dpsweep.privacy.spectral import ConvMap, Records

NUM, LENGTH = 319, 16
WEIGHT = frozenset({"weight"})
ALLOWED = 2e-4
"""Clip norms; without the split the search finds 0.004 to 0.02."""


def rounding(form: str, inputs_BTI: Tensor, grads_BTO: Tensor) -> Tensor:
    """What the clipped sum is away from the exact sum with the same factors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PhaseLayout, "cheaper_by_gram", lambda *_: True)
        patch.setattr(OuterProducts, "ghost_norm_is_cheaper", True)
        sums = []
        factor_B = None
        for dtype in (torch.float32, torch.float64):
            a, g = inputs_BTI.to(dtype), grads_BTO.to(dtype)
            width, out = a.shape[2], g.shape[2]
            if form == "linear":
                found = linear(nn.Linear(width, out), [LayerCall(1.0, (a,), g, {})], WEIGHT)
            elif form == "embedding":
                rows = torch.zeros(g.shape[:2], dtype=torch.long)
                found = embedding(nn.Embedding(3, out), [LayerCall(1.0, (rows,), g, {})], WEIGHT)
            elif form == "circulant":
                layer = CirculantLinear(width, out, block=width)
                found = circulant(layer, [LayerCall(1.0, (a,), g, {})], WEIGHT)
            else:
                images = [x.transpose(1, 2).unflatten(2, (4, 4)).contiguous() for x in (a, g)]
                convolution = nn.Conv2d(width, out, 3, padding=1)
                found = conv2d(convolution, [LayerCall(1.0, (images[0],), images[1], {})], WEIGHT)
            answer = found["weight"]
            if factor_B is None:
                factors, _ = compute_factors({"w": answer.squares().double()}, Flat(1.0))
                factor_B = factors["w"]
            sums.append(answer.sum_scaled(factor_B).double())
    return sums[0] - sums[1]


@pytest.mark.parametrize("form", ["linear", "embedding", "circulant", "convolution"])
def test_no_order_and_size_of_positions_that_cancel_blurs_the_others(form):
    others, grads = torch.ones(NUM, LENGTH, 8), torch.ones(NUM, LENGTH, 8)
    before, worst = rounding(form, others, grads), 0.0
    for run in (1, 4, 8):
        signs_T = 1.0 - 2 * (torch.arange(LENGTH) // run % 2)
        for size in 10.0 ** torch.arange(2, 8):
            crafted = (size * signs_T)[None, :, None].expand(1, LENGTH, 8)
            for at in (0, NUM // 2):
                inputs = torch.cat([others[:at], torch.ones(1, LENGTH, 8), others[at:]])
                moved = torch.cat([grads[:at], crafted, grads[at:]])
                after = rounding(form, inputs, moved)
                worst = max(worst, float((after - before).norm()))
    assert worst <= ALLOWED


class Signed(nn.Module):
    """Pixels as positions of a linear layer without bias, added with signs of a public size."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)
        self.register_buffer("signs_T", size * (1.0 - 2 * (torch.arange(8) // 4)))

    def forward(self, x: Tensor) -> Tensor:
        positions = self.linear(x.flatten(1).unflatten(1, (8, 32)))
        return (positions * self.signs_T[:, None]).sum(1)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
def test_one_crafted_image_of_whole_numbers_moves_the_sum_as_in_double(size):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (NUM + 1, 1, 16, 16)) / 255
    images[0] = 1.0  # one brightness: all positions cancel
    targets = torch.arange(NUM + 1) % 32
    moved = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        model = Signed(size).to(dtype)
        engine = BookkeepingEngine(model, F.cross_entropy, NUM + 1)
        params = {k: p.detach() for k, p in model.named_parameters()}
        sums = [
            engine.clipped_sum([params], [1.0], x.to(dtype), y, Flat(1.0))["linear.weight"]
            for x, y in ((images, targets), (images[1:], targets[1:]))
        ]
        moved.append(float((sums[0] - sums[1]).double().norm()))
    assert moved[1] < 1e-6
    assert moved[0] <= ALLOWED


@pytest.mark.parametrize("size", [1.0, 1e3, 1e6])
def test_image_whose_lags_cancel_does_not_blur_the_others_in_a_spectral_layer(size):
    layer_map = ConvMap.of(nn.Conv2d(1, 4, 3), (1, 8, 8), keep=0.5)
    inputs, grads = torch.ones(NUM + 1, 1, 8, 8), torch.ones(NUM + 1, 4, 6, 6)
    grads[0] = size * (1.0 - 2 * ((torch.arange(6)[:, None] + torch.arange(6)) % 2))
    sums, factor_B = [], None
    for dtype in (torch.float32, torch.float64):
        records = Records((1.0,), (inputs.to(dtype),), (grads.to(dtype),))
        answer = MappedGradients(layer_map, records)
        if factor_B is None:
            factor_B = compute_factors({"w": answer.squares()}, Flat(1.0))[0]["w"]
        without = torch.cat([torch.zeros(1), factor_B[1:]])
        sums.append(answer.sum_scaled(factor_B).double() - answer.sum_scaled(without).double())
    assert (sums[0] - sums[1]).norm() <= ALLOWED
