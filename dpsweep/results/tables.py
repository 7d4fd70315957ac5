"""Tables of trials and sweeps, for people and (as rows) for programs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dpsweep.config.keys import (
    BATCH_SIZE,
    CLIP_NORM,
    EPSILON,
    LEARNING_RATE,
    METHOD_NAME,
    TOTAL_STEP,
)
from dpsweep.privacy.statement import format_epsilon
from dpsweep.results.rich_table import plain_table
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.trial_record import Record

LETTERS = {
    "method.kappa": "κ",
    "method.gamma": "γ",
    "method.depth": "ρ",
    "method.cut": "λ",
    BATCH_SIZE: "B",
    CLIP_NORM: "C",
    METHOD_NAME: "method",
    EPSILON: "target ε",
}
"""The papers' letters, in tables and figures; a key without one is shown by its last word."""

_MOST_COLUMNS = 6
"""Searched keys that fit beside each other; more, as where methods are compared, share one."""


def trial_table(records: list[Record], title: str, *, show_state: bool = True) -> Table:
    """One line a trial, in the given order; narrow enough for 80 columns."""
    hyperparams = hyperparam_names(records)
    named = {"ε": "epsilon spent", "σ": "noise multiplier"}
    named.update(
        {LETTERS[k]: k.rpartition(".")[2] for k in hyperparams if k in LETTERS and k != EPSILON}
    )
    void = " (void: fixed test secret, no privacy)" if any(r.void for r in records) else ""
    legend = ", ".join(f"{letter} {name}" for letter, name in named.items())
    if steps := sorted({heading(key) for record in records for key in _fitted_keys(record)}):
        legend += f"; {' and '.join(steps)} as the final run has it: exploring trials have less"
    together = len(hyperparams) > _MOST_COLUMNS
    headings = [] if together else [heading(name) for name in hyperparams]
    metric, *others = [*list_metrics(records), "loss"]
    if metric == "loss":  # all that a task of one's own has
        others = []
    spare = ("loss", "σ", "sec", *others[-2::-1], *reversed(headings), "state")
    table = plain_table(title + void, spare=spare, caption=legend)
    expected = ["expected"] if any(r.expected is not None for r in records) else []
    for name in ("trial", metric, *expected, *others, "ε", "σ", *headings, "sec"):
        table.add_column(name, justify="right", no_wrap=True)
    if together:
        table.add_column("searched")
    if show_state:
        table.add_column("state", no_wrap=True)
    for record in records:
        row = record.row or {}
        table.add_row(
            str(record.number),
            format_cell(row.get(f"valid/{metric}")),
            *(format_cell(record.expected) for _ in expected),
            *(format_cell(row.get(f"valid/{name}")) for name in others),
            format_epsilon(row["privacy/epsilon_spent"]) if row else "–",
            format_cell(row.get("noise_multiplier")),
            *(
                []
                if together
                else [Text(format_cell(record.hyperparams.get(name))) for name in hyperparams]
            ),
            f"{record.seconds:.0f}",
            *([Text(format_hyperparams(record))] if together else []),
            *([_state(record)] if show_state else []),
        )
    return table


def _fitted_keys(record: Record) -> list[str]:
    """List the searched keys of an exploring trial that are fitted to its noise."""
    config = record.config
    own = {LEARNING_RATE: config.learning_rate, TOTAL_STEP: config.total_step}
    searched = {key: record.hyperparams[key] for key in own if key in record.hyperparams}
    return [key for key, value in searched.items() if not math.isclose(value, own[key])]


def _state(record: Record) -> str:
    kind = "final run of" if record.final else "repeats"
    again = "" if record.confirms is None else f", {kind} {record.confirms}"
    return f"{record.state}{again}"


def run_words(trials: int, repeats: int, *planned: int, explores: bool = False) -> str:
    """Say how many runs there are, trials of the search apart from repeats of the chosen config.

    >>> run_words(16, 6), run_words(1, 1), run_words(4, 0), run_words(3, 0, 16, 6)
    ('16 trials + 6 repeats', '1 trial + 1 repeat', '4 trials', '3/16 trials + 0/6 repeats')
    >>> run_words(6, 1, explores=True)
    '6 trials + 1 final run'

    Args:
        trials: Of the search.
        repeats: Of chosen configs.
        planned: How many there are to be of each, if that is to be shown as well.
        explores: True where the second kind is the final run that exploring trials choose.
    """
    words = []
    nouns = ("trial", "final run" if explores else "repeat")
    for i, (count, noun) in enumerate(zip((trials, repeats), nouns, strict=True)):
        whole = planned[i] if planned else count
        if i == 0 or whole or count:
            of = f"/{whole}" if planned else ""
            words.append(f"{count}{of} {noun}{'' if whole == 1 else 's'}")
    return " + ".join(words)


