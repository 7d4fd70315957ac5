"""Changes of a sweep file since its launch, and which of them are allowed."""

from dpsweep.config.explain import format_value
from dpsweep.config.keys import flatten
from dpsweep.config.source import Tree
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.core.errors import StateError
from dpsweep.search.charge import get_privacy_cap
from dpsweep.store.state_dir import SweepFolder

_HARMLESS = ("budget", "confirm", "resources", "keep_weights")
"""Parts of a sweep file that say how much is run, and not what: no trial of before means
anything else, and what more is run is charged."""

_NUM_RUNS = ("budget.trials", "budget.explore", "confirm")
"""Those of them that say how many runs there are. Noise is calibrated to that number where all
share one budget, and the Renyi order of a proof is chosen by it where lengths are searched."""

_MISSING = "nothing"


def list_changes(launched: ResolvedSweep, sweep: ResolvedSweep) -> dict[str, tuple[str, str]]:
    """Dotted key -> what was launched and what the file says now, where they differ."""
    then, now = (_make_comparable_tree(s.file.tree, s.base.tree) for s in (launched, sweep))
    keys = sorted(k for k in {*then, *now} if then.get(k) != now.get(k))
    return {k: (_format_setting(then, k), _format_setting(now, k)) for k in keys}


def may_add_trials(sweep: ResolvedSweep) -> bool:
    """True if a launched sweep may be given more trials: nothing was chosen by their number."""
    is_shared = sweep.search_budget is not None or sweep.is_private_selection
    return not is_shared and get_privacy_cap(sweep) is None


def _explain_fixed_number(launched: ResolvedSweep, sweep: ResolvedSweep) -> str:
    """Say why the number of runs cannot change, and what can be done."""
    if may_add_trials(sweep):
        return (
            " Trials and repeats can be added, not taken away: results might have decided that. To "
            f"end early, stop the sweep: dpsweep best {launched.name} shows what there is."
        )
    if launched.is_private_selection:
        why = "accounting: private_selection proves its epsilon for this mean number of trials"
    elif launched.search_budget is not None:
        why = f"under privacy.scope: sweep the noise was made for {launched.num_runs} runs"
    else:
        why = (
            "batch size or epochs are searched, and the proof of the search's epsilon chose its "
            f"Renyi order for {launched.num_runs} runs"
        )
    return f" The number of runs is fixed: {why}."


def describe_second_sweep(sweep: ResolvedSweep) -> str:
    """Say how the file of a sweep is launched once more, and what that costs."""
    learns = not sweep.is_private_selection  # which draws its trials from one law
    return (
        "a sweep of its own, whose epsilon adds to this one's"
        + ", and which may begin from what this one found" * learns
        + f": dpsweep launch FILE --name {sweep.name}-2"
        + f" --from {sweep.name}" * learns
    )


def check_changes(
    folder: SweepFolder, launched: ResolvedSweep, sweep: ResolvedSweep, *, accepted: bool
) -> ResolvedSweep:
    """Take over changes that do no harm, if they were accepted; return the sweep to go on with.

    Raises:
        StateError: Showing what differs, and what to do about it.
    """
    found = list_changes(launched, sweep)
    if not found:
        return launched
    listed = "; ".join(f"{key}: {then} -> {now}" for key, (then, now) in found.items())
    harmful = [key for key in found if not _is_harmless(key, launched, sweep)]
    if harmful:
        about_number = any(key.startswith(_NUM_RUNS) for key in harmful)
        why = _explain_fixed_number(launched, sweep) if about_number else ""
        raise StateError(
            f"{sweep.file.name}: is not what sweep {sweep.name!r} was launched with ({listed}). "
            f"{', '.join(harmful)} cannot change under trials that have run.{why} Launch the file "
            f"as {describe_second_sweep(sweep)}. Or go on with what was launched: dpsweep resume "
            f"{sweep.name}"
        )
    if not accepted:
        grown = ""
        if sweep.num_runs != launched.num_runs:
            grown = (
                " If trials have run, its privacy statement will say that the number of runs was "
                "raised after results had been seen."
            )
        raise StateError(
            f"{sweep.file.name}: is not what sweep {sweep.name!r} was launched with ({listed}). "
            f"Take it over with --accept-changes, or go on with what was launched: dpsweep resume "
            f"{sweep.name}.{grown}"
        )
    folder.accept(sweep.file, sweep.base)
    return sweep


def _is_harmless(key: str, launched: ResolvedSweep, sweep: ResolvedSweep) -> bool:
    section = key.split(".")[0]
    if key.startswith(_NUM_RUNS):
        return may_add_trials(sweep) and not _drops_runs(launched, sweep)
    return section in _HARMLESS


def _drops_runs(launched: ResolvedSweep, sweep: ResolvedSweep) -> bool:
    """True if something that was planned is dropped: results may have had a say in that."""
    then, now = launched.config, sweep.config
    if now.budget.trials < then.budget.trials:
        return True
    if then.confirm is None:
        return False
    return (
        now.confirm is None
        or now.confirm.top < then.confirm.top
        or now.confirm.seeds < then.confirm.seeds
        or now.confirm.each_method < then.confirm.each_method
    )


def _make_comparable_tree(sweep: Tree, base: Tree) -> Tree:
    """Without the sweep's name, by which it was found, and with the base in place of its path."""
    whole = {**sweep, "base": base}
    whole.pop("name", None)
    return flatten(whole, empty=False)


def _format_setting(tree: Tree, key: str) -> str:
    return format_value(tree[key]) if key in tree else _MISSING
