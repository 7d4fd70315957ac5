"""Coefficients, losses, noise and choice of bands, against the reference computed elsewhere.

The numbers are those of JAX-Privacy's optimize_banded_toeplitz and of a prototype in NumPy
(n = 2000, q = 0.02, delta = 1e-5).
"""

import math
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.linalg

from dpsweep.core.errors import InvalidKey
from dpsweep.privacy.accounting import calibrate_noise
from dpsweep.privacy.correlated import (
    Banded,
    Buffered,
    Correlation,
    PublicSettings,
    _choose_bands,
    _loss_and_gradient,
    _optimize_bands,
    banded_coefficients,
    buffered_column,
    buffered_square,
    choose_bands,
    optimize_buffers,
    predict_error,
    sqrt_coefficients,
    workload_of,
)

STEPS, RATE, DELTA = 2000, 0.02, 1e-5


def compute_loss(c, steps, momentum=0.0):
    """|c|^2 mean_t E_t: squared error of the workload's sums at unit noise and sensitivity."""
    return _loss_and_gradient(c, workload_of(steps, momentum))[0]


REFERENCE = {
    1: (31.630681, 31.6307, {1: 3.4538, 2: 1.9507, 4: 1.2079, 8: 0.8467}),
    2: (22.455149, 23.5879, {1: 4.8323, 2: 2.6706, 4: 1.5734, 8: 1.0317}),
    4: (16.032467, 17.6719, {1: 6.8033, 2: 3.7057, 4: 2.1135, 8: 1.3081}),
    8: (11.579958, 13.2620, {1: 9.5783, 2: 5.1872, 4: 2.8980, 8: 1.7172}),
    16: (8.534628, 9.9701, {1: 13.5185, 2: 7.2722, 4: 4.0129, 8: 2.3094}),
    32: (6.482643, 7.5391, {1: 19.0903, 2: 10.2376, 4: 5.5877, 8: 3.1444}),
    50: (5.543758, 6.3434, {1: 23.6549, 2: 12.6319, 4: 6.8425, 8: 3.7973}),
}
"""Bands -> root of the loss, the same with sqrt coefficients, and sigma by epsilon."""

COEFFICIENTS = {
    2: [0.7415308337, 0.6709187900],
    4: [0.5686470614, 0.5050203217, 0.4765380561, 0.4410288826],
    8: [
        0.4695156860,
        0.3825519855,
        0.3588130122,
        0.3442129621,
        0.3321908482,
        0.3202168273,
        0.3057215367,
        0.2821780003,
    ],
    16: [0.4315352697, 0.3054987133, 0.2758284557, 0.2608504116],
    32: [0.4352661583, 0.2666543470, 0.2270897123, 0.2079734134],
    50: [0.4502378639, 0.2565815239, 0.2104105051, 0.1880373562],
}

LAST = {16: 0.1784716270, 32: 0.1130854870, 50: 0.0840785167}


def settings(epsilon: float | None = 4.0, **other: float) -> PublicSettings:
    """Settings of 2000 steps at q = 0.02: 40 epochs of 50,000 examples."""
    given = {"num_examples": 50_000, "batch_size": 1000, "epochs": 40.0, "delta": DELTA} | other
    return PublicSettings(epsilon=epsilon, **given)


@pytest.mark.parametrize("bands", REFERENCE)
def test_optimal_coefficients_and_losses_equal_the_reference_to_six_decimals(bands):
    c = np.array(banded_coefficients("optimal", STEPS, bands))
    assert math.sqrt(compute_loss(c, STEPS)) == pytest.approx(REFERENCE[bands][0], abs=6e-7)
    assert Correlation(STEPS, bands, 1.0, tuple(c)).error() == pytest.approx(
        REFERENCE[bands][0], abs=6e-7
    )
    if bands > 1:
        known = COEFFICIENTS[bands]
        assert c[: len(known)] == pytest.approx(known, abs=1e-6)
        assert c[-1] == pytest.approx(LAST.get(bands, known[-1]), abs=1e-6)
    assert 1 - 1e-14 < float(c @ c) <= 1, "the sensitivity is the norm: never more than 1"
    assert all(np.diff(c) <= 0)
    assert all(c > 0)
    plain = np.array(banded_coefficients("sqrt", STEPS, bands))
    assert math.sqrt(compute_loss(plain, STEPS)) == pytest.approx(REFERENCE[bands][1], abs=6e-5)


