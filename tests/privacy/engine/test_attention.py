"""Attention in pieces returns what torch's does, and its projections answer as autograd."""

from functools import partial

import pytest
import torch
from oracle import BOTH_SIGNS, CLIPS, alone, draw, flat, params_of, points_of
from pairs import pairs
from torch import Tensor, nn
from torch.nn import functional as F

from dpsweep.privacy.clip import clipped_sum
from dpsweep.privacy.engine import BookkeepingEngine
from dpsweep.privacy.engine.attention import IN, OUT, attend, can_attend
from dpsweep.privacy.engine.layers import find_black_boxes, find_sites

NUM, HEADS, WIDTH, LENGTH = 3, 2, 4, 5
NEVER = float("-inf")
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
ADDED = draw(LENGTH, LENGTH, seed=50)
MASKS: dict[str, dict[str, object]] = {
    "none": {},
    "bool": {"attn_mask": CAUSAL},
    "float": {"attn_mask": ADDED},
    "float, a head": {"attn_mask": draw(NUM * HEADS, LENGTH, LENGTH, seed=51)},
    "bool, a head": {"attn_mask": CAUSAL.expand(NUM * HEADS, -1, -1)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "padding": {"key_padding_mask": PADDED},
    "padding in numbers": {
        "key_padding_mask": torch.zeros(NUM, LENGTH).double().masked_fill(PADDED, NEVER)
    },
    "causal and padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDED},
}
INPUTS = {"self": (0, 0, 0), "cross": (0, 1, 1), "three": (0, 1, 2), "keys apart": (0, 1, 0)}
ORDERS = {"batch": True, "length": False}
BIASES = {"bias": True, "no bias": False}
WEIGHTS = {"weights": True, "no weights": False}
pytestmark = pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule")


def attention(**options) -> nn.MultiheadAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
        for p in layer.parameters():  # torch begins biases at zero
            nn.init.normal_(p)
    return layer


def sequences(given: str, batch_first: bool) -> list[Tensor]:
    """Query, key and value; the same tensor where they are the same."""
    shape = (NUM, LENGTH, WIDTH) if batch_first else (LENGTH, NUM, WIDTH)
    drawn = [draw(*shape, seed=i) for i in range(3)]
    return [drawn[i] for i in INPUTS[given]]


class Attending(nn.Module):
    """Images as sequences of rows, attended to in one of several ways, then summed over."""

    def __init__(self, given: str, mask: str, batch_first: bool = True, **options) -> None:
        super().__init__()
        self.attention = attention(batch_first=batch_first, **options)
        self.given, self.batch_first = INPUTS[given], batch_first
        self.masks = {k: x for k, x in MASKS[mask].items() if k != "key_padding_mask"}
        self.pads = "key_padding_mask" in MASKS[mask]

    def forward(self, inputs: Tensor) -> Tensor:
        drawn = [inputs, inputs.sin(), inputs.flip(1)]
        if not self.batch_first:
            drawn = [x.transpose(0, 1) for x in drawn]
        padding = {"key_padding_mask": inputs[:, :, 0] > 1} if self.pads else {}
        q, k, v = (drawn[i] for i in self.given)
        output, _ = self.attention(q, k, v, **self.masks, **padding)
        return output.transpose(0, 1) if not self.batch_first else output


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.sin().sum(1), targets)


def agrees(model: nn.Module) -> None:
    """Asserts that book-keeping answers as plain autograd, at three points in every clipping."""
    inputs, targets = draw(NUM, LENGTH, WIDTH, seed=9), torch.tensor([0, 3, 1])
    inputs[:, 0, 0] = 0  # one key at least is never padding
    query = (points_of(model, 3), BOTH_SIGNS, inputs, targets)
    expected_B = alone(model, loss, *query)
    for clip in CLIPS.values():
        total = BookkeepingEngine(model, loss, 2).clipped_sum(*query, clip)
        expected = clipped_sum(expected_B, clip)
        torch.testing.assert_close(flat(total), flat(expected), rtol=1e-10, atol=1e-10)


