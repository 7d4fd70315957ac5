"""Audit: lower bounds on epsilon, measured on runs with and without one example.

The auditor sees every release of a run, knows all but one example (the canary), and boils a
run down to one number, its log-likelihood ratio, larger where the canary was in. From `absent`
(runs without it) and `present` (runs with it) follow two bounds, each wrong in at most a share
1 - confidence of all audits:

    counted   if runs are independent and alike: the error rates at one threshold
    fitted    if, besides, the releases are mu-Gaussian-DP for some mu: how often a run with
              the canary outscores one without

Measured on normal samples of a mechanism of exactly epsilon, delta 1e-5 (1000 audits each; the
median bound over the truth, as `bound_epsilon` gives it at 95 %; fitted exceeded it in 2 to 5 %
of them, counted in none):

              1000 + 1000 runs     2000 + 2000 runs     4000 + 4000 runs
    epsilon   counted   fitted     counted   fitted     counted   fitted
       1        0.00     0.58         0.08     0.72         0.19     0.81
       2        0.16     0.78         0.24     0.85         0.31     0.89
       4        0.26     0.87         0.33     0.90         0.38     0.94
       8        0.29     0.90         0.34     0.93         0.38     0.95

Half of the audits see 85 % of epsilon by the fit with 7300 runs a side at epsilon 1, 2300 at 2,
800 at 4 and 400 at 8; the number grows with 1 / mu^2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import betaincinv, expit, log_ndtr, ndtr, ndtri
from scipy.stats import binom, rankdata

Floats = npt.NDArray[np.float64]

FEWEST_RUNS = 20
"""Least number of runs of each kind; the bounds hold for fewer too, but say nothing."""

FITTED_SHARE = 0.8
"""Share of the error of `bound_epsilon` that the fitted bound takes; the rest is the counted one's.

