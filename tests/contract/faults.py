"""Faults of public code, each as a function that patches it into the package for one test.

test_planted_faults.py says which check catches which.
"""

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from world import World

from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.methods.momentum import InnerMomentum
from dpsweep.models import build_model
from dpsweep.privacy import correlated, noise
from dpsweep.privacy.clip import Clip, PerLayer, Quantile
from dpsweep.privacy.correlated import Banded, Correlation, PublicSettings
from dpsweep.privacy.engine import BookkeepingEngine, bookkeeping, conv, gradients, parallel
from dpsweep.privacy.engine import base as room_of_portions
from dpsweep.privacy.engine.base import Microbatch, split_microbatches
from dpsweep.privacy.engine.gradients import ParameterGradients, WrittenOut
from dpsweep.privacy.engine.records import LayerCall, record_calls
from dpsweep.privacy.engine.state_guard import StateGuard
from dpsweep.privacy.history import NoiseHistory
from dpsweep.privacy.query import EvaluationPoint, FixedQuery, JointQuery, SplitQuery
from dpsweep.privacy.spectral import ConvMap
from dpsweep.training import assemble as assemble_module
from dpsweep.training import step as step_module
from dpsweep.training.step import Progress, Step

Plant = Callable[[pytest.MonkeyPatch], None]


# Clipping.


def clip_each_then_combine(patch: pytest.MonkeyPatch) -> None:
    def clipped(self, sum_clipped, iterates, step):
        asks = self.evaluation_points(step)
        sums = [sum_clipped([ask.point(iterates)], [1.0]) for ask in asks]
        pairs = list(zip(asks, sums, strict=True))
        return Clipped({k: sum(ask.weight * part[k] for ask, part in pairs) for k in sums[0]})

    patch.setattr(JointQuery, "evaluate", clipped)


def sum_clipped_points(patch: pytest.MonkeyPatch) -> None:
    def clipped(self, sum_clipped, iterates, step):
        sums = [sum_clipped([ask.point(iterates)], [1.0]) for ask in self.evaluation_points(step)]
        return Clipped({k: sum(part[k] for part in sums) for k in sums[0]})

    patch.setattr(JointQuery, "evaluate", clipped)


def whole_bound_for_each_layer(patch: pytest.MonkeyPatch) -> None:
    resolved = PerLayer.resolve_bounds
    patch.setattr(
        PerLayer, "resolve_bounds", lambda self, names: dict.fromkeys(resolved(self, names), 1.0)
    )


def count_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quantile, "clip_norm", property(lambda self: self.bound))


def nan_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        bookkeeping, "compute_factors", lambda squares, clip, *_: (clip.factors(squares), {})
    )
    patch.setattr(gradients, "zero_excluded", lambda leaf_B, factor_B: leaf_B)
    patch.setattr(conv, "zero_excluded", lambda leaf, factor_B, dim=0: leaf)


def mean_loss(patch: pytest.MonkeyPatch) -> None:
    def mean(*args: object) -> dict[str, list[LayerCall]]:
        uses = record_calls(*args)
        return {k: [replace(use, grad=use.grad / 128) for use in u] for k, u in uses.items()}

    patch.setattr(bookkeeping, "record_calls", mean)


# Noise.


