"""A trial's schedule, known before its first step: what it spends, and when it reports.

The accountant's part is the same for all trials of one length and budget, and the driver knows
it: workers receive it, so that none of them needs an accountant.
"""

import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from dpsweep.config.plan import PrivacyPlan, plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.correlated import Correlation


@dataclass(frozen=True)
class Report:
    """One report of a trial."""

    epoch: int  # counted from 1
    step: int  # steps taken by then
    epsilon: float  # spent by then, at most


@dataclass(frozen=True)
class TrialSchedule:
    """Steps, noise and reports of a trial."""

    plan: PrivacyPlan  # sampling rate, noise and steps, and what they spend
    reports: tuple[Report, ...]  # its reports in order; the last one stands at the last step

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "TrialSchedule":
        """Read what `to_json` wrote."""
        plan = values["plan"]
        correlation = plan.get("correlation")
        if correlation is not None:
            lists = {k: tuple(correlation[k]) for k in ("coefficients", "decays")}
            correlation = Correlation(**{**correlation, **lists})
        return cls(
            PrivacyPlan(**{**plan, "run": Run(**plan["run"]), "correlation": correlation}),
            tuple(Report(**report) for report in values["reports"]),
        )


def resolve_trial_schedule(config: TrialConfig) -> TrialSchedule:
    """Compute the schedule of one trial, by the accountant."""
    plan = plan_privacy(config)
    marks = _report_steps(plan, config)
    before = _compute_epsilons_spent(
        plan.run, plan.delta, tuple(plan.rounds_after(step) for _, step in marks[:-1])
    )
    spent = [*(min(epsilon, plan.epsilon) for epsilon in before), plan.epsilon]
    return TrialSchedule(
        plan, tuple(Report(*mark, e) for mark, e in zip(marks, spent, strict=True))
    )


def _report_steps(plan: PrivacyPlan, config: TrialConfig) -> list[tuple[int, int]]:
    """List (epoch, step) of each report."""
    last = max(1, math.ceil(config.train.epochs))
    epochs = [*range(config.train.evaluate_every, last, config.train.evaluate_every), last]
    marks = [(epoch, plan.step_after(epoch)) for epoch in epochs[:-1]]
    return [mark for mark in marks if mark[1] < plan.steps] + [(last, plan.steps)]


@lru_cache(maxsize=256)
def _compute_epsilons_spent(run: Run, delta: float, after: tuple[int, ...]) -> tuple[float, ...]:
    """Compute the epsilon spent after each report; cached, as it takes a fifth of a second."""
    return tuple(run.epsilons_spent(delta, after)) if after else ()
