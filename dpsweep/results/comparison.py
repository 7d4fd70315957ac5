"""A comparison in words, as a table, as Markdown and as plain data."""

import math
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from dpsweep.config.keys import EPSILON, METHOD_NAME
from dpsweep.privacy.statement import format_delta, format_epsilon
from dpsweep.results.compare import Compared, Comparison, uneven
from dpsweep.results.groups import TrialGroup
from dpsweep.results.importance import LEAST_TRIALS
from dpsweep.results.rich_table import markdown_table, plain_table
from dpsweep.results.significance import CONFIDENCE, LEVEL
from dpsweep.results.tables import format_cell, format_hyperparams, heading

_HEADINGS = ("ε", "method", "trials", "as chosen", "confirmed", "± 95 %", "runs", "difference", "p")
_SPARE = ("as chosen", "runs", "trials", "± 95 %")
_POINTS = "valid/accuracy"
_TOP_KEYS = 2


def comparison_table(comparison: Comparison) -> Table:
    """One line a group."""
    title, legend = _title(comparison), _legend(comparison)
    table = plain_table(title, _HEADINGS, words=("method",), spare=_SPARE, caption=legend)
    for row in _rows(comparison):
        table.add_row(*row)
    return table


def print_comparison(console: Console, comparison: Comparison | None) -> None:
    """Print the table and its sentences; nothing if there is nothing to compare."""
    if comparison:
        console.print(comparison_table(comparison))
        for sentence in sentences(comparison):
            console.print(f"- {sentence}", markup=False)


def markdown(comparison: Comparison) -> str:
    """The same with all its sentences, to paste into a page."""
    lines = [f"**{_title(comparison)}**", "", *markdown_table(_HEADINGS, _rows(comparison)), ""]
    lines += [f"{_legend(comparison)}.", ""]
    return "\n".join([*lines, *(f"- {sentence}" for sentence in sentences(comparison))])


def rows(comparison: Comparison) -> dict[str, Any]:
    """The same as plain data, for --json."""
    first = comparison.groups[0]
    return {
        "metric": first.metric,
        "confidence": CONFIDENCE,
        "level": LEVEL,
        "groups": [_group_row(group) for group in comparison.groups],
        "compared": [_compared_row(each) for each in comparison.compared],
        "warnings": warnings(comparison),
    }


def sentences(comparison: Comparison) -> list[str]:
    """Describe the differences, chance, the keys that mattered in each search, and the caveats."""
    found = []
    several = len(comparison.by_target()) > 1
    for peers in comparison.by_target():
        at = f"at ε {format_target(peers[0])}: " if several else ""
        by_label = {c.label: c for c in comparison.compared if c.target == peers[0].target}
        found += [
            at + _verdict(by_label[group.label], group)
            for group in peers
            if group.label in by_label
        ]
        found += [
            at + _lead(by_label[group.label], group)
            for group in peers
            if group.label in by_label and by_label[group.label].chance_lead is not None
        ]
        found += [f"{at}{group.label}: {_describe_best(group)}" for group in peers]
    return [*found, *warnings(comparison)]


def warnings(comparison: Comparison) -> list[str]:
    """List the caveats of a comparison."""
    found = []
    by_target = comparison.by_target()
    for peers in by_target:
        at = f"at ε {format_target(peers[0])} " if len(by_target) > 1 else ""
        found += [f"{at}{sentence}" for sentence in uneven(peers)]
        found += _without_a_test(comparison, peers, at)
    for group in comparison.groups:
        found += [f"{group.sweep}: {remark}" for remark in group.remarks]
        if group.num_failed:
            found.append(
                f"{group.label}: {group.num_failed} repeats failed and are not in its mean"
            )
    found += _state_spending(comparison)
    if comparison.compared and (few := _hardly_searched(comparison)):
        found.append(
            f"fewer than {LEAST_TRIALS} trials were spent on {', '.join(few)}: a difference may be "
            f"that one search met a good learning rate and the other did not, however small p is. "
            f"Give each more trials: dpsweep resume NAME --trials N, or, where batch size or "
            f"epochs were searched, launch FILE --from SWEEP"
        )
    if any(each.gap.kind == "Welch" for each in comparison.compared):
        found.append(
            "groups marked W have repeats with different public seeds; they are compared by "
            "Welch's test instead of in pairs"
        )
    if any(group.num_confirmed > 1 for group in comparison.groups):
        found.append(
            "where several configs were repeated, the best of their means is shown; selection "
            "makes it slightly too good"
        )
    if comparison.chosen and len(comparison.compared) > 1:
        found.append(
            "the reference was chosen by these same repeats, which makes the other groups look "
            "worse than they are; --reference names one beforehand"
        )
    return list(dict.fromkeys(found))


