"""Every figure of a sweep, by name: for the page, for MLflow and for notebooks.

`figures(study)` gives those that say something; a figure that would be empty, or that shows a
thing which did not vary, is left out. Of a private selection there are none: they would tell of
the trials that lost.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from dpsweep.core.errors import StateError
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.importance import importances
from dpsweep.results.plots.axes import KeyAxis, key_axes
from dpsweep.results.plots.filters import filters
from dpsweep.results.plots.outcome import (
    confusion,
    distribution,
    groups,
    learning,
    name_groups,
    tradeoff,
)
from dpsweep.results.plots.pairs import PAIRS, pair
from dpsweep.results.plots.posterior import posterior
from dpsweep.results.plots.search import (
    history,
    importance,
    parallel,
    rank,
    slices,
    timeline,
)
from dpsweep.search.choose import LEAST_TRIALS, surrogates
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Curve, Study
from dpsweep.training.trial_dir import ConfusionMatrix, TrialDir

_FILTERED = 4
"""Trials whose filters are drawn."""

_LEAST_FOR_SHARES = 5
"""Different results below which their distribution says no more than a table."""

_WIDTH, _SCALE = 900, 2
_OFF = "DPSWEEP_PICTURES"

CAPTIONS = {
    "posterior": "What a config is worth as the total step (learning rate x clip norm x steps; "
    "else the most decisive key) varies and all other keys stay as in the chosen trial: mean and "
    "95 % band of the Gaussian process that chooses. A trial away from the line has other values "
    "of other keys, or chance.",
    "history": "Every trial in the order it was asked for, and the best so far.",
    "tradeoff": "What is gained in one objective for what is spent in the other. No trial is "
    "better in both than one on the front.",
    "budgets": "All complete trials of each budget, with their quartiles.",
    "methods": "All complete trials of each method, with their quartiles; the best method first.",
    "learning": "The result by epoch. Pruned trials are grey and dotted.",
    "importance": "How far the values of a key among the best trials lie from those among all "
    "(PED-ANOVA). With few trials this is a hint.",
    "parallel": "One line a complete trial across all searched keys, coloured by its result from "
    "dark (worst) to bright; the best is thick and red. With a mouse, drag along an axis to keep "
    "the trials that pass there; click it to let all pass.",
    "slices": "The result against each searched key alone; the other keys vary as well.",
    "rank": "Complete trials over the two most important keys, coloured by rank.",
    "kappa-gamma": "The result over Kalman gain and look-ahead. Marks are trials.",
    "cut-depth": "The result over cut and depth of the spectral shelf. Marks are trials.",
    "batch_size-lr": "The result over batch size and learning rate. Marks are trials.",
    "batch_size-total_step": "The result over batch size and total step. Marks are trials.",
    "distribution": "Share of the complete trials whose result is at or below each value.",
    "timeline": "When each run was asked for and when it ended. Times in which the sweep was "
    "stopped are in it.",
    "confusion": "Validation examples by their true class and the class that the best trial's "
    "model gives them; colours are shares of the true class.",
    "filters": "What the filters of the best trials let pass, by frequency, and the noise variance "
    "that is left behind them.",
}
"""Description of each figure, also for those who cannot see it."""

TITLES = {
    "posterior": "What the trials say together",
    "confusion": "Confusion matrix of the best trial",
    "history": "The search",
    "tradeoff": "Trade-off and Pareto front",
    "budgets": "By budget",
    "methods": "By method",
    "learning": "Learning curves",
    "importance": "Importance of the keys",
    "parallel": "All keys together",
    "slices": "Each key alone",
    "rank": "The two most important keys, by rank",
    "kappa-gamma": "κ and γ",
    "cut-depth": "λ (cut) and ρ (depth)",
    "batch_size-lr": "Batch size and learning rate",
    "batch_size-total_step": "Batch size and total step",
    "distribution": "Distribution of the results",
    "filters": "Filters of the best trials",
    "timeline": "Timeline",
}


def caption_of(name: str, figure: go.Figure) -> str:
    """Describe a figure, with its background where it has one: few trials make none."""
    filled = name != "confusion" and any(trace.type == "heatmap" for trace in figure.data)
    return CAPTIONS[name] + (
        " The background is the mean result of the trials nearby." if filled else ""
    )


def figures(study: Study, folder: SweepFolder | None = None) -> dict[str, go.Figure]:
    """The figures of a sweep, by name, in the order they are to be looked at.

    Args:
        study: The search; it may still run.
        folder: Its folder, which has the confusion matrix of the best trial; None to draw none.

    Returns:
        Those of `TITLES` that have something to show; none for a private selection.
    """
    if not disclosure_of(study.sweep).tells_trials:
        return {}
    seen = _Seen.of(study)
    made = {name: make(study, seen) for name, make in _MAKERS.items()}
    if folder and (found := read_confusion(study, folder)):
        made["confusion"] = confusion(found)
    made = {name: made.get(name) for name in TITLES}
    return {name: one for name, one in made.items() if one is not None}


def read_confusion(study: Study, folder: SweepFolder) -> ConfusionMatrix | None:
    """Confusion matrix of the best trial's weights; None where it was not counted."""
    best = next(iter(study.best()), None)
    return None if best is None else TrialDir(folder.trial_dir(best.number)).confusion()