def changed_noise(change: Callable[[Tensor, str], Tensor]) -> Plant:
    """Noise that is changed after it was added: `change` is given it and its leaf's name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        release = step_module.release

        def faulty(total: Clipped, *, batch_size: int, **how: object) -> Released:
            released = release(total, batch_size=batch_size, **how)
            means = {k: x / batch_size for k, x in total.items()}
            return Released({k: m + change(released[k] - m, k) for k, m in means.items()})

        patch.setattr(step_module, "release", faulty)

    return plant


def mean_of_noisy_examples(patch: pytest.MonkeyPatch) -> None:
    """Each of B examples brings noise of its own, of standard deviation sigma C / B."""

    def faulty(total, *, clip_norm, noise_multiplier, batch_size, rng, dtype):
        scale = noise_multiplier * clip_norm / batch_size
        draws = {k: rng.standard_normal((batch_size, *x.shape)).sum(0) for k, x in total.items()}
        return Released(
            {k: (x + scale * torch.as_tensor(draws[k])) / batch_size for k, x in total.items()}
        )

    patch.setattr(step_module, "release", faulty)


def masked(noise: Tensor, _: str) -> Tensor:
    spectrum = torch.fft.rfft(noise.flatten())
    spectrum[len(spectrum) // 2 :] /= 2
    return torch.fft.irfft(spectrum, n=noise.numel()).view_as(noise)


def one_passes(noise: Tensor, name: str) -> Tensor:
    if name == "conv.weight":
        noise = noise.clone()
        noise.view(-1)[3] = 0
    return noise


def half_passes(noise: Tensor, _: str) -> Tensor:
    noise = noise.clone()
    noise.view(-1)[noise.numel() // 2 :] = 0
    return noise


def real_part(noise: Tensor, _: str) -> Tensor:
    spectrum = torch.fft.rfft(noise.flatten()).real
    return torch.fft.irfft(spectrum, n=noise.numel()).view_as(noise)


def strong_real_part(noise: Tensor, _: str) -> Tensor:
    """Of variance one again, but for the two coordinates that were their own mirror image."""
    even = real_part(noise, _).flatten() * math.sqrt(2)
    even[0] /= math.sqrt(2)
    if even.numel() % 2 == 0:
        even[even.numel() // 2] /= math.sqrt(2)
    return even.view_as(noise)


def seeded_per_tensor(patch: pytest.MonkeyPatch) -> None:
    release = step_module.release

    class SameForEach:
        def __init__(self, seed: int) -> None:
            self.seed = seed

        def standard_normal(self, size: tuple[int, ...]) -> np.ndarray:
            return np.random.default_rng(self.seed).standard_normal(size)

    def faulty(total: Clipped, *, rng: np.random.Generator, **how: object) -> Released:
        return release(total, rng=SameForEach(rng.integers(2**32)), **how)

    patch.setattr(step_module, "release", faulty)


def seeded_per_step(patch: pytest.MonkeyPatch) -> None:
    stream = Secret.stream
    patch.setattr(Secret, "stream", lambda self, step, name: stream(self, 0, name))


# Secrets.


def fixed_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Secret, "draw", classmethod(lambda cls: cls(bytes(32))))


def secret_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Secret, "stream", lambda self, step, name: np.random.default_rng([step, len(name)])
    )


def fresh_at_every_replay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Secret, "stream", lambda self, step, name: np.random.default_rng())


def secret_shown(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Secret, "__repr__", lambda self: f"Secret(key={self.key!r})")


def secret_saved(patch: pytest.MonkeyPatch) -> None:
    start, state_dict = Step.start, Progress.state_dict

    def begin(self: Step, params: object) -> Progress:
        progress = start(self, params)
        progress.key = self.secret.key
        return progress

    patch.setattr(Step, "start", begin)
    patch.setattr(Progress, "state_dict", lambda self: {**state_dict(self), "seed": self.key.hex()})


# Batches.


def sampler(draw: Callable[[int, int, int], object]) -> Plant:
    """`draw` is given N, the batch size and the number of the call, and gives indices."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        calls = iter(range(10**6))
        patch.setattr(
            step_module,
            "poisson_batch",
            lambda num, rate, rng: torch.as_tensor(
                np.sort(draw(num, round(num * rate), next(calls)))
            ),
        )

    return plant


def in_order(num: int, size: int, call: int) -> object:
    return (call * size + np.arange(size)) % num


