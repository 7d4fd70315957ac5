"""A tied embedding has one gradient of two terms; the norm is that of their sum, for any text."""

from itertools import product

import pytest
import torch
from torch import nn

from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine

VOCABULARY, WIDTH, LENGTH, C = 11, 6, 7, 1e-4


class Tied(nn.Module):
    """Next-token logits by the embedding itself, which may be called twice."""

    def __init__(self, padding: int | None, twice: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.twice = twice

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        if self.twice:
            hidden = hidden + self.embedding((ids + 1) % VOCABULARY)
        return self.head(hidden + self.inner(hidden).tanh())


def loss(outputs_B, targets_B):
    return nn.functional.cross_entropy(outputs_B.transpose(1, 2), targets_B)


def texts():
    rng = torch.Generator().manual_seed(0)
    same = [torch.full((1, LENGTH), token) for token in (0, 3)]
    runs = [torch.tensor([[0, 0, 0, 5, 5, 5, 1]]), torch.arange(LENGTH)[None]]
    drawn = [torch.randint(0, VOCABULARY, (1, LENGTH), generator=rng) for _ in range(4)]
    return [*same, *runs, *drawn]


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("twice", [False, True])
def test_one_text_moves_the_sum_by_at_most_the_clip_norm(padding, twice):
    torch.manual_seed(1)
    model = Tied(padding, twice)
    params = {k: x.detach() for k, x in model.named_parameters()}
    engines = [kind(model, loss, 4) for kind in (BookkeepingEngine, VmapEngine)]
    largest = 0.0
    for ids, targets in product(texts(), texts()):
        sums = [each.clipped_sum([params], [1.0], ids, targets, Flat(C)) for each in engines]
        ours, written_out = (torch.cat([x.flatten() for x in found.values()]) for found in sums)
        largest = max(largest, float(ours.norm()) / C)
        torch.testing.assert_close(ours, written_out.double(), rtol=1e-3, atol=1e-5 * C)
    assert 0.999 < largest <= 1 + 1e-5