@dataclass(frozen=True)
class _Seen:
    """Data of all figures, read once.

    Attributes:
        records: Trials of the search, without repeats.
        done: The complete ones.
        best: Those, the best first: by their repeats where they have any.
        confirmed: What repeats came to, by trial.
        axes: The searched keys that vary among the complete ones.
        curves: Learning curves, by trial.
    """

    records: list[Record]
    done: list[Record]
    best: list[Record]
    confirmed: dict[int, Confirmation]
    axes: dict[str, KeyAxis]
    curves: dict[int, Curve]

    @classmethod
    def of(cls, study: Study) -> "_Seen":
        records = [r for r in study.records() if r.confirms is None]
        done = [r for r in records if r.state == "complete" and r.value is not None]
        return cls(
            records=records,
            done=done,
            best=[r for r in study.best() if r.value is not None and not r.final],
            confirmed=study.confirmed(),
            axes=key_axes(study.sweep, done),
            curves=study.curves(),
        )


Maker = Callable[[Study, _Seen], go.Figure | None]


def _history(study: Study, seen: _Seen) -> go.Figure | None:
    if not any(r.value is not None for r in seen.records):
        return None
    return history(seen.records, study.sweep.config.objective, seen.confirmed)


def _tradeoff(study: Study, seen: _Seen) -> go.Figure | None:
    objective = study.sweep.config.objective
    varied = len(objective.goals) > 1 or len(study.sweep.epsilons) > 1
    if not varied or len(seen.done) < 2:
        return None
    if objective.goals == ("valid/accuracy", "valid/loss"):
        return tradeoff(seen.done, objective, {})
    return tradeoff(seen.done, objective, seen.confirmed)


def _budgets(study: Study, seen: _Seen) -> go.Figure | None:
    if len({r.epsilon for r in seen.done}) < 2:
        return None
    return groups(seen.done, study.sweep.config.objective, seen.confirmed, by="epsilon")


def _methods(study: Study, seen: _Seen) -> go.Figure | None:
    if len({r.config.method.name for r in seen.done}) < 2:
        return None
    return groups(seen.done, study.sweep.config.objective, seen.confirmed, by="method")


def _learning(study: Study, seen: _Seen) -> go.Figure | None:
    if not any(len(seen.curves.get(r.number, ())) > 1 for r in seen.records):
        return None
    return learning(seen.records, seen.curves, study.sweep.config.objective)


def _importance(study: Study, seen: _Seen) -> go.Figure | None:
    found = importances(study) if len(seen.axes) > 1 else []
    return importance(found) if found else None


def _parallel(study: Study, seen: _Seen) -> go.Figure | None:
    if len(seen.done) < 2 or not seen.axes:
        return None
    return parallel(seen.done, seen.axes, study.sweep.config.objective)


def _slices(study: Study, seen: _Seen) -> go.Figure | None:
    if len(seen.done) < 2 or not seen.axes:
        return None
    return slices(seen.done, seen.axes, study.sweep.config.objective)