def _state_spending(comparison: Comparison) -> list[str]:
    """State what all compared sweeps spent together: whoever chooses among them has seen all."""
    sweeps = {(g.folder, g.sweep): g.spending for g in comparison.groups}
    if len(sweeps) < 2 or any(spending.void for spending in sweeps.values()):
        return []  # of a void sweep a remark says that nothing holds
    epsilon = delta = 0.0
    for (folder, _), spending in sweeps.items():
        began = spending.warm_start
        if began and (folder, began[0][-1]) in sweeps:  # which counts it already
            spending = replace(spending, earlier=None)
        epsilon, delta = epsilon + spending.largest[0], delta + spending.largest[1]
    if math.isinf(epsilon):
        return []
    return [
        f"a choice among these {len(sweeps)} sweeps has seen all of them: on the same data they "
        f"cost ({format_epsilon(epsilon)}, {format_delta(min(delta, 1.0))})-DP together, by basic "
        f"composition"
    ]


def format_target(group: TrialGroup) -> str:
    """The epsilon of a group's trials, or of its whole sweep."""
    epsilon, scope, noise = group.target
    if epsilon is None:
        return f"of σ {noise:g}"
    return f"{epsilon:g}" + (" (all runs together)" if scope == "sweep" else "")


def _hardly_searched(comparison: Comparison) -> list[str]:
    """Groups in which something was searched, in few trials."""
    few = [group for group in comparison.groups if (group.trials or LEAST_TRIALS) < LEAST_TRIALS]
    return list(dict.fromkeys(group.label for group in few if group.searched))


def _title(comparison: Comparison) -> str:
    first = comparison.groups[0]
    models = sorted({str(group.model.get("name", "several models")) for group in comparison.groups})
    return (
        f"{first.metric} on {first.data['name']}, {' or '.join(models)}, "
        f"delta {format_delta(first.delta)} a trial"
    )


def _legend(comparison: Comparison) -> str:
    tests = sum(each.p is not None for each in comparison.compared)
    said = (
        f"as chosen: {_as_chosen(comparison)}; confirmed: mean of fresh runs of the best config, ± "
        f"its 95 % interval over noise and weights at the start, not over validation data"
    )
    if not tests:
        return said
    return (
        f"{said}; difference: to the reference; p: corrected for {tests} test{'s' * (tests != 1)} "
        f"(Holm). The tests compare the best configs; they do not cover the chance in each search"
    )


def _as_chosen(comparison: Comparison) -> str:
    """Explain the column: every best config was chosen in one of two ways."""
    bests = [group.best for group in comparison.groups if group.best]
    ways = {r.expected is not None for r in bests}
    names = {True: "posterior mean", False: "result of one run"}
    return " or, with few trials, ".join(names[way] for way in sorted(ways, reverse=True)) or "none"


def _rows(comparison: Comparison) -> list[list[str]]:
    by_place = {(each.target, each.label): each for each in comparison.compared}
    found = []
    for group in comparison.groups:
        each = by_place.get((group.target, group.label))
        found.append(
            [
                format_target(group),
                group.label,
                "secret" if group.trials is None else str(group.trials),
                _figure(group.best.ranking_value if group.best else None),
                _figure(group.mean),
                _figure(group.half),
                str(len(group.repeats)) if group.repeats else "–",
                _amount(each.gap.difference, group) if each else "–",
                _p(each) if each else "–",
            ]
        )
    return found


def _verdict(each: Compared, group: TrialGroup) -> str:
    """State in a sentence whether a group and the reference differ."""
    gap, (ours, theirs) = each.gap, each.gap.num_runs
    amount = _amount(abs(gap.difference), group, sign=False)
    margin = "" if gap.half is None else f" ± {_amount(gap.half, group, sign=False)}"
    how = f"{ours} pairs of runs" if gap.kind == "paired" else f"{ours} and {theirs} runs, Welch"
    if each.p is None:
        return (
            f"{group.label} and {each.reference}: {ours} and {theirs} runs are too few, or too "
            f"much alike, to test a difference of {amount}{margin}; confirm with seeds: 5"
        )
    if each.p >= LEVEL:
        return (
            f"{group.label}: no difference from {each.reference} that these {ours + theirs} runs "
            f"can show ({_amount(gap.difference, group)}{margin} {_unit(group)}, p = {each.p:.2g}, "
            f"{how})"
        )
    which = "better" if each.better else "worse"
    return (
        f"{group.label}: {which} than {each.reference} by {amount}{margin} {_unit(group)} "
        f"(p = {each.p:.2g}, {how})"
    )