The fit is the tighter one by far where its assumption holds, so it is given the larger part.
"""

_PILOT_SHARE = 0.1
_SORTED_VALUES = 10  # so many distinct values in order by chance: once in 10!/2 = 1.8 million
_COUPLED = 6.0  # standard deviations of the rank correlation: by chance once in 500 million


@dataclass(frozen=True)
class Audit:
    """Result of an audit of one method.

    `counted` and `fitted` hold together: at most a share 1 - confidence of all audits has
    either of them above the truth, so the larger may be quoted.

    Attributes:
        method: Name of the method.
        claimed: The epsilon that its runs claim.
        delta: The delta of all epsilons here.
        runs: Runs with the canary, and as many without; of the smaller sample if they differ.
        confidence: Of the two bounds together.
        counted: Lower bound on epsilon by counting.
        fitted: Lower bound on epsilon by a fit of Gaussian DP.
    """

    method: str
    claimed: float
    delta: float
    runs: int
    confidence: float
    counted: float
    fitted: float

    @property
    def lower(self) -> float:
        """The larger of the two bounds."""
        return max(self.counted, self.fitted)

    @property
    def ratio(self) -> float:
        """Share of the claimed epsilon that was seen; near 1, the accounting is tight."""
        return self.lower / self.claimed

    @property
    def violated(self) -> bool:
        """True if the claim is refuted; of true claims, at most 1 - confidence are."""
        return self.lower > self.claimed


def bound_epsilon(
    method: str,
    absent: Floats,
    present: Floats,
    claimed: float,
    delta: float,
    confidence: float = 0.95,
) -> Audit:
    """Compute both bounds on the epsilon of one method, with the error split between them.

    Args:
        method: Name of the method.
        absent: Log-likelihood ratios of runs without the canary, shape (n0,), as they were run.
        present: The same of runs with it, shape (n1,); other noise, not that of `absent`.
        claimed: Epsilon that the runs claim, > 0.
        delta: In (0, 1).
        confidence: In (0, 1).

    Raises:
        ValueError: If an argument is out of range, or the samples cannot be those of independent
            runs: not finite, sorted, or coupled.
    """
    if not claimed > 0:
        raise ValueError(f"The claimed epsilon must be above 0, got {claimed}.")
    _check_share("confidence", confidence)
    error = 1 - confidence
    return Audit(
        method=method,
        claimed=claimed,
        delta=delta,
        runs=min(len(absent), len(present)),
        confidence=confidence,
        counted=bound_epsilon_by_counting(absent, present, delta, 1 - (1 - FITTED_SHARE) * error),
        fitted=epsilon_of_mu(bound_mu_by_fit(absent, present, 1 - FITTED_SHARE * error), delta),
    )


def bound_epsilon_by_counting(
    absent: Floats, present: Floats, delta: float, confidence: float
) -> float:
    """Lower bound on epsilon from the error rates of one threshold; assumes only like runs.

    With FPR the share of absent runs above the threshold and FNR that of present ones below,
    (epsilon, delta)-DP asks for both of

        epsilon >= ln((1 - delta - FNR) / FPR),    epsilon >= ln((1 - delta - FPR) / FNR)

    The first tenth of either sample, the pilot, is spent on choosing the threshold, within the
    pilot's range, and one of the two directions: those of the largest expected bound if both
    samples were normal. The other nine tenths give Clopper-Pearson upper bounds of FPR and FNR,
    each with half the error. The choice is thus independent of what it is used on, and a sample
    that is not normal costs tightness, not truth.
    Measured at epsilon 4 with 4000 + 4000 runs: 0.43 of the truth, against 0.36 for the best
    threshold of half the runs and 0.41 for a union bound over four fixed ones.

    What keeps it far below the truth is delta: the events that decide about 1e-5 are too rare to
    be counted (Nasr et al. 2021, arXiv:2101.04535).
    """
    absent, present = _check_sample("absent", absent), _check_sample("present", present)
    _check_share("delta", delta)
    _check_share("confidence", confidence)
    pilot0, rest0 = np.split(absent, [math.ceil(_PILOT_SHARE * len(absent))])
    pilot1, rest1 = np.split(present, [math.ceil(_PILOT_SHARE * len(present))])
    error = (1 - confidence) / 2  # of each rate; _K below runs over K thresholds
    mean0, mean1 = float(pilot0.mean()), float(pilot1.mean())
    least = 1e-9 * max(1.0, abs(mean0), abs(mean1))  # all values alike have no spread
    std0, std1 = max(float(pilot0.std()), least), max(float(pilot1.std()), least)
    pilots = np.concatenate([pilot0, pilot1])
    at_K = np.linspace(pilots.min(), pilots.max(), 400, endpoint=False)
    fpr_K = bound_probability(len(rest0) * ndtr((mean0 - at_K) / std0), len(rest0), error)
    fnr_K = bound_probability(len(rest1) * ndtr((at_K - mean1) / std1), len(rest1), error)
    by_fpr_K = _epsilon_of_rates(fpr_K, fnr_K, delta)
    by_fnr_K = _epsilon_of_rates(fnr_K, fpr_K, delta)
    by_fpr = by_fpr_K.max() >= by_fnr_K.max()
    threshold = at_K[np.argmax(by_fpr_K if by_fpr else by_fnr_K)]
    fpr = bound_probability(np.count_nonzero(rest0 > threshold), len(rest0), error)
    fnr = bound_probability(np.count_nonzero(rest1 <= threshold), len(rest1), error)
    return float(_epsilon_of_rates(*((fpr, fnr) if by_fpr else (fnr, fpr)), delta))


def bound_mu_by_fit(absent: Floats, present: Floats, confidence: float) -> float:
    """Lower bound on mu, if what the auditor saw of a run is mu-GDP (arXiv:1905.02383).

    A mu-GDP mechanism keeps the ROC curve of *every* statistic, normal or not, under that of
    N(0, 1) against N(mu, 1), and so the area under it:

        P(present > absent) <= Phi(mu / sqrt(2))

    Runs are paired as they come. Pairs are independent, so wins are binomial, and Clopper-Pearson's
    lower bound of their share gives mu. No threshold is chosen, so none is paid for; ties count
    as losses.

    Nasr et al. (arXiv:2302.07956) bound mu from FPR and FNR at a threshold instead. With two
    Clopper-Pearson bounds at threshold 0, which no sample chose, that gives 0.83 of epsilon 2
    from 4000 + 4000 runs, where pairs give 0.90; the best unproven ones, Mann-Whitney with its
    normal limit or a t-test, give 0.92.

    Assumes a Gaussian trade-off curve: exact for the Gaussian mechanism (q = 1). Under Poisson
    sampling privacy loss has the heavier tail, so the epsilon at a small delta belongs to a larger
    mu than the bulk of runs shows, and the bound errs to the safe side: exact log-ratios of ten
    (q, sigma, T) showed 0.5 to 0.99 of `mu_of_epsilon` of the accountant's epsilon at 1e-5. Where
    privacy loss is bounded (randomized response), it is no bound; `bound_epsilon_by_counting` is.

    Cannot exceed sqrt(2) Phi^-1((1 - confidence)^(1/n)), 4.5 for n = 4000 at 95 %, which is
    epsilon 28 at delta 1e-5.
    """
    absent, present = _check_sample("absent", absent), _check_sample("present", present)
    _check_share("confidence", confidence)
    runs = min(len(absent), len(present))
    absent, present = absent[:runs], present[:runs]
    losses = np.count_nonzero(present <= absent)
    mu = -math.sqrt(2) * float(ndtri(bound_probability(losses, runs, 1 - confidence)))
    if not mu > 0:
        return 0.0
    _check_independent(absent, present)
    return mu


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The least epsilon for which mu-GDP is (epsilon, delta)-DP.

        delta = Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu)

    One Gaussian mechanism of noise multiplier sigma has mu = 1 / sigma, T of them
    sqrt(T) / sigma. Dong, Roth and Su, arXiv:1905.02383, corollary 1.

    Args:
        mu: In [0, inf).
        delta: In (0, 1).

    >>> round(epsilon_of_mu(1.0, 1e-5), 3), round(epsilon_of_mu(0.5, 1e-5), 3)
    (4.377, 1.993)
    """
    if not 0 <= mu < math.inf:
        raise ValueError(f"mu must lie in [0, inf), got {mu}. 0 is perfect privacy.")
    _check_share("delta", delta)
    if mu == 0 or _log_delta(0.0, mu) <= math.log(delta):
        return 0.0
    most_it_can_be = mu * (mu / 2 - float(ndtri(delta)))  # where Phi alone is delta
    return _find_root(
        lambda epsilon: math.log(delta) - _log_delta(epsilon, mu), 0.0, most_it_can_be
    )


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP is (epsilon, delta)-DP; undoes `epsilon_of_mu`.

    Args:
        epsilon: In [0, inf). At 0, mu is what delta alone allows.
        delta: In (0, 1).

    >>> round(mu_of_epsilon(epsilon_of_mu(0.5, 1e-5), 1e-5), 9)
    0.5
    """
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must lie in [0, inf), got {epsilon}.")
    _check_share("delta", delta)
    if epsilon == 0:
        return 2 * float(ndtri((1 + delta) / 2))
    z = -float(ndtri(delta))
    low = math.sqrt(z * z + 2 * epsilon) - z  # where Phi alone is delta
    high = 2 * low
    while _log_delta(epsilon, high) < math.log(delta):
        high *= 2
    return _find_root(lambda mu: _log_delta(epsilon, mu) - math.log(delta), low, high)


def epsilon_of_one_run(
    canaries: int, guesses: int, correct: int, delta: float, error: float
) -> float:
    """Lower bound on epsilon from one run with many canaries, each in it with probability 1/2.

    With (epsilon, delta)-DP, p = 1 / (1 + e^-epsilon) and X ~ Binomial(guesses, p),

        P(at least v right) <= P(X >= v) + 2 m delta max_i P(v > X >= v - i) / i

    The bound is the largest epsilon that makes `correct` right guesses less likely than `error`.
    Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, theorem 5.2 and appendix D.

    Args:
        canaries: m.
        guesses: How many of them were guessed in or out; the others were abstained from.
        correct: v.
        delta: In [0, 1).
        error: In (0, 1).

    >>> round(epsilon_of_one_run(1000, 1000, 1000, 0.0, 0.05), 2)
    5.81
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"correct <= guesses <= canaries is needed, got {correct}, {guesses}, {canaries}."
        )
    _check_share("error", error)

    def likely(epsilon: float) -> float:
        share = float(expit(epsilon))
        tail = float(binom.sf(correct - 1, guesses, share))
        below_I = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, share))
        worst = float((below_I / np.arange(1, correct + 1)).max()) if correct else 0.0
        return min(1.0, tail + 2 * canaries * delta * worst)

    if likely(0.0) >= error:
        return 0.0
    high = 1.0
    while likely(high) < error and high < 100:
        high *= 2
    return _find_root(lambda epsilon: likely(epsilon) - error, 0.0, high) if high < 100 else high


