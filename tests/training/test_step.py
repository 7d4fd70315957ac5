"""A step samples its own batch, moves the newest iterate and keeps the older ones whole."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import pytest
import torch
from torch import Tensor, nn

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Tensors
from dpsweep.data.read import Dataset
from dpsweep.optim.schedule import Constant, Cosine
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.clip import Clip
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.release import GRID_BITS
from dpsweep.training import step as step_module
from dpsweep.training.step import Progress, Step

STEPS = 10


class Slope(nn.Module):
    """Its output is its one parameter, so every example's gradient of it is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs_B: Tensor) -> Tensor:
        return self.x + 0 * inputs_B.flatten(1)


def downhill(output_11: Tensor, target_1: Tensor) -> Tensor:
    return output_11.sum()


def step_of(method: str = "dp_sgd", sigma: float = 0.0, **optimizer: object) -> Step:
    """Four examples in every batch, B = 4: without noise the release is 1 at every step."""
    config = TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small"},
            "privacy": {"noise_multiplier": sigma},
            "train": {"batch_size": 4, "epochs": 1, "dtype": "float64"},
            "optimizer": {"lr": 0.5, **optimizer},
            "method": {"name": method},
        }
    )
    inputs, targets = torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    data = Dataset(inputs, targets, inputs, targets, brightest=16)
    run = Run(sampling_rate=1.0, noise_multiplier=sigma, steps=STEPS)
    budget = PrivacyPlan(num_examples=4, run=run, epsilon=math.inf, delta=1e-5)
    return Step(config, budget, data, VmapEngine(Slope(), downhill, 4), Secret.fixed("step"))


def beginning(step: Step) -> Progress:
    return step.start({"x": torch.zeros(1, dtype=torch.float64)})


@pytest.mark.parametrize(
    "schedule", [Constant(), Constant(warmup=0.3), Cosine(), Cosine(warmup=0.25, final=0.1)]
)
@pytest.mark.parametrize("method", ["dp_sgd", "disk"])
def test_constant_release_is_descended_at_the_scheduled_rate(method, schedule):
    step = step_of(method, schedule=schedule.model_dump())
    progress, rates = beginning(step), []
    for t in range(STEPS):
        before = progress.params["x"].item()
        step(progress)
        rates.append(before - progress.params["x"].item())
        assert step.learning_rate(t) == 0.5 * schedule.factor(t, STEPS)
    assert rates == pytest.approx([0.5 * schedule.factor(t, STEPS) for t in range(STEPS)])


@pytest.mark.parametrize(("method", "kept"), [("dp_sgd", 1), ("disk", 2), ("fftkf", 2)])
def test_trail_holds_the_iterates_the_query_looks_at(method, kept):
    step = step_of(method, sigma=1.0)
    progress, visited = beginning(step), [0.0]
    for _ in range(4):
        step(progress)
        visited.append(progress.params["x"].item())
        assert [x["x"].item() for x in progress.iterates] == visited[-kept:]
    assert len(set(visited)) == 5


@pytest.mark.parametrize("method", ["dp_sgd", "dp_adam", "disk", "fftkf"])
def test_nothing_is_left_in_the_gradient_slots_after_a_step(method):
    step = step_of(method, sigma=1.0)
    progress = beginning(step)
    step(progress)
    assert all(x.grad is None for iterate in progress.iterates for x in iterate.values())
    assert progress.step == 1


def test_weight_decay_acts_in_the_optimizer_and_not_on_the_release():
    step = step_of(weight_decay=0.1)
    progress = step.start({"x": torch.full((1,), 8.0, dtype=torch.float64)})
    step(progress)
    assert progress.params["x"].item() == pytest.approx(8 - 0.5 * (1 + 0.1 * 8))


def test_each_step_draws_its_own_noise():
    step = step_of(sigma=1.0)
    progress, releases = beginning(step), []
    for _ in range(STEPS):
        before = progress.params["x"].item()
        step(progress)
        releases.append((before - progress.params["x"].item()) / 0.5)
    noise = [4 * (r - 1) for r in releases]
    expected = [
        float(Secret.fixed("step").stream(t, "noise").standard_normal(1)[0]) for t in range(STEPS)
    ]
    assert noise == pytest.approx(expected, abs=4 * 2**-GRID_BITS)  # the release's grid, times B


