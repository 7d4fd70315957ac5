"""Copies in one piece of memory have the numbers and the layout of what they are copies of."""

import pytest
import torch

from dpsweep.core.flat import copy_flat, in_memory_order, make_zeros

LEAVES = {
    "plain": torch.arange(6.0).view(2, 3),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "turned": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "with gaps": torch.arange(12.0).view(3, 4)[:, ::2],
    "expanded": torch.ones(3, 1).expand(3, 4),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "whole numbers": torch.arange(4),
    "double": torch.tensor([0.1, float("nan"), -0.0], dtype=torch.float64),
}


def test_copies_have_the_numbers_and_the_layout_of_their_tensors():
    for name, copy in zip(LEAVES, copy_flat(LEAVES.values()), strict=True):
        leaf = LEAVES[name]
        assert (copy.dtype, copy.shape) == (leaf.dtype, leaf.shape)
        assert torch.equal(copy.nan_to_num(7), leaf.nan_to_num(7)), name
        assert copy.data_ptr() != leaf.data_ptr() or not leaf.numel()
        if name not in ("with gaps", "expanded", "empty"):
            assert copy.stride() == leaf.stride(), name


def test_copies_of_one_precision_share_their_memory_and_may_have_another():
    floats = [x for x in LEAVES.values() if x.dtype == torch.float32]
    copies = copy_flat(floats, torch.float64)
    assert len({x.untyped_storage().data_ptr() for x in copies}) == 1
    for leaf, copy in zip(floats, copies, strict=True):
        assert torch.equal(leaf.double(), copy)


@pytest.mark.parametrize("name", LEAVES)
def test_a_line_is_no_copy_where_there_are_no_gaps(name):
    leaf = LEAVES[name]
    line, stride = in_memory_order(leaf)
    assert torch.equal(line.as_strided(leaf.shape, stride).nan_to_num(7), leaf.nan_to_num(7))
    if name not in ("with gaps", "expanded"):
        assert line.data_ptr() == leaf.data_ptr()


def test_zeros_are_views_of_one_tensor():
    zeros = make_zeros([(2, 3), (), (4,)], torch.float64, torch.device("cpu"))
    assert [tuple(x.shape) for x in zeros] == [(2, 3), (), (4,)]
    assert len({x.untyped_storage().data_ptr() for x in zeros}) == 1
    assert not any(x.any() for x in zeros)
