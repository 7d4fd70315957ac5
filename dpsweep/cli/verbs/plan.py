"""The verb plan: what a sweep will take, before anything runs."""

import json
from dataclasses import asdict
from pathlib import Path

from dpsweep.cli.say import console, warn
from dpsweep.config.sweep import load_sweep
from dpsweep.core.disk import format_bytes, free_bytes
from dpsweep.execution.resources import count_concurrent_trials, get_local_resources
from dpsweep.privacy.statement import format_epsilon
from dpsweep.privacy.ways import Ends, Ways
from dpsweep.results.tables import format_budgets
from dpsweep.store.state_dir import StateFolder


def plan(file: Path, settings: list[str], as_json: bool) -> None:
    """Print what a sweep will take on this machine."""
    sweep = load_sweep(file, settings)
    from dpsweep.execution.preflight import make_plan
    from dpsweep.training.check import check_sweep  # torch, once the file has no mistake

    warn(check_sweep(sweep))
    resources = sweep.config.resources
    made = make_plan(sweep, count_concurrent_trials(resources, [get_local_resources(resources)]))
    if as_json:
        print(json.dumps(asdict(made), indent=2))
        return
    free = free_bytes(StateFolder.at(None).root)
    noise, steps = format_range(made.noise, ".3f"), format_range(made.steps, "d")
    repeats = f" and {made.repeats} repeats of the best" if made.repeats else ""
    repeats = " with much noise, and the final run" if sweep.explores else repeats
    console().print(
        f"[bold]{sweep.name}[/bold]: {made.trials} trials{repeats}, {made.at_once} at once on this "
        f"machine\n"
        f"steps      {steps} a trial\n"
        f"noise      {noise} times the clip norm, calibrated for each trial\n"
        f"a trial    {made.trial_words}\n"
        f"expected   {made.search_words}\n"
        f"time       about {made.seconds / 60:.1f} min here, from a probe of a few steps\n"
        f"disk       up to {format_bytes(made.disk_bytes)}; {format_bytes(free)} are free"
    )
    if sweep.search_budget and sweep.explores:
        finals = [sweep.search_budget.noise(schedule, final=True) for schedule in sweep.schedules]
        final = format_range((min(finals), max(finals)), ".3f")
        console().print(
            f"final run  noise {final}, with nearly all of ε; the trials' is larger, and with sgd "
            f"their step smaller in the same ratio"
        )
    if len(made.epsilons) > 1:
        console().print(f"budgets    ε {format_budgets(made.epsilons)} in turn")
    if made.share < 1:
        console().print(f"where      {made.share:.1%} of random points meet it; others are not run")
    for words in made.correlations:
        console().print(f"correlated {words}")
    if made.stop_words:
        console().print(f"stop       {made.stop_words}")
    if made.ways:
        console().print(show_ways(made.ways))


def show_ways(ways: Ways) -> str:
    """Own epsilon of the released model, by how the search is charged."""
    return (
        f"one ε      {ways.epsilon:g} for all {ways.num_trials} trials together would leave the "
        f"model that is released\n"
        f"           {_format_ends(ways.equal)} by equal shares (privacy.scope: sweep)\n"
        f"           {_format_ends(ways.selection)} by private selection (and accounting: "
        f"private_selection)\n"
        f"           {_format_ends(ways.explore)} by explore-then-train (and budget.explore, "
        f"share {ways.share:g}); an exploring trial has {_format_ends(ways.each)}\n"
        f"           {ways.advice}"
    )


def _format_ends(ends: Ends) -> str:
    return " to ".join(dict.fromkeys(map(format_epsilon, ends)))


def format_range(ends: tuple[float, float], form: str) -> str:
    """Format a range in words; one number where both ends look the same.

    >>> format_range((183, 183), "d"), format_range((1.2345, 2), ".2f")
    ('183', '1.23 to 2.00')
    """
    low, high = (format(end, form) for end in ends)
    return low if low == high else f"{low} to {high}"
