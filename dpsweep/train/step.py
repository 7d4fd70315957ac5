"""One step of DP training, for every method. The page to read first.

query     a_i = sum_m w_m grad f(p_m ; xi_i)                      points from past iterates
release   r_t = (1/B) (sum_{i in S_t} clip_C(a_i) + sigma C z_t)  S_t ~ Poisson(q)
filters   g~_t = F_n(...F_1(r_t))                                 of releases alone
base      x_{t+1} = Opt(x_t, g~_t)
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Tensors
from dpsweep.data.read import Dataset
from dpsweep.filters.base import Public, State
from dpsweep.methods import build as build_method
from dpsweep.methods.base import Method
from dpsweep.privacy.engine.vmap import VmapEngine
from dpsweep.privacy.query import memory
from dpsweep.privacy.release import release
from dpsweep.privacy.sampling import poisson_batch
from dpsweep.train.budget import Budget


@dataclass
class Progress:
    """Everything a trial must remember between two steps.

    Attributes:
        step: Steps taken.
        trail: The last iterates, newest last; the newest is what the optimizer moves.
        filter_state: The filters' memory.
        optimizer: Torch's optimizer over the newest iterate.
    """

    step: int
    trail: deque[Tensors]
    filter_state: State
    optimizer: torch.optim.Optimizer

    @property
    def params(self) -> Tensors:
        """The newest iterate."""
        return self.trail[-1]

    def state_dict(self) -> dict[str, Any]:
        """As plain tensors and containers, for torch.save."""
        return {
            "step": self.step,
            "trail": list(self.trail),
            "filter_state": self.filter_state,
            "optimizer": self.optimizer.state_dict(),
        }


@dataclass(frozen=True)
class Step:
    """x_t -> x_{t+1}.

    Attributes:
        config: The trial.
        budget: Its sampling rate, noise and length.
        data: The examples, on the device of the parameters.
        engine: How examples answer.
        secret: Where sampling and noise come from.
    """

    config: TrialConfig
    budget: Budget
    data: Dataset
    engine: VmapEngine
    secret: Secret

    def start(self, params: Tensors) -> Progress:
        """Before the first step, at `params`."""
        return Progress(
            step=0,
            trail=deque([params], maxlen=memory(self.method.query)),
            filter_state=self.method.chain.init(params),
            optimizer=self.config.optimizer.build(params.values()),
        )

    def resume(self, saved: dict[str, Any]) -> Progress:
        """Where `Progress.state_dict` left off."""
        progress = self.start(saved["trail"][-1])
        progress.trail.clear()
        progress.trail.extend(saved["trail"])
        progress.optimizer.load_state_dict(saved["optimizer"])
        progress.step, progress.filter_state = saved["step"], saved["filter_state"]
        return progress

    def __call__(self, progress: Progress) -> None:
        """Takes one step. What leaves it is `progress.params`, a function of releases."""
        method, run, t = self.method, self.budget.run, progress.step
        batch = poisson_batch(
            self.budget.num_examples, run.sampling_rate, self.secret.stream(t, "sample")
        ).to(self.data.inputs.device)
        clipped = self.engine.clipped_sum(
            points=[ask.point(progress.trail) for ask in method.query],
            weights=[ask.weight for ask in method.query],
            inputs_B=self.data.scaled(self.data.inputs[batch], self.dtype),
            targets_B=self.data.targets[batch],
            clip=self.config.privacy.clip,
        )
        released = release(
            clipped,
            clip_norm=self.config.privacy.clip_norm,
            noise_multiplier=run.noise_multiplier,
            batch_size=self.config.train.batch_size,
            rng=self.secret.stream(t, "noise"),
        )
        public = Public(step=t, params=progress.params, noise_std=self.budget.noise_std)
        filtered, progress.filter_state = method.chain.apply(
            released, progress.filter_state, public
        )
        self._move(progress, filtered)

    def _move(self, progress: Progress, direction: Tensors) -> None:
        """The base optimizer's update, in place on the newest iterate; older ones are kept."""
        newest, trail = progress.params, progress.trail
        if trail.maxlen != 1:
            trail[-1] = {k: x.clone() for k, x in newest.items()}
            trail.append(newest)
        for k, x in newest.items():
            x.grad = direction[k]
        for group in progress.optimizer.param_groups:
            group["lr"] = self.learning_rate(progress.step)
        progress.optimizer.step()
        for x in newest.values():
            x.grad = None
        progress.step += 1

    def learning_rate(self, step: int) -> float:
        """lr_t."""
        optimizer = self.config.optimizer
        return optimizer.lr * optimizer.schedule.factor(step, self.budget.run.steps)

    @cached_property
    def method(self) -> Method:
        """Query and filters."""
        return build_method(self.config.method)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and gradients."""
        dtype: torch.dtype = getattr(torch, self.config.train.dtype)
        return dtype
