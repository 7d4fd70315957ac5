"""Privacy that a sweep's trials have spent together."""

import math
from collections.abc import Sequence
from dataclasses import replace

from dpsweep.config.plan import plan_privacy, statement_of_trial
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.accounting import Run, calibrate_noise, compose_runs
from dpsweep.privacy.renyi import Cap, RunCap
from dpsweep.privacy.search_budget import (
    SearchBudget,
    choose_cap,
    find_selection_cap,
    selection_epsilon,
    total_epsilon,
)
from dpsweep.privacy.statement import Growth, SearchSpending
from dpsweep.search.trial_record import Record

_SAME_NOISE = 5e-3
"""Noise that two machines calibrate to one budget differs by less, as a share (SHORTFALL)."""

Plans = tuple[tuple[int, int], ...]
"""Runs that were planned, and how many had begun by then: at first, and after each change."""


def make_ledger_entry(config: TrialConfig) -> dict[str, float]:
    """Make a trial's ledger entry: its whole length once dispatched, however it ends."""
    run = plan_privacy(config).run
    return {
        "sampling_rate": run.sampling_rate,
        "noise_multiplier": run.noise_multiplier,
        "steps": run.steps,
    }


def get_charged_run(record: Record) -> Run:
    """The run a trial is charged for: the ledger's entry, or what it would be."""
    if record.charged:
        entry = record.charged
        return Run(entry["sampling_rate"], entry["noise_multiplier"], int(entry["steps"]))
    steps, rate = record.config.steps_and_rate
    if record.row:
        return Run(rate, record.row["noise_multiplier"], steps)
    return plan_privacy(record.config).run


def describe_trial_privacy(record: Record) -> str:
    """State the privacy of one trial that has reported."""
    spent = get_charged_run(record)
    epsilon = record.config.privacy.epsilon or spent.epsilon(record.config.delta)
    return statement_of_trial(record.config, epsilon, spent.noise_multiplier, record.void)


def get_privacy_cap(sweep: ResolvedSweep) -> RunCap | None:
    """Get the most that one trial may lose for the search's epsilon to hold; None for no limit.

    It is needed where a search over batch sizes, lengths or bands may choose them, or its own end,
    by results, and for private selection, whose bound is about what loses most. It follows from the
    sweep file alone, so that it is the same before the first trial and after the last.
    """
    if sweep.search_budget:
        return None if sweep.search_budget.is_one_run else sweep.search_budget.cap
    if not sweep.schedules_vary:
        return None
    runs = _list_extreme_runs(sweep)
    if any(run.noise_multiplier == 0 for run in runs):
        return None
    return choose_cap(runs, sweep.charged, sweep.num_runs, sweep.written.delta)


def is_within_cap(cap: RunCap | None, run: Run) -> bool:
    """True if the trial may run: it loses no more than the search's proof allows."""
    return cap is None or cap.admits(run)


def check_privacy_cap(sweep: ResolvedSweep, config: TrialConfig) -> None:
    """Raise ConfigError for a proposed trial that would void what is proven of the search.

    To be called when a trial is drawn, before its secret is.
    """
    if not is_within_cap(get_privacy_cap(sweep), plan_privacy(config).run):
        train = config.train
        raise ConfigError(
            f"train.batch_size: {train.batch_size} with train.epochs: {train.epochs:g} loses more "
            f"than the trials at the ends of the space, from which the search's guarantee was "
            f"computed. It is not run; a choice of few batch sizes avoids it"
        )


def compute_search_privacy(
    sweep: ResolvedSweep,
    runs: Sequence[Run],
    *,
    confirming: int = 0,
    void: bool = False,
    plans: Plans = (),
    ahead: int | None = None,
) -> SearchSpending:
    """Compute what the search as a whole has spent.

    Args:
        runs: What each trial and each confirming run is charged.
        confirming: How many of `runs` repeat a config.
        void: True if one of them used a test secret.
        plans: How many runs were planned; more than one if that was raised after some had begun.
        ahead: Runs in all that the figure is to cover, those to come included; None for `runs`.
    """
    spent = _compute_spent(sweep, runs, confirming, void)
    if ahead is not None:
        spent = _compute_planned(spent, sweep, runs, ahead)
    if len(plans) > 1 and sweep.search_budget is None and not sweep.is_private_selection:
        planned = max(spent.planned, len(runs))
        spent = replace(spent, growth=compute_growth(sweep, runs, plans, planned))
    return spent


