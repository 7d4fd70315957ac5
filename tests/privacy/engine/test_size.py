"""A microbatch is sized by what an example keeps in memory, and by nothing that may change."""

import math

import pytest
import torch
from pairs import pairs
from torch import nn

from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine
from dpsweep.privacy.engine.size import (
    PeakMemory,
    choose_batch,
    choose_gpu_batch,
    estimate_bytes_per_example,
    measure_peak_bytes,
)
from dpsweep.privacy.query import EvaluationPoint, FixedQuery

CPU = torch.device("cpu")
BUDGET, MOST = 192 * 2**20, 256
ENGINES = ["bookkeeping", "vmap", "opacus"]
SIZES = [1, 2, 7, 64, 100, 500, 4096, 60_000]
every_engine = pytest.mark.parametrize("engine", ENGINES)
every_size = pytest.mark.parametrize("batch_size", SIZES)


def net(width: int = 8, side: int = 16, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(2, width),
        nn.Flatten(),
        nn.Linear(width * side * side, 10),
    ).to(dtype)


def size(engine: str, width: int = 8, side: int = 16, dtype: torch.dtype = torch.float32) -> int:
    return estimate_bytes_per_example(net(width, side, dtype), (3, side, side), engine)


@every_engine
def test_larger_images_take_more(engine):
    sizes = [size(engine, side=side) for side in (4, 8, 16, 32)]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] > 3 * sizes[-2]  # four times the pixels


@every_engine
def test_wider_models_take_more(engine):
    sizes = [size(engine, width=width) for width in (2, 4, 8, 16)]
    assert sizes == sorted(set(sizes))


@every_engine
def test_double_precision_takes_twice_as_much(engine):
    assert size(engine, dtype=torch.float64) == 2 * size(engine)


@every_engine
def test_same_model_takes_the_same_every_time(engine):
    assert len({size(engine) for _ in range(5)}) == 1


def test_what_is_kept_is_counted_once_and_twice_for_its_gradient():
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    kept = 6 + 5 + 3  # the input, what Tanh and the second layer share, the output
    assert estimate_bytes_per_example(model, (6,), "bookkeeping") == 2 * 4 * kept
    own = 4 * (6 * 5 + 5 + 5 * 3 + 3)
    assert estimate_bytes_per_example(model, (6,), "vmap") == 2 * 4 * kept + 3 * own


def test_gradients_that_are_not_written_out_are_not_counted():
    linear, conv = nn.Linear(4, 4), nn.Conv2d(1, 4, 2)
    weights = 4 * sum(p.numel() for p in conv.parameters())
    kept = 2 * 4 * (1 * 9 * 1 + 4 * 4)
    assert estimate_bytes_per_example(conv, (1, 3, 3), "bookkeeping") == kept + weights
    assert estimate_bytes_per_example(linear, (4,), "bookkeeping") == 2 * 4 * (4 + 4)


def test_no_number_is_computed_and_the_model_is_left_alone():
    model = net()
    for p in model.parameters():
        p.data.fill_(math.nan)
    estimate_bytes_per_example(model, (3, 16, 16), "bookkeeping")
    assert all(p.device == CPU and p.grad is None and p.isnan().all() for p in model.parameters())


def fits_of(model: nn.Module, shape: tuple[int, ...], engine: str) -> float:
    """How many examples a processor takes at once."""
    return max(1.0, min(BUDGET / estimate_bytes_per_example(model, shape, engine), MOST))


@every_engine
@every_size
def test_few_even_parts_hold_a_batch_two_deviations_above_its_mean(batch_size, engine):
    at_once = choose_batch(net(), (3, 16, 16), batch_size, engine)
    parts = max(1, round(batch_size / fits_of(net(), (3, 16, 16), engine)))
    largest = batch_size + 2 * math.sqrt(batch_size)
    assert at_once < 4 or at_once % 4 == 0
    assert (at_once - (1 if at_once < 4 else 4)) * parts < largest <= at_once * parts


@pairs(side=[8, 32, 128], batch_size=SIZES, engine=ENGINES)
def test_memory_of_a_processor_is_kept_but_for_the_rounding(side, batch_size, engine):
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Tanh(), nn.Conv2d(32, 32, 3))
    at_once = choose_batch(model, (3, side, side), batch_size, engine)
    fits = fits_of(model, (3, side, side), engine)
    spread = 1 + 2 / math.sqrt(batch_size)
    # The number of parts is rounded to the nearest, so that 1.5 of what fits is one part.
    assert at_once <= math.ceil(1.5 * fits * spread)
    assert at_once >= min(0.6 * fits, batch_size)


def test_batch_that_fits_is_computed_at_once():
    assert choose_batch(nn.Linear(4, 2), (4,), 100, "bookkeeping") == 120


def test_batch_of_many_small_examples_is_computed_in_parts_on_a_processor():
    at_once = choose_batch(nn.Linear(4, 2), (4,), 1000, "bookkeeping")
    assert at_once == 4 * math.ceil((1000 + 2 * math.sqrt(1000)) / round(1000 / MOST) / 4)


def test_example_that_alone_is_too_large_is_computed_all_the_same():
    huge = nn.Linear(2**26, 1, device="meta")
    assert estimate_bytes_per_example(huge, (2**26,), "vmap") > BUDGET
    assert choose_batch(huge, (2**26,), 4, "vmap") == 2  # four parts, of eight at the most


def test_peak_counts_what_is_alive_at_once_and_no_more():
    with PeakMemory() as memory:
        first = torch.zeros(1000, dtype=torch.float64)
        del first
        kept = torch.zeros(250, dtype=torch.float64)
        view = kept[:10].view(2, 5)
        kept.add_(1)
        torch.zeros(500, dtype=torch.float64)
    assert memory.peak == 8000
    assert memory.held == 2000
    assert view.shape == (2, 5)


@pytest.mark.parametrize("points", [1, 3])
def test_memory_of_a_query_grows_with_its_points_and_examples(points):
    model = net()
    params = {k: p.detach() for k, p in model.named_parameters()}
    query = FixedQuery(tuple(EvaluationPoint(1 / points, age=age) for age in range(points)))

    def peak(rows):
        engine = BookkeepingEngine(model, nn.functional.cross_entropy, rows)
        return measure_peak_bytes(engine, query, Flat(1.0), params, (3, 16, 16), rows)

    activations = 2 * 4 * 16 * 14 * 14  # at least: one layer's output and its gradient
    assert peak(8) - peak(4) >= points * 4 * activations
    assert peak(32) - peak(16) == pytest.approx(2 * (peak(16) - peak(8)), rel=0.01)


def test_a_larger_gpu_takes_more_at_once_up_to_the_whole_batch():
    model = net()
    params = {k: p.detach() for k, p in model.named_parameters()}

    def at_once(gpu_bytes, held_bytes=0):
        return choose_gpu_batch(
            lambda rows: BookkeepingEngine(model, nn.functional.cross_entropy, rows),
            FixedQuery((EvaluationPoint(1.0),)),
            Flat(1.0),
            params,
            (3, 16, 16),
            10_000,
            gpu_bytes=gpu_bytes,
            held_bytes=held_bytes,
        )

    assert 1 <= at_once(1) < at_once(1e8) < at_once(4e8) < at_once(1e11) == 10_200
    assert at_once(4e8, held_bytes=2 * 10**8) < at_once(4e8)