def _lead(each: Compared, group: TrialGroup) -> str:
    """Tell if the chance in the two searches alone could make the difference."""
    assert each.chance_lead is not None, "asked where it is known"
    lead, chance = abs(each.gap.difference), each.chance_lead
    within = "more than that" if lead > chance else "no more than that"
    return (
        f"{group.label} and {each.reference}: which configs two searches find is chance too. "
        f"Between equally good methods it makes leads of up to "
        f"{_amount(chance, group, sign=False)} {_unit(group)}, about 9 times in 10; this one is "
        f"{within}"
    )


def _describe_best(group: TrialGroup) -> str:
    """Describe a group's best config, the selection bias of its result, and which keys mattered."""
    if group.best is None:
        return "no trial was completed"
    hyperparams = (
        format_hyperparams(group.best, without=(EPSILON, METHOD_NAME)) or "nothing was searched"
    )
    words = f"best is trial {group.best.number}: {hyperparams}"
    if group.selection_bias and group.trials:
        words += (
            f". The best result of {group.trials} trials is better than its config by "
            f"{_amount(group.selection_bias.overstatement, group, sign=False)} {_unit(group)} on "
            f"average"
        )
    if group.shares:
        top = list(group.shares.items())[:_TOP_KEYS]
        shares = ", ".join(f"{heading(key)} {share:.0%}" for key, share in top)
        return f"{words}. Most important keys (PED-ANOVA): {shares}"
    if group.trials is not None:
        return f"{words}. Importance needs {LEAST_TRIALS} complete trials"
    return words


def _without_a_test(comparison: Comparison, peers: list[TrialGroup], at: str) -> list[str]:
    """Groups that could not be compared, and why."""
    bare = [group.label for group in peers if not group.repeats and group.best]
    found = []
    if bare:
        found.append(
            f"{at}not repeated: {', '.join(bare)}: the best of many noisy trials is too good by "
            f"selection, so it is not tested. To repeat it, write confirm: {{top: 1, seeds: 5, "
            f"each_method: true}}"
        )
    tested = any(each.target == peers[0].target for each in comparison.compared)
    if sum(bool(group.repeats) for group in peers) > 1 and not tested:
        found.append(f"{at}no test was made: the reference has no repeats there")
    if len(peers) == 1:
        found.append(f"{at}there is no other group to compare {peers[0].label} with")
    return found


def _amount(value: float, group: TrialGroup, *, sign: bool = True) -> str:
    """A difference, in points where the metric is an accuracy."""
    scaled = 100 * value if group.metric == _POINTS else value
    return f"{scaled:+.2f}" if sign else f"{scaled:.2f}"


def _unit(group: TrialGroup) -> str:
    return "points" if group.metric == _POINTS else f"of {group.metric}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _p(each: Compared) -> str:
    mark = " W" if each.gap.kind == "Welch" else ""
    return "–" if each.p is None else f"{each.p:.2g}{mark}"


def _group_row(group: TrialGroup) -> dict[str, Any]:
    epsilon, scope, noise = group.target
    best = group.best
    return {
        "label": group.label,
        "sweep": group.sweep,
        "state": group.folder,
        "method": group.method,
        "epsilon": epsilon,
        "scope": scope,
        "noise_multiplier": noise,
        "delta": group.delta,
        "trials": group.trials,
        "trial": best.number if best else None,
        "value": best.value if best else None,
        "expected": best.expected if best else None,
        "hyperparams": {
            k: format_cell(v) if isinstance(v, dict) else v for k, v in best.hyperparams.items()
        }
        if best
        else {},
        "mean": group.mean,
        "half_width": group.half,
        "repeats": [{"seed": seed, "value": value} for seed, value in group.repeats],
        "failed_repeats": group.num_failed,
        "confirmed_configs": group.num_confirmed,
        "importance": group.shares,
        "overstatement": group.selection_bias.overstatement if group.selection_bias else None,
        "search_spread": group.selection_bias.spread if group.selection_bias else None,
        "remarks": list(group.remarks),
    }


def _compared_row(each: Compared) -> dict[str, Any]:
    return {
        "label": each.label,
        "reference": each.reference,
        "epsilon": each.target[0],
        "difference": each.gap.difference,
        "half_width": each.gap.half,
        "test": each.gap.kind,
        "runs": list(each.gap.num_runs),
        "p": each.gap.p,
        "p_holm": each.p,
        "better": each.better,
        "chance_lead": each.chance_lead,
        "significant": each.p is not None and each.p < LEVEL,
    }
