"""One step of DP training, for every method. The page to read first.

query     a_i = sum_m w_m grad f(p_m ; xi_i)                      points from past iterates
geometry  u_i = L a_i                                             L fixed; mostly the identity
release   r_t = (1/B) L+(sum_{i in S_t} clip_C(u_i) + sigma C x_t)  S_t ~ Poisson(q)
noise     x_t = z_t, or (z_t - c_1 x_{t-1} - ...) / c_0           z_t ~ N(0, I)
filters   g~_t = F_n(...F_1(r_t))                                 of releases alone
base      x_{t+1} = Opt(x_t, g~_t)
"""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.inputs import Inputs, one_tensor, take_rows
from dpsweep.core.seeds import Draws, Secret, Stream
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.data.augment import hash_images
from dpsweep.data.read import Dataset
from dpsweep.filters.base import Chain, Public, State
from dpsweep.methods import build_method
from dpsweep.methods.base import Method
from dpsweep.optim.eager import NOISE_VARIANCES
from dpsweep.privacy.clip import Clip, Quantile, split_count
from dpsweep.privacy.engine import Engine
from dpsweep.privacy.geometry import IDENTITY, Geometry
from dpsweep.privacy.history import NoiseHistory
from dpsweep.privacy.noise import SOURCES, NoiseDraw
from dpsweep.privacy.release import release
from dpsweep.privacy.sampling import draw_groups, poisson_batch
from dpsweep.training.coloured import Coloured

REGIONS = ("sample", "gradients", "release", "filters", "optimizer")
"""The parts of a step, as a profiler names them after `step/`."""

_FEWEST_DRAWN_BY_A_THREAD = 2**16
"""Numbers that take about a millisecond to draw; to hand work to a thread takes a tenth of it."""


def mark_region(name: str) -> AbstractContextManager[Any]:
    """Mark a part of the step for a profiler of this thread; does nothing without one."""
    assert name in REGIONS
    # torch has no public way to ask, and a mark that nobody reads costs two operations
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(f"step/{name}")


@dataclass
class Progress:
    """Everything a trial must remember between two steps."""

    step: int  # steps taken
    iterates: deque[Tensors]  # the last ones, newest last: that is what the optimizer moves
    filter_state: State  # the filters' memory
    optimizer: torch.optim.Optimizer  # torch's optimizer over the newest iterate
    bound: float  # the clip norm of the next step; changes under adaptive clipping alone
    # moving average of the iterates after each step, which train.ema asks for; nothing in training
    # reads it. None before the first step, or if it is not asked for
    average: Tensors | None = None
    # numbers in each leaf of a release; empty before this process's first step
    leaf_sizes: tuple[int, ...] = ()
    # of correlated noise, as secret as the noise; None where noise is independent
    history: NoiseHistory | None = None

    @property
    def params(self) -> Tensors:
        """The newest iterate."""
        return self.iterates[-1]

    @property
    def result(self) -> Tensors:
        """Parameters to measure and keep: the average, if there is one, or the newest iterate."""
        return self.params if self.average is None else self.average

    def state_dict(self) -> dict[str, Any]:
        """Convert to plain tensors and containers, for torch.save. Private, with the history."""
        state = {
            "step": self.step,
            "iterates": list(self.iterates),
            "filter_state": self.filter_state,
            "optimizer": self.optimizer.state_dict(),
            "bound": self.bound,
            "average": self.average,
        }
        return state if self.history is None else {**state, "history": self.history.state_dict()}


