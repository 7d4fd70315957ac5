"""The verb that measures privacy: audit."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from dpsweep.cli.say import console
from dpsweep.cli.verbs.trial import print_release_checks
from dpsweep.config.source import Source, read_yaml, with_value
from dpsweep.config.sweep import is_sweep, parse_sweep
from dpsweep.config.trial import TrialConfig, load_trial, refuse_shared_budget, resolve_trial_source
from dpsweep.core.errors import unknown_name_error
from dpsweep.methods import METHODS, PUBLISHED
from dpsweep.privacy.audit import Audit, power_against, power_of_one_run
from dpsweep.results.rich_table import plain_table
from dpsweep.training.audit import Canary, Plan, audit_one_run
from dpsweep.training.audit import run_audit as audit_plan

_VIOLATED = 1


def audit(
    what: str,
    settings: list[str],
    plan: dict[str, Any],
    as_json: bool,
    canaries: Sequence[Canary] = ("bright",),
    one_run: int = 0,
) -> None:
    """Audit a method of the table, all of them, or the method of a trial's or a sweep's file.

    Of a file, the checks of its own releases come first; of a sweep, those of a trial at one corner
    of its space. They are all, unless `plan` has runs.

    Args:
        plan: Fields of `Plan` other than the config; without `runs`, 5000 for methods.
        canaries: Images that come and go; each is audited with all runs.
        one_run: Canaries of an audit by one run, at least 40; 0 for none.
    """
    configs, of_file = _configs(what, settings), _is_file(what)
    if of_file and not print_release_checks(configs[0], quiet=as_json):
        sys.exit(_VIOLATED)
    rows: list[tuple[Audit, float]] = []
    if one_run:
        refuted = [_one_run(Plan(c, own=of_file, **plan), one_run, as_json) for c in configs]
        if any(refuted):
            sys.exit(_VIOLATED)
    if one_run or (of_file and "runs" not in plan):
        return
    plan = {"runs": Plan.runs, **plan}
    error = (1 - plan["confidence"]) / len(configs) / len(canaries)  # all bounds hold together
    power = power_against(0.9, plan["epsilon"], plan["delta"], plan["runs"], 1 - error)
    words = (
        f"The canary stands for one of the {configs[0].data.private_units}. Noise at 0.9 of what "
        f"is claimed would be found in {power:.0%} of such audits (q = 1)."
    )
    for config, canary in product(configs, canaries):
        start = time.monotonic()
        found = audit_plan(Plan(config, canary, of_file, **{**plan, "confidence": 1 - error}))
        if len(canaries) > 1:
            found = replace(found, method=f"{found.method}, {canary} canary")
        rows.append((found, time.monotonic() - start))
        if not as_json:
            console().print(_line(*rows[-1]), highlight=False)
    if as_json:
        kept = [{**asdict(a), "lower": a.lower, "ratio": a.ratio, "seconds": s} for a, s in rows]
        print(json.dumps(kept, indent=2))
    else:
        console().print(_table(rows, plan))
        console().print(words, highlight=False)
    if any(found.violated for found, _ in rows):
        sys.exit(_VIOLATED)


def _one_run(plan: Plan, canaries: int, as_json: bool) -> bool:
    """Audit by one run; True if it refutes the claim."""
    found = audit_one_run(plan, canaries)
    weak, least = (
        power_of_one_run(share, plan.epsilon, plan.delta, canaries, plan.confidence)
        for share in (0.9, 0.3)
    )
    row = {
        "method": plan.config.method.name,
        "claimed": plan.epsilon,
        **asdict(found),
        "power": weak,
    }
    if as_json:
        print(json.dumps(row))
    else:
        console().print(
            f"{row['method']}: claimed {plan.epsilon:g}, one run of {plan.steps} steps with "
            f"{found.canaries} canaries: {found.correct} of {found.guesses} guesses right, epsilon "
            f"is at least {found.lower:.2f}. A canary stands for one of the "
            f"{plan.config.data.private_units}. Noise at 0.9 of what is claimed would be found in "
            f"at most {weak:.0%} of such audits, at 0.3 in {least:.0%}",
            highlight=False,
        )
    return found.lower > plan.epsilon


def known_canaries(names: list[str]) -> list[Canary]:
    """The names, if they are canaries'; ConfigError if one is not."""
    known = get_args(Canary)
    for name in names:
        if name not in known:
            raise unknown_name_error("canary", name, known, where="--canary")
    return [canary for canary in known if canary in names]


def _is_file(what: str) -> bool:
    return Path(what).suffix in (".yaml", ".yml") or Path(what).exists()


def _configs(what: str, settings: list[str]) -> list[TrialConfig]:
    """A trial for each method to be audited; of methods, the data and model are the audit's own."""
    if _is_file(what):
        source = read_yaml(what)
        if is_sweep(source.tree):
            return [parse_sweep(source, Path(what).parent, settings).reference_trial]
        source = resolve_trial_source(source, settings)
        config = load_trial(source)
        refuse_shared_budget(config, source)
        return [config]
    if what != "all" and what not in METHODS:
        raise unknown_name_error("method", what, ["all", *METHODS], where="audit")
    names = PUBLISHED if what == "all" else (what,)
    return [load_trial(resolve_trial_source(_strip_method(name), settings)) for name in names]


def _strip_method(method: str) -> Source:
    tree = {
        "data": {"name": "digits"},
        "model": {"name": "cnn_small", "width": 5, "block": 10},
        "privacy": {"epsilon": 1.0},
        "train": {"batch_size": 8, "epochs": 1},
        "optimizer": {"lr": 1.0},
    }
    return Source(f"method {method}", with_value(tree, ("method",), {"name": method}), {})


def _line(found: Audit, seconds: float) -> str:
    verdict = "VIOLATED" if found.violated else "holds"
    return (
        f"{found.method}: claimed {found.claimed:g}, measured at least {found.lower:.2f} "
        f"({found.ratio:.0%}), {verdict} ({seconds:.0f} s)"
    )


def _table(rows: list[tuple[Audit, float]], plan: dict[str, Any]) -> Table:
    figures = ("claimed ε", "measured ε ≥", "ratio", "by counting", "by Gaussian fit", "sec")
    table = plain_table(
        f"Audit at q = {plan['sampling_rate']:g}, {plan['steps']} steps, {plan['runs']} runs "
        f"with and without the canary, confidence {plan['confidence']:g} for all rows together",
        ("method", *figures, "verdict"),
        words=("method", "verdict"),
    )
    for found, seconds in rows:
        table.add_row(
            found.method,
            f"{found.claimed:g}",
            f"{found.lower:.2f}",
            f"{found.ratio:.2f}",
            f"{found.counted:.2f}",
            f"{found.fitted:.2f}",
            f"{seconds:.0f}",
            "[red]VIOLATED[/red]" if found.violated else "holds",
        )
    return table