def num_trials_and_repeats(records: Iterable[Record]) -> tuple[int, int]:
    """Count the runs that belong to the search, and those that repeat a config."""
    kinds = [record.confirms is None for record in records]
    return sum(kinds), len(kinds) - sum(kinds)


def main_metric(records: Sequence[Record]) -> str:
    """Name the first metric of the trials' task, without `valid/`; accuracy of no trials."""
    return list_metrics(records)[0]


def list_metrics(records: Sequence[Record]) -> list[str]:
    """Name the metrics of the trials' task but the loss, which has a column of its own."""
    names = records[0].config.data.task.metric_names if records else ("accuracy",)
    return [name for name in names if name != "loss"] or ["loss"]


def running_table(records: Iterable[Record]) -> Table:
    """One line a trial that runs, of its last report; for a panel under a heading of its own."""
    records = list(records)
    metric = main_metric(records)
    table = panel_table("trial", "epoch", metric, "loss", "ε spent", "searched")
    for record in records:
        row = record.row or {}
        table.add_row(
            str(record.number),
            f"{row.get('epoch', 0):g}/{record.config.train.epochs:g}",
            *(f"{row[k]:.4f}" if k in row else "–" for k in (f"valid/{metric}", "valid/loss")),
            format_epsilon(row["privacy/epsilon_spent"]) if row else "–",
            Text(format_hyperparams(record)),
        )
    return table


def panel_table(*columns: str) -> Table:
    """A table without a frame, to be filled; what was searched stands left, figures right."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name == "searched" else "right")
    return table


def repeated_words(record: Record) -> str:
    """Name the trial that it repeats, or is the final run of; empty if none."""
    if record.final:
        return f" (final run, chosen: trial {record.confirms})"
    return "" if record.confirms is None else f" (trial {record.confirms} with fresh noise)"


def best_words(best: Record | None, repeats: Confirmation | None = None) -> str:
    """The best so far, in a few words: by its repeats, if it has any."""
    if best is None or best.value is None:
        return "no trial complete yet"
    if repeats is not None:
        return f"best {repeats.mean:.4f} (trial {best.number}, confirmed)"
    return f"best {best.value:.4f} (trial {best.number})"


def trial_row(record: Record) -> dict[str, Any]:
    """One trial as plain data, for --json."""
    return {
        "trial": record.number,
        "state": record.state,
        "value": record.value,
        "expected": record.expected,
        "reason": record.reason,
        "confirms": record.confirms,
        "void": record.void,
        **(record.row or {}),
        "hyperparams": record.hyperparams,
    }


def hyperparam_names(records: list[Record]) -> list[str]:
    """Every searched key, in the order of the sweep file."""
    return list(dict.fromkeys(name for record in records for name in record.hyperparams))


def format_hyperparams(record: Record, *, without: Sequence[str] = ()) -> str:
    """Write one trial's searched values as `name=value` pairs, `without` some keys."""
    hyperparams = {k: v for k, v in record.hyperparams.items() if k not in without}
    return " ".join(f"{heading(k)}={format_cell(v)}" for k, v in hyperparams.items())


def heading(name: str) -> str:
    """Return the paper's letter of a searched key, or its last word.

    >>> heading("model.adapter.rank"), heading("model.adapter.name")
    ('rank', 'adapter')
    """
    return LETTERS.get(name, name.removesuffix(".name").rpartition(".")[2])


def format_budgets(epsilons: Sequence[float | None]) -> str:
    """The budgets of a sweep's trials; infinite where the noise was given.

    >>> format_budgets([1, 2.5]), format_budgets([None])
    ('1, 2.5', '∞')
    """
    return ", ".join("∞" if epsilon is None else f"{epsilon:g}" for epsilon in epsilons)


def format_cell(value: Any) -> str:
    """A figure in three digits, a dash for nothing, a form of filter by its content."""
    if value is None:
        return "–"
    if isinstance(value, dict) and len(value) == 1:  # the form of a filter: its content says it
        return format_cell(*value.values())
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if 0.01 <= abs(value) < 1 else f"{value:.3g}"
