"""The look of every figure: colours, fonts, and what axes are called.

Colours are Okabe and Ito's, which the colour-blind can tell apart and which differ in print;
nothing is told by colour alone. Backgrounds are white; a page in dark overrides them.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from dpsweep.config.keys import BATCH_SIZE, CLIP_NORM, EPOCHS, FLOOR, LEARNING_RATE, TOTAL_STEP
from dpsweep.results.tables import LETTERS, format_hyperparams, heading
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.trial_record import Record

BLUE, ORANGE, GREEN = "#0072B2", "#E69F00", "#009E73"
PURPLE, SKY, RED = "#CC79A7", "#56B4E9", "#D55E00"
PALETTE = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")
GREY = "#8A8F98"
SCALE = ("#46327E", "#365C8D", "#277F8E", "#1FA187", "#4AC16D", "#A0DA39")
"""Part of viridis, from worst to best, without the ends that vanish on black or white."""

GOAL_TITLES = {
    "valid/accuracy": "validation accuracy (share correct)",
    "valid/f1": "validation F1 (0 to 1)",
    "valid/matthews": "validation Matthews correlation (-1 to 1)",
    "valid/mae": "validation MAE (unit of the target)",
    "valid/r2": "validation R2 (at most 1)",
    "valid/perplexity": "validation perplexity (of a token)",
    "valid/loss": "validation loss",  # nats, or what a task has
    "seconds": "time of a trial (seconds)",
    "epsilon": "target ε",
}

_DESCRIPTIONS = {
    "method.kappa": "Kalman gain",
    "method.gamma": "look-ahead (last steps)",
    "method.depth": "depth of the shelf",
    "method.cut": "cut (share of the spectrum)",
    "method.points": "points a step",
    "method.decay": "inner decay",
    "method.outer_decay": "outer decay",
    "method.keep": "share of frequencies kept",
    "method.keep_circulant": "share kept, circulant layers",
    "method.filter": "low-pass filter",
    LEARNING_RATE: "learning rate",
    TOTAL_STEP: "how far the weights may travel",
    FLOOR: "floor of the variance",
    BATCH_SIZE: "batch size (examples)",
    EPOCHS: "passes over the data",
    CLIP_NORM: "clip norm (gradient units)",
}
"""Names of searched keys, with their units."""

_TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif", "size": 13},
        "colorway": list(PALETTE),
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 64, "r": 24, "t": 24, "b": 56},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "closest",
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": BLUE},
        "xaxis": {"automargin": True, "gridcolor": "#E3E5E8", "zeroline": False},
        "yaxis": {"automargin": True, "gridcolor": "#E3E5E8", "zeroline": False},
    }
)


def figure(traces: Sequence[Any] = (), *, height: int = 420, **layout: Any) -> go.Figure:
    """A figure in the common style; `height` in pixels, as wide as where it is shown."""
    made = go.Figure(list(traces))
    made.update_layout(template=_TEMPLATE, height=height, **layout)
    return made


def key_title(key: str) -> str:
    """Get the title of a searched key's axis: first what tables call it.

    >>> key_title("method.kappa"), key_title("optimizer.lr"), key_title("privacy.epsilon")
    ('κ, Kalman gain', 'lr, learning rate', 'target ε')
    >>> key_title("optimizer.schedule.warm_up")
    'schedule.warm_up'
    """
    if key in _DESCRIPTIONS:
        return f"{heading(key)}, {_DESCRIPTIONS[key]}"
    if key in LETTERS:
        return heading(key)
    return ".".join(key.split(".")[-2:]) if key.count(".") > 1 else key


def stack_title(title: str) -> str:
    """An axis title with its unit on a second line, for narrow columns."""
    return title.replace(" (", "<br>(")


def goal_title(goal: str) -> str:
    """Get the title of an objective's axis."""
    return GOAL_TITLES.get(goal, goal)


def markers(colour: Any = BLUE, size: int = 8, **more: Any) -> dict[str, Any]:
    """Mark with a rim, so that they stand out on white and on black."""
    return {"color": colour, "size": size, "line": {"width": 0.6, "color": GREY}, **more}


def colour_by_objective(values: Sequence[float], direction: str, title: str) -> dict[str, Any]:
    """Mark coloured by objective, the best at the bright end, with their legend."""
    colours = list(SCALE) if direction == "maximize" else list(reversed(SCALE))
    bar = {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0}
    return markers(list(values), 9, colorscale=colours, showscale=True, colorbar=bar)


def repeats(
    places: Sequence[Any], found: Sequence[Confirmation], symbol: str = "diamond"
) -> go.Scatter:
    """Draw the mean and standard deviation of each repeated config, at its place on x."""
    return go.Scatter(
        x=list(places),
        y=[c.mean for c in found],
        error_y={"array": [c.spread for c in found], "color": RED, "thickness": 2},
        mode="markers",
        marker=markers(RED, 10, symbol=symbol),
        name="repeated with fresh noise, mean ± s.d.",
        legendgroup="repeats",
        text=[f"trial {c.number}, repeated: {c}" for c in found],
        hovertemplate="%{text}<extra></extra>",
    )


def scatter(records: Sequence[Record], **looks: Any) -> go.Scatter:
    """Mark each trial at its result, with its hover text; `looks` as plotly takes them."""
    defaults = {
        "y": [r.value for r in records],
        "mode": "markers",
        "text": [hover(r) for r in records],
        "hovertemplate": "%{text}<extra></extra>",
    }
    return go.Scatter(defaults | looks)


def hover(record: Record) -> str:
    """Make the hover text of a trial, without tags, which plotly would read."""
    value = "no result" if record.value is None else f"{record.value:.4f}"
    return f"trial {record.number}, {record.state}: {value}<br>{escape(format_hyperparams(record))}"
