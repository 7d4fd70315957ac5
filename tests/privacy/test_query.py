"""A query's points are where the last iterates say, and its answers weigh what they should."""

import math
from collections.abc import Sequence

import pytest
import torch

from dpsweep.core.types import Clipped, PerExample, Released, Tensors
from dpsweep.filters.lti import Ema, Riccati
from dpsweep.methods.disk import LookAhead
from dpsweep.privacy.clip import Automatic, Clip, Flat, PerLayer, clipped_sum
from dpsweep.privacy.query import NEWEST_ITERATE, EvaluationPoint, FixedQuery, SplitQuery

BEFORE = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(4.0)}
NOW = {"w": torch.tensor([2.0, 0.0]), "b": torch.tensor(4.5)}


class Asked:
    """Keep the points and weights of each call, and return the weighted sum of the points."""

    def __init__(self) -> None:
        self.points: list[Sequence[Tensors]] = []
        self.weights: list[list[float]] = []

    def __call__(self, points: Sequence[Tensors], weights: Sequence[float]) -> Clipped:
        self.points.append(points)
        self.weights.append(list(weights))
        pairs = list(zip(points, weights, strict=True))
        return Clipped({k: sum(weight * point[k] for point, weight in pairs) for k in points[0]})


def make_iterates(num: int) -> list[Tensors]:
    """A trail whose newest iterate holds 0, the one before it 1, and so on."""
    return [{"w": torch.tensor([float(age)])} for age in reversed(range(num))]


# One point.


@pytest.mark.parametrize("iterates", [[NOW], [BEFORE, NOW]])
def test_here_is_the_newest_iterate_itself(iterates):
    (ask,) = NEWEST_ITERATE.evaluation_points(7)
    assert ask.weight == 1.0
    assert ask.point(iterates) is NOW


@pytest.mark.parametrize(
    ("ahead", "w", "b"),
    [(0.5, [2.5, -1.0], 4.75), (2.0, [4.0, -4.0], 5.5), (-1.0, [1.0, 2.0], 4.0)],
)
def test_point_ahead_lies_on_the_line_of_the_last_step(ahead, w, b):
    point = EvaluationPoint(weight=1.0, ahead=ahead).point([BEFORE, NOW])
    assert list(point) == ["w", "b"]
    assert torch.equal(point["w"], torch.tensor(w))
    assert torch.equal(point["b"], torch.tensor(b))


def test_before_the_second_iterate_there_is_no_step_to_look_along():
    assert EvaluationPoint(weight=1.0, ahead=0.5).point([NOW]) is NOW


def test_only_the_newest_two_of_a_longer_trail_matter():
    older = {"w": torch.full((2,), 99.0), "b": torch.tensor(99.0)}
    ask = EvaluationPoint(weight=1.0, ahead=0.5)
    assert torch.equal(ask.point([older, BEFORE, NOW])["w"], ask.point([BEFORE, NOW])["w"])


@pytest.mark.parametrize("age", [0, 1, 4])
def test_age_counts_steps_back_from_the_newest(age):
    iterates = make_iterates(5)
    assert EvaluationPoint(weight=1.0, age=age).point(iterates) is iterates[-1 - age]


def test_point_ahead_of_an_older_iterate_goes_along_the_newest_step():
    iterates = [{"w": torch.tensor([x])} for x in (10.0, 3.0, 5.0)]
    assert EvaluationPoint(weight=1.0, age=2, ahead=0.5).point(iterates)[
        "w"
    ].item() == 10.0 + 0.5 * (5.0 - 3.0)


@pytest.mark.parametrize(
    ("query", "kept"),
    [
        (NEWEST_ITERATE, 1),
        (FixedQuery((EvaluationPoint(1.0, ahead=0.5),)), 2),
        (FixedQuery((EvaluationPoint(0.5), EvaluationPoint(0.5, ahead=-1.0))), 2),
        (FixedQuery((EvaluationPoint(0.5), EvaluationPoint(0.5))), 1),
        (FixedQuery((EvaluationPoint(0.5), EvaluationPoint(0.5, age=3))), 4),
        (FixedQuery((EvaluationPoint(0.5, ahead=1.0), EvaluationPoint(0.5, age=1))), 2),
        (SplitQuery(0.5, 0.9, 0.2), 2),
        (LookAhead(Ema(0.7), 0.5), 2),
    ],
)
def test_memory_is_how_many_iterates_the_farthest_look_needs(query, kept):
    assert query.memory == kept


# Points answered together.

MOMENTUM = FixedQuery(
    (EvaluationPoint(0.5), EvaluationPoint(0.3, age=1), EvaluationPoint(0.2, age=2))
)


