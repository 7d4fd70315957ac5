"""The verb that measures privacy: audit."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from dpsweep.cli.say import console
from dpsweep.config.source import Source, read_yaml, with_value
from dpsweep.config.sweep import is_sweep
from dpsweep.config.trial import TrialConfig, load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError, unknown_name_error
from dpsweep.methods import METHODS, PUBLISHED
from dpsweep.privacy.audit import Audit
from dpsweep.results.rich_table import plain_table
from dpsweep.training.audit import Plan
from dpsweep.training.audit import run_audit as audit_plan

_VIOLATED = 1


def audit(what: str, settings: list[str], plan: dict[str, Any], as_json: bool) -> None:
    """Audit a method of the table, all of them, or the method of a trial config.

    Args:
        what: `all`, a method's name, or a file.
        settings: KEY=VALUE, set in each trial.
        plan: Fields of `Plan` other than the config.
        as_json: True to print rows.
    """
    configs = _configs(what, settings)
    error = (1 - plan["confidence"]) / len(configs)  # all bounds hold together
    rows = []
    for config in configs:
        start = time.monotonic()
        found = audit_plan(Plan(config, **{**plan, "confidence": 1 - error}))
        rows.append((found, time.monotonic() - start))
        if not as_json:
            console().print(_line(*rows[-1]), highlight=False)
    if as_json:
        kept = [{**asdict(a), "lower": a.lower, "ratio": a.ratio, "seconds": s} for a, s in rows]
        print(json.dumps(kept, indent=2))
    else:
        console().print(_table(rows, plan))
    if any(found.violated for found, _ in rows):
        sys.exit(_VIOLATED)


def _configs(what: str, settings: list[str]) -> list[TrialConfig]:
    """A trial for each method to be audited; its data and model are the audit's own."""
    if Path(what).suffix in (".yaml", ".yml") or Path(what).exists():
        source = resolve_trial_source(read_yaml(what), settings)
        if is_sweep(source.tree):
            raise ConfigError(f"{what}: is a sweep. Audit a trial config, or a method by its name")
        return [load_trial(source)]
    if what != "all" and what not in METHODS:
        raise unknown_name_error("method", what, ["all", *METHODS], where="audit")
    names = PUBLISHED if what == "all" else (what,)
    return [load_trial(resolve_trial_source(_bare(name), settings)) for name in names]


def _bare(method: str) -> Source:
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
    table = plain_table(
        f"Audit at q = {plan['sampling_rate']:g}, {plan['steps']} steps, {plan['runs']} runs "
        f"with and without the canary, confidence {plan['confidence']:g} for all rows together"
    )
    table.add_column("method")
    for name in ("claimed ε", "measured ε ≥", "ratio", "by counting", "by Gaussian fit", "sec"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
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