def shuffled(num: int, size: int, call: int) -> object:
    per_epoch = num // size
    order = np.random.default_rng(call // per_epoch).permutation(num)
    return order[call % per_epoch * size :][:size]


def of_fixed_size(num: int, size: int, call: int) -> object:
    return np.random.default_rng(call).choice(num, size, replace=False)


def true_divisor(patch: pytest.MonkeyPatch) -> None:
    sample, release, sizes = step_module.poisson_batch, step_module.release, []

    def noting(*args: object) -> Tensor:
        batch = sample(*args)
        sizes.append(len(batch))
        return batch

    patch.setattr(step_module, "poisson_batch", noting)
    patch.setattr(
        step_module,
        "release",
        lambda total, **how: release(total, **{**how, "batch_size": max(1, sizes[-1])}),
    )


def empty_batch_skipped(patch: pytest.MonkeyPatch) -> None:
    sample, call = step_module.poisson_batch, Step.__call__

    class EmptyBatch(Exception):
        pass

    def refusing(*args: object) -> Tensor:
        batch = sample(*args)
        if not len(batch):
            raise EmptyBatch
        return batch

    def skipping(self: Step, progress: Progress) -> None:
        with contextlib.suppress(EmptyBatch):
            call(self, progress)

    patch.setattr(step_module, "poisson_batch", refusing)
    patch.setattr(Step, "__call__", skipping)


# Points and weights.


def reversed_weights(patch: pytest.MonkeyPatch) -> None:
    query = InnerMomentum.query

    def turned(self: InnerMomentum) -> FixedQuery:
        asks = query.fget(self).points
        pairs = zip(reversed(asks), asks, strict=True)
        return FixedQuery(tuple(EvaluationPoint(old.weight, age=new.age) for old, new in pairs))

    patch.setattr(InnerMomentum, "query", property(turned))


def overwritten_weights(patch: pytest.MonkeyPatch) -> None:
    clipped = JointQuery.evaluate

    def equal(self, sum_clipped, iterates, step):
        def equally_weighted(points, weights):
            return sum_clipped(points, [1 / len(weights)] * len(weights))

        return clipped(self, equally_weighted, iterates, step)

    patch.setattr(JointQuery, "evaluate", equal)


def point_moved_by_the_batch(patch: pytest.MonkeyPatch) -> None:
    """The look-ahead goes along this batch's own, un-noised gradient."""
    clipped = JointQuery.evaluate

    def ahead(self, sum_clipped, iterates, step):
        slope = sum_clipped([iterates[-1]], [1.0])
        moved = {k: x - 0.1 * slope[k] for k, x in iterates[-1].items()}
        return clipped(self, sum_clipped, [*list(iterates)[:-1], moved], step)

    patch.setattr(JointQuery, "evaluate", ahead)


# What leaves beside the release.


def raw_prediction(patch: pytest.MonkeyPatch) -> None:
    clipped, restore, raw = SplitQuery.evaluate, SplitQuery.restore, {}

    def noting(self, sum_clipped, iterates, step):
        total = clipped(self, sum_clipped, iterates, step)
        raw.update({k.removeprefix("1/"): x for k, x in total.items() if k.startswith("1/")})
        return total

    def unprotected(self, released, step):
        return Released({k: g + raw[k].to(g) for k, g in restore(self, released, step).items()})

    patch.setattr(SplitQuery, "evaluate", noting)
    patch.setattr(SplitQuery, "restore", unprotected)


def raw_count(patch: pytest.MonkeyPatch) -> None:
    count, moved, raw = Quantile.count, Quantile.update_bound, []

    def noting(self, squares, present_B):
        raw.append(count(self, squares, present_B))
        return raw[-1]

    patch.setattr(Quantile, "count", noting)
    patch.setattr(Quantile, "update_bound", lambda self, _, size: moved(self, raw[-1] / size, size))


def rate_of_the_true_batch(patch: pytest.MonkeyPatch) -> None:
    sample, rate, sizes = step_module.poisson_batch, Step.learning_rate, []

    def noting(*args: object) -> Tensor:
        batch = sample(*args)
        sizes.append(len(batch))
        return batch

    patch.setattr(step_module, "poisson_batch", noting)
    patch.setattr(Step, "learning_rate", lambda self, *at: rate(self, *at) * sizes[-1])


# The model, and what is saved of it.


def frozen_layer(patch: pytest.MonkeyPatch) -> None:
    _silence(patch, "body.weight")


def frozen_norm_layer(patch: pytest.MonkeyPatch) -> None:
    _silence(patch, "norm.weight", "norm.bias")


def _silence(patch: pytest.MonkeyPatch, *names: str) -> None:
    make_gradients = BookkeepingEngine._make_gradients

    def without(self: BookkeepingEngine, *args: object) -> dict[str, ParameterGradients]:
        found = make_gradients(self, *args)
        return {k: WrittenOut(0 * a.each()) if k in names else a for k, a in found.items()}

    patch.setattr(BookkeepingEngine, "_make_gradients", without)


def kernel_turned(patch: pytest.MonkeyPatch) -> None:
    restore = ConvMap.restore
    patch.setattr(ConvMap, "restore", lambda self, white: restore(self, white).flip(-1))


def hundred_classes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        assemble_module,
        "build_model",
        lambda config, spec, seed: build_model(config, replace(spec, num_classes=100), seed),
    )