@pytest.mark.parametrize("epsilon", [1, 2, 4, 8])
@pytest.mark.parametrize("bands", REFERENCE)
def test_noise_that_is_calibrated_equals_the_reference_within_half_a_percent(bands, epsilon):
    rounds, rate = Banded(bands).schedule(settings(epsilon))
    assert (rounds, rate) == (-(-STEPS // bands), pytest.approx(bands * RATE, rel=1e-15))
    run, _ = calibrate_noise(epsilon, DELTA, rate, rounds)
    assert run.noise_multiplier == pytest.approx(REFERENCE[bands][2][epsilon], rel=5e-3)


def test_one_band_is_independent_noise():
    assert Banded(1).schedule(settings()) == (2000, 0.02)
    assert Banded(1).correlate(settings()) is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradient_of_the_loss_equals_central_differences(momentum):
    c, workload = 0.9 * sqrt_coefficients(6), workload_of(300, momentum)
    gradient = _loss_and_gradient(c, workload)[1]
    for j, h in enumerate(1e-6 * np.eye(6)):
        up, down = (_loss_and_gradient(c + side * h, workload)[0] for side in (1, -1))
        assert (up - down) / 2e-6 == pytest.approx(gradient[j], rel=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_loss_is_that_of_the_matrices_written_out(momentum):
    steps, c = 40, np.array(banded_coefficients("sqrt", 40, 5))
    row, column = np.indices((steps, steps))
    lag = row - column
    strategy = np.where((lag >= 0) & (lag < 5), c[np.clip(lag, 0, 4)], 0)
    heavy = np.where(lag >= 0, workload_of(steps, momentum)[np.clip(lag, 0, None)], 0)
    error = heavy @ np.linalg.inv(strategy)
    assert compute_loss(c, steps, momentum) == pytest.approx((error**2).sum() / steps)
    assert np.linalg.norm(strategy, axis=0).max() == pytest.approx(1)
    inverse = np.linalg.inv(strategy)
    correlation = Correlation(steps, 5, 0.5, tuple(c))
    assert correlation.noise_gains(steps) == pytest.approx((inverse**2).sum(1))
    assert correlation.column(steps) == pytest.approx(strategy[:, 0])


def test_workload_of_momentum_lowers_the_loss_it_is_about_and_needs_one():
    plain = Banded(8, workload="prefix").correlate(settings(momentum=0.9))
    heavy = Banded(8, workload="momentum").correlate(settings(momentum=0.9))
    assert heavy.error(0.9) < plain.error(0.9) * 0.9999
    assert plain.error() < heavy.error() * 0.9999
    with pytest.raises(InvalidKey, match="the base optimizer has none"):
        Banded(8, workload="momentum").correlate(settings())


@pytest.mark.parametrize(("epsilon", "bands"), [(1, 2), (4, 8), (0.1, 1)])
def test_auto_chooses_the_bands_of_the_least_predicted_error_in_under_a_second(epsilon, bands):
    start = time.process_time()
    found = _choose_bands.__wrapped__.__wrapped__(STEPS, RATE, epsilon, DELTA, 50, "optimal", 0.0)
    assert found == [bands]
    # three or four calibrations; other people's load does not count as CPU time
    assert time.process_time() - start < (1.0 if epsilon >= 1 else 3.0)
    assert choose_bands(settings(epsilon)) == bands


def test_auto_chooses_for_the_epsilon_of_independent_noise_where_the_noise_is_given():
    assert choose_bands(settings(None, noise_multiplier=1.2079)) == 8
    assert choose_bands(settings(None, noise_multiplier=3.4538)) == 2
    assert choose_bands(settings(None, noise_multiplier=0.0)) == 1


def test_auto_never_exceeds_what_batches_and_length_allow():
    assert choose_bands(settings(8.0, batch_size=20_000, epochs=4.0)) <= 2
    assert choose_bands(settings(8.0, batch_size=50, epochs=0.003)) <= 3


@pytest.mark.parametrize(
    ("noise", "changed", "match"),
    [
        (Banded(51), {}, "51 bands of batch_size 1000 exceed the 50000 private examples"),
        (Banded(9), {"epochs": 0.1}, "9 bands are more than the 5 steps"),
        (Banded("auto"), {"epsilon": None}, "auto chooses for the trial's own epsilon"),
    ],
)
def test_bands_that_do_not_fit_are_refused_with_the_remedy(noise, changed, match):
    with pytest.raises(InvalidKey, match=match) as e:
        noise.schedule(settings(**changed))
    assert e.value.key == "bands"


def test_given_coefficients_are_divided_by_their_norm_and_counted():
    assert banded_coefficients((4.0, 3.0), 100, 2) == pytest.approx((0.8, 0.6))
    with pytest.raises(InvalidKey, match="one for each of the 3 bands, got 2"):
        banded_coefficients((4.0, 3.0), 100, 3)


def test_prediction_is_the_product_of_the_table():
    c = Banded(8).correlate(settings(4.0))
    found = predict_error(c, 2.8980, 4.0, DELTA, settings(4.0))
    assert found.error == pytest.approx(33.56, rel=5e-3)
    assert found.independent == pytest.approx(38.21, rel=5e-3)
    assert found.ratio == pytest.approx(0.8784, rel=5e-3)


# DP-FTRL's buffers.


@pytest.mark.parametrize(("buffers", "error"), [(1, 37.27), (2, 37.10)])
def test_buffers_reach_the_error_of_the_reference(buffers, error):
    found = Buffered(buffers).correlate(settings())
    # per unit of the sensitivity: the square of c's is the number of rounds, 40
    assert found.error() * math.sqrt(40) == pytest.approx(error, abs=0.006)
    assert Buffered(buffers).schedule(settings()) == (40, 1.0)
    assert (found.cycle, found.sampling_rate, found.num_kept) == (50, 1.0, buffers)
    square = buffered_square(found.column(STEPS), 50)
    assert 40 * (1 - 1e-12) < square <= 40


def test_sensitivity_of_buffers_is_the_worst_over_all_patterns():
    column = buffered_column([0.5, 0.2], [0.9, 0.4], 12)
    row, at = np.indices((12, 12))
    strategy = np.where(row >= at, column[np.clip(row - at, 0, None)], 0)
    worst = max(
        float(np.square(strategy[:, [*chosen]].sum(1)).sum())
        for offset in range(4)
        for chosen in ([offset], [offset, offset + 4], [offset, offset + 4, offset + 8])
    )
    assert buffered_square(column, 4) == pytest.approx(worst)
    # what the first t steps spend is at most their share of the rounds, also in mid-cycle
    for steps in range(1, 13):
        spent = buffered_square(column[:steps], 4) if steps % 4 == 0 else None
        part = strategy[:steps, :steps:4].sum(1)
        assert float(part @ part) <= worst / 3 * -(-steps // 4) + 1e-12
        assert spent is None or spent <= worst / 3 * (steps // 4) + 1e-12


def test_reading_the_module_imports_no_scipy():
    code = "import dpsweep.privacy.correlated, sys; print('scipy' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def test_optimum_is_stored_for_the_next_process(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("DPSWEEP_CACHE", str(folder))
    _optimize_bands.__wrapped__(123, 3, 0.0)
    assert len(list((folder / "numbers").iterdir())) == 1


@pytest.mark.parametrize(("steps", "cycle"), [(40, 8), (100, 30), (64, 1), (7, 7)])
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_part_of_a_buffered_run_spends_at_most_its_share_of_the_rounds(steps, cycle, buffers):
    """A pruned trial reports epsilon of the rounds so far, each as one Gaussian mechanism."""
    numbers = optimize_buffers(steps, cycle, buffers)
    first, scales, decays = numbers[0], numbers[1 : buffers + 1], numbers[buffers + 1 :]
    for done in range(1, steps + 1):
        column = first * buffered_column(scales, decays, done)
        matrix = scipy.linalg.toeplitz(column, np.zeros(done))
        worst = max(float(np.square(matrix[:, s::cycle].sum(1)).sum()) for s in range(cycle))
        assert worst <= -(-done // cycle) * (1 + 1e-9)
