"""A query's points are where the last two iterates say."""

import pytest
import torch

from dpsweep.privacy.query import HERE, Ask, memory

BEFORE = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(4.0)}
NOW = {"w": torch.tensor([2.0, 0.0]), "b": torch.tensor(4.5)}


@pytest.mark.parametrize("trail", [[NOW], [BEFORE, NOW]])
def test_here_is_the_newest_iterate_itself(trail):
    (ask,) = HERE
    assert ask.weight == 1.0
    assert ask.point(trail) is NOW


@pytest.mark.parametrize(
    ("ahead", "w", "b"),
    [(0.5, [2.5, -1.0], 4.75), (2.0, [4.0, -4.0], 5.5), (-1.0, [1.0, 2.0], 4.0)],
)
def test_point_ahead_lies_on_the_line_of_the_last_step(ahead, w, b):
    point = Ask(weight=1.0, ahead=ahead).point([BEFORE, NOW])
    assert list(point) == ["w", "b"]
    assert torch.equal(point["w"], torch.tensor(w))
    assert torch.equal(point["b"], torch.tensor(b))


def test_before_the_second_iterate_there_is_no_step_to_look_along():
    assert Ask(weight=1.0, ahead=0.5).point([NOW]) is NOW


def test_only_the_newest_two_of_a_longer_trail_matter():
    older = {"w": torch.full((2,), 99.0), "b": torch.tensor(99.0)}
    ask = Ask(weight=1.0, ahead=0.5)
    assert torch.equal(ask.point([older, BEFORE, NOW])["w"], ask.point([BEFORE, NOW])["w"])


@pytest.mark.parametrize(
    ("query", "iterates"),
    [
        (HERE, 1),
        ((Ask(1.0, ahead=0.5),), 2),
        ((Ask(0.5), Ask(0.5, ahead=-1.0)), 2),
        ((Ask(0.5), Ask(0.5)), 1),
    ],
)
def test_memory_is_how_many_iterates_the_farthest_look_needs(query, iterates):
    assert memory(query) == iterates