def remembering(make: Callable[[], nn.Module]) -> Plant:
    """A model that begins with a layer that remembers, and no state guard to refuse it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = World.model.func

        def model(world: World) -> nn.Module:
            layers = dict(sound(world).named_children())
            return nn.Sequential(OrderedDict(memory=make(), **layers))

        patch.setattr(World, "model", property(model))  # each run has one that is new
        patch.setattr(StateGuard, "check", lambda *_: None)
        checks = ("check_stateless", "warm_up", "find_wrong_gradients", "find_mixing_sizes")
        for check in (*checks, "find_moved_records"):
            patch.setattr(f"dpsweep.privacy.engine.{check}", lambda *_: None)

    return plant


def moments_not_saved(patch: pytest.MonkeyPatch) -> None:
    resume = Step.resume

    def forgetful(self: Step, saved: dict[str, object]) -> Progress:
        moments = {**saved["optimizer"], "state": {}}
        return resume(self, {**saved, "optimizer": moments})

    patch.setattr(Step, "resume", forgetful)


def average_not_saved(patch: pytest.MonkeyPatch) -> None:
    resume = Step.resume
    patch.setattr(Step, "resume", lambda self, saved: resume(self, {**saved, "average": None}))


# Augmentation.


def copies_as_examples(patch: pytest.MonkeyPatch) -> None:
    def portion(
        self: BookkeepingEngine,
        points: Sequence[Tensors],
        weights: Sequence[float],
        portion: Microbatch,
        clip: Clip,
    ) -> Clipped:
        apart = replace(self, copies=1)
        return asking(apart, points, weights, portion.flatten_copies(self.copies), clip)

    asking = BookkeepingEngine._portion
    patch.setattr(BookkeepingEngine, "_portion", portion)


def mean_of_clipped_copies(patch: pytest.MonkeyPatch) -> None:
    copies_as_examples(patch)
    asking = BookkeepingEngine._portion

    def mean(self: BookkeepingEngine, *args: object) -> Clipped:
        return Clipped({k: x / self.copies for k, x in asking(self, *args).items()})

    patch.setattr(BookkeepingEngine, "_portion", mean)


def augmentation_by_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_module, "hash_images", lambda inputs: torch.arange(len(inputs)))


def last_microbatch_dropped(patch: pytest.MonkeyPatch) -> None:
    def whole(inputs_B: Tensor, targets_B: Tensor, size: int) -> Iterator[Microbatch]:
        for portion in split_microbatches(inputs_B, targets_B, size):
            full = size in (int(portion.present_B.sum()), 256)
            yield portion._replace(present_B=portion.present_B & full)

    patch.setattr(room_of_portions, "split_microbatches", whole)


def norms_of_other_records(patch: pytest.MonkeyPatch) -> None:
    """Norms from records in bf16, and sums from those in float32."""

    def squares(self: gradients.OuterProducts) -> Tensor:
        pair = (self.inputs_BTI, self.grads_BTO)
        return gradients.OuterProducts(*(x.bfloat16().to(x) for x in pair)).norms[0]

    patch.setattr(gradients.OuterProducts, "squares", squares)


def norms_of_exact_records(patch: pytest.MonkeyPatch) -> None:
    """Norms from records in float32, and sums from those in bf16."""
    record, make, exact = bookkeeping.record_calls, BookkeepingEngine._make_gradients, {}
    compute = BookkeepingEngine._portion

    def portion(*args: object) -> Clipped:
        exact.clear()  # of what the checks before the first step recorded
        return compute(*args)

    def records(*args: object) -> dict[str, list[LayerCall]]:
        for name, calls in record(*args[:-1], None).items():
            exact.setdefault(name, []).extend(calls)
        return record(*args)

    def mixed(self: BookkeepingEngine, calls: object, *args: object) -> dict[str, object]:
        summed, measured = make(self, calls, *args), make(self, dict(exact), *args)
        return {k: NormsOfOthers(g, measured[k]) for k, g in summed.items()}

    patch.setattr(bookkeeping, "record_calls", records)
    patch.setattr(BookkeepingEngine, "_make_gradients", mixed)
    patch.setattr(BookkeepingEngine, "_portion", portion)


@dataclass(frozen=True)
class NormsOfOthers:
    """Gradients with the norms of others."""

    summed: ParameterGradients
    measured: ParameterGradients

    def squares(self) -> Tensor:
        return self.measured.squares()

    def sum_scaled(self, *args: object) -> Tensor:
        return self.summed.sum_scaled(*args)


def sums_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """Clipped gradients of rounded records are added as they come out of the backward pass."""
    products = gradients.summed_products

    def added(left: Tensor, right: Tensor, *args: object) -> Tensor:
        return products(left.bfloat16(), right.bfloat16(), *args).to(left)

    patch.setattr(gradients, "summed_products", added)


def noise_in_bf16(patch: pytest.MonkeyPatch) -> None:
    """Noise of the precision of the passes is added to the sum, and rounded with it afterwards."""
    fill = noise._fill
    patch.setattr(noise, "_fill", lambda *args: fill(*args).bfloat16().double())


# Several devices.


def noise_for_each_device(patch: pytest.MonkeyPatch) -> None:
    """Each of three devices adds noise to its part of the sum."""
    release = step_module.release

    def faulty(total: Clipped, **how: object) -> Released:
        third = Clipped({k: x / 3 for k, x in total.items()})
        parts = [release(third, **how) for _ in range(3)]
        return Released({k: sum(part[k] for part in parts) for k in total})

    patch.setattr(step_module, "release", faulty)


def part_answered_twice(patch: pytest.MonkeyPatch) -> None:
    """Two devices have the first portion, as after a retry."""

    def split(*args: Any) -> Iterator[Microbatch]:
        for i, portion in enumerate(split_microbatches(*args)):
            yield from [portion] * (2 if i == 0 else 1)

    patch.setattr(room_of_portions, "split_microbatches", split)


def added_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    class LastFirst(parallel.ThreadPoolExecutor):
        def map(self, *args: object) -> Iterator[Clipped]:
            return reversed(list(super().map(*args)))

    patch.setattr(parallel, "ThreadPoolExecutor", LastFirst)


# Correlated noise.


def corrupted_strategy(patch: pytest.MonkeyPatch) -> None:
    """C z in the place of C^-1 z."""

    def correlate(self: NoiseHistory, white: Tensor, step: int) -> Tensor:
        past = vars(self).setdefault("past", [])
        past.append(white.clone())
        column = self.correlation.coefficients
        self.step += 1
        return sum(c * z for c, z in zip(column, reversed(past[-len(column) :]), strict=False))

    patch.setattr(NoiseHistory, "correlate", correlate)


def ungrouped_batches(patch: pytest.MonkeyPatch) -> None:
    """Batches of everybody, at the rate of a group divided by their number."""

    def batch(self: Step, step: int) -> Tensor:
        rate = self.plan.sampling_rate / self.plan.correlation.cycle
        rng = self.draws(step, "sample")
        return step_module.poisson_batch(self.plan.num_examples, rate, rng)

    patch.setattr(Step, "batch", batch)


def schedule_of_independent_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Banded, "schedule", lambda self, settings: (settings.steps, settings.rate))


def long_column(patch: pytest.MonkeyPatch) -> None:
    """|c| > 1: the noise of the formula, and coefficients that were not divided by their norm."""
    sound = correlated.banded_coefficients
    patch.setattr(
        correlated, "banded_coefficients", lambda *args: tuple(1.5 * c for c in sound(*args))
    )


def more_bands_than_groups(patch: pytest.MonkeyPatch) -> None:
    sound = Banded.correlate

    def correlate(self: Banded, settings: PublicSettings) -> Correlation:
        found = sound(self, settings)
        return replace(found, cycle=found.cycle // 2)

    patch.setattr(Banded, "correlate", correlate)


def groups_by(draw: Callable[[int, int], object]) -> Plant:
    """`draw` is given N and b, and gives the group of each example."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            step_module, "draw_groups", lambda num, groups, rng: torch.as_tensor(draw(num, groups))
        )

    return plant


