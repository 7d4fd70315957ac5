"""Models that take tensors by name: every engine is right about them, and mixing is found."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpsweep.core.inputs import apply_model, draw_inputs, replace_row, select_rows, take_rows
from dpsweep.core.types import Field, PerExample
from dpsweep.privacy.clip import Flat, clipped_sum
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.engine.mixing_check import find_mixing_sizes
from dpsweep.privacy.engine.repeatability import Probe
from dpsweep.privacy.engine.size import choose_batch
from dpsweep.privacy.geometry import IDENTITY

pytestmark = [
    pytest.mark.usefixtures("forgotten"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # Opacus' own
]

LENGTH, WORDS = 6, 11
SPEC = (Field("input_ids", (LENGTH,), num_ids=WORDS), Field("mask", (LENGTH,), is_mask=True))


class Reader(nn.Module):
    """A mean over the embeddings of an example's own words."""

    def __init__(self, pool: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 5), nn.Linear(5, 3)
        self.pool = pool

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.pool(self.words(input_ids).tanh(), mask[..., None].to(torch.float)))


def own_mean(words: Tensor, mask: Tensor) -> Tensor:
    return (words * mask).sum(1) / mask.sum(1)


def mean_of_longest(words: Tensor, mask: Tensor) -> Tensor:
    """Padded to the batch's longest: others' lengths show in the divisor."""
    return words[:, : int(mask.sum(1).max())].mean(1)


def mean_over_all_tokens(words: Tensor, mask: Tensor) -> Tensor:
    return (words * mask).sum(1) / mask.sum() * len(words)


def batch(num: int = 7) -> tuple[dict[str, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(3)
    inputs = draw_inputs(SPEC, num, rng, torch.zeros(()))
    assert isinstance(inputs, dict)
    return inputs, torch.arange(num) % 3


@pytest.mark.parametrize("choice", ["bookkeeping", "vmap", "opacus"])
@pytest.mark.parametrize("at_once", [3, 7])
def test_each_engine_answers_as_autograd_does(choice, at_once):
    net, (inputs_B, targets_B) = Reader(own_mean), batch()
    engine = make_engine(net, cross_entropy, IDENTITY, at_once, SPEC, choice)
    each: dict[str, list[Tensor]] = {k: [] for k, _ in net.named_parameters()}
    for i in range(7):
        one = slice(i, i + 1)
        value = cross_entropy(apply_model(net, take_rows(inputs_B, one)), targets_B[one])
        for k, grad in zip(each, torch.autograd.grad(value, net.parameters()), strict=True):
            each[k].append(grad)
    clip = Flat(0.5)
    expected = clipped_sum(PerExample({k: torch.stack(x) for k, x in each.items()}), clip)
    params = {k: p.detach() for k, p in net.named_parameters()}
    found = engine.clipped_sum([params], [1.0], inputs_B, targets_B, clip)
    for k, x in expected.items():
        torch.testing.assert_close(found[k].to(x), x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", [mean_of_longest, mean_over_all_tokens])
def test_length_of_another_example_is_found(pool):
    assert find_wrong_gradients(Reader(pool), cross_entropy, SPEC) is not None
    with pytest.raises(ValueError, match="mix"):
        make_engine(Reader(pool), cross_entropy, IDENTITY, 8, SPEC)


@pytest.mark.parametrize("pool", [mean_of_longest, mean_over_all_tokens])
def test_length_of_another_example_is_found_in_large_batches(pool):
    """Only batches of more than eight mix, which gradient_check.py does not try."""

    def late(words: Tensor, mask: Tensor) -> Tensor:
        return pool(words, mask) if len(words) > 8 else own_mean(words, mask)

    assert find_wrong_gradients(Reader(late), cross_entropy, SPEC, BookkeepingEngine) is None
    assert find_mixing_sizes(Reader(late), SPEC, [4, 64]) == "examples mix in batches of 64"
    assert find_mixing_sizes(Reader(own_mean), SPEC, [4, 64]) is None


def test_padding_may_hold_anything_where_a_model_masks_it():
    net, (inputs_B, _) = Reader(own_mean), batch()
    filled = dict(inputs_B, input_ids=inputs_B["input_ids"] * inputs_B["mask"])
    assert torch.equal(apply_model(net, inputs_B), apply_model(net, filled))


def test_inputs_that_are_drawn_have_all_lengths_and_ids():
    inputs_B, _ = batch(400)
    lengths = inputs_B["mask"].sum(1)
    assert set(lengths.tolist()) == set(range(1, LENGTH + 1))
    assert (inputs_B["mask"].diff(dim=1) <= 0).all(), "padding is at the end"
    assert set(inputs_B["input_ids"].unique().tolist()) == set(range(WORDS))


def test_rows_are_taken_and_replaced_in_all_fields_together():
    inputs_B, _ = batch()
    swapped = replace_row(inputs_B, 0, take_rows(inputs_B, slice(3, 4)))
    for name, x in swapped.items():
        assert torch.equal(x[0], inputs_B[name][3])
        assert torch.equal(x[1:], inputs_B[name][1:])
    chosen = select_rows(torch.arange(7) < 2, inputs_B, swapped)
    assert all(torch.equal(x, inputs_B[name]) for name, x in chosen.items())


def test_probe_and_batch_size_take_named_inputs():
    net = Reader(own_mean)
    Probe.of(net, SPEC).check()
    assert 1 <= choose_batch(net, SPEC, 100, "bookkeeping") <= 256


def test_vmap_takes_copies_of_named_inputs():
    net, (inputs_B, targets_B) = Reader(own_mean), batch(4)
    params = {k: p.detach() for k, p in net.named_parameters()}
    copies = {name: x.view(2, 2, LENGTH) for name, x in inputs_B.items()}
    sums = [
        engine(net, cross_entropy, 2, copies=2).clipped_sum(
            [params], [1.0], copies, targets_B[:2], Flat(0.3)
        )
        for engine in (VmapEngine, BookkeepingEngine)
    ]
    for k, x in sums[0].items():
        torch.testing.assert_close(sums[1][k], x, rtol=1e-5, atol=1e-7)
