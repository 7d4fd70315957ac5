"""Tables of trials and sweeps, for people and (as rows) for programs."""

from typing import Any

from rich.table import Table

from dpsweep.tune.study import Record

LETTERS = {
    "method.kappa": "κ",
    "method.gamma": "γ",
    "method.depth": "ρ",
    "method.cut": "λ",
    "train.batch_size": "B",
    "privacy.clip_norm": "C",
    "privacy.epsilon": "ε",
}
"""The papers' letters, shown beside the names."""


def trial_table(records: list[Record], title: str) -> Table:
    """One line a trial, in the given order."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("trial", "state", "accuracy", "loss", "ε spent", "σ"):
        table.add_column(name, justify="right" if name != "state" else "left")
    knobs = knob_names(records)
    for name in knobs:
        table.add_column(_heading(name), justify="right")
    table.add_column("seconds", justify="right")
    for record in records:
        row = record.row or {}
        table.add_row(
            str(record.number),
            record.state + (" (void)" if record.void else ""),
            *(_shown(row.get(k)) for k in ("valid/accuracy", "valid/loss")),
            *(_shown(row.get(k)) for k in ("privacy/epsilon_spent", "noise_multiplier")),
            *(_shown(record.knobs.get(name)) for name in knobs),
            f"{record.seconds:.1f}",
        )
    return table


def trial_row(record: Record) -> dict[str, Any]:
    """One trial as plain data, for --json."""
    return {
        "trial": record.number,
        "state": record.state,
        "value": record.value,
        "reason": record.reason,
        "void": record.void,
        **(record.row or {}),
        "knobs": record.knobs,
    }


def knob_names(records: list[Record]) -> list[str]:
    """Every searched key, in the order of the sweep file."""
    return list(dict.fromkeys(name for record in records for name in record.knobs))


def _heading(name: str) -> str:
    short = name.rpartition(".")[2]
    return f"{short} {LETTERS[name]}" if name in LETTERS else short


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
