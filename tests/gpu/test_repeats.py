"""A step that is replayed on a GPU gives the same bits: no kernel adds in an order of its own."""

import torch
from steps import World, one_step
from torch import nn
from virtual import virtual_gpu

from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine


class Tied(nn.Module):
    """Words in, words out, by the same table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7)
        self.out.weight = self.table.weight

    def forward(self, words):
        return self.out(self.table(words.long()).tanh().mean(1))


def words_and_targets(device):
    torch.manual_seed(0)
    return torch.randint(0, 7, (6, 9)).to(device), torch.randint(0, 3, (6,)).to(device)


def clipped_sum(model, device):
    model = model.to(device)
    engine = BookkeepingEngine(model, nn.functional.cross_entropy, 4)
    point = {k: p.detach() for k, p in model.named_parameters()}
    return engine.clipped_sum([point], [1.0], *words_and_targets(device), Flat(0.1))


def check_same_on_cuda(make):
    torch.manual_seed(1)
    on_cpu = clipped_sum(make(), "cpu")
    with virtual_gpu() as gpu:
        torch.manual_seed(1)
        on_cuda = clipped_sum(make(), "cuda")
        assert gpu.unordered == []
        assert gpu.launches["index_put_"]
    for name, leaf in on_cpu.items():
        torch.testing.assert_close(on_cuda[name], leaf)


def test_rows_of_an_embedding_are_added_in_one_order():
    check_same_on_cuda(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(36, 3)))


def test_rows_of_an_embedding_that_is_used_again_are_added_in_one_order():
    check_same_on_cuda(Tied)


def test_a_step_of_a_transformer_adds_in_one_order():
    gpu = one_step(World("dp_sgd", "vit_small", 8))
    assert gpu.launches["index_put_"]
    assert gpu.unordered == []
