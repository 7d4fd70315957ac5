"""Figures of what a search came to: budgets and fronts, methods, learning curves.

`objective` is what trials are judged by, `confirmed` the repeats of the best, by trial.
"""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from dpsweep.config.search import ObjectiveConfig
from dpsweep.results.compare import Comparison
from dpsweep.results.plots.style import (
    BLUE,
    DASHES,
    GREY,
    ORANGE,
    PALETTE,
    RED,
    SCALE,
    figure,
    goal_title,
    hover,
    markers,
    repeats,
    scatter,
)
from dpsweep.search.confirmation import Confirmation
from dpsweep.search.objectives import find_pareto_front, get_goal_values, group_by_epsilon
from dpsweep.search.trial_record import Record
from dpsweep.store.study import Curve
from dpsweep.training.trial_dir import ConfusionMatrix

_STRONG = 3
_MOST_NUMBERED = 20
"""Classes up to which each cell of a confusion matrix shows its number."""


def tradeoff(
    records: Sequence[Record], objective: ObjectiveConfig, confirmed: dict[int, Confirmation]
) -> go.Figure:
    """Accuracy against epsilon, or against the second objective, with the Pareto front.

    With one goal the other is epsilon, which `records` vary; they are complete.
    """
    first, second = (*objective.goals, "epsilon")[:2]
    two = ObjectiveConfig.model_validate({"metrics": [first, second]})
    placed = [(r, v) for r in records if (v := get_goal_values(two, r.row, r.config))]
    made = figure(xaxis_title=goal_title(second), yaxis_title=goal_title(first))
    done, values = [r for r, _ in placed], [v for _, v in placed]
    marks = markers(BLUE, 8, opacity=0.8)
    at = {"x": [v[1] for v in values], "y": [v[0] for v in values]}
    made.add_trace(scatter(done, **at, marker=marks, name="complete"))
    best = sorted(find_pareto_front(done, two), key=lambda r: _of(two, r)[1])
    values = [_of(two, r) for r in best]
    made.add_trace(
        scatter(
            best,
            x=[v[1] for v in values],
            y=[v[0] for v in values],
            mode="lines+markers",
            line={"color": ORANGE, "width": 2, "shape": "hv"},
            marker=markers(ORANGE, 11, symbol="diamond"),
            name="front: no trial is better in both",
        )
    )
    by_number = {r.number: v for r, v in placed}
    if repeated := [c for n, c in confirmed.items() if n in by_number]:
        places = [by_number[c.number][1] for c in repeated]
        made.add_trace(repeats(places, repeated, symbol="square"))  # the front has the diamonds
    if second == "epsilon" and len({v[1] for _, v in placed}) > 1:
        ticks = sorted({round(v[1], 3) for _, v in placed})
        made.update_xaxes(type="log", **({"tickvals": ticks} if len(ticks) < 9 else {}))
    return made


def groups(
    records: Sequence[Record],
    objective: ObjectiveConfig,
    confirmed: dict[int, Confirmation],
    *,
    by: str,
) -> go.Figure:
    """All complete trials of each method, or of each budget, side by side, with their median.

    `by` is "method" or "epsilon".
    """
    named = _by_method(records) if by == "method" else _by_budget(records)
    sign = objective.sign
    if by == "method":
        named = dict(
            sorted(named.items(), key=lambda item: min(sign * (r.value or 0) for r in item[1]))
        )
    made = figure(
        yaxis_title=goal_title(objective.metric),
        xaxis_title="method" if by == "method" else "target ε",
    )
    in_legend = False
    for name, group in named.items():
        made.add_trace(
            go.Box(
                y=[r.value for r in group],
                name=name,
                boxpoints="all",
                pointpos=0,
                jitter=0.5,
                whiskerwidth=0,
                fillcolor="rgba(138,143,152,0.15)",
                line={"color": GREY, "width": 1},
                marker=markers(BLUE, 7, opacity=0.8),
                text=[hover(r) for r in group],
                hovertemplate="%{text}<extra></extra>",
                hoveron="points",
                showlegend=False,
            )
        )
        if repeated := [confirmed[r.number] for r in group if r.number in confirmed]:
            marks = repeats([name] * len(repeated), repeated)
            made.add_trace(marks.update(showlegend=not in_legend))
            in_legend = True
    made.update_xaxes(type="category")
    return made


def learning(
    records: Sequence[Record], curves: Mapping[int, Curve], objective: ObjectiveConfig
) -> go.Figure:
    """The objective by epoch: pruned trials grey, complete ones blue, the best in strong colours.

    `curves` holds (epoch, objective) by trial.
    """
    made = figure(xaxis_title="epoch", yaxis_title=goal_title(objective.metric), height=460)
    shown = [r for r in records if r.number in curves]
    done = [r for r in shown if r.state == "complete"]
    best = sorted(done, key=lambda r: objective.sign * (r.value or 0.0))[:_STRONG]
    kinds = {
        "pruned": ([r for r in shown if r.state == "pruned"], GREY, "dot", 1.2),
        "failed": ([r for r in shown if r.state == "failed"], RED, "dot", 1.0),
        "still running": ([r for r in shown if r.state == "running"], GREY, "dash", 1.2),
        "complete": ([r for r in done if r not in best], BLUE, "solid", 1.0),
    }
    for name, (group, colour, dash, width) in kinds.items():
        for i, record in enumerate(group):
            line = {"color": colour, "dash": dash, "width": width}
            made.add_trace(_curve(record, curves[record.number], name, line, legend=i == 0))
    for i, record in enumerate(best):
        line = {"color": PALETTE[1 + i], "width": 3, "dash": DASHES[i]}
        name = f"trial {record.number}" + (", the best" if i == 0 else "")
        made.add_trace(_curve(record, curves[record.number], name, line, legend=True))
    return made


