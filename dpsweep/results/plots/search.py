"""Figures of the search itself: how it went, what mattered, where the good configs lie.

`objective` is what trials are judged by, `axes` the searched keys, `confirmed` the repeats of the
best, by trial.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from dpsweep.config.search import ObjectiveConfig
from dpsweep.results.importance import Importance
from dpsweep.results.plots.axes import KeyAxis
from dpsweep.results.plots.style import (
    BLUE,
    DASHES,
    GREEN,
    GREY,
    PALETTE,
    RED,
    SCALE,
    SKY,
    SYMBOLS,
    colour_by_objective,
    figure,
    goal_title,
    hover,
    key_title,
    markers,
    repeats,
    scatter,
    stack_title,
)
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.objectives import group_by_epsilon
from dpsweep.search.trial_record import Record

_SHADES = 6
_SLICES_IN_A_ROW = 3
_MOST_BARS = 12
_MOST_COLUMNS = 9
_COLUMN_WIDTH = 72
"""Pixels that an axis of the parallel coordinates needs for its numbers."""


def history(
    records: Sequence[Record], objective: ObjectiveConfig, confirmed: dict[int, Confirmation]
) -> go.Figure:
    """Each trial's objective in the order of asking, the best so far, and what repeats came to."""
    made = figure(
        xaxis_title="trial, in the order of asking", yaxis_title=goal_title(objective.metric)
    )
    groups = group_by_epsilon(records)
    for i, group in enumerate(groups):
        done = [r for r in group if r.state == "complete" and r.value is not None]
        budget = f", ε {group[0].epsilon:g}" if len(groups) > 1 and group[0].epsilon else ""
        colour = PALETTE[i % len(PALETTE)]
        marks = markers(colour, symbol=SYMBOLS[i % len(SYMBOLS)])
        numbers = [r.number for r in done]
        made.add_trace(scatter(done, x=numbers, marker=marks, name=f"complete{budget}"))
        pick = max if objective.direction == "maximize" else min
        best = list(accumulate((r.value or 0.0 for r in done), pick))
        line = {"color": colour, "width": 2, "shape": "hv", "dash": DASHES[i % len(DASHES)]}
        made.add_trace(
            go.Scatter(
                x=numbers,
                y=best,
                mode="lines",
                line=line,
                name=f"best so far{budget}",
                hoverinfo="skip",
            )
        )
    grey, red = {"width": 2, "color": GREY}, {"width": 2, "color": RED}
    if pruned := [r for r in records if r.state == "pruned" and r.value is not None]:
        marks = markers(GREY, 8, symbol="circle-open", line=grey)
        numbers = [r.number for r in pruned]
        made.add_trace(scatter(pruned, x=numbers, marker=marks, name="pruned, at its end"))
    if failed := [r for r in records if r.state == "failed"]:
        known = (r.value for r in records if r.value is not None and r.state != "failed")
        marks = markers(RED, 8, symbol="x-thin", line=red)
        at = {"x": [r.number for r in failed], "y": [min(known, default=0.0)] * len(failed)}
        made.add_trace(scatter(failed, **at, marker=marks, name="failed (no result)"))
    if confirmed:
        repeated = sorted(confirmed.values(), key=lambda c: c.number)
        made.add_trace(repeats([c.number for c in repeated], repeated))
    return made


def importance(found: Sequence[Importance]) -> go.Figure:
    """PED-ANOVA importance of each searched key, the most important on top."""
    rows = list(reversed(found[:_MOST_BARS]))
    names = [key_title(one.key) + (f" ({one.branch})" if one.branch else "") for one in rows]
    bars = go.Bar(
        x=[one.share for one in rows],
        y=names,
        orientation="h",
        marker={"color": BLUE},
        text=[f"{one.share:.0%}" for one in rows],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.1%}<extra></extra>",
    )
    made = figure([bars], height=120 + 30 * len(rows), xaxis_title="share of importance")
    made.update_xaxes(tickformat=".0%", range=[0, 1.15 * max(one.share for one in rows)])
    return made