def test_points_are_asked_at_their_iterates_with_their_weights():
    sum_clipped, iterates = Asked(), make_iterates(3)
    answer = MOMENTUM.evaluate(sum_clipped, iterates, 2)
    assert sum_clipped.points == [[iterates[2], iterates[1], iterates[0]]]
    assert sum_clipped.weights == [[0.5, 0.3, 0.2]]
    assert answer["w"].item() == pytest.approx(0.5 * 0 + 0.3 * 1 + 0.2 * 2)


def test_iterates_that_do_not_exist_yet_are_left_out_and_the_rest_share_the_whole_weight():
    sum_clipped, iterates = Asked(), make_iterates(2)
    MOMENTUM.evaluate(sum_clipped, iterates, 1)
    assert sum_clipped.points == [[iterates[1], iterates[0]]]
    assert sum_clipped.weights == [pytest.approx([0.5 / 0.8, 0.3 / 0.8])]


def test_weights_are_scaled_to_the_same_sum_also_where_that_is_not_one():
    sum_clipped = Asked()
    FixedQuery(
        (EvaluationPoint(1.0), EvaluationPoint(0.6, age=1), EvaluationPoint(0.4, age=2))
    ).evaluate(sum_clipped, make_iterates(2), 1)
    assert sum_clipped.weights == [pytest.approx([2 * 1 / 1.6, 2 * 0.6 / 1.6])]


@pytest.mark.parametrize(
    "query",
    [NEWEST_ITERATE, MOMENTUM, LookAhead(Ema(0.3), 0.5), LookAhead(Ema(0.3), None)],
    ids=repr,
)
def test_first_step_asks_once_with_the_whole_weight(query):
    sum_clipped, iterates = Asked(), [NOW]
    query.evaluate(sum_clipped, iterates, 0)
    assert sum_clipped.points == [[NOW]]
    assert sum_clipped.weights == [[pytest.approx(1.0, abs=1e-12)]]


@pytest.mark.parametrize(
    "query", [NEWEST_ITERATE, MOMENTUM, LookAhead(Riccati(0.5, 0.1), 0.5)], ids=repr
)
def test_joint_answer_is_the_gradient_and_its_noise_stays_as_it_is(query):
    released = Released({"w": torch.ones(3)})
    assert query.restore(released, 3) is released
    assert query.noise_gain(3) == 1.0


# DiSK's pair, whose weights may change from step to step.

FILTERS = [Ema(0.7), Ema(0.2), Riccati(0.5, 0.1), Riccati(0.05, 0.0), Riccati(3.0, 0.9)]
every_filter = pytest.mark.parametrize("gain", FILTERS, ids=repr)


@every_filter
@pytest.mark.parametrize("gamma", [0.5, 2.0, -1.0, 0.2])
def test_pair_has_the_printed_weights_of_the_steps_own_gain(gain, gamma):
    query = LookAhead(gain, gamma)
    for step in (0, 1, 2, 10, 1000):
        k = gain.gain_at(step)
        c = (1 - k) / (k * gamma)
        here, there = query.evaluation_points(step)
        assert (here.ahead, there.ahead) == (0.0, gamma)
        assert (here.age, there.age) == (0, 0)
        assert [here.weight, there.weight] == pytest.approx([1 - c, c], rel=1e-12)


def test_riccati_weights_change_and_settle():
    query = LookAhead(Riccati(0.3, 0.0), 0.5)
    weights = [query.evaluation_points(step)[1].weight for step in range(60)]
    assert weights[0] < weights[1] < weights[2]
    assert weights[58] == pytest.approx(weights[59], rel=1e-9)


@every_filter
def test_one_point_lies_where_its_weight_is_one(gain):
    query = LookAhead(gain, None)
    for step in (0, 1, 2, 10):
        k = gain.gain_at(step)
        assert query.evaluation_points(step) == (EvaluationPoint(1.0, ahead=(1 - k) / k),)


def test_one_point_is_what_the_pair_comes_to_at_its_distance():
    far = 0.7 / 0.3
    assert LookAhead(Ema(0.3), far).evaluation_points(0) == LookAhead(
        Ema(0.3), None
    ).evaluation_points(0)


@pytest.mark.parametrize("gamma", [0.5, None])
def test_full_gain_asks_here_alone(gamma):
    assert LookAhead(Ema(1.0), gamma).evaluation_points(4) == (EvaluationPoint(1.0),)


@every_filter
def test_pair_is_asked_at_the_newest_iterate_and_on_its_way(gain):
    sum_clipped = Asked()
    LookAhead(gain, 0.5).evaluate(sum_clipped, [BEFORE, NOW], 1)
    ((here, there),) = sum_clipped.points
    assert here is NOW
    assert torch.equal(there["w"], torch.tensor([2.5, -1.0]))


# Two points clipped apart.

C = 0.8
APARTS = [SplitQuery(0.5, 0.857, 0.2), SplitQuery(-1.0, -1.5, 0.5), SplitQuery(2.0, 0.1, 0.05)]
every_apart = pytest.mark.parametrize("query", APARTS, ids=repr)
every_clip = pytest.mark.parametrize("clip", [Flat(C), Automatic(C), PerLayer(C)], ids=repr)
SHAPES = {"0.weight": (4, 3), "0.bias": (3,), "2.weight": (5,)}


