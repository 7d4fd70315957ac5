"""The steps of a linear model in NumPy, some ten times as fast as the trial's own.

Example i's gradient, summed over the points p_m with the query's weights w_m, is an outer product,

    a_i = d_i x_i^T,     d_i = sum_m w_m (softmax(W_m x_i) - y_i),     |a_i| = |d_i| |x_i|

with a 1 behind x_i for the bias. Sampling, noise, query and filters are the package's own, of the
same secret, so that the iterates are those of `training.step.Step` but for rounding
(tests/benchmarks/test_search_tables.py). For tables only: it keeps none of the step's checks.
"""

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from dpsweep.core.inputs import one_tensor
from dpsweep.core.types import Released
from dpsweep.filters.base import Public
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.history import NoiseHistory
from dpsweep.training.step import Step

Weights = NDArray[np.float64]
"""Shape (K, D + 1), the bias last."""


def suits(step: Step) -> bool:
    """True for a plain linear model with flat clipping and SGD without momentum."""
    config = step.config
    plain = config.model.name == "linear" and config.model.model_dump(exclude_none=True) == {
        "name": "linear"
    }
    sgd = config.optimizer.name == "sgd" and not config.optimizer.momentum
    whole = config.train.augment is None and config.train.ema is None
    return plain and sgd and whole and config.privacy.clipping.name == "flat"


class LinearRun:
    """One run.

    Attributes:
        weights: The newest iterate.
    """

    def __init__(self, step: Step, start: dict[str, torch.Tensor]) -> None:
        self._step = step
        self.weights = np.hstack([p.reshape(len(p), -1).double().numpy() for p in start.values()])
        self._inputs = _rows(step, one_tensor(step.data.inputs))
        self._squares = np.square(self._inputs).sum(1)
        self._targets = np.eye(len(self.weights))[one_tensor(step.data.targets).numpy()]
        self._trail: deque[Weights] = deque([self.weights], maxlen=step.method.query.memory)
        self._state = step.method.chain.init(start)
        correlation = step.plan.correlation
        self._history = None if correlation is None else NoiseHistory(correlation)

    def train(self) -> None:
        """All steps of the run."""
        for t in range(self._step.plan.steps):
            self.take(t)

    def take(self, t: int) -> None:
        """The step numbered `t`, from 0."""
        step, batch = self._step, self._step.batch(t).numpy()
        clip = step.config.privacy.clip_norm
        inputs, targets = self._inputs[batch], self._targets[batch]
        asks = [ask for ask in step.method.query.evaluation_points(t) if ask.age < len(self._trail)]
        total = sum(ask.weight for ask in step.method.query.evaluation_points(t))
        scale = total / sum(ask.weight for ask in asks)
        if len(self._trail) == 1:
            delta = total * (_softmax(inputs @ self._trail[-1].T) - targets)
        else:
            delta = -total * targets
            for ask in asks:
                point = self._trail[-1 - ask.age]
                if ask.ahead:
                    point = point + ask.ahead * (self._trail[-1] - self._trail[-2])
                delta += scale * ask.weight * _softmax(inputs @ point.T)
        norms = np.sqrt(np.square(delta).sum(1) * self._squares[batch])
        factors = np.minimum(1, clip / np.maximum(norms, 1e-300))
        gradient = self._released((delta * factors[:, None]).T @ inputs, t)
        self.weights = self.weights - step.learning_rate(t) * gradient
        self._trail.append(self.weights)

    def _released(self, summed: Weights, t: int) -> Weights:
        step, rng = self._step, self._step.draws(t, "noise")
        classes, width = summed.shape
        weights = rng.standard_normal((classes * (width - 1),))
        noise = np.concatenate([weights, rng.standard_normal((classes,))])
        if self._history is not None:
            noise = self._history.correlate(torch.from_numpy(noise), t).numpy()
        parts = [noise[:-classes].reshape(classes, width - 1), noise[-classes:]]
        clip = step.config.privacy.clip_norm
        on_sum = step.plan.run.noise_multiplier * clip
        mean = (summed + on_sum * np.column_stack(parts)) / step.config.train.batch_size
        if not step.method.filters:
            return mean
        leaf = torch.from_numpy(mean)
        public = Public(t, {}, step.noise_std(Flat(clip), t))
        leaves = Released({"1.weight": leaf[:, :-1].contiguous(), "1.bias": leaf[:, -1].clone()})
        filtered, self._state = step.method.chain.apply(leaves, self._state, public)
        return np.column_stack([part.numpy() for part in filtered.values()])

    def count_right(self) -> int:
        """Test examples that the newest iterate classifies rightly."""
        inputs = _rows(self._step, one_tensor(self._step.data.valid_inputs))
        guesses = (inputs @ self.weights.T).argmax(1)
        return int((guesses == self._step.data.valid_targets.numpy()).sum())


def _rows(step: Step, images: torch.Tensor) -> Weights:
    """Scaled pixels with a 1 behind them, shape (N, D + 1); the last data's are kept."""
    if id(images) not in _KEPT:
        pixels = one_tensor(step.data.scaled(images, torch.float32))
        flat = pixels.flatten(1).numpy().astype(np.float64)
        _KEPT[id(images)] = images, np.column_stack([flat, np.ones(len(flat))])
    return _KEPT[id(images)][1]


_KEPT: dict[int, tuple[torch.Tensor, Weights]] = {}
"""With the images themselves, so that no others can have their id."""


def _softmax(logits: Weights) -> Weights:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    softmax: Weights = shifted / shifted.sum(1, keepdims=True)
    return softmax