def parallel(
    records: Sequence[Record], axes: dict[str, KeyAxis], objective: ObjectiveConfig
) -> go.Figure:
    """A line a complete trial across all searched keys, coloured by its objective, the last axis.

    The page lets a reader drag along an axis to pick trials: `meta` holds each trial's heights. Of
    more than nine keys it shows the first that most trials have.
    """
    common = [k for k in axes if 2 * sum(k in r.hyperparams for r in records) >= len(records)]
    axes = {key: axes[key] for key in common[:_MOST_COLUMNS]}
    columns = list(axes.values())
    values = [r.value or 0.0 for r in records]
    low, high = min(values), max(values)
    spread = (high - low) or 1.0
    made = figure(height=460, showlegend=False)
    made.update_layout(margin={"t": 60, "l": 40, "r": 40, "b": 16}, dragmode=False)
    lines = list[dict[str, Any]]()
    for trace, shade in enumerate(_shades(records, low, spread, objective)):
        xs, ys, texts = list[float | None](), list[float | None](), list[str | None]()
        for record in shade[1]:
            across = [_height(axis, record) for axis in columns]
            heights = [*across, ((record.value or 0.0) - low) / spread]
            xs += [float(i) for i, h in enumerate(heights) if h is not None] + [None]
            ys += [h for h in heights if h is not None] + [None]
            texts += [hover(record)] * sum(h is not None for h in heights) + [None]
            lines.append({"trace": trace, "heights": heights, "text": hover(record)})
        made.add_trace(
            go.Scatter(
                x=xs,
                y=ys,
                text=texts,
                mode="lines",
                line={"color": shade[0], "width": 3.5 if shade[2] else 1.5},
                opacity=1.0 if shade[2] else 0.75,
                hovertemplate="%{text}<extra></extra>",
            )
        )
    goal = KeyAxis(objective.metric, low, low + spread)
    _label_columns(made, [*columns, goal], [*axes, objective.metric])
    made.update_layout(meta={"lines": lines, "least_width": _COLUMN_WIDTH * (len(columns) + 1)})
    return made