@pairs(
    given=INPUTS.keys(), mask=MASKS.keys(), batch_first=ORDERS, bias=BIASES, need_weights=WEIGHTS
)
def test_output_is_torchs_own(given, mask, batch_first, bias, need_weights):
    layer = attention(batch_first=batch_first, bias=bias)
    q, k, v = sequences(given, batch_first)
    options = {**MASKS[mask], "need_weights": need_weights}
    expected, their_weights = layer(q, k, v, **options)
    output, weights = attend(layer, lambda *_: None, q, k, v, **options)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert (weights is None) == (their_weights is None) == (not need_weights)
    if need_weights:
        torch.testing.assert_close(weights, their_weights, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("need_weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("kind", ["bool", "float", "padding", "in turns"])
def test_query_that_may_attend_to_nothing_gets_torchs_own_answer(kind, need_weights):
    layer, given = attention(batch_first=True), sequences("self", batch_first=True)
    first = torch.arange(LENGTH).expand(LENGTH, -1) == 0
    nothing = {
        "bool": {"attn_mask": torch.arange(LENGTH)[:, None].expand(-1, LENGTH) < 2},
        "float": {"attn_mask": torch.full((LENGTH, LENGTH), NEVER, dtype=torch.float64)},
        "padding": {"key_padding_mask": torch.ones_like(PADDED)},
        "in turns": {"key_padding_mask": ~first[:NUM], "attn_mask": first},
    }[kind] | {"need_weights": need_weights}
    expected, _ = layer(*given, **nothing)
    output, _ = attend(layer, lambda *_: None, *given, **nothing)
    torch.testing.assert_close(output, expected, equal_nan=True)
    assert output.isnan().any() == need_weights


def test_attention_to_nothing_answers_as_autograd():
    class Padded(Attending):
        def forward(self, inputs: Tensor) -> Tensor:
            padding = (inputs[:, :1, 1] > -0.2).expand(-1, LENGTH)  # all of an example, or none
            return self.attention(*[inputs] * 3, key_padding_mask=padding, need_weights=False)[0]

    padded = draw(NUM, LENGTH, WIDTH, seed=9)[:, 0, 1] > -0.2
    assert padded.any()
    assert not padded.all()
    agrees(Padded("self", "none"))


def test_weights_of_each_head_are_torchs_own():
    layer, given = attention(batch_first=True), sequences("cross", batch_first=True)
    _, expected = layer(*given, average_attn_weights=False)
    _, weights = attend(layer, lambda *_: None, *given, average_attn_weights=False)
    assert weights.shape == (NUM, HEADS, LENGTH, LENGTH)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_keys_may_be_fewer_than_queries():
    layer, given = attention(batch_first=True), sequences("cross", batch_first=True)
    given = (given[0], given[1][:, :2], given[2][:, :2])
    expected, _ = layer(*given)
    output, _ = attend(layer, lambda *_: None, *given)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def test_causal_without_a_mask_is_refused_by_both():
    layer, given = attention(batch_first=True), sequences("self", batch_first=True)
    with pytest.raises(RuntimeError, match="is_causal"):
        layer(*given, is_causal=True)
    with pytest.raises(ValueError, match="is_causal is a hint, and needs attn_mask beside it"):
        attend(layer, lambda *_: None, *given, is_causal=True)


@pytest.mark.parametrize(
    ("given", "slots"), [("self", [None]), ("cross", [0, 1, 2]), ("keys apart", [0, 1, 2])]
)
@pytest.mark.parametrize("batch_first", ORDERS.values(), ids=ORDERS)
def test_each_projection_is_noted_with_its_input_and_examples_first(given, slots, batch_first):
    layer, notes = attention(batch_first=batch_first), []
    attend(layer, lambda *note: notes.append(note), *sequences(given, batch_first))
    assert [piece for piece, _, _ in notes] == [IN] * len(slots) + [OUT]
    assert [inputs[1] for _, inputs, _ in notes[:-1]] == slots
    assert all(len(inputs[0]) == len(output) == NUM for _, inputs, output in notes)
    ((mixed,), output) = notes[-1][1:]
    torch.testing.assert_close(output, layer.out_proj(mixed))


@pairs(given=INPUTS.keys(), batch_first=ORDERS, bias=BIASES)
def test_projections_answer_as_autograd(given, batch_first, bias):
    agrees(Attending(given, "none", batch_first, bias=bias))


@pytest.mark.parametrize("given", ["self", "three"])
@pytest.mark.parametrize("mask", ["bool", "float", "causal", "padding", "causal and padding"])
def test_masked_attention_answers_as_autograd(mask, given):
    agrees(Attending(given, mask))


@pytest.mark.parametrize(
    "options",
    [{"kdim": 3, "vdim": 3}, {"dropout": 0.1}, {"add_bias_kv": True}, {"add_zero_attn": True}],
    ids=lambda options: next(iter(options)),
)
def test_attention_of_another_make_is_not_computed_in_pieces(options):
    layer = attention(batch_first=True, **options)
    assert not can_attend(layer)
    assert find_black_boxes(nn.ModuleDict({"a": layer})) == ["'a' (MultiheadAttention)"]


def test_subclass_may_compute_something_else_and_is_not_computed_in_pieces():
    class Other(nn.MultiheadAttention):
        pass

    wrapped = attention()
    wrapped.forward = partial(wrapped.forward, need_weights=True)
    assert not can_attend(Other(WIDTH, HEADS))
    assert not can_attend(wrapped)
    assert can_attend(attention())


def test_layer_is_as_before_once_its_calls_are_recorded():
    model = Attending("self", "none")
    agrees(model)
    assert "forward" not in vars(model.attention)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
def test_transformer_layer_answers_as_autograd(norm_first, training):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 6, dropout=0.0, batch_first=True, norm_first=norm_first
        ).double()
    layer.train(training)
    assert set(find_sites(layer)) == {
        *("self_attn/in", "self_attn/out", "linear1", "linear2", "norm1", "norm2"),
    }
    agrees(layer)


def test_same_attention_called_twice_answers_as_autograd():
    class Twice(Attending):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(super().forward(inputs).sin())

    agrees(Twice("cross", "none"))


def test_shared_projections_answer_as_autograd():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Attending("self", "none")
            self.second = Attending("cross", "none")
            self.second.attention.in_proj_weight = self.first.attention.in_proj_weight

        def forward(self, inputs: Tensor) -> Tensor:
            return self.second(self.first(inputs))

    assert "second.attention.in_proj_weight" not in params_of(Tied())
    agrees(Tied())
