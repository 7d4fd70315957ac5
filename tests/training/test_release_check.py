"""Each check of a config's own releases holds for the real step, and finds the fault it is for."""

import math
import time
from dataclasses import replace
from itertools import count, islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import dpsweep.privacy.release
import dpsweep.training.step
from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped
from dpsweep.methods import METHODS
from dpsweep.privacy import correlated
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine
from dpsweep.privacy.history import NoiseHistory
from dpsweep.privacy.query import JointQuery
from dpsweep.privacy.sampling import poisson_batch
from dpsweep.training import release_check
from dpsweep.training.assemble import assemble_step_on
from dpsweep.training.release_check import (
    Check,
    _ascend_shares,
    _example_inputs,
    _iterates,
    check_releases,
    stand_in,
    table_of_checks,
)
from dpsweep.training.step import Step

QUICK = 0.2


def config(name: str = "dp_sgd", method: object = None, **privacy: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 5, "block": 5},
            "privacy": {"noise_multiplier": 1.1, **privacy},
            "train": {"batch_size": 64, "epochs": 1, "device": "cpu"},
            "optimizer": {"lr": 1.0},
            "method": {"name": name, **(method or {})},
        }
    )


def violated(trial: TrialConfig) -> set[str]:
    return {check.name for check in check_releases(trial, QUICK) if not check.holds}


@pytest.mark.parametrize("name", METHODS)
def test_the_real_step_holds(name):
    found = check_releases(config(name) if name != "compose" else config(), QUICK)
    assert [check.name for check in found] == ["noise", "sensitivity", "divisor", "sampling"]
    assert all(check.holds for check in found), table_of_checks(found)


@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer", "adaptive"])
def test_every_clipping_holds(clipping):
    assert not violated(config(clipping=clipping))


def test_clipping_is_reached_so_that_a_bound_means_something():
    (found,) = [c for c in check_releases(config(clip_norm=1e6), QUICK) if c.name == "sensitivity"]
    assert 0.99 < found.measured <= 1.002


def test_without_noise_only_the_rest_is_checked():
    names = [check.name for check in check_releases(config(noise_multiplier=0.0), QUICK)]
    assert names == ["sensitivity", "divisor", "sampling"]


def noise_at(patch: pytest.MonkeyPatch, share: float, only: str = "") -> None:
    sound = dpsweep.training.step.release

    def weakened(total, *, noise_multiplier, **rest):
        strong = sound(total, noise_multiplier=noise_multiplier, **rest)
        return {k: share * x if not only or k.endswith(only) else x for k, x in strong.items()}

    patch.setattr(dpsweep.training.step, "release", weakened)


def test_noise_at_nine_tenths_is_found(monkeypatch):
    noise_at(monkeypatch, 0.9)
    assert "noise" in violated(config())


def test_noise_that_one_bias_has_not_is_found(monkeypatch):
    """In a few draws too, as on a busy machine, or where a model has millions of weights."""
    noise_at(monkeypatch, 0.0, only="bias")
    found = check_releases(config(), 0.0)
    assert "noise" in {check.name for check in found if not check.holds}


def test_noise_that_is_the_same_at_every_step_is_found(monkeypatch):
    sound = Step.draws
    monkeypatch.setattr(Step, "draws", lambda self, step, name: sound(self, 0, name))
    assert {"noise", "sampling"} <= violated(config())


def test_norm_that_ignores_the_last_bias_is_found(monkeypatch):
    sound = Flat.factors

    def careless(self, squares):
        last = list(squares)[-1]
        return sound(self, squares | {last: torch.zeros_like(squares[last])})

    monkeypatch.setattr(Flat, "factors", careless)
    assert violated(config()) == {"sensitivity"}


def test_points_that_are_clipped_apart_and_added_are_found(monkeypatch):
    def clipped(self, sum_clipped, iterates, step):
        asks = self.evaluation_points(step)
        sums = [sum_clipped([ask.point(iterates)], [1.0]) for ask in asks]
        pairs = list(zip(asks, sums, strict=True))
        return Clipped({k: sum(ask.weight * part[k] for ask, part in pairs) for k in sums[0]})

    monkeypatch.setattr(JointQuery, "evaluate", clipped)
    assert violated(config("disk", {"kappa": 0.3})) == {"sensitivity"}


def test_engine_that_clips_only_usual_images_is_found(monkeypatch):
    """Black images pass unclipped: what only some data trigger."""
    sound = BookkeepingEngine.clipped_sum

    def careless(self, points, weights, inputs_B, targets_B, clip):
        total = sound(self, points, weights, inputs_B, targets_B, clip)
        black_B = (inputs_B.flatten(1) == -1).all(1)
        if black_B.any():
            wide = replace(clip, clip_norm=2 * clip.clip_norm)
            more = sound(self, points, weights, inputs_B[black_B], targets_B[black_B], wide)
            total = Clipped({k: x + more[k] for k, x in total.items()})
        return total

    monkeypatch.setattr(BookkeepingEngine, "clipped_sum", careless)
    assert violated(config()) == {"sensitivity"}


