"""Long work says on standard error how far it is; short work says nothing."""

from dpsweep.core import progress
from dpsweep.core.progress import ProgressLines


def test_lines_come_at_intervals_with_the_time_left(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = ProgressLines("data.features: scattering", 1000, "images")
    for seconds in (4.0, 6.0, 7.0, 40.0):
        now[0] = 100 + seconds
        lines.advance(100)
    assert capsys.readouterr().err == (
        "data.features: scattering: 200 of 1000 images, 24 s left\n"
        "data.features: scattering: 400 of 1000 images, 60 s left\n"
    )


def test_the_end_is_silent(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = ProgressLines("x", 10, "images")
    now[0] = 100.0
    lines.advance(10)
    assert capsys.readouterr().err == ""