def _compute_spent(
    sweep: ResolvedSweep, runs: Sequence[Run], confirming: int, void: bool
) -> SearchSpending:
    """Compute the privacy spent, by the sweep's own accounting."""
    delta, whole = sweep.written.delta, sweep.search_budget
    data = sweep.written.data
    told = SearchSpending(
        num_runs=len(runs),
        planned=sweep.num_runs,
        epsilon=0.0,
        delta=delta,
        each=sweep.written.privacy.epsilon if len(sweep.epsilons) == 1 and not whole else None,
        confirming=confirming,
        adaptive=_is_adaptive(sweep),
        void=void,
        accounting=sweep.config.accounting,
        num_held_out=data.num_held_out,
        units=data.protected,
    )
    if whole and whole.covers(runs):
        return replace(
            told, epsilon=whole.epsilon, shared=True, how=_how(whole), explore=whole.share
        )
    told = replace(told, broken=whole.epsilon if whole else None)
    if sweep.is_private_selection:
        epsilon, how = _compute_selection_epsilon(sweep, runs)
        return replace(told, epsilon=epsilon, how=how)
    told = replace(told, epsilon=compose_runs(runs, delta))
    if sweep.schedules_vary and (_is_adaptive(sweep) or len(runs) < sweep.num_runs):
        proven, how = _prove_planned(sweep, runs, sweep.num_runs)
        return replace(told, proven=proven, how=how, planned=max(sweep.num_runs, len(runs)))
    if len(runs) < sweep.num_runs and not sweep.schedules_vary:
        kinds, each = _count_run_kinds(sweep, runs, sweep.num_runs)
        return replace(told, to_the_end=compose_runs(kinds * each, delta))
    return told


def _compute_planned(
    spent: SearchSpending, sweep: ResolvedSweep, runs: Sequence[Run], num_runs: int
) -> SearchSpending:
    """Compute what all planned runs will have spent: never less than `runs` have spent.

    A figure for the whole search, and one whose budget was broken, stay what they are.
    """
    num_runs, delta = max(num_runs, len(runs)), sweep.written.delta
    if spent.shared or sweep.is_private_selection:
        return replace(spent, ahead=True)
    if spent.broken is not None:
        return spent
    whole = replace(spent, planned=num_runs, proven=None, to_the_end=None, ahead=True)
    if not sweep.schedules_vary:
        kinds, each = _count_run_kinds(sweep, runs, num_runs)
        return replace(whole, epsilon=max(spent.epsilon, compose_runs(kinds * each, delta)))
    (epsilon, delta), how = _prove_planned(sweep, runs, num_runs)
    if math.isinf(epsilon):
        return replace(whole, epsilon=epsilon)
    return replace(whole, epsilon=epsilon, delta=delta, how=how) if delta < 1 else spent


def compute_growth(
    sweep: ResolvedSweep, runs: Sequence[Run], plans: Plans, num_runs: int
) -> Growth:
    """Compute what is proven of `num_runs` runs whose number depended on results.

    Let c be the most runs of any kind (budget) that there are in the end, and c_1 what was planned
    at first. Outcomes with c <= c_1 are those of a composition of c_1 runs of each kind: they get
    delta. Each c > c_1 gets delta / ((c - c_1) (c - c_1 + 1)), and these add up to delta again.
    With e_c the epsilon of c runs of each kind at that share of delta, for any set S of outcomes

        P(S) = sum_c P(S and c) <= sum_c (exp(e_c) P'(S and c) + delta_c)
             <= E'[exp(e_c); S] + 2 delta

    which is (e_c, 2 delta)-DP ex post: epsilon belongs to the outcome (Ligett et al. 2017,
    arXiv:1705.10829; as an odometer, Rogers et al. 2016, arXiv:1605.08294). Proof in
    docs/concepts/accounting.md.
    """
    delta = sweep.written.delta
    kinds, now = _count_run_kinds(sweep, runs, num_runs)
    more = now - _count_run_kinds(sweep, (), plans[0][0])[1]
    share = 1 / (more * (more + 1)) if more else 1.0
    return Growth(
        plans, num_runs, compose_runs(kinds * now, delta * share), delta * (2 if more else 1)
    )


