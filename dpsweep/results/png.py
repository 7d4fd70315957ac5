"""Figures as PNG files, drawn by kaleido in a Chromium that has to be there."""

import importlib
import importlib.util
import os
from pathlib import Path

import plotly.graph_objects as go

from dpsweep.core.errors import StateError

_WIDTH, _SCALE = 900, 2
_OFF = "DPSWEEP_PICTURES"


def can_draw() -> bool:
    """True if kaleido is installed, and DPSWEEP_PICTURES is not 0."""
    return os.environ.get(_OFF) != "0" and importlib.util.find_spec("kaleido") is not None


def write_pictures(figures: dict[str, go.Figure], folder: Path) -> list[Path]:
    """Writes each figure to `folder` as NAME.png, 1800 pixels wide.

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
    places = [folder / f"{name}.png" for name in figures]
    if not figures:
        return []
    kaleido = importlib.import_module("kaleido")
    specs = [
        {"fig": figure, "path": place, "opts": {"width": _WIDTH, "scale": _SCALE}}
        for figure, place in zip(figures.values(), places, strict=True)
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
