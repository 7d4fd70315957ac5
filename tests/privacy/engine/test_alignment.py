"""Linear layers whose rows MKL would compute otherwise at another place of the batch."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpsweep.core.threads import torch_threads
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine
from dpsweep.privacy.engine.alignment import aligned, aligned_linear, find_unaligned
from dpsweep.privacy.engine.base import draw_classes
from dpsweep.privacy.engine.mixing_check import find_place_dependence
from dpsweep.privacy.engine.opacus import OpacusEngine

ROWS, PLACES = 64, (1, 2, 3, 33)
every_number_of_threads = pytest.mark.parametrize("threads", [1, 2, 3, 4])


def layer_and_inputs(inputs: int, outputs: int, *shape: int) -> tuple[nn.Linear, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(inputs, outputs), torch.randn(*shape, inputs)


@every_number_of_threads
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("inputs", "outputs", "shape"), [(13, 10, (5,)), (10, 13, (2, 3)), (8, 4, (5,)), (13, 1, (5,))]
)
def test_outputs_and_gradients_are_those_of_the_layer(inputs, outputs, shape, bias, threads):
    layer, x = layer_and_inputs(inputs, outputs, *shape)
    layer, x = layer.double(), x.double().requires_grad_()
    given = layer.weight, layer.bias if bias else None
    leaves = [x, *(leaf for leaf in given if leaf is not None)]
    with torch_threads(threads):
        ours, theirs = aligned_linear(x, *given), F.linear(x, *given)
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs)
        weights = torch.arange(ours.numel()).view(ours.shape).double()
        for a, b in zip(
            torch.autograd.grad((ours * weights).sum(), leaves),
            torch.autograd.grad((theirs * weights).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@every_number_of_threads
@pytest.mark.parametrize("outputs", [1, 2, 7, 11, 12, 17, 67])
@pytest.mark.parametrize("inputs", [3, 10, 13, 102])
def test_each_row_is_computed_alike_at_every_place(inputs, outputs, threads):
    layer, x = layer_and_inputs(inputs, outputs, ROWS)
    grad = torch.randn(ROWS, outputs, generator=torch.Generator().manual_seed(1))

    def asked(by: int) -> list[Tensor]:
        moved = x.roll(by, 0).requires_grad_()
        made = aligned_linear(moved, layer.weight, layer.bias)
        (back,) = torch.autograd.grad((made * grad.roll(by, 0)).sum(), moved)
        return [made.roll(-by, 0), back.roll(-by, 0)]

    with torch_threads(threads):
        made, back = asked(0)
        for by in PLACES:
            for ours, theirs in zip(asked(by), (made, back), strict=True):
                assert torch.equal(ours, theirs), by


@every_number_of_threads
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(13, 33), nn.LayerNorm(33), nn.Linear(33, 17), nn.Linear(17, 10)),
        nn.Sequential(
            nn.Unflatten(1, (1, 13)),
            nn.TransformerEncoderLayer(13, 1, 22, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(13, 3),
        ),
    ],
    ids=["narrow", "wide", "attention"],
)
def test_every_record_is_computed_alike_at_every_place(model, threads):
    with torch_threads(threads):
        for num in (4, 64, 100):
            engine = BookkeepingEngine(model, F.cross_entropy, num)
            assert find_place_dependence(engine, (13,), num, draw_classes) is None


@pytest.mark.parametrize("engine", [BookkeepingEngine, OpacusEngine])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_other_examples_gradients_do_not_depend_on_their_place(engine):
    """In a model that amplifies rounding: without the zeros a sum moves by 9 C."""
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    model = nn.Sequential(nn.Linear(13, 2), nn.Linear(2, 32), *layers, nn.Linear(32, 4))
    point = {k: 6 * p.shape[-1] ** -0.5 * torch.randn_like(p) for k, p in model.named_parameters()}
    inputs, targets = torch.randn(200, 13), torch.arange(200) % 4
    found = engine(model, F.cross_entropy, 256)

    def asked(first: int) -> Tensor:
        total = found.clipped_sum([point], [1.0], inputs[first:], targets[first:], Flat(1.0))
        return torch.cat([leaf.flatten() for leaf in total.values()])

    sums = [asked(first) for first in range(6)]
    moves = [(more - fewer).norm().item() for more, fewer in pairwise(sums)]
    assert max(moves) < 1 + 1e-5


def test_layers_are_as_before_after_the_context_and_after_an_error():
    model = nn.Sequential(nn.Linear(13, 10), nn.Linear(8, 4))
    (layer,) = found = find_unaligned(model)
    assert layer is model[0]
    with aligned(found):
        assert "forward" in vars(layer)
    with pytest.raises(RuntimeError, match="shapes"), aligned(found):
        model(torch.ones(1, 13))
    assert "forward" not in vars(layer)


def test_layers_that_compute_something_else_are_left_alone():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    wrapped = nn.Linear(13, 10)
    wrapped.forward = lambda x: 2 * F.linear(x, wrapped.weight, wrapped.bias)
    assert find_unaligned(nn.Sequential(Scaled(13, 10), wrapped)) == []
