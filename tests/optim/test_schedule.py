"""Learning rates rise by equal stairs and fall along a cosine."""

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from dpsweep.optim.base import Base
from dpsweep.optim.schedule import Constant, Cosine

STEPS = 100


def factors(schedule: Constant | Cosine, steps: int = STEPS) -> list[float]:
    return [schedule.factor(t, steps) for t in range(steps)]


def test_constant_is_one_throughout():
    assert factors(Constant()) == [1.0] * STEPS


@pytest.mark.parametrize("kind", [Constant, Cosine])
def test_warm_up_rises_by_equal_stairs_to_the_peak(kind):
    rise = factors(kind(warmup=0.2))[:20]
    assert rise == pytest.approx([(t + 1) / 20 for t in range(20)])
    assert max(factors(kind(warmup=0.2))) == 1.0


def test_constant_stays_at_the_peak_after_the_warm_up():
    assert factors(Constant(warmup=0.2))[20:] == [1.0] * 80


@pytest.mark.parametrize(
    ("step", "factor"),
    [(0, 1.0), (25, (2 + math.sqrt(2)) / 4), (50, 0.5), (75, 0.14644660940672624)],
)
def test_cosine_falls_from_one_to_zero(step, factor):
    assert Cosine().factor(step, STEPS) == pytest.approx(factor, rel=1e-12)


def test_cosine_ends_just_above_its_final_share():
    assert Cosine(final=0.2).factor(STEPS, STEPS) == pytest.approx(0.2)
    assert 0.2 < Cosine(final=0.2).factor(STEPS - 1, STEPS) < 0.201


def test_cosine_after_a_warm_up_takes_the_rest_of_the_run():
    schedule = Cosine(warmup=0.2, final=0.2)
    assert schedule.factor(20, STEPS) == 1.0
    assert schedule.factor(60, STEPS) == pytest.approx(0.6)
    fall = factors(schedule)[20:]
    assert fall == sorted(fall, reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("schedule", [Constant(warmup=0.5), Cosine(warmup=0.9), Cosine()], ids=repr)
def test_runs_of_few_steps_learn_at_every_one(schedule, steps):
    assert all(0 < factor <= 1 for factor in factors(schedule, steps))


@pytest.mark.parametrize("wrong", [{"warmup": 1.0}, {"warmup": -0.1}, {"final": 1.1}])
def test_shares_outside_their_range_are_refused(wrong):
    (key,) = wrong
    with pytest.raises(ValidationError, match=rf"{key}\n  Input should be (greater|less) than"):
        Cosine(**wrong)


@pytest.mark.parametrize("kind", [Constant, Cosine])
def test_schedule_is_told_by_its_name(kind):
    name = kind().name
    config = TypeAdapter(Base).validate_python({"lr": 1.0, "schedule": {"name": name}})
    assert config.schedule == kind()