def groups_by_place(num: int, groups: int) -> object:
    return np.arange(num) % groups


def groups_of_a_public_seed(num: int, groups: int) -> object:
    return np.random.default_rng(0).integers(0, groups, num)


def groups_drawn_each_cycle(patch: pytest.MonkeyPatch) -> None:
    def batch(self: Step, step: int) -> Tensor:
        cycle, num = self.plan.correlation.cycle, self.plan.num_examples
        groups = step_module.draw_groups(num, cycle, self.draws(step // cycle, "groups"))
        rng = self.draws(step, "sample")
        sampled = step_module.poisson_batch(num, self.plan.sampling_rate, rng)
        return sampled[groups[sampled] == step % cycle]

    patch.setattr(Step, "batch", batch)


def history_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        NoiseHistory, "resume", classmethod(lambda cls, found, saved, step: cls(found, step))
    )


def history_drawn_anew(patch: pytest.MonkeyPatch) -> None:
    sound = NoiseHistory.resume.__func__

    def resume(cls: type, found: Correlation, saved: dict, step: int) -> NoiseHistory:
        if saved["kept"] is not None:
            saved = {**saved, "kept": torch.randn_like(saved["kept"])}
        return sound(cls, found, saved, step)

    patch.setattr(NoiseHistory, "resume", classmethod(resume))


def first_columns_cut_off(patch: pytest.MonkeyPatch) -> None:
    """The norms of the last columns of C, which are cut off, at the first steps' noise."""
    sound = NoiseHistory.correlate

    def correlate(self: NoiseHistory, white: Tensor, step: int) -> Tensor:
        norm = float(np.linalg.norm(self.correlation.coefficients[: step + 1]))
        return norm * sound(self, white, step)

    patch.setattr(NoiseHistory, "correlate", correlate)