def test_divisor_of_the_true_batch_is_found(monkeypatch):
    sound, sizes = Step.batch, []

    def sampled(self, step):
        sizes.append(len(sound(self, step)))
        return sound(self, step)

    def divided(total, *, batch_size, **rest):
        true = max(1, sizes[-1]) if sizes else batch_size
        return dpsweep.privacy.release.release(total, batch_size=true, **rest)

    monkeypatch.setattr(Step, "batch", sampled)
    monkeypatch.setattr(dpsweep.training.step, "release", divided)
    assert "divisor" in violated(config())


@pytest.mark.parametrize("fault", ["fixed", "twice as many"])
def test_batches_that_are_no_poisson_samples_are_found(monkeypatch, fault):
    sound = dpsweep.training.step.poisson_batch

    def batches(num_examples, rate, rng):
        if fault == "fixed":
            return torch.randperm(num_examples)[: round(rate * num_examples)]
        return sound(num_examples, min(1.0, 2 * rate), rng)

    monkeypatch.setattr(dpsweep.training.step, "poisson_batch", batches)
    assert violated(config()) == {"sampling"}


def test_measurement_that_is_not_a_number_does_not_hold():
    check = Check("noise", math.nan, 6.0, "standard errors", 0.1)
    assert not check.holds
    assert "**VIOLATED**" in table_of_checks([check])


def test_search_gives_each_parameter_more_of_the_gradient_than_any_extreme_input():
    trial = config()
    step = assemble_step_on(stand_in(trial), plan_privacy(trial), trial, Secret.draw())
    progress = list(_iterates(step))[1]
    starts = _example_inputs(step.data, torch.Generator().manual_seed(0))
    target = torch.tensor([0])

    def shares(found):
        loss = nn.functional.cross_entropy
        params = {k: x.requires_grad_() for k, x in progress.params.items()}
        outputs = functional_call(step.engine.model, params, (step.data.scaled(found, step.dtype),))
        parts = torch.autograd.grad(loss(outputs, target), list(params.values()))
        squares = {k: float(x.square().sum()) for k, x in zip(params, parts, strict=True)}
        return {k: x / sum(squares.values()) for k, x in squares.items()}

    extreme = [shares(x) for x in starts]
    searched = [shares(x) for x in islice(_ascend_shares(step, progress, starts, target), 24)]
    gains = {k: max(s[k] for s in searched) / max(s[k] for s in extreme) for k in progress.params}
    assert min(gains.values()) > 0.999
    assert sum(gain > 1.1 for gain in gains.values()) >= 3, gains


# Correlated noise.

BANDS = {"name": "bandmf", "method": {"bands": 8}}


def test_noise_of_a_long_column_is_found(monkeypatch):
    sound = correlated.banded_coefficients
    monkeypatch.setattr(
        correlated, "banded_coefficients", lambda *args: tuple(1.5 * c for c in sound(*args))
    )
    assert violated(config(**BANDS)) == {"noise"}


def test_more_bands_than_groups_are_found(monkeypatch):
    sound = correlated.Banded.correlate
    monkeypatch.setattr(
        correlated.Banded, "correlate", lambda *args: replace(sound(*args), cycle=4)
    )
    assert violated(config(**BANDS)) == {"noise"}


def test_noise_that_is_not_taken_back_is_found(monkeypatch):
    def correlate(self, white, step):
        self.step += 1
        return white.div_(self.correlation.coefficients[0])

    monkeypatch.setattr(NoiseHistory, "correlate", correlate)
    assert violated(config(**BANDS)) == {"noise"}


def test_batches_of_all_groups_are_found(monkeypatch):
    def batch(self, step):
        found = self.plan.correlation  # None where the divisor is checked
        rate = self.plan.sampling_rate / (found.cycle if found else 1)
        return poisson_batch(self.plan.num_examples, rate, self.draws(step, "sample"))

    monkeypatch.setattr(Step, "batch", batch)
    assert violated(config(**BANDS)) == {"sampling"}


def test_time_limit_is_cpu_time_so_that_a_busy_machine_searches_as_much(monkeypatch):
    """The wall clock stood for it: at load 10 the search ended with its first parameter."""
    clocks = SimpleNamespace(thread_time=time.thread_time, monotonic=count(step=1000.0).__next__)
    monkeypatch.setattr(release_check, "time", clocks)
    asked = []
    ascend = _ascend_shares

    def counted(*args):
        for found in ascend(*args):
            asked.append(found)
            yield found

    monkeypatch.setattr(release_check, "_ascend_shares", counted)
    check_releases(config(), 1.5)
    assert len(asked) >= 4
