"""The objective over searched keys: one, as the Gaussian process has it, or two together."""

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from dpsweep.config.keys import BATCH_SIZE, LEARNING_RATE, TOTAL_STEP
from dpsweep.config.search import ObjectiveConfig
from dpsweep.results.plots.axes import KeyAxis
from dpsweep.results.plots.style import (
    BLUE,
    RED,
    colour_by_objective,
    figure,
    goal_title,
    markers,
    repeats,
    scatter,
)
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.surrogate import Surrogate
from dpsweep.search.trial_record import Record

PAIRS = (
    ("method.kappa", "method.gamma"),
    ("method.cut", "method.depth"),
    (BATCH_SIZE, LEARNING_RATE),
    (BATCH_SIZE, TOTAL_STEP),
)
"""Keys that belong together, (to the right, upwards)."""

_LEAST_FOR_BACKGROUND = 8
_CELLS = 80
_LEAST_WEIGHT = 0.3
"""Trials, counted by nearness, below which a cell stays empty."""


def pair(
    records: Sequence[Record], x: KeyAxis, y: KeyAxis, objective: ObjectiveConfig
) -> go.Figure:
    """A mark for each trial, on a background of the mean over the trials nearby.

    The background is m(p) = sum_i w_i v_i / sum_i w_i, w_i = exp(-|p - p_i|^2 / 2 h^2), h the rule
    of Scott over the unit square (a third of a step between categories); it is left out far from
    every trial, and below eight of them. All trials are complete and have both keys: `x` to the
    right, `y` upwards.
    """
    values = np.array([r.value or 0.0 for r in records])
    xs = np.array([x.place(r.hyperparams[x.key]) for r in records], dtype=float)
    ys = np.array([y.place(r.hyperparams[y.key]) for r in records], dtype=float)
    marks = colour_by_objective(values.tolist(), objective.direction, goal_title(objective.metric))
    made = figure(height=440, showlegend=False, xaxis=x.layout(), yaxis=y.layout())
    if len(records) >= _LEAST_FOR_BACKGROUND:
        columns, rows = _cells(x), _cells(y)
        smooth = _means(xs, ys, values, (x, columns), (y, rows))
        background = go.Heatmap(
            x=columns,
            y=rows,
            z=smooth,
            colorscale=marks["colorscale"],
            zmin=values.min(),
            zmax=values.max(),
            showscale=False,
            opacity=0.45,
            hoverinfo="skip",
        )
        made.add_trace(background)
    made.add_trace(scatter(records, x=xs, y=ys, marker=marks | {"size": 11}))
    return made


def _cells(axis: KeyAxis) -> np.ndarray:
    """Middles of the ground's cells along one axis."""
    return axis.low + np.linspace(0, 1, _CELLS if axis.words is None else len(axis.words)) * (
        axis.high - axis.low
    )


def _means(
    xs: np.ndarray,
    ys: np.ndarray,
    values: np.ndarray,
    across: tuple[KeyAxis, np.ndarray],
    upwards: tuple[KeyAxis, np.ndarray],
) -> np.ndarray:
    """The ground, shape (rows, columns); NaN where no trial is near."""
    width = len(values) ** (-1 / 6) / 4  # Scott's exponent, the unit square's spread of about 1/4
    near = [
        np.exp(-0.5 * ((cells[:, None] - at[None, :]) / _width(axis, width)) ** 2)
        for (axis, cells), at in ((across, xs), (upwards, ys))
    ]
    weights = near[1][:, None, :] * near[0][None, :, :]
    total = weights.sum(-1)
    means: np.ndarray = (weights @ values) / np.maximum(total, 1e-12)
    return np.where(total < _LEAST_WEIGHT, np.nan, means)


def _width(axis: KeyAxis, width: float) -> float:
    return 1 / 3 if axis.words is not None else width * (axis.high - axis.low)


_BAND = "rgba(0, 114, 178, 0.18)"
"""BLUE, thin enough that marks show through it."""


def posterior(
    process: Surrogate, chosen: Record, objective: ObjectiveConfig, confirmed: Confirmation | None
) -> go.Figure | None:
    """Posterior mean and 95 % band over one key, other keys as in the chosen trial; all trials.

    None if no number was searched. `confirmed` is what the chosen trial's repeats came to.
    """
    numbers = [f for f in process.features if not f.words]
    if not numbers:
        return None
    feature = next((f for f in numbers if f.key == TOTAL_STEP), numbers[0])
    values, mean, spread = process.along(feature, chosen)
    places = [math.log10(v) if feature.log else v for v in values]
    axis = KeyAxis(feature.key, places[0], places[-1], log=feature.log)
    high, low = mean + 1.96 * spread, mean - 1.96 * spread
    band = go.Scatter(
        x=[*places, *reversed(places)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=_BAND,
        line={"width": 0},
        name="95 % band",
        hoverinfo="skip",
    )
    line = go.Scatter(
        x=places,
        y=mean,
        mode="lines",
        line={"color": BLUE, "width": 2},
        name="posterior mean, other keys as chosen",
        hoverinfo="skip",
    )
    shown = [r for r in process.records if process.value_of(feature.key, r) is not None]
    marks = {r.number: axis.place(process.value_of(feature.key, r)) for r in shown}
    trials = scatter(
        shown,
        x=[marks[r.number] for r in shown],
        marker=markers(BLUE, 7, opacity=0.7),
        name="trials, at their own values of all keys",
    )
    made = figure(
        [band, line, trials], xaxis=axis.layout(), yaxis_title=goal_title(objective.metric)
    )
    if chosen.number in marks:
        ring = markers(RED, 14, symbol="circle-open", line={"width": 2.5, "color": RED})
        at, name = [marks[chosen.number]], f"chosen, trial {chosen.number}"
        made.add_trace(scatter([chosen], x=at, marker=ring, name=name))
        if confirmed:
            made.add_trace(repeats([marks[chosen.number]], [confirmed]))
    return made