@dataclass(frozen=True)
class NotingDraws(Step):
    """The real step, noting which stream is drawn from at which step, and by which thread."""

    drawn: list[tuple[int, int, str]] = field(default_factory=list)
    now: list[int] = field(default_factory=lambda: [0])

    def __call__(self, progress: Progress) -> None:
        self.now[0] = progress.step
        super().__call__(progress)

    def draws(self, step: int, name: str):
        rng, noted, now = super().draws(step, name), self.drawn, self.now

        class Noted:
            def random(self, size):
                return rng.random(size)

            def standard_normal(self, size):
                noted.append((now[0], step, threading.current_thread().name))
                return rng.standard_normal(size)

        return Noted()


def test_a_thread_draws_the_noise_of_the_step_that_is_taken_and_of_no_other(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    here = threading.current_thread().name
    plain = step_of("disk", sigma=1.0)
    expected = beginning(plain)
    for _ in range(6):
        plain(expected)
    monkeypatch.setattr(step_module, "_FEWEST_DRAWN_BY_A_THREAD", 1)
    step = NotingDraws(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    progress = beginning(step)
    for _ in range(3):
        step(progress)
    saved = progress.state_dict()
    assert not any("noise" in key or "sizes" in key for key in saved)
    resumed = step.resume(saved)
    for _ in range(3):
        step(resumed)
    assert torch.equal(resumed.params["x"], expected.params["x"])
    assert [(now, t) for now, t, _ in step.drawn] == [(t, t) for t in range(6)]
    by_threads = [name != here for *_, name in step.drawn]
    assert by_threads == [False, True, True] * 2  # a process's first step learns what it needs


def test_without_noise_none_is_drawn(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(step_module, "_FEWEST_DRAWN_BY_A_THREAD", 1)
    plain = step_of(sigma=0.0)
    step = NotingDraws(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    progress = beginning(step)
    for _ in range(2):
        step(progress)
    assert step.drawn == []


@dataclass(frozen=True)
class Noting(VmapEngine):
    """The engine itself, keeping whom it is asked about by their targets."""

    batches: list[Tensor] = field(default_factory=list)

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Tensor,
        targets_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        self.batches.append(targets_B)
        return super().clipped_sum(points, weights, inputs_B, targets_B, clip)


@pytest.mark.parametrize("method", ["dp_sgd", "disk"])
def test_every_step_asks_a_poisson_sample_of_its_own(method):
    num_examples, num_steps, rate = 100, 400, 0.1
    step = step_of(method)
    data = replace(
        step.data,
        inputs=torch.zeros(num_examples, 1, 1, 1, dtype=torch.uint8),
        targets=torch.arange(num_examples),  # each example is told by its target
    )
    run = Run(sampling_rate=rate, noise_multiplier=0.0, steps=num_steps)
    budget = replace(step.plan, num_examples=num_examples, run=run)
    step = replace(step, data=data, plan=budget, engine=Noting(Slope(), downhill, 100))
    progress = beginning(step)
    table = torch.zeros(num_steps, num_examples, dtype=torch.float64)
    for t in range(num_steps):
        step(progress)
        table[t, step.engine.batches[t]] = 1
    # 40,000 coins. Five standard deviations each: a false alarm in two million for every line.
    deviation = math.sqrt(rate * (1 - rate) / table.numel())
    assert table.mean().item() == pytest.approx(rate, abs=5 * deviation)
    variance = table.sum(1).var().item()  # 0 if batches had a fixed size
    expected = num_examples * rate * (1 - rate)
    assert variance == pytest.approx(expected, rel=5 * math.sqrt(2 / (num_steps - 1)))
    coins = (table - rate) / math.sqrt(rate * (1 - rate))
    for lag in (1, 10):  # 1 if batches were fixed, -0.11 if epochs were shuffled
        product = coins[:-lag] * coins[lag:]
        assert abs(product.mean().item()) < 5 / math.sqrt(product.numel())