def answers(num: int, size: float, seed: int) -> PerExample:
    rng = torch.Generator().manual_seed(seed)
    return PerExample(
        {
            k: size * torch.randn((num, *shape), generator=rng, dtype=torch.float64)
            for k, shape in SHAPES.items()
        }
    )


def one_after_the_other(here: PerExample, there: PerExample, clip: Clip):
    """Clip the gradients of the first call, and then those of the second."""
    waiting = [here, there]
    return lambda points, weights: clipped_sum(waiting.pop(0), clip)


def norm(tree: Tensors) -> float:
    return math.sqrt(sum(x.square().sum().item() for x in tree.values()))


def test_apart_asks_twice_with_weight_one():
    sum_clipped, query = Asked(), SplitQuery(0.5, 0.9, 0.2)
    query.evaluate(sum_clipped, [BEFORE, NOW], 1)
    assert sum_clipped.weights == [[1.0], [1.0]]
    (here,), (there,) = sum_clipped.points
    assert here is NOW
    assert torch.equal(there["w"], torch.tensor([2.5, -1.0]))


@every_clip
@every_apart
def test_one_example_moves_both_parts_together_by_at_most_the_clip_norm(query, clip):
    iterates = [BEFORE, NOW]
    for seed, size in enumerate([0.01, 0.3, 1.0, 50.0]):
        here, there = answers(1, size, seed), answers(1, size, seed + 100)
        assert (
            norm(query.evaluate(one_after_the_other(here, there, clip), iterates, 1)) <= C + 1e-12
        )


@every_apart
def test_bound_on_both_parts_is_reached_by_gradients_that_turn_around(query):
    here = answers(1, 50.0, seed=0)
    there = PerExample({k: -g for k, g in here.items()})
    both = query.evaluate(one_after_the_other(here, there, Flat(C)), [BEFORE, NOW], 1)
    assert norm(both) == pytest.approx(C, rel=1e-12)


@every_apart
def test_restored_answer_is_the_gradient_and_c_times_its_change(query):
    here, there = answers(7, 0.3, seed=0), answers(7, 0.3, seed=1)
    r, r_there = clipped_sum(here, Flat(C)), clipped_sum(there, Flat(C))
    parts = query.evaluate(one_after_the_other(here, there, Flat(C)), [BEFORE, NOW], 1)
    restored = query.restore(Released(parts), 1)
    assert list(restored) == list(SHAPES)
    for k in SHAPES:
        expected = r[k] + query.weight * (r_there[k] - r[k])
        torch.testing.assert_close(restored[k], expected, rtol=1e-12, atol=1e-12)


@every_apart
def test_noise_gain_is_that_of_the_linear_map(query):
    own, other = 1 / math.sqrt(1 - query.share), 2 * query.weight / math.sqrt(query.share)
    assert query.noise_gain(5) == pytest.approx(own**2 + other**2, rel=1e-12)
    rng, num = torch.Generator().manual_seed(0), 40_000
    white = {f"{i}/w": torch.randn(num, generator=rng, dtype=torch.float64) for i in (0, 1)}
    measured = query.restore(Released(white), 5)["w"].square().mean().item()
    # 40,000 draws: relative standard deviation sqrt(2 / 40000); five of them are passed by
    # chance once in two million times, for each of the three.
    assert measured == pytest.approx(query.noise_gain(5), rel=5 * math.sqrt(2 / num))


@every_apart
def test_paper_noises_of_both_parts_add_up_to_the_steps_own(query):
    sigma = 1.7
    sigma_r, sigma_fd = sigma / math.sqrt(1 - query.share), 2 * sigma / math.sqrt(query.share)
    assert 1 / sigma_r**2 + 4 / sigma_fd**2 == pytest.approx(1 / sigma**2, rel=1e-12)
    # In gradient units: sigma_r C on the gradient, and c sigma_fd C / C beside it.
    gain = sigma_r**2 + (query.weight * sigma_fd) ** 2
    assert sigma**2 * query.noise_gain(0) == pytest.approx(gain, rel=1e-12)


def test_at_the_first_step_the_change_is_zero():
    here = answers(3, 1.0, seed=0)
    parts = SplitQuery(0.5, 0.9, 0.2).evaluate(one_after_the_other(here, here, Flat(C)), [NOW], 0)
    assert all((parts[f"1/{k}"] == 0).all() for k in SHAPES)


def test_points_of_both_parts_are_declared_like_those_of_the_pair():
    assert SplitQuery(0.5, 0.9, 0.2).evaluation_points(3) == (
        EvaluationPoint(1 - 0.9),
        EvaluationPoint(0.9, ahead=0.5),
    )