def slices(
    records: Sequence[Record], axes: dict[str, KeyAxis], objective: ObjectiveConfig
) -> go.Figure:
    """The objective of complete trials against each searched key alone."""
    columns = min(_SLICES_IN_A_ROW, len(axes))
    rows = -(-len(axes) // columns)
    made = make_subplots(
        rows, columns, shared_yaxes=True, horizontal_spacing=0.03, vertical_spacing=0.3 / rows
    )
    made.update_layout(figure(height=60 + 280 * rows, showlegend=False).layout)
    for i, axis in enumerate(axes.values()):
        row, column = divmod(i, columns)
        shown = [r for r in records if r.hyperparams.get(axis.key) is not None]
        places = [axis.place(r.hyperparams[axis.key]) for r in shown]
        dots = scatter(shown, x=places, marker=markers(BLUE, 7, opacity=0.8))
        made.add_trace(dots, row + 1, column + 1)
        title = {"text": stack_title(axis.title), "font": {"size": 12}}
        made.update_xaxes(axis.layout(title=title), row=row + 1, col=column + 1)
    made.update_yaxes(title_text=stack_title(goal_title(objective.metric)), col=1)
    return made


def rank(
    records: Sequence[Record], x: KeyAxis, y: KeyAxis, objective: ObjectiveConfig
) -> go.Figure:
    """Complete trials over two keys, coloured by rank: outliers of the result cannot hide others.

    All have both keys: `x` to the right, `y` upwards.
    """
    ranked = sorted(records, key=lambda r: objective.sign * (r.value or 0.0))
    places = [i + 1.0 for i in range(len(ranked))]
    dots = scatter(
        ranked,
        x=[x.place(r.hyperparams[x.key]) for r in ranked],
        y=[y.place(r.hyperparams[y.key]) for r in ranked],
        marker=colour_by_objective(places, "minimize", "rank (1 is the best)"),
        text=[f"rank {i + 1}: {hover(r)}" for i, r in enumerate(ranked)],
    )
    return figure([dots], showlegend=False, xaxis=x.layout(), yaxis=y.layout())


def timeline(records: Sequence[Record]) -> go.Figure:
    """A bar for each run, from when it was asked for to its end; pauses of the sweep included."""
    begin = min(r.asked or 0.0 for r in records)
    ends = [r.ended or max((r.asked or 0.0) + r.seconds, begin) for r in records]
    unit, name = next(
        (unit, name)
        for unit, name in ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
        if max(ends) - begin > 2 * unit or unit == 1.0
    )
    made = figure(
        height=160 + min(900, 14 * len(records)),
        barmode="overlay",
        xaxis_title=f"{name} since the first trial was asked for",
        yaxis_title="trial",
    )
    looks = {"complete": (BLUE, ""), "repeat": (GREEN, ""), "pruned": (GREY, "/")}
    looks |= {"failed": (RED, "x"), "running": (SKY, ".")}
    for state, (colour, pattern) in looks.items():
        shown = [
            (r, end)
            for r, end in zip(records, ends, strict=True)
            if state == ("repeat" if r.confirms is not None and r.state == "complete" else r.state)
        ]
        if not shown:
            continue
        made.add_trace(
            go.Bar(
                orientation="h",
                base=[((r.asked or 0.0) - begin) / unit for r, _ in shown],
                x=[(end - (r.asked or 0.0)) / unit for r, end in shown],
                y=[r.number for r, _ in shown],
                marker={"color": colour, "pattern": {"shape": pattern}},
                name="repeat or final run" if state == "repeat" else state,
                text=[hover(r) for r, _ in shown],
                textposition="none",
                hovertemplate="%{text}<br>%{x:.3g} " + name + "<extra></extra>",
            )
        )
    made.update_yaxes(autorange="reversed")
    made.update_layout(showlegend=True)
    return made


def _shades(
    records: Sequence[Record], low: float, spread: float, objective: ObjectiveConfig
) -> list[tuple[str, list[Record], bool]]:
    """Colour, trials, and whether it is the best alone; the worst first, to be drawn below."""
    ranked = sorted(records, key=lambda r: -objective.sign * (r.value or 0.0))
    groups: list[list[Record]] = [[] for _ in range(_SHADES)]
    for record in ranked[:-1]:
        good = ((record.value or 0.0) - low) / spread
        good = good if objective.direction == "maximize" else 1 - good
        groups[min(_SHADES - 1, int(good * _SHADES))].append(record)
    shaded = [(SCALE[i], group, False) for i, group in enumerate(groups) if group]
    return [*shaded, (RED, ranked[-1:], True)]


def _height(axis: KeyAxis, record: Record) -> float | None:
    place = axis.place(record.hyperparams.get(axis.key))
    return None if place is None else (place - axis.low) / (axis.high - axis.low)


def _label_columns(made: go.Figure, axes: Sequence[KeyAxis], names: Sequence[str]) -> None:
    """An upright line a key, with its ticks beside it and its letter or last word above."""
    heads = [key_title(name).partition(",")[0].rpartition(".")[2] for name in names]
    heads[-1] = goal_title(names[-1]).partition(" (")[0].replace(" ", "<br>")
    for i, axis in enumerate(axes):
        made.add_shape(type="line", x0=i, x1=i, y0=0, y1=1, line={"color": GREY, "width": 1})
        for place, word in zip(*axis.ticks(), strict=True):
            made.add_annotation(
                x=i,
                y=(place - axis.low) / (axis.high - axis.low),
                text=word,
                showarrow=False,
                xanchor="left",
                xshift=4,
                font={"size": 11},
            )
    made.update_xaxes(
        tickvals=list(range(len(axes))),
        ticktext=heads,
        side="top",
        showgrid=False,
        range=[-0.15, len(axes) - 0.6],
        fixedrange=True,
    )
    made.update_yaxes(visible=False, range=[-0.05, 1.05], fixedrange=True)