def _pair(x: str, y: str) -> Maker:
    def make(study: Study, seen: _Seen) -> go.Figure | None:
        if x not in seen.axes or y not in seen.axes:
            return None
        both = [
            r
            for r in seen.done
            if r.hyperparams.get(x) is not None and r.hyperparams.get(y) is not None
        ]
        if len(both) < 2:
            return None
        return pair(both, seen.axes[x], seen.axes[y], study.sweep.config.objective)

    return make


def _rank(study: Study, seen: _Seen) -> go.Figure | None:
    """Over the two keys of greatest importance that enough trials have."""
    keys = list(dict.fromkeys(one.key for one in importances(study) if one.key in seen.axes))[:2]
    both = [r for r in seen.done if all(r.hyperparams.get(key) is not None for key in keys)]
    if len(keys) < 2 or len(both) < 2:
        return None
    return rank(both, seen.axes[keys[0]], seen.axes[keys[1]], study.sweep.config.objective)


def _distribution(study: Study, seen: _Seen) -> go.Figure | None:
    if len({r.value for r in seen.done}) < _LEAST_FOR_SHARES:
        return None
    return distribution(name_groups(seen.done), study.sweep.config.objective)


def _timeline(study: Study, seen: _Seen) -> go.Figure | None:
    shown = [r for r in study.records() if r.asked is not None]
    return timeline(shown) if len(shown) > 1 else None


def _filters(study: Study, seen: _Seen) -> go.Figure | None:
    """Of the best trials or, in a search over methods, of the best of each."""
    firsts: dict[str, Record] = {}
    for record in seen.best:
        firsts.setdefault(record.config.method.name, record)
    shown = list(firsts.values()) if len(firsts) > 1 else seen.best[:_FILTERED]
    return filters(shown)


def _posterior(study: Study, seen: _Seen) -> go.Figure | None:
    """At the first epsilon that has enough trials, among them the best."""
    found = surrogates(study.sweep, seen.done, LEAST_TRIALS)
    chosen = next((r for r in seen.best if r.epsilon in found), None)
    if chosen is None:
        return None
    confirmed = seen.confirmed.get(chosen.number)
    return posterior(found[chosen.epsilon], chosen, study.sweep.config.objective, confirmed)


_MAKERS: dict[str, Maker] = {
    "posterior": _posterior,
    "history": _history,
    "tradeoff": _tradeoff,
    "budgets": _budgets,
    "methods": _methods,
    "learning": _learning,
    "importance": _importance,
    "parallel": _parallel,
    "slices": _slices,
    "rank": _rank,
    **{f"{x.rpartition('.')[2]}-{y.rpartition('.')[2]}": _pair(x, y) for x, y in PAIRS},
    "distribution": _distribution,
    "filters": _filters,
    "timeline": _timeline,
}


def can_draw() -> bool:
    """True if kaleido is installed, and DPSWEEP_PICTURES is not 0."""
    return os.environ.get(_OFF) != "0" and importlib.util.find_spec("kaleido") is not None


def write_pictures(drawn: dict[str, go.Figure], folder: Path) -> list[Path]:
    """Write each figure to `folder` as NAME.png, 1800 pixels wide, by kaleido and a Chromium.

    Raises:
        StateError: If kaleido or a browser is missing, or the folder cannot be written.
    """
    if importlib.util.find_spec("kaleido") is None:
        raise StateError(
            "--png: kaleido, which draws the pictures, is not installed. Install it with: "
            "pip install 'dpsweep[figures]'; or leave out --png: the page has all figures"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise StateError(f"--png {folder}: cannot be made: {e.strerror}. Name another") from e
    places = [folder / f"{name}.png" for name in drawn]
    if not drawn:
        return []
    kaleido = importlib.import_module("kaleido")
    specs = [
        {"fig": figure, "path": place, "opts": {"width": _WIDTH, "scale": _SCALE}}
        for figure, place in zip(drawn.values(), places, strict=True)
    ]
    try:
        kaleido.write_fig_from_object_sync(specs)
    except Exception as e:  # kaleido has no one class for what goes wrong in a browser
        raise StateError(
            f"--png {folder}: no picture could be drawn: {type(e).__name__}: "
            f"{(str(e).strip() or 'no reason given').splitlines()[0]}. A Chromium or Chrome has to "
            f"be there (apt-get install chromium; BROWSER_PATH names another place); or leave "
            f"out --png: the page has all figures"
        ) from e
    return places
