"""The query of per-example momentum, shared by InnerOuter and DP-PMLF."""

from typing import ClassVar

from pydantic import Field

from dpsweep.core.strict import Strict
from dpsweep.privacy.query import NEWEST_ITERATE, EvaluationPoint, FixedQuery, Query


class InnerMomentum(Strict):
    """One example's momentum, computed afresh at the last iterates.

        {(w_j, x_{t-j})},   j = 0..k-1,   w_j = beta^j / sum_j beta^j

    The newest iterate weighs most. In the first k-1 steps the iterates that exist share the
    whole weight. Each step touches its own batch only, so amplification by sampling holds.
    """

    letters: ClassVar[dict[str, str]] = {"k": "points", "beta": "decay"}

    points: int = Field(default=2, ge=1, le=16)
    """k: iterates asked at, the newest included; each costs one gradient. 1 is DP-SGD's query.
    Print: 2 to 6."""

    decay: float = Field(default=0.3, gt=0, le=1)
    """beta: weight of an iterate relative to the next newer one; 1 weighs all the same. Print
    leaves it open; 0.3 is measured (docs/benchmarks/search.md)."""

    @property
    def query(self) -> Query:
        """The weighted iterates."""
        if self.points == 1:
            return NEWEST_ITERATE
        weights = [self.decay**age for age in range(self.points)]
        return FixedQuery(
            tuple(EvaluationPoint(w / sum(weights), age=age) for age, w in enumerate(weights))
        )
