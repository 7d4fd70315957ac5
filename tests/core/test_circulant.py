"""CirculantLinear is the dense layer whose matrix its generators spell out."""

import math

import pytest
import torch
from torch.func import functional_call, grad, vmap

from dpsweep.core.circulant import CirculantLinear

SIZES = [(12, 8, 4), (6, 9, 3), (10, 5, 5), (7, 3, 1), (4, 4, 2)]
every_size = pytest.mark.parametrize(("inputs", "outputs", "block"), SIZES)


def matrix(weight: torch.Tensor) -> torch.Tensor:
    """The matrix of p x q circulant blocks, entry by entry from the definition."""
    p, q, d = weight.shape
    rows = [
        torch.stack([weight[i, j, (s - r) % d] for j in range(q) for r in range(d)])
        for i in range(p)
        for s in range(d)
    ]
    return torch.stack(rows)


def layer_and_inputs(inputs: int, outputs: int, block: int, dtype=torch.float64):
    torch.manual_seed(0)
    layer = CirculantLinear(inputs, outputs, block).to(dtype)
    return layer, torch.randn(5, 2, inputs, dtype=dtype)


@every_size
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_forward_and_gradient_are_those_of_the_materialised_matrix(
    inputs, outputs, block, dtype, atol
):
    layer, x = layer_and_inputs(inputs, outputs, block, dtype)
    y = layer(x)
    dense = torch.nn.functional.linear(x, matrix(layer.weight), layer.bias)
    assert y.dtype == dtype
    torch.testing.assert_close(y, dense, atol=atol, rtol=0)
    params = list(layer.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), params),
        torch.autograd.grad(dense.sin().sum(), params),
        atol=10 * atol,
        rtol=0,
    )


def test_any_leading_axes_give_the_same_rows():
    layer, x = layer_and_inputs(12, 8, 4)
    one_by_one = torch.stack([layer(row) for row in x.flatten(0, 1)])
    torch.testing.assert_close(layer(x).flatten(0, 1), one_by_one)
    assert layer(x[:0]).shape == (0, 2, 8)


def test_per_example_gradients_by_vmap_are_those_of_a_loop():
    layer, x = layer_and_inputs(12, 8, 4)
    params = {k: p.detach() for k, p in layer.named_parameters()}

    def loss(params, row):
        return functional_call(layer, params, (row,)).sin().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(params, x)
    for b, row in enumerate(x):
        alone = torch.autograd.grad(layer(row).sin().sum(), list(layer.parameters()))
        torch.testing.assert_close([g[b] for g in together.values()], list(alone))


def test_meta_device_knows_the_shapes():
    with torch.device("meta"):
        layer = CirculantLinear(12, 8, 4)
    assert layer.weight.shape == (2, 3, 4)
    assert layer(torch.empty(5, 12, device="meta")).shape == (5, 8)


def test_without_bias_zero_goes_to_zero():
    layer = CirculantLinear(12, 8, 4, bias=False)
    assert [k for k, _ in layer.named_parameters()] == ["weight"]
    assert torch.equal(layer(torch.zeros(12)), torch.zeros(8))


def test_initial_output_varies_as_much_as_that_of_a_dense_layer():
    torch.manual_seed(0)
    inputs, layers = 64, 400
    x = torch.ones(inputs)
    # Each entry sums 64 weights and a bias, all of variance 1/(3 inputs). 400 layers of 8 runs
    # give 3200 independent ones at least, so a sample variance of relative standard deviation
    # sqrt(2/3199) = 2.5%; 5 of them make a false alarm a one-in-two-million event.
    expected = (inputs + 1) / (3 * inputs)
    outputs = torch.cat([CirculantLinear(inputs, 64, 8)(x)[::8] for _ in range(layers)])
    assert outputs.var().item() == pytest.approx(expected, rel=5 * math.sqrt(2 / 3199))
    dense = torch.cat([torch.nn.Linear(inputs, 8)(x) for _ in range(layers)])
    assert outputs.var().item() == pytest.approx(dense.var().item(), rel=10 * math.sqrt(2 / 3199))


def test_initial_values_follow_the_global_seed_and_stay_in_the_bound():
    torch.manual_seed(3)
    first = CirculantLinear(64, 64, 8)
    torch.manual_seed(3)
    second = CirculantLinear(64, 64, 8)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)
    assert 0.11 < first.weight.abs().max().item() <= 1 / 8


def test_repr_is_the_call_that_makes_the_layer():
    expected = "CirculantLinear(in_features=12, out_features=8, block=4, bias=False)"
    assert repr(CirculantLinear(12, 8, 4, bias=False)) == expected


@pytest.mark.parametrize("block", [5, 3, 8, 0, -1])
def test_block_that_does_not_divide_both_sizes_is_refused(block):
    message = (
        rf"block must divide both in_features = 12 and out_features = 8, got {block}\. "
        r"Blocks that fit: 1, 2, 4\."
    )
    with pytest.raises(ValueError, match=message):
        CirculantLinear(12, 8, block)
