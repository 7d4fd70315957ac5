"""Correlated noise is C^-1 z exactly, whatever the blocks, and goes on after a resume or not."""

import io
from functools import partial

import numpy as np
import pytest
import torch

from dpsweep.core.errors import StateError
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped
from dpsweep.privacy import history
from dpsweep.privacy.correlated import Banded, Buffered, PublicSettings
from dpsweep.privacy.history import NoiseHistory
from dpsweep.privacy.noise import NoiseDraw
from dpsweep.privacy.release import GRID_BITS, release
from dpsweep.training.coloured import Coloured

STEPS = 30
SETTINGS = PublicSettings(600, 60, 3, epsilon=4.0, delta=1e-5)
KINDS = {
    "banded": Banded(4),
    "two bands": Banded(2, "sqrt"),
    "given": Banded(3, (3.0, 2.0, 2.0)),
    "one buffer": Buffered(1),
    "buffers": Buffered(2),
}
every_kind = pytest.mark.parametrize("noise", KINDS.values(), ids=KINDS)


def white(size=37):
    rng = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, size, generator=rng, dtype=torch.float64)


def correlate(made, z, steps=range(STEPS)):
    return torch.stack([made.correlate(z[t].clone(), t) for t in steps])


@every_kind
@pytest.mark.parametrize("block", [8, 1 << 16])
def test_noise_is_the_inverse_of_the_strategy_matrix_times_white_noise(noise, block, monkeypatch):
    monkeypatch.setattr(history, "_BLOCK", block)
    correlation, z = noise.correlate(SETTINGS), white()
    x = correlate(NoiseHistory(correlation), z)
    row, at = np.indices((STEPS, STEPS))
    strategy = np.where(row >= at, correlation.column(STEPS)[np.clip(row - at, 0, None)], 0)
    np.testing.assert_allclose(x.numpy(), np.linalg.solve(strategy, z.numpy()), atol=1e-12)
    torch.testing.assert_close(correlation.whiten(x), z, atol=1e-12, rtol=0)
    assert x.dtype == torch.float64


@every_kind
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 17])
def test_history_that_was_saved_goes_on_bit_for_bit(noise, stop):
    correlation, z = noise.correlate(SETTINGS), white()
    straight = correlate(NoiseHistory(correlation), z)
    first = NoiseHistory(correlation)
    if stop:
        correlate(first, z, range(stop))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = NoiseHistory.resume(correlation, saved, stop)
    assert torch.equal(correlate(again, z, range(stop, STEPS)), straight[stop:])
    kept = first.state_dict()["kept"]
    if stop:
        assert kept.shape == (correlation.num_kept, 37)


def test_step_that_is_left_out_or_repeated_is_refused():
    made = NoiseHistory(Banded(4).correlate(SETTINGS))
    made.correlate(white()[0], 0)
    for step in (0, 2):
        with pytest.raises(StateError, match=f"noise of step {step} was asked for"):
            made.correlate(white()[step], step)


def test_history_that_is_missing_or_another_runs_is_refused():
    four, two = Banded(4).correlate(SETTINGS), Banded(2).correlate(SETTINGS)
    made = NoiseHistory(four)
    made.correlate(white()[0], 0)
    with pytest.raises(StateError, match="has no noise history"):
        NoiseHistory.resume(four, None, 1)
    for correlation, step in ((two, 1), (four, 2)):
        with pytest.raises(StateError, match="it belongs to another run"):
            NoiseHistory.resume(correlation, made.state_dict(), step)


def test_coefficients_of_another_machine_are_those_that_were_saved():
    saved = NoiseHistory(Banded(4).correlate(SETTINGS)).state_dict()
    moved = [c * (1 - 1e-9) for c in saved["coefficients"]]
    again = NoiseHistory.resume(Banded(4).correlate(SETTINGS), {**saved, "coefficients": moved}, 0)
    assert list(again.correlation.coefficients) == moved


@every_kind
def test_gain_of_coloured_noise_is_that_of_the_matrix(noise):
    coloured = Coloured(noise.correlate(SETTINGS))
    angles = torch.arange(2**18, dtype=torch.float64) * (2 * torch.pi / 2**18)
    column = torch.from_numpy(coloured.correlation.column(400))
    response = coloured.frequency_response(angles[1:400:57])
    lags = torch.arange(400, dtype=torch.float64)
    for w, found in zip(angles[1:400:57], response, strict=True):
        wanted = 1 / (column * torch.exp(-1j * w * lags)).sum()
        assert abs(found - wanted) < 1e-6 * abs(wanted) + 1e-9 or coloured.correlation.decays
    variance = float(coloured.frequency_response(angles).abs().square().mean())
    far = coloured.correlation.noise_gains(5000)[-1]
    assert variance == pytest.approx(far, rel=1e-3)


def test_noise_that_a_thread_drew_is_correlated_alike():
    total = Clipped({"w": torch.ones(5, 4), "b": torch.zeros(3)})
    how = {"clip_norm": 0.5, "noise_multiplier": 2.0, "batch_size": 7}
    runs = []
    for ahead in (False, True):
        made, secret = NoiseHistory(Banded(3).correlate(SETTINGS)), Secret.fixed("thread")
        released = []
        for t in range(6):
            rng = secret.stream(t, "noise")
            drawn = NoiseDraw(rng, (20, 3), pinned=False) if ahead else rng
            released.append(
                release(total, rng=drawn, correlate=partial(made.correlate, step=t), **how)
            )
        runs.append(torch.stack([torch.cat([x.flatten() for x in r.values()]) for r in released]))
    assert torch.equal(*runs)
    assert float(runs[0].std()) > 0.05


def test_correlated_noise_is_rounded_to_the_grid_and_its_history_is_not():
    made = NoiseHistory(Banded(3).correlate(SETTINGS))
    total, secret = Clipped({"w": torch.zeros(1000, dtype=torch.float64)}), Secret.fixed("grid")
    for t in range(4):
        released = release(
            total,
            clip_norm=1.0,
            noise_multiplier=1.0,
            batch_size=1,
            rng=secret.stream(t, "noise"),
            correlate=partial(made.correlate, step=t),
        )
        cells = released["w"] * 2.0**GRID_BITS
        assert torch.equal(cells, cells.round())
        kept = made.state_dict()["kept"][t % 2] * 2.0**GRID_BITS
        assert not torch.equal(kept, kept.round())
        assert float((kept[:1000] - cells).abs().max()) <= 0.5 + 1e-6
