"""Every figure of a sweep, by name: for the page, for MLflow and for notebooks.

`figures(study)` gives those that say something; a figure that would be empty, or that shows a
thing which did not vary, is left out. Of a private selection there are none: they would tell of
the trials that lost.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from dpsweep.core.errors import StateError
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.importance import importances
from dpsweep.results.plots.axes import key_axes
from dpsweep.results.plots.filters import filters
from dpsweep.results.plots.landscape import PAIRS, pair, posterior
from dpsweep.results.plots.outcome import (
    confusion,
    distribution,
    groups,
    learning,
    name_groups,
    tradeoff,
)
from dpsweep.results.plots.search import history, importance, parallel, rank, slices, timeline
from dpsweep.search.ranking import LEAST_TRIALS, as_searched, surrogates
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study
from dpsweep.training.trial_dir import ConfusionMatrix, TrialDir

_FILTERED = 4
"""Trials whose filters are drawn."""

_LEAST_FOR_SHARES = 5
"""Different results below which their distribution says no more than a table."""

_WIDTH, _SCALE = 900, 2
_OFF = "DPSWEEP_PICTURES"

CAPTIONS = {
    "posterior": "What a config is worth as the total step r (else the most decisive key) "
    "varies and all other keys stay as in the chosen trial: mean and "
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
    runs, objective, confirmed = study.records(), study.sweep.config.objective, study.confirmed()
    records = [r for r in runs if r.confirms is None]
    done = [r for r in records if r.state == "complete" and r.value is not None]
    best = [r for r in study.best() if r.value is not None and not r.final]
    axes, curves = key_axes(study.sweep, done), study.curves()
    made: dict[str, go.Figure | None] = {}

    # at the first epsilon that has enough trials, among them the best
    processes = surrogates(study.sweep, done, LEAST_TRIALS)
    if chosen := next((r for r in best if r.epsilon in processes), None):
        made["posterior"] = posterior(
            processes[chosen.epsilon],
            as_searched(study.sweep, chosen),
            objective,
            confirmed.get(chosen.number),
        )
    if folder and (found := read_confusion(study, folder)):
        made["confusion"] = confusion(found)
    if any(r.value is not None for r in records):
        made["history"] = history(records, objective, confirmed)
    if len(done) > 1 and (len(objective.goals) > 1 or len(study.sweep.epsilons) > 1):
        alone = objective.goals != ("valid/accuracy", "valid/loss")
        made["tradeoff"] = tradeoff(done, objective, confirmed if alone else {})
    if len({r.epsilon for r in done}) > 1:
        made["budgets"] = groups(done, objective, confirmed, by="epsilon")
    if len({r.config.method.name for r in done}) > 1:
        made["methods"] = groups(done, objective, confirmed, by="method")
    if any(len(curves.get(r.number, ())) > 1 for r in records):
        made["learning"] = learning(records, curves, objective)
    shares = importances(study) if len(axes) > 1 else []
    if shares:
        made["importance"] = importance(shares)
    if len(done) > 1 and axes:
        made["parallel"] = parallel(done, axes, objective)
        made["slices"] = slices(done, axes, objective)
    keys = list(dict.fromkeys(one.key for one in shares if one.key in axes))[:2]
    if len(keys) > 1 and len(both := _having(done, keys)) > 1:
        made["rank"] = rank(both, axes[keys[0]], axes[keys[1]], objective)
    for x, y in PAIRS:
        if x in axes and y in axes and len(both := _having(done, (x, y))) > 1:
            name = f"{x.rpartition('.')[2]}-{y.rpartition('.')[2]}"
            made[name] = pair(both, axes[x], axes[y], objective)
    if len({r.value for r in done}) >= _LEAST_FOR_SHARES:
        made["distribution"] = distribution(name_groups(done), objective)
    # of the best trials or, in a search over methods, of the best of each
    firsts = dict[str, Record]()
    for record in best:
        firsts.setdefault(record.config.method.name, record)
    made["filters"] = filters(list(firsts.values()) if len(firsts) > 1 else best[:_FILTERED])
    if len(asked := [r for r in runs if r.asked is not None]) > 1:
        made["timeline"] = timeline(asked)
    return {name: one for name in TITLES if (one := made.get(name)) is not None}


def _having(records: list[Record], keys: Sequence[str]) -> list[Record]:
    """Those in which all of some keys were searched."""
    return [r for r in records if all(r.hyperparams.get(key) is not None for key in keys)]


def read_confusion(study: Study, folder: SweepFolder) -> ConfusionMatrix | None:
    """Confusion matrix of the best trial's weights; None where it was not counted."""
    best = next(iter(study.best()), None)
    return None if best is None else TrialDir(folder.trial_dir(best.number)).confusion()


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
