"""Queries: the points in parameter space where each example's gradient is evaluated.

A query is a weighted list of public points. Example i contributes the weighted sum
of its gradients there; that sum, not each gradient, is clipped. The points depend
only on past iterates, which are public, so a longer query costs compute, not privacy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.privacy.clip import stack_parts

SumClipped = Callable[[Sequence[Tensors], Sequence[float]], Clipped]
"""(points, weights) -> the sum over the batch of each example's clipped gradient."""


@dataclass(frozen=True)
class EvaluationPoint:
    """`weight` times the gradient at x_{t-age} + ahead * (x_t - x_{t-1}).

    Attributes:
        weight: Weight of this point's gradient in the sum; may be negative.
        age: How many steps back; 0 is the newest iterate.
        ahead: How far past it, in units of the last step; may be negative.
    """

    weight: float
    age: int = 0
    ahead: float = 0.0

    @property
    def memory(self) -> int:
        """Number of iterates that `point` reads, the newest included."""
        return max(self.age + 1, 2 if self.ahead else 1)

    def point(self, iterates: Sequence[Tensors]) -> Tensors:
        """Compute the point. `trail` holds iterates, newest last; before the second, d_t is 0."""
        here = iterates[-1 - self.age]
        if not self.ahead or len(iterates) < 2:
            return here
        now, before = iterates[-1], iterates[-2]
        return {k: x + self.ahead * (now[k] - before[k]) for k, x in here.items()}


class Query(Protocol):
    """Evaluation points of a step, and the map from its release to a gradient."""

    @property
    def memory(self) -> int:
        """Number of iterates to keep, the newest included."""

    def evaluation_points(self, step: int) -> tuple[EvaluationPoint, ...]:
        """Evaluation points of step `step` and their weights, a function of public numbers."""

    def evaluate(self, sum_clipped: SumClipped, iterates: Sequence[Tensors], step: int) -> Clipped:
        """Clipped sum of the batch; one example moves it by at most the clip norm."""

    def restore(self, released: Released, step: int) -> Released:
        """Compute the gradient from a release: a fixed linear map, so post-processing."""

    def noise_gain(self, step: int) -> float:
        """Variance of what `restore` gives per unit variance of the noise that was released."""


class JointQuery:
    """Queries whose points are clipped together: one weighted sum, clipped once.

    In the first steps the points whose iterates do not exist yet are left out, and the other
    weights scaled up to the same sum.
    """

    def evaluation_points(self, step: int) -> tuple[EvaluationPoint, ...]:
        raise NotImplementedError

    def evaluate(self, sum_clipped: SumClipped, iterates: Sequence[Tensors], step: int) -> Clipped:
        points = self.evaluation_points(step)
        total = sum(point.weight for point in points)
        if len(iterates) == 1:  # all points are one
            return sum_clipped([iterates[-1]], [total])
        known = [point for point in points if point.age < len(iterates)]
        scale = total / sum(point.weight for point in known)
        return sum_clipped([p.point(iterates) for p in known], [scale * p.weight for p in known])

    def restore(self, released: Released, step: int) -> Released:
        return released

    def noise_gain(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class FixedQuery(JointQuery):
    """Query with the same points and weights at every step."""

    points: tuple[EvaluationPoint, ...]

    @property
    def memory(self) -> int:
        return max(point.memory for point in self.points)

    def evaluation_points(self, step: int) -> tuple[EvaluationPoint, ...]:
        return self.points


NEWEST_ITERATE = FixedQuery((EvaluationPoint(weight=1.0),))


@dataclass(frozen=True)
class SplitQuery:
    """Query of two points clipped separately: the gradient at x_t, and its change ahead.

        u_i = ( sqrt(1-s) clip_C(g_i(x_t)),  sqrt(s)/2 (clip_C(g_i(ahead)) - clip_C(g_i(x_t))) )

    |u_i|^2 <= (1-s) C^2 + s/4 (2C)^2 = C^2, so both are one release of sensitivity C, with the
    same noise on all coordinates. In units of the paper that is sigma_r = sigma / sqrt(1-s) on
    the gradient and sigma_fd = 2 sigma / sqrt(s) on the difference:
    1/sigma^2 = 1/sigma_r^2 + 4/sigma_fd^2. `restore` gives r_t + c h_t, h_t the difference.

    Attributes:
        ahead: gamma, the second point x_t + gamma (x_t - x_{t-1}).
        weight: c, factor of the difference.
        share: s, of the step's privacy cost that the difference takes, in (0, 1).
    """

    ahead: float
    weight: float
    share: float

    @property
    def memory(self) -> int:
        return 2

    def evaluation_points(self, step: int) -> tuple[EvaluationPoint, ...]:
        return (EvaluationPoint(1 - self.weight), EvaluationPoint(self.weight, ahead=self.ahead))

    def evaluate(self, sum_clipped: SumClipped, iterates: Sequence[Tensors], step: int) -> Clipped:
        here = sum_clipped([iterates[-1]], [1.0])
        there = sum_clipped([EvaluationPoint(1.0, ahead=self.ahead).point(iterates)], [1.0])
        return stack_parts(here, there, sqrt(1 - self.share), sqrt(self.share) / 2)

    def restore(self, released: Released, step: int) -> Released:
        names = [k.removeprefix("0/") for k in released if k.startswith("0/")]
        own, other = self._scales
        return Released({k: own * released[f"0/{k}"] + other * released[f"1/{k}"] for k in names})

    def noise_gain(self, step: int) -> float:
        return sum(scale**2 for scale in self._scales)

    @property
    def _scales(self) -> tuple[float, float]:
        return 1 / sqrt(1 - self.share), 2 * self.weight / sqrt(self.share)