def _count_run_kinds(
    sweep: ResolvedSweep, runs: Sequence[Run], num_runs: int
) -> tuple[list[Run], int]:
    """The kinds of runs where schedules do not vary, and how many there may be of each.

    Among `num_runs`, of which `runs` have begun. There is a kind for each budget, however near two
    budgets are. A run is of the kind whose noise is nearest, since another machine may have
    calibrated it; one whose noise is none of theirs is a kind of its own.
    """
    kinds = _list_extreme_runs(sweep)
    begun = [0] * len(kinds)
    for run in runs:
        off = [abs(kind.noise_multiplier - run.noise_multiplier) for kind in kinds]
        nearest = off.index(min(off))
        if off[nearest] > _SAME_NOISE * run.noise_multiplier:
            nearest = len(kinds)
            kinds, begun = [*kinds, run], [*begun, 0]
        begun[nearest] += 1
        if run.noise_multiplier < kinds[nearest].noise_multiplier:  # never less than was spent
            kinds[nearest] = run
    return kinds, max(-(-num_runs // len(sweep.epsilons)), *begun)


def _is_adaptive(sweep: ResolvedSweep) -> bool:
    """True if what is run depends on results."""
    config = sweep.config
    learns = config.sampler.learns or config.pruner.name != "none"
    return learns or config.confirm is not None or sweep.explores


def _list_extreme_runs(sweep: ResolvedSweep) -> list[Run]:
    """Trials of each budget at the ends of what the search may choose."""
    given, delta = sweep.written.privacy.noise_multiplier or 0.0, sweep.written.delta
    return [
        calibrate_noise(epsilon, delta, rate, steps)[0] if epsilon else Run(rate, given, steps)
        for epsilon in sweep.epsilons
        for steps, rate in sweep.schedules
    ]


def _how(whole: SearchBudget) -> str:
    """Proof of a budget that all runs share."""
    if whole.charged == "private_selection":
        return selection_epsilon(whole.cap, whole.num_runs, whole.delta)[1]
    if whole.is_one_run and whole.share is not None:
        return "(PLD, at two noise levels fixed beforehand)"
    return "(PLD)" if whole.is_one_run else "(RDP, at an order fixed beforehand)"


def _compute_selection_epsilon(sweep: ResolvedSweep, runs: Sequence[Run]) -> tuple[float, str]:
    """Epsilon of a private selection, and its proof; by what was run, if that broke the cap."""
    ends, cap, delta = _list_extreme_runs(sweep), get_privacy_cap(sweep), sweep.written.delta
    if cap is None:
        cap = find_selection_cap(ends, sweep.num_runs, delta)[1]
    if not all(cap.admits(run) for run in runs):
        cap = find_selection_cap([*ends, *runs], sweep.num_runs, delta)[1]
    return selection_epsilon(cap, sweep.num_runs, delta)


def _prove_planned(
    sweep: ResolvedSweep, runs: Sequence[Run], planned: int
) -> tuple[tuple[float, float], str]:
    """(epsilon, delta) of all planned runs whatever the search chose, and how it is proven.

    Divergences add up at an order fixed beforehand, if every run kept the cap. If one did not,
    each trial's own guarantee counts, by basic composition.
    """
    num, delta, cap = max(planned, len(runs)), sweep.written.delta, get_privacy_cap(sweep)
    if isinstance(cap, Cap) and all(cap.admits(run) for run in runs):
        epsilon, at = total_epsilon("composition", cap, num, delta)
        return (epsilon, delta), f"RDP at order {at.orders[0]:g}, fixed beforehand"
    if None in sweep.epsilons:
        return (math.inf, 1.0), ""
    dearest = max(epsilon or 0.0 for epsilon in sweep.epsilons)
    return (num * dearest, min(1.0, num * delta)), "basic composition"