def distribution(groups: Mapping[str, Sequence[Record]], objective: ObjectiveConfig) -> go.Figure:
    """Empirical distribution function of the objective, a staircase for each group."""
    made = figure(
        xaxis_title=goal_title(objective.metric), yaxis_title="share of trials at or below"
    )
    for i, (name, group) in enumerate(groups.items()):
        values = sorted(r.value or 0.0 for r in group)
        shares = [(k + 1) / len(values) for k in range(len(values))]
        made.add_trace(
            go.Scatter(
                x=[values[0], *values],
                y=[0.0, *shares],
                mode="lines",
                line={"shape": "hv", "width": 2, "dash": DASHES[i % len(DASHES)]},
                name=f"{name} ({len(values)} trials)",
                hovertemplate="%{y:.0%} at or below %{x:.4f}<extra></extra>",
            )
        )
    made.update_yaxes(tickformat=".0%", range=[0, 1.02])
    made.update_layout(showlegend=True)
    return made


def confusion(found: ConfusionMatrix) -> go.Figure:
    """Share of each true class's examples that the model gives each class."""
    names, counts = list(found.classes), found.counts
    totals = [max(1, sum(row)) for row in counts]
    shares = [[n / total for n in row] for row, total in zip(counts, totals, strict=True)]
    many = len(names) > _MOST_NUMBERED
    cells = go.Heatmap(
        x=names,
        y=names,
        z=shares,
        zmin=0,
        zmax=1,
        text=counts,
        colorscale=SCALE,
        colorbar={"title": {"text": "share of the true class", "side": "right"}, "thickness": 12},
        texttemplate=None if many else "%{text}",
        hovertemplate="true %{y}, given %{x}: %{text}, %{z:.1%}<extra></extra>",
    )
    made = figure([cells], height=140 + min(560, 28 * max(8, len(names))))
    axis = {"type": "category", "tickmode": "auto" if many else "linear", "showgrid": False}
    made.update_xaxes(title="class that the model gives", **axis)
    made.update_yaxes(title="true class", autorange="reversed", **axis)
    return made


def _curve(
    record: Record, curve: Curve, name: str, line: dict[str, object], *, legend: bool
) -> go.Scatter:
    strong = bool(line["width"] == 3)
    return go.Scatter(
        x=[epoch for epoch, _ in curve],
        y=[value for _, value in curve],
        mode="lines+markers" if len(curve) == 1 or strong else "lines",
        line=line,
        opacity=1.0 if strong else 0.55,
        name=name,
        legendgroup=name,
        showlegend=legend,
        text=[hover(record)] * len(curve),
        hovertemplate="%{text}<br>epoch %{x}: %{y:.4f}<extra></extra>",
    )


def _of(objective: ObjectiveConfig, record: Record) -> tuple[float, ...]:
    values = get_goal_values(objective, record.row, record.config)
    assert values is not None, "a trial of the front has its figures"
    return values


def name_groups(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Trials by method where there are several, else by target epsilon, else all as one."""
    methods, budgets = _by_method(records), _by_budget(records)
    if len(methods) > 1:
        return methods
    return {f"target ε {k}": v for k, v in budgets.items()} if len(budgets) > 1 else methods


def _by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(str(record.config.method.name), []).append(record)
    return found


def _by_budget(records: Sequence[Record]) -> dict[str, list[Record]]:
    return {f"{group[0].epsilon or 0:g}": group for group in group_by_epsilon(records)}


def confirmed_groups(comparison: Comparison) -> go.Figure:
    """A mark for each group: the mean of its repeats with its interval, or the chosen run."""
    groups = [g for g in comparison.groups if g.mean is not None or g.best is not None][::-1]
    means = [g.mean is not None for g in groups]
    values = [g.best.value if g.mean is None and g.best else g.mean for g in groups]
    marks = go.Scatter(
        x=values,
        y=[f"{g.label}, ε {g.target[0]:g}" if g.target[0] else g.label for g in groups],
        mode="markers",
        marker={"size": 11, "symbol": ["circle" if m else "circle-open" for m in means]},
        error_x={"type": "data", "array": [g.half or 0.0 for g in groups]},
        hovertemplate="%{y}: %{x:.4f}<extra></extra>",
    )
    title = goal_title(comparison.groups[0].metric)
    height = 140 + 40 * len(groups)
    return figure(
        [marks], height=height, showlegend=False, xaxis={"title": title}, yaxis={"automargin": True}
    )
