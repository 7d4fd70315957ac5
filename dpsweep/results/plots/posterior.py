"""The objective over the total step (or the leading key), as the Gaussian process has it."""

import math

import plotly.graph_objects as go

from dpsweep.config.keys import TOTAL_STEP
from dpsweep.config.search import ObjectiveConfig
from dpsweep.results.plots.axes import KeyAxis
from dpsweep.results.plots.style import BLUE, RED, figure, goal_title, markers, repeats, scatter
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.surrogate import Surrogate
from dpsweep.search.trial_record import Record

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
