"""Frequency responses of the best trials' filters, and the noise that they let pass."""

from collections.abc import Sequence
from math import pi

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from dpsweep.filters.base import Filter
from dpsweep.methods import build_method
from dpsweep.results.plots.style import DASHES, PALETTE, figure, stack_title
from dpsweep.search.trial_record import Record

_LINE = 20
_POINTS = 513
"""Frequencies from 0 to the highest, both included."""

OVER_TIME = "frequency over steps (cycles per step)"
ACROSS = "frequency over coordinates (share of the spectrum)"


def responses(filters: Sequence[Filter]) -> dict[str, torch.Tensor]:
    """|H(f)| / |H(0)| of filters in a row, by what they filter over; shape (513,).

    Frequencies go from 0 to half a cycle a step or, over coordinates, through the spectrum.
    """
    found: dict[str, torch.Tensor] = {}
    if links := [f for f in filters if f.over_time]:
        at = torch.linspace(0, pi, _POINTS, dtype=torch.float64)
        gains = torch.stack([f.frequency_response(at).abs() for f in links]).prod(0)
        found[OVER_TIME] = gains / gains[0]
    if links := [f for f in filters if not f.over_time]:
        gains = torch.stack([f.frequency_response(2 * (_POINTS - 1)).abs() for f in links]).prod(0)
        found[ACROSS] = gains / gains[0]
    return found


def noise_gain(record: Record) -> float:
    """Noise variance behind a trial's filters, where a constant gradient comes out as it went in.

    1 without filters. What the release adds is not changed: only what is made of it.
    """
    method = build_method(record.config.method)
    still = torch.zeros(1, dtype=torch.float64)
    whole = 1.0
    for link in method.filters:
        if link.over_time:
            whole *= float(link.frequency_response(still).abs()[0])
    return method.chain.noise_gain / whole**2


def filters(records: Sequence[Record]) -> go.Figure | None:
    """Magnitude responses of the given trials' filters, and what noise they let pass.

    Returns:
        None if none of them has a filter.
    """
    drawn = [
        (r, found) for r in records if (found := responses(build_method(r.config.method).filters))
    ]
    kinds = [k for k in (OVER_TIME, ACROSS) if any(k in found for _, found in drawn)]
    if not kinds:
        return None
    made = make_subplots(1, len(kinds), shared_yaxes=True, horizontal_spacing=0.05)
    legend_height = 30 + _LINE * len(drawn)
    made.update_layout(figure(height=360 + legend_height).layout)
    made.update_layout(legend={"orientation": "v"}, margin={"t": legend_height})
    for i, (record, found) in enumerate(drawn):
        name = f"trial {record.number}, {record.config.method.name}"
        name += f": noise variance times {noise_gain(record):.3g}"
        for column, kind in enumerate(kinds, 1):
            if kind not in found:
                continue
            end = 0.5 if kind == OVER_TIME else 1.0
            made.add_trace(
                go.Scatter(
                    x=torch.linspace(0, end, _POINTS).tolist(),
                    y=found[kind].tolist(),
                    mode="lines",
                    line={"color": PALETTE[i % len(PALETTE)], "width": 2, "dash": DASHES[i % 6]},
                    name=name,
                    legendgroup=name,
                    showlegend=kind == next(k for k in kinds if k in found),
                    hovertemplate="%{x:.3f}: %{y:.3f}<extra></extra>",
                ),
                1,
                column,
            )
    for column, kind in enumerate(kinds, 1):
        made.update_xaxes(title_text=stack_title(kind), row=1, col=column)
    made.update_yaxes(title_text="gain, of a constant gradient's", rangemode="tozero", col=1)
    return made