@dataclass(frozen=True)
class OneRun:
    """Result of one run with many canaries, each included with probability 1/2.

    Attributes:
        canaries: How many.
        guesses: How many of them were guessed.
        correct: How many guesses were right.
        lower: Lower bound on epsilon.
    """

    canaries: int
    guesses: int
    correct: int
    lower: float


def bound_one_run(
    scores: Floats, inside: npt.NDArray[np.bool_], delta: float, confidence: float
) -> OneRun:
    """Bound epsilon by guessing the canaries of largest score in, and of smallest out.

    A twentieth, an eighth or a quarter of them on either side: the number with the best bound,
    which is paid for by splitting the error among the three.

    Args:
        scores: How much of each canary the auditor sees, shape (m,).
        inside: True where it was in the run.
        delta: In [0, 1).
        confidence: Of the bound.
    """
    canaries, order = len(scores), np.argsort(scores)
    tried = [canaries // 20, canaries // 8, canaries // 4]
    error = (1 - confidence) / len(tried)
    best = OneRun(canaries, 0, 0, 0.0)
    for side in tried:
        correct = int((~inside[order[:side]]).sum() + inside[order[-side:]].sum())
        lower = epsilon_of_one_run(canaries, 2 * side, correct, delta, error)
        if lower >= best.lower:
            best = OneRun(canaries, 2 * side, correct, lower)
    return best


def power_of_one_run(
    share: float, epsilon: float, delta: float, canaries: int, confidence: float
) -> float:
    """Probability that one run refutes a claim, with noise at `share` of what it should be.

    Of 100 simulated runs, whose canaries' gradients are orthogonal: real ones overlap, and tell
    less.
    """
    rng, mu, found = np.random.default_rng(0), mu_of_epsilon(epsilon, delta) / share, 0
    for _ in range(100):
        inside = rng.random(canaries) < 0.5
        scores = mu * inside + rng.standard_normal(canaries)
        found += bound_one_run(scores, inside, delta, confidence).lower > epsilon
    return found / 100


def power_against(
    share: float, epsilon: float, delta: float, runs: int, confidence: float
) -> float:
    """Probability that `judge` finds noise at `share` of what it should be, by the fit alone.

    The runs lose mu / share in place of mu. Pairs won are binomial, so the smallest number that
    refutes the claim says how often it is reached.

    >>> round(power_against(0.5, 4.0, 1e-5, 1000, 0.99), 3)
    1.0
    """
    mu, error = mu_of_epsilon(epsilon, delta), FITTED_SHARE * (1 - confidence)
    lost_L = np.arange(runs + 1)
    refutes = -math.sqrt(2) * ndtri(bound_probability(lost_L, runs, error)) > mu
    if not refutes.any():
        return 0.0
    truth = float(ndtr(-mu / share / math.sqrt(2)))
    return float(binom.cdf(int(lost_L[refutes].max()), runs, truth))


def compute_log_ratio(shift: npt.ArrayLike, centred: npt.ArrayLike, sampling_rate: float) -> Floats:
    """Compute one step's part of the log-likelihood ratio of "the canary was in".

    With the release y in units of the clipped sum, its mean `base` without the canary, the
    canary's own clipped gradient v and noise of standard deviation sigma C,

        shift   = |v|^2 / (sigma C)^2,      centred = <y - base, v> / (sigma C)^2
        log(N(base + v) / N(base))          = centred - shift / 2
        log(((1 - q) N(base) + q N(base + v)) / N(base))
                                            = log(1 - q + q exp(centred - shift / 2))

    Args:
        shift: Any shape, >= 0.
        centred: A shape that broadcasts with it.
        sampling_rate: q, in (0, 1].

    >>> [round(float(compute_log_ratio(1.0, g, sampling_rate=0.01)), 4) for g in (-50, 0.5, 50)]
    [-0.0101, 0.0, 44.8948]
    """
    if not 0 < sampling_rate <= 1:
        raise ValueError(f"sampling_rate must lie in (0, 1], got {sampling_rate}.")
    ratio = np.asarray(centred, dtype=np.float64) - np.asarray(shift, dtype=np.float64) / 2
    if sampling_rate == 1:
        return ratio
    far = np.logaddexp(np.log1p(-sampling_rate), np.log(sampling_rate) + ratio)
    # Near 0 the two logs cancel; far from it expm1 overflows or leaves 1 - q to rounding.
    near = np.log1p(sampling_rate * np.expm1(np.clip(ratio, -0.5, 0.5)))
    return np.where(np.abs(ratio) < 0.5, near, far)


def bound_probability(count: npt.ArrayLike, runs: int, error: float) -> Floats:
    """Clopper-Pearson: the largest probability that `count` of `runs` leaves, one-sided.

    It lies under the true one with probability `error` at most. Counts may be fractions, of
    runs that are only expected.

    >>> round(float(bound_probability(0, runs=1000, error=0.05)), 4)     # the rule of three
    0.003
    """
    count = np.minimum(np.asarray(count, dtype=np.float64), runs)
    some = np.maximum(runs - count, 1e-300)  # betaincinv wants it positive
    return np.where(count < runs, betaincinv(count + 1, some, 1 - error), 1.0)


def _epsilon_of_rates(rare: Floats, missed: Floats, delta: float) -> Floats:
    """ln((1 - delta - missed) / rare), or 0 where that is less."""
    return np.log(np.maximum(1 - delta - missed, rare) / rare)


def _log_delta(epsilon: float, mu: float) -> float:
    """Log of the least delta for which mu-GDP is (epsilon, delta)-DP; mu > 0."""
    first = float(log_ndtr(mu / 2 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return first + math.log(-math.expm1(min(second - first, -1e-300)))  # rounding may reach 0


def _find_root(rising: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(rising, low, high, xtol=1e-13 * high, rtol=1e-14, maxiter=500))


def _check_sample(name: str, sample: Floats) -> Floats:
    """Return the sample, if it can be one of independent runs in the order they were run."""
    sample = np.asarray(sample, dtype=np.float64)
    if sample.ndim != 1 or len(sample) < FEWEST_RUNS:
        raise ValueError(
            f"{name} must hold one number a run for at least {FEWEST_RUNS} runs, got shape "
            f"{sample.shape}. Bounds worth having take a thousand."
        )
    num_bad = len(sample) - np.count_nonzero(np.isfinite(sample))
    if num_bad:
        raise ValueError(
            f"{name}: {num_bad} of {len(sample)} runs have a log-likelihood ratio of NaN or "
            f"infinity. Mend those runs (they diverged, or had no noise) and audit again; leaving "
            f"them out would bias the bound."
        )
    steps = np.diff(sample)
    if (np.all(steps >= 0) or np.all(steps <= 0)) and len(np.unique(sample)) >= _SORTED_VALUES:
        raise ValueError(
            f"{name} is sorted. Runs are paired and split as they come: pass them in the order "
            f"they were run."
        )
    return sample


def _check_independent(absent: Floats, present: Floats) -> None:
    """Refuse two samples whose runs share their noise: a canary of any size would win them all."""
    rank0, rank1 = rankdata(absent), rankdata(present)
    spread = float(rank0.std() * rank1.std())
    if spread == 0:
        return
    correlation = float(((rank0 - rank0.mean()) * (rank1 - rank1.mean())).mean()) / spread
    by_chance = 1 / math.sqrt(len(absent) - 1)
    if not abs(correlation) <= _COUPLED * by_chance:
        raise ValueError(
            f"absent and present are coupled: run i of the one tells of run i of the other (rank "
            f"correlation {correlation:.2f}; independent runs would stay within "
            f"{_COUPLED * by_chance:.2f}). Give every run noise and sampling of its own."
        )


def _check_share(name: str, share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"{name} must lie in (0, 1), got {share}.")