@dataclass(frozen=True)
class Step:
    """x_t -> x_{t+1}."""

    config: TrialConfig
    plan: PrivacyPlan  # its sampling rate, noise and length
    data: Dataset  # the examples, on the device of the parameters
    engine: Engine  # computes clipped sums of per-example gradients
    secret: Secret  # source of sampling and noise
    geometry: Geometry = IDENTITY  # the space in which per-example gradients are clipped
    # the model, if its frozen part was computed before and the engine has the rest of it; None if
    # the engine has all of it
    uncut_model: nn.Module | None = None

    def start(self, params: Tensors) -> Progress:
        """Make the progress before the first step, at `params`."""
        correlation = self.plan.correlation
        return Progress(
            step=0,
            iterates=deque([params], maxlen=self.method.query.memory),
            filter_state=self.method.chain.init(params),
            optimizer=self.config.optimizer.build(params.values(), self.config.learning_rate),
            bound=self.config.privacy.clip_norm,
            history=None if correlation is None else NoiseHistory(correlation),
        )

    def resume(self, saved: dict[str, Any]) -> Progress:
        """Restore the progress that `Progress.state_dict` saved.

        Raises:
            StateError: If its noise history is missing or another run's.
        """
        progress = self.start(saved["iterates"][-1])
        progress.iterates.clear()
        progress.iterates.extend(saved["iterates"])
        progress.optimizer.load_state_dict(saved["optimizer"])
        progress.step, progress.filter_state = saved["step"], saved["filter_state"]
        progress.bound, progress.average = saved["bound"], saved.get("average")
        if self.plan.correlation is not None:
            progress.history = NoiseHistory.resume(
                self.plan.correlation, saved.get("history"), progress.step
            )
        return progress

    def __call__(self, progress: Progress) -> None:
        """Take one step. What leaves it is `progress.params`, a function of releases."""
        method, t, clip = self.method, progress.step, self.clip(progress)
        with mark_region("sample"):
            batch = self.batch(t)
            noise = self.noise_draw(progress)
        with mark_region("gradients"):
            clipped = self.sum_clipped(batch, progress)
        with mark_region("release"):
            released = self.release_sum(clipped, clip, progress, noise)
            progress.leaf_sizes = tuple(x.numel() for x in clipped.values())
            grad_part, count = split_count(released)
            gradient = self.geometry.restore(method.query.restore(grad_part, t))
        noise_std = self.noise_std(clip, t)
        public = Public(step=t, params=progress.params, noise_std=noise_std)
        with mark_region("filters"):
            filtered, progress.filter_state = method.chain.apply(
                gradient, progress.filter_state, public
            )
        with mark_region("optimizer"):
            self._apply_update(progress, filtered, noise_std)
            self._update_average(progress)
        if isinstance(clip, Quantile) and count is not None:
            progress.bound = clip.update_bound(count, self.config.train.batch_size)

    def batch(self, step: int) -> torch.Tensor:
        """Indices of the examples of one step: a secret Poisson sample, of one group if cyclic."""
        rng, correlation = self.draws(step, "sample"), self.plan.correlation
        sampled = poisson_batch(self.plan.num_examples, self.plan.sampling_rate, rng)
        if correlation is not None:
            sampled = sampled[self.groups[sampled] == step % correlation.cycle]
        if self.data.device.type == "cuda":  # from page-locked memory the copy does not wait
            sampled = sampled.pin_memory()
        return sampled.to(self.data.device, non_blocking=True)

    @cached_property
    def groups(self) -> torch.Tensor:
        """Group of each example, shape (N,): drawn once from the secret, the same on a resume."""
        assert self.plan.correlation is not None, "only cyclic sampling has groups"
        rng = self.draws(0, "groups")
        return draw_groups(self.plan.num_examples, self.plan.correlation.cycle, rng)

    def inputs(self, batch: torch.Tensor, step: int) -> Inputs:
        """Inputs of these examples, shape (B, ...), or (B, K, ...) as K copies each."""
        inputs_B = take_rows(self.data.inputs, batch)
        if augment := self.config.train.augment:
            marks_B = self.marks.index_select(0, batch)
            inputs_B = augment.copies(one_tensor(inputs_B), marks_B, step, self.config.seed)
        return self.data.scaled(inputs_B, self.dtype)

    @cached_property
    def marks(self) -> torch.Tensor:
        """Hash of each example, from which its augmentation is drawn, int64, shape (N,)."""
        return hash_images(one_tensor(self.data.inputs))

    def sum_clipped(self, batch: torch.Tensor, progress: Progress) -> Clipped:
        """Sum of the batch's clipped per-example gradients, in whitened coordinates. Private."""
        inputs_B = self.inputs(batch, progress.step)
        targets_B = take_rows(self.data.targets, batch)
        sum_clipped = partial(self._sum_at_points, inputs_B, targets_B, self.clip(progress))
        return self.method.query.evaluate(sum_clipped, progress.iterates, progress.step)

    def noise_draw(self, progress: Progress) -> NoiseDraw | None:
        """This step's noise, which a thread draws while examples are processed.

        None where that saves no time: of few numbers, or without a second core.
        """
        on_gpu = self.data.device.type == "cuda"
        overlaps = on_gpu or torch.get_num_threads() > 1
        if not overlaps or sum(progress.leaf_sizes) < _FEWEST_DRAWN_BY_A_THREAD:
            return None
        if self.plan.run.noise_multiplier == 0:
            return None
        return NoiseDraw(self.draws(progress.step, "noise"), progress.leaf_sizes, pinned=on_gpu)

    def release_sum(
        self, clipped: Clipped, clip: Clip, progress: Progress, noise: NoiseDraw | None = None
    ) -> Released:
        """Release the clipped sum: the one value that crosses the boundary in a step."""
        step, history = progress.step, progress.history
        correlated = {"correlate": partial(history.correlate, step=step)} if history else {}
        return release(
            clipped,
            clip_norm=clip.clip_norm,
            noise_multiplier=self.plan.run.noise_multiplier,
            batch_size=self.config.train.batch_size,
            rng=noise or self.draws(step, "noise"),
            dtype=self.dtype,
            **correlated,
        )

    def draws(self, step: int, name: Stream) -> Draws:
        """One step's secret stream; the same at every call."""
        return SOURCES[self.config.privacy.noise.source](self.secret, step, name)

    def clip(self, progress: Progress) -> Clip:
        """The style of clipping, at the next step's norm."""
        return self.config.privacy.clipping.build(
            progress.bound, self.plan.run.noise_multiplier, self.config.train.batch_size
        )

    def noise_std(self, clip: Clip, step: int) -> float:
        """Standard deviation of the noise in a gradient, per whitened coordinate."""
        on_sum = self.plan.run.noise_multiplier * clip.clip_norm
        gain = self.method.query.noise_gain(step)
        gain *= self._noise_gains[min(step, len(self._noise_gains) - 1)]
        return on_sum / self.config.train.batch_size * math.sqrt(gain)

    def _sum_at_points(
        self,
        inputs_B: Inputs,
        targets_B: Inputs,
        clip: Clip,
        points: Sequence[Tensors],
        weights: Sequence[float],
    ) -> Clipped:
        """Sum of the clipped per-example gradients of a batch."""
        return self.engine.clipped_sum(
            points, weights, inputs_B=inputs_B, targets_B=targets_B, clip=clip
        )

    def _update_average(self, progress: Progress) -> None:
        """A_t = sum_s ema^(t-s) x_s / sum_s ema^(t-s) over the iterates after each step so far.

        Where the learning rate falls little, an average has less of the noise than its last term
        (Polyak and Juditsky 1992; De et al. 2022, arXiv:2204.13650, with the weights of Kingma and
        Ba's bias correction). A function of released iterates: post-processing.
        """
        ema = self.config.train.ema
        if ema is None:
            return
        if progress.average is None:
            progress.average = {k: x.detach().clone() for k, x in progress.params.items()}
            return
        newest = (1 - ema) / (1 - ema**progress.step)
        for k, x in progress.params.items():
            progress.average[k].lerp_(x, newest)

    def _apply_update(self, progress: Progress, direction: Tensors, noise_std: float) -> None:
        """The base optimizer's update, in place on the newest iterate; older ones are kept."""
        newest, iterates = progress.params, progress.iterates
        if iterates.maxlen != 1:
            iterates[-1] = {k: x.clone() for k, x in newest.items()}
            iterates.append(newest)
        for k, x in newest.items():
            x.grad = direction[k]
        for group in progress.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress.step, progress.bound)
            if NOISE_VARIANCES in group:
                white = self.filters_gain * noise_std**2
                group[NOISE_VARIANCES] = [white * self.geometry.noise_gain(k) for k in newest]
        progress.optimizer.step()
        for x in newest.values():
            x.grad = None
        progress.step += 1

    def learning_rate(self, step: int, bound: float | None = None) -> float:
        """lr_t at clip norm `bound`, or at the first one.

        With a total step, lr_t C_t is what the schedule says: where clipping adapts, the learning
        rate follows the norm inversely. Both are functions of releases.
        """
        rate = self._peak_rate * self.config.optimizer.schedule.factor(step, self.plan.steps)
        if bound is None or self.config.optimizer.total_step is None:
            return rate
        reach, clip_norm = self.config.optimizer.reach, self.config.privacy.clip_norm
        return rate * reach(clip_norm) / reach(bound)

    @cached_property
    def _peak_rate(self) -> float:
        return self.config.learning_rate

    @cached_property
    def method(self) -> Method:
        """Query and filters."""
        return build_method(self.config.method)

    @cached_property
    def filters_gain(self) -> float:
        """Noise gain of all filters together, for the noise that they are given."""
        if self.plan.correlation is None:
            return self.method.chain.noise_gain
        coloured = Coloured(self.plan.correlation)
        return Chain((coloured, *self.method.chain.links)).noise_gain / coloured.noise_gain

    @cached_property
    def _noise_gains(self) -> list[float]:
        correlation = self.plan.correlation
        return [1.0] if correlation is None else correlation.noise_gains(correlation.steps).tolist()

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and gradients."""
        dtype: torch.dtype = getattr(torch, self.config.train.dtype)
        return dtype
