"""Noise that is correlated over the steps: banded matrix factorisation and DP-FTRL's buffers.

A run of T steps adds x = C^-1 z in place of white noise z. C is lower-triangular and Toeplitz,
C[i, j] = c_(i-j), so that each step takes back part of the noise of the steps before it. What the
optimizer sums up, A x with the workload A, then has less noise:

    beta_t = first column of A C^-1         E_t = sum_(s <= t) beta_s^2
    loss   = sensitivity^2 mean_t E_t       predicted error = sqrt(loss) sigma, in units of C / B

    banded    c has b entries, and |c| = 1. An example takes part in steps b apart, at random
              with probability b B / N (Choquette-Choo et al. 2023, arXiv:2306.08153, theorem 4)
    buffered  c_i = sum_j s_j d_j^(i-1), DP-FTRL's noise with a few buffers (Dvijotham et al. 2024,
              arXiv:2404.16706). It has no end, so nothing is gained by sampling

Everything here is a function of public numbers. NumPy and SciPy are imported where they are used,
since configs are read with this module. The proof stands in docs/concepts/privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

from dpsweep.core.cache import cached_numbers
from dpsweep.core.errors import InvalidKey
from dpsweep.privacy.accounting import Run, calibrate_noise

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_AUTO_BANDS = 64
"""Most bands that `auto` chooses. Each holds one more copy of the weights in double precision."""

_PACKAGES = ("numpy", "scipy")


@dataclass(frozen=True)
class PublicSettings:
    """Public numbers that the choice of a noise and its accounting depend on.

    Attributes:
        num_examples: N.
        batch_size: B.
        epochs: E.
        epsilon: The trial's own budget; None where the noise is given or several share a budget.
        delta: Its failure probability.
        noise_multiplier: sigma, where the noise is given.
        momentum: Of the base optimizer.
    """

    num_examples: int
    batch_size: float
    epochs: float
    epsilon: float | None = None
    delta: float = 0.0
    noise_multiplier: float | None = None
    momentum: float = 0.0

    @property
    def rate(self) -> float:
        """Sampling rate of independent batches, q = B / N."""
        return self.batch_size / self.num_examples

    @property
    def steps(self) -> int:
        """T = round(E N / B), at least 1."""
        return max(1, round(self.epochs / self.rate))

    @property
    def most_bands(self) -> int:
        """Most bands that the batch size and the length allow: b B <= N and b <= T."""
        return min(int(self.num_examples // self.batch_size), self.steps)

    @property
    def auto_epsilon(self) -> float:
        """Epsilon that `bands: auto` chooses for: the budget, or that of independent noise.

        Within 0.1 and 16: beyond, the choice hardly changes, and calibrating takes long.
        """
        spent = self.epsilon
        if spent is None:
            assert self.noise_multiplier is not None, "Banded.check asks for it"
            spent = Run(self.rate, self.noise_multiplier, self.steps).epsilon(self.delta)
        return min(max(spent, 0.1), 16.0)


@dataclass(frozen=True)
class Correlation:
    """The correlated noise of one run, and the sampling that its proof needs.

    Attributes:
        steps: T.
        cycle: b. Each example belongs to one of b groups; step t samples from group t mod b.
        sampling_rate: Probability with which an example of that group is sampled.
        coefficients: Banded: c_0 to c_(b-1), of L2 norm 1. Buffered: c_0 and s_1 to s_d.
        decays: d_1 to d_d of the buffers; empty where c is banded.
    """

    steps: int
    cycle: int
    sampling_rate: float
    coefficients: tuple[float, ...]
    decays: tuple[float, ...] = ()

    @property
    def num_kept(self) -> int:
        """Vectors of the weights' size that a run remembers: b - 1, or one a buffer."""
        return len(self.coefficients) - 1

    def rounds_after(self, step: int) -> int:
        """Most steps among the first `step` that one example can take part in."""
        return -(-step // self.cycle)

    def column(self, num_steps: int) -> Floats:
        """First column of C for `num_steps` steps: c_0, c_1, ...; zeros after the last band."""
        import numpy as np

        column = np.zeros(num_steps)
        if not self.decays:
            bands = np.array(self.coefficients[:num_steps])
            column[: len(bands)] = bands
            return column
        return self.coefficients[0] * buffered_column(self.coefficients[1:], self.decays, num_steps)

    def noise_gains(self, num_steps: int) -> Floats:
        """Variance of the noise of each step, per unit of variance of z."""
        import numpy as np
        from scipy.signal import lfilter

        impulse = np.zeros(num_steps)
        impulse[0] = 1.0
        gains: Floats = np.cumsum(
            np.square(lfilter([1.0], self._trim_coefficients(num_steps), impulse))
        )
        return gains

    def whiten(self, noise: torch.Tensor) -> torch.Tensor:
        """White noise z = C x of the noise x of the first steps of a run, shape (T, ...)."""
        column = self.column(len(noise))
        white = float(column[0]) * noise
        for back in range(1, len(noise)):
            if column[back]:
                white[back:] += float(column[back]) * noise[:-back]
        return white

    def error(self, momentum: float = 0.0) -> float:
        """Root of the mean squared error of the sums that the optimizer makes, at sigma 1.

        In units of C / B. With `momentum` of the optimizer, the sums are those of its heavy ball.
        """
        import numpy as np

        beta = _first_column(self._trim_coefficients(self.steps), workload_of(self.steps, momentum))
        return float(np.sqrt(np.mean(np.cumsum(np.square(beta)))))

    def _trim_coefficients(self, num_steps: int) -> Floats:
        column = self.column(num_steps)
        return column if self.decays else column[: len(self.coefficients)]


class Noise(Protocol):
    """The noise of a method: how it depends on the step, and what that means for accounting."""

    def check(self, settings: PublicSettings) -> None:
        """Raise InvalidKey if the noise does not fit the settings; nothing is calibrated.

        Its key is relative to the noise.
        """

    def schedule(self, settings: PublicSettings) -> tuple[int, float]:
        """Rounds and sampling rate of the subsampled Gaussians whose composition is the run.

        Raises:
            InvalidKey: As `check` does.
        """

    def correlate(self, settings: PublicSettings) -> Correlation | None:
        """The correlation over the steps; None for independent noise."""

    def count_kept(self, settings: PublicSettings) -> int:
        """Vectors of the weights' size, in double precision, that a run remembers."""


@dataclass(frozen=True)
class Independent:
    """Independent noise at each step: z itself."""

    def check(self, settings: PublicSettings) -> None:
        return None

    def schedule(self, settings: PublicSettings) -> tuple[int, float]:
        return settings.steps, settings.rate

    def correlate(self, settings: PublicSettings) -> Correlation | None:
        return None

    def count_kept(self, settings: PublicSettings) -> int:
        return 0


INDEPENDENT = Independent()


@dataclass(frozen=True)
class Banded:
    """Noise x = C^-1 z with a banded C. One band is independent noise.

    Attributes:
        bands: b; `auto` for the least predicted error.
        coefficients: `optimal` for the least loss, `sqrt` for the square root of the prefix sums,
            or c_0 to c_(b-1) up to a common factor.
        workload: What the loss is about: `prefix` sums, or the sums of a heavy ball with the
            optimizer's `momentum`.
    """

    bands: int | Literal["auto"]
    coefficients: Literal["optimal", "sqrt"] | tuple[float, ...] = "optimal"
    workload: Literal["prefix", "momentum"] = "prefix"

    def check(self, settings: PublicSettings) -> None:
        """Raise InvalidKey if the noise does not fit the settings; nothing is calibrated."""
        most, bands = settings.most_bands, self.bands
        self._momentum(settings)
        if bands == "auto":
            if settings.epsilon is None and settings.noise_multiplier is None:
                raise InvalidKey(
                    "bands",
                    "auto chooses for the trial's own epsilon, and privacy.scope: sweep shares one "
                    f"among all trials. Give a number, such as bands: {min(8, max(1, most))}, or "
                    f"search over some",
                )
            return
        if bands * settings.batch_size > settings.num_examples:
            raise InvalidKey(
                "bands",
                f"{bands} bands of batch_size {settings.batch_size:g} exceed the "
                f"{settings.num_examples} private examples: an example joins every {bands}th step "
                f"with probability bands * batch_size / num_examples, here "
                f"{bands * settings.rate:.3g}. Give at most {most}, or smaller batches",
            )
        if bands > settings.steps:
            raise InvalidKey(
                "bands",
                f"{bands} bands are more than the {settings.steps} steps of the run. Give at most "
                f"{most}, or train for longer",
            )

    def count_bands(self, settings: PublicSettings) -> int:
        """b, chosen or given.

        Raises:
            InvalidKey: If it does not fit the settings.
        """
        self.check(settings)
        if self.bands != "auto":
            return self.bands
        assert isinstance(self.coefficients, str), "given coefficients give the bands"
        return choose_bands(settings, self.coefficients, self._momentum(settings))

    def schedule(self, settings: PublicSettings) -> tuple[int, float]:
        """ceil(T / b) rounds at rate b B / N."""
        bands = self.count_bands(settings)
        return -(-settings.steps // bands), bands * settings.batch_size / settings.num_examples

    def correlate(self, settings: PublicSettings) -> Correlation | None:
        bands = self.count_bands(settings)
        if bands == 1:
            return None
        _, rate = self.schedule(settings)
        return Correlation(
            steps=settings.steps,
            cycle=bands,
            sampling_rate=rate,
            coefficients=banded_coefficients(
                self.coefficients, settings.steps, bands, self._momentum(settings)
            ),
        )

    def count_kept(self, settings: PublicSettings) -> int:
        return self.count_bands(settings) - 1

    def _momentum(self, settings: PublicSettings) -> float:
        if self.workload == "prefix":
            return 0.0
        if settings.momentum == 0:
            raise InvalidKey(
                "workload",
                "momentum is about the sums of a heavy ball, and the base optimizer has none. "
                "Write workload: prefix, or give optimizer.momentum with sgd",
            )
        return settings.momentum


@dataclass(frozen=True)
class Buffered:
    """DP-FTRL's noise with a few buffers, over fixed groups that take turns, without sampling.

    Attributes:
        buffers: d, how many vectors of the weights' size it remembers.
    """

    buffers: int

    def check(self, settings: PublicSettings) -> None:
        return None

    def schedule(self, settings: PublicSettings) -> tuple[int, float]:
        """As many rounds as an example takes part in, each without sampling."""
        return -(-settings.steps // self._cycle(settings)), 1.0

    def correlate(self, settings: PublicSettings) -> Correlation | None:
        cycle = self._cycle(settings)
        numbers = optimize_buffers(settings.steps, cycle, self.buffers)
        return Correlation(
            steps=settings.steps,
            cycle=cycle,
            sampling_rate=cycle * settings.batch_size / settings.num_examples,
            coefficients=tuple(numbers[: self.buffers + 1]),
            decays=tuple(numbers[self.buffers + 1 :]),
        )

    def count_kept(self, settings: PublicSettings) -> int:
        return self.buffers

    def _cycle(self, settings: PublicSettings) -> int:
        return int(settings.num_examples // settings.batch_size)


def workload_of(steps: int, momentum: float = 0.0) -> Floats:
    """First column of A: ones for prefix sums, 1 + m + ... + m^t with momentum m."""
    import numpy as np

    return np.cumsum(momentum ** np.arange(steps))


def sqrt_coefficients(bands: int) -> Floats:
    """The first coefficients of 1 / sqrt(1 - x) (Fichtenberger et al. 2022)."""
    import numpy as np

    k = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def banded_coefficients(
    given: Literal["optimal", "sqrt"] | Sequence[float],
    steps: int,
    bands: int,
    momentum: float = 0.0,
) -> tuple[float, ...]:
    """c_0 to c_(b-1) of L2 norm 1.

    Raises:
        InvalidKey: If as many were not given.
    """
    import numpy as np

    if given == "optimal":
        return tuple(_optimize_bands(steps, bands, momentum))
    if given == "sqrt":
        return _normalize(sqrt_coefficients(bands))
    if len(given) != bands:
        raise InvalidKey(
            "coefficients",
            f"must be one for each of the {bands} bands, got {len(given)}. Give as many, bands: "
            f"{len(given)}, or coefficients: optimal",
        )
    return _normalize(np.array(given, dtype=np.float64))


def _normalize(c: Floats) -> tuple[float, ...]:
    """Scale to L2 norm 1, or a rounding error less."""
    norm = math.sqrt(math.fsum(float(x) ** 2 for x in c)) * (1 + 1e-15)
    return tuple(float(x) / norm for x in c)


@lru_cache(maxsize=256)
@cached_numbers(*_PACKAGES)
def _optimize_bands(steps: int, bands: int, momentum: float) -> list[float]:
    """The coefficients of least loss.

    With c_j = c_(j-1) (1 - x_j) and x in [0, 1) they are positive and do not increase, so that all
    roots of C lie outside the unit circle (Enestroem and Kakeya) and no solve overflows. Without
    that, L-BFGS runs into infinities at b = 2 and ends 5 % off.
    """
    import numpy as np
    from scipy.optimize import minimize

    if bands == 1:
        return [1.0]
    workload, start = workload_of(steps, momentum), sqrt_coefficients(bands)

    def objective(x: Floats) -> tuple[float, Floats]:
        c = np.concatenate([[1.0], np.cumprod(1 - x)])
        loss, gradient = _loss_and_gradient(c, workload)
        tail = np.cumsum((gradient * c)[::-1])[::-1]  # dc_j / dx_i = -c_j / (1 - x_i) for j >= i
        return math.log(loss), -tail[1:] / (1 - x) / loss

    found = minimize(
        objective,
        1 - start[1:] / start[:-1],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1 - 1e-9)] * (bands - 1),
        options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-16, "gtol": 1e-12, "maxcor": 50},
    )
    return list(_normalize(np.concatenate([[1.0], np.cumprod(1 - found.x)])))


def _loss_and_gradient(c: Floats, workload: Floats) -> tuple[float, Floats]:
    """Loss of a banded c, and its gradient.

    v = C^-T (w beta),  w_s = (n - s) / n       dE / dc_j = -2 sum_(s >= j) v_s beta_(s-j)
    """
    import numpy as np
    from scipy.signal import lfilter

    steps = len(workload)
    weight = 1 - np.arange(steps) / steps
    beta = _first_column(c, workload)
    error, square = float((weight * beta**2).sum()), float(c @ c)
    v = lfilter([1.0], c, (weight * beta)[::-1])[::-1]
    slope = np.array([-2 * (v[j:] @ beta[: steps - j]) if j < steps else 0 for j in range(len(c))])
    return error * square, slope * square + 2 * c * error


def _first_column(c: Floats, workload: Floats) -> Floats:
    """beta: first column of A C^-1; Toeplitz matrices commute."""
    from scipy.signal import lfilter

    column: Floats = lfilter([1.0], c, workload)
    return column


def choose_bands(
    settings: PublicSettings,
    coefficients: Literal["optimal", "sqrt"] = "optimal",
    momentum: float = 0.0,
) -> int:
    """The number of bands with the least predicted error, sqrt(loss) sigma(b).

    Of the powers of two up to MOST_AUTO_BANDS and what the settings allow. The search walks from
    McKenna's rule of thumb, epsilon sqrt(T) / epochs (arXiv:2405.15913), while the error falls.
    """
    if settings.noise_multiplier == 0:
        return 1  # there is no noise to correlate
    most = max(1, min(MOST_AUTO_BANDS, settings.most_bands))
    found = _choose_bands(
        settings.steps,
        settings.rate,
        settings.auto_epsilon,
        settings.delta,
        most,
        coefficients,
        momentum,
    )
    return int(found[0])


@lru_cache(maxsize=1024)
@cached_numbers(*_PACKAGES, "dp-accounting")
def _choose_bands(
    steps: int,
    rate: float,
    epsilon: float,
    delta: float,
    most: int,
    coefficients: Literal["optimal", "sqrt"],
    momentum: float,
) -> list[float]:
    errors: dict[int, float] = {}

    def error(power: int) -> float:
        bands = 2**power
        if power not in errors:
            if power < 0 or bands > most:
                return math.inf
            c = banded_coefficients(coefficients, steps, bands, momentum)
            run, _ = calibrate_noise(epsilon, delta, min(1.0, bands * rate), -(-steps // bands))
            errors[power] = Correlation(steps, bands, 1.0, c).error(momentum) * run.noise_multiplier
        return errors[power]

    rule = epsilon / (math.sqrt(steps) * rate)  # epochs are T q
    power = min(max(0, round(math.log2(max(rule, 1.0)))), int(math.log2(most)))
    while (better := min((power - 1, power + 1), key=error)) and error(better) < error(power):
        power = better
    if error(0) < error(power):
        power = 0
    return [float(2**power)]


def buffered_column(
    scales: Sequence[float] | Floats, decays: Sequence[float] | Floats, num_steps: int
) -> Floats:
    """1, then c_i = sum_j s_j d_j^(i-1)."""
    import numpy as np

    powers = np.array(decays)[:, None] ** np.arange(max(0, num_steps - 1))
    return np.concatenate([[1.0], np.array(scales) @ powers])


def buffered_square(column: Floats, cycle: int) -> float:
    """Squared sensitivity for an example that takes part every `cycle` steps, the first included.

    |sum_m C[:, m cycle]|^2, the worst for a c that is positive and does not increase (Kalinin and
    Lampert 2024, arXiv:2405.13763, theorem 2). The last cycle counts as if it were complete, so
    that what part of a run spends is never more than its share of the rounds.
    """
    import numpy as np

    rounds = -(-len(column) // cycle)
    whole = np.zeros(rounds * cycle)
    whole[: len(column)] = column
    whole[len(column) :] = column[-1]
    return float(np.square(np.cumsum(whole.reshape(rounds, cycle), axis=0)).sum())


@lru_cache(maxsize=64)
@cached_numbers(*_PACKAGES)
def optimize_buffers(steps: int, cycle: int, buffers: int) -> list[float]:
    """c_0, scales and decays of least mean error.

    c_0 is chosen so that the squared sensitivity is the number of rounds, ceil(T / cycle): then the
    run spends what as many Gaussian mechanisms of the same sigma spend. Returned scales are those
    of c / c_0.
    """
    import numpy as np
    from scipy.optimize import minimize

    workload = workload_of(steps)

    def unpack(u: Floats) -> tuple[Floats, Floats]:
        share = 1 / (1 + np.exp(-u))  # in (0, 1), so that c falls and stays positive
        decays = share[:buffers]
        scales = np.cumprod(share[buffers:]) if buffers > 1 else share[buffers:]
        return scales / max(1.0, scales.sum()), decays

    def objective(u: Floats) -> float:
        column = buffered_column(*unpack(u), steps)
        beta = _first_column(column, workload)
        error = float(np.mean(np.cumsum(beta**2)))
        return math.log(buffered_square(column, cycle) * error)

    start = np.concatenate([3.0 - 2.0 * np.arange(buffers), np.full(buffers, -0.5)])
    found = minimize(
        objective,
        start,
        method="Nelder-Mead",
        options={"maxiter": 4000, "maxfev": 4000, "xatol": 1e-8, "fatol": 1e-12},
    )
    scales, decays = unpack(found.x)
    square = buffered_square(buffered_column(scales, decays, steps), cycle)
    rounds = -(-steps // cycle)
    return [math.sqrt(rounds / square) * (1 - 1e-15), *scales.tolist(), *decays.tolist()]


@dataclass(frozen=True)
class Prediction:
    """Predicted error of a run's noise, beside that of independent noise at the same budget.

    Attributes:
        error: sqrt(loss) sigma, in units of C / B: the noise in the sums that the optimizer makes.
        independent: The same for independent noise.
    """

    error: float
    independent: float

    @property
    def ratio(self) -> float:
        """The part of DP-SGD's error that is left; below 1 the noise may help."""
        return self.error / self.independent


def predict_error(
    correlation: Correlation, sigma: float, epsilon: float, delta: float, settings: PublicSettings
) -> Prediction:
    """Predict the error of correlated noise and of independent noise that spend the same.

    Args:
        correlation: The noise.
        sigma: Its noise multiplier.
        epsilon: What it spends.
        delta: Its failure probability.
        settings: Of the trial.
    """
    plain, _ = calibrate_noise(epsilon, delta, settings.rate, settings.steps)
    white = Correlation(settings.steps, 1, settings.rate, (1.0,))
    return Prediction(correlation.error() * sigma, white.error() * plain.noise_multiplier)
