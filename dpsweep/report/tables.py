"""Tables of trials and sweeps, for people and (as rows) for programs."""

from typing import Any

from rich import box
from rich.table import Table

from dpsweep.privacy.statement import shown_epsilon
from dpsweep.tune.study import Record

LETTERS = {
    "method.kappa": "κ",
    "method.gamma": "γ",
    "method.depth": "ρ",
    "method.cut": "λ",
    "train.batch_size": "B",
    "privacy.clip_norm": "C",
    "method.name": "method",
    "privacy.epsilon": "ε",
}
"""The papers' letters, shown beside the names."""

_MOST_COLUMNS = 6
"""Searched keys that fit beside each other; more, as where methods are compared, share one."""


def trial_table(records: list[Record], title: str, *, show_state: bool = True) -> Table:
    """One line a trial, in the given order; narrow enough for 80 columns."""
    knobs = knob_names(records)
    named = {"ε": "epsilon spent", "σ": "noise multiplier"}
    named.update({LETTERS[k]: k.rpartition(".")[2] for k in knobs if k in LETTERS})
    void = " (void: fixed test secret, no privacy)" if any(r.void for r in records) else ""
    table = Table(
        title=title + void,
        title_justify="left",
        title_style="bold",
        caption=", ".join(f"{letter} {name}" for letter, name in named.items()),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    together = len(knobs) > _MOST_COLUMNS
    headings = [] if together else [heading(name) for name in knobs]
    for name in ("trial", "accuracy", "loss", "ε", "σ", *headings, "sec"):
        table.add_column(name, justify="right", no_wrap=True)
    if together:
        table.add_column("searched")
    if show_state:
        table.add_column("state", no_wrap=True)
    for record in records:
        row = record.row or {}
        table.add_row(
            str(record.number),
            *(_shown(row.get(name)) for name in ("valid/accuracy", "valid/loss")),
            shown_epsilon(row["privacy/epsilon_spent"]) if row else "–",
            _shown(row.get("noise_multiplier")),
            *([] if together else [_shown(record.knobs.get(name)) for name in knobs]),
            f"{record.seconds:.0f}",
            *([knob_words(record)] if together else []),
            *([record.state] if show_state else []),
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


def knob_words(record: Record) -> str:
    """What was searched in one trial, as `name=value` pairs."""
    return " ".join(f"{heading(k)}={_shown(v)}" for k, v in record.knobs.items())


def heading(name: str) -> str:
    """The paper's letter of a searched key, or its last word."""
    return LETTERS.get(name, name.rpartition(".")[2])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, dict) and len(value) == 1:  # the form of a filter: its content says it
        return _shown(*value.values())
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if 0.01 <= abs(value) < 1 else f"{value:.3g}"
