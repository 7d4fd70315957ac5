"""The checks of chance: that the noise is noise, the batches are coins, and nobody knows either.

Each states its false-alarm rate. Secrets are fixed, so a false alarm can only come up when the
order of the draws changes.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from scipy import stats
from torch import nn
from world import BATCH_SIZE, SIGMA, STEPS, UNDERWAY, World, examples, flat, only, same, watched

from dpsweep.config.plan import plan_privacy
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Released, Tensors
from dpsweep.privacy.clip import split_count
from dpsweep.privacy.engine import Engine
from dpsweep.privacy.release import GRID_BITS

LEVEL = 1e-6
"""False alarms of one statistical test, at most."""


def check_noise(world: World) -> None:
    """Noise of standard deviation sigma C on every whitened coordinate, and all of it independent.

    Measured at the boundary and once more on what the filters are given, in 10 tests and one a
    leaf, each at LEVEL: a false alarm in one world has a probability of 4e-5 at most (none was
    seen in 180 runs with other secrets). Noise off by 10 % on all coordinates is caught.
    """
    steps = 24
    at = UNDERWAY if world.correlation is None else 0
    tape = world.run(examples(), steps=steps, at=at)
    trees = [recording.noise for recording in tape.releases]
    _check_law(_whiten(world, trees), "noise of the release")
    step = world.step(examples())
    query, maps = step.method.query, step.geometry.maps
    after = []
    for t, (recording, gradient) in enumerate(
        zip(tape.releases, tape.gradients, strict=True), start=at
    ):
        mean = Released({k: x / BATCH_SIZE for k, x in recording.total.items()})
        clean = step.geometry.restore(query.restore(split_count(mean)[0], t))
        unit = recording.clip_norm / BATCH_SIZE * math.sqrt(query.noise_gain(t))
        after.append(
            {
                k: (maps[k].lags.whiten((g - clean[k]).flatten(2)) if k in maps else g - clean[k])
                / unit
                for k, g in gradient.items()
            }
        )
    _check_law(_whiten(world, after), "noise in the gradient")


def _whiten(world: World, trees: list[Tensors]) -> list[Tensors]:
    """C x of correlated noise x, with the sensitivity of C brought to 1 here, not by the package.

    Buffered noise may have a sensitivity of the square root of the rounds: they are counted.
    """
    if world.correlation is None:
        return trees
    column = world.strategy
    return [
        {k: sum(column[t - s] * trees[s][k].double() for s in range(t + 1)) for k in tree}
        for t, tree in enumerate(trees)
    ]


def _check_law(trees: list[Tensors], where: str) -> None:
    """`trees` are draws of N(0, sigma^2), one tree a step."""
    z_TP = torch.stack([flat(tree) for tree in trees]) / SIGMA
    steps, size = z_TP.shape
    # Sums of N products of independent normals have deviation sqrt(N), tails nearly normal.
    far, power = -stats.norm.ppf(LEVEL / 4), float(z_TP.square().mean())
    after = float((z_TP[1:] * z_TP[:-1]).sum()) / math.sqrt((steps - 1) * size) / power
    assert abs(after) < far, f"{where}: one step's tells of the next one's"
    beside = float((z_TP[:, 1:] * z_TP[:, :-1]).sum()) / math.sqrt(steps * (size - 1)) / power
    assert abs(beside) < far, f"{where}: one coordinate's tells of its neighbour's"
    normal = stats.norm.cdf
    assert stats.kstest(z_TP.flatten(), normal).pvalue > LEVEL, f"{where}: not N(0, sigma C)"
    strength = stats.chi2(z_TP.numel()).cdf(float(z_TP.square().sum()))
    assert LEVEL / 2 < strength < 1 - LEVEL / 2, f"{where}: not N(0, sigma C) in strength"
    for wrong in (2 / 3, 3 / 2):  # the test sees what it should
        assert stats.kstest(z_TP.flatten() * wrong, normal).pvalue < LEVEL, f"{where}: blind"
    for k in trees[0]:  # every leaf has its share, the smallest too
        leaf = torch.stack([tree[k] for tree in trees]).flatten() / SIGMA
        assert stats.kstest(leaf, normal).pvalue > LEVEL, f"{where}: not N(0, sigma C) in {k}"
    energy = z_TP.square().sum(0)  # chi-square of `steps` along each axis
    lowest, highest = stats.chi2(steps).ppf([LEVEL / size, 1 - LEVEL / size])
    assert float(energy.min()) > lowest, f"{where}: a coordinate is quieter than the others"
    assert float(energy.max()) < highest, f"{where}: a coordinate is louder than the others"
    shared = float((z_TP.sum(1).square() / size).sum())
    assert shared < stats.chi2(steps).isf(LEVEL), f"{where}: all coordinates share a part"
    pairs = torch.corrcoef(z_TP.T).triu(1).abs().max()
    t = stats.t(steps - 2).isf(LEVEL / size**2)
    assert float(pairs) < t / math.hypot(t, math.sqrt(steps - 2)), f"{where}: two go together"
    # Sums do not lie on the release's grid: a draw that serves twice comes back to within a cell of
    # it. Independent draws come so near about once in three runs, and 20 times in none.
    gaps = z_TP.sort(1).values.diff()
    assert int((gaps < 2.0**-GRID_BITS).sum()) < 20, f"{where}: the same draw is used twice"
    each = z_TP.square().sum(1)  # chi-square of `size` at each step
    lowest, highest = stats.chi2(size).ppf([LEVEL / steps, 1 - LEVEL / steps])
    assert lowest < float(each.min()), f"{where}: a step is quieter than the others"
    assert float(each.max()) < highest, f"{where}: a step is louder than the others"


def check_fresh_noise(world: World) -> None:
    """Two trials draw different noise and batches; one that is replayed draws the same."""
    one, other = Secret.for_new_trial(), Secret.for_new_trial()
    if not one.void:
        assert one.key != other.key, "secret: two trials have one"
    gain = 1.0 if world.correlation is None else 1 / world.strategy[0]  # of a first step's noise
    runs = [world.total(examples(), secret=s).noise for s in (one, one, other)]
    assert same(runs[0], runs[1]), "replay: the same step draws other noise"
    bound = world.total(examples(), secret=one.bind_to_config("another config")).noise
    for stranger in (runs[2], bound):
        x, y = flat(runs[0]), flat(stranger)
        # A correlation of P independent pairs; 6 deviations are 2e-9.
        far = 6 * (gain * SIGMA) ** 2 / math.sqrt(len(x))
        assert abs(float((x * y).mean())) < far, "secret: fixed noise"
    many = [world.step(examples(), rate=0.5, secret=s) for s in (one, one, other)]
    batches = [[step.batch(t) for t in range(20)] for step in many]
    again = [torch.equal(a, b) for a, b in zip(batches[0], batches[1], strict=True)]
    fresh = [torch.equal(a, b) for a, b in zip(batches[0], batches[2], strict=True)]
    assert all(again), "replay: the same step samples another batch"
    assert not all(fresh), "secret: fixed batches"  # 180 coins alike: 2^-180


def check_sampling(world: World) -> None:
    """Every example joins every batch by a coin of its own, of probability q.

    300 steps of 60 examples at q = 0.2. About 8 tests at LEVEL: a false alarm in 1e5 runs.
    """
    num, steps, rate = 60, 300, 0.2
    data = only(examples(), [0] * num)
    brightness = torch.arange(1, num + 1, dtype=data.inputs.dtype)
    data = replace(data, inputs=brightness.view(-1, 1, 1, 1).expand(data.inputs.shape).clone())
    with watched(world.step(data, rate=rate)) as (step, _):
        deaf = _Deaf(step.engine)
        step = replace(step, engine=deaf)
        progress = world.begin(step)
        for _ in range(steps):
            step(progress)
    joined_TN = torch.zeros(steps, num, dtype=torch.float64)
    per_step = len(deaf.batches) // steps
    for t, inputs in enumerate(deaf.batches[::per_step]):
        pixels = (inputs[:, 0, 0, 0] + 1) * (data.brightest / 2)
        joined_TN[t, pixels.round().long() - 1] = 1
    sizes = joined_TN.sum(1)
    law = stats.binom(num, rate)
    cuts = law.ppf(np.linspace(0, 1, 9)[1:-1])  # eight groups of some 37 sizes each
    seen = np.bincount(np.searchsorted(cuts, sizes.numpy()), minlength=8)
    wanted = steps * np.diff(np.concatenate([[0], law.cdf(cuts), [1]]))
    assert stats.chisquare(seen, wanted).pvalue > LEVEL, "sampling: sizes are not binomial"
    # The sample variance has a relative deviation of sqrt(2 / 299) = 8 %; five are 6e-7.
    spread = float(sizes.var()) / law.var()
    assert abs(spread - 1) < 5 * math.sqrt(2 / (steps - 1)), "sampling: sizes vary too little"
    each = stats.binom(steps, rate).ppf([LEVEL / num, 1 - LEVEL / num])
    assert each[0] <= joined_TN.sum(0).min(), "sampling: an example is left out"
    assert joined_TN.sum(0).max() <= each[1], "sampling: an example is preferred"
    coins = (joined_TN - rate) / math.sqrt(rate * (1 - rate))
    for lag in (1, 2, 5):  # an epoch is 5 steps; -1/4 on average if epochs were shuffled
        product = coins[:-lag] * coins[lag:]
        steady = float(product.sum()) / math.sqrt(product.numel())
        assert abs(steady) < 5, f"sampling: batches {lag} apart are not independent"
    # 1770 pairs; the tail of a sum of 300 products is a little heavier than the normal one's,
    # which passes 7 deviations with 3e-12.
    pairs = (coins.T @ coins / math.sqrt(steps)).triu(1)
    assert float(pairs.abs().max()) < 7, "sampling: two examples go together"


def check_groups(world: World) -> None:
    """Each example is sampled at steps b apart alone, by a coin; groups are secret and independent.

    b is the number of bands, or of groups that take turns. 3000 examples, about 40 rounds, 12
    tests at LEVEL: a false alarm in 1e5 runs.
    """
    correlation = world.correlation
    cycle = correlation.cycle if correlation.decays else len(correlation.coefficients)
    num, rate, rounds = 3000, 0.25, STEPS // cycle
    joined_TN = _sample(world, num, rate, Secret.fixed("groups"))
    entered = joined_TN.int().argmax(0)  # the first step of each, if it has one
    for t in range(STEPS):
        apart = (t - entered) % cycle
        wrong = joined_TN[t] & (apart != 0)
        assert not wrong.any(), f"groups: an example is sampled at steps less than {cycle} apart"
    sizes = joined_TN.view(rounds, cycle, num).sum((1, 2))  # binomial, whatever the groups
    law = stats.binom(num, rate)
    off = (float(sizes.double().mean()) - law.mean()) / math.sqrt(law.var() / rounds)
    assert abs(off) < 5, "groups: samples have another rate"
    spread = float(sizes.double().var()) / law.var()
    # the sum of squares of about 15 to 40 sizes is chi-square
    bounds = stats.chi2(rounds - 1).ppf([LEVEL, 1 - LEVEL]) / (rounds - 1)
    assert bounds[0] < spread < bounds[1], "groups: sizes of samples are not binomial"
    ones = _sample(world, num, 1.0, Secret.fixed("groups")).int().argmax(0)
    others = _sample(world, num, 1.0, Secret.fixed("other groups")).int().argmax(0)
    counts = np.bincount(ones, minlength=cycle)
    assert stats.chisquare(counts).pvalue > LEVEL, "groups: some are preferred"
    # groups that are dealt out in equal parts have no spread at all
    assert stats.chisquare(counts).pvalue < 1 - LEVEL, "groups: equal parts"
    for lag in (1, 2, cycle):
        steps_between = np.bincount((ones[lag:] - ones[:-lag]) % cycle, minlength=cycle)
        assert stats.chisquare(steps_between).pvalue > LEVEL, "groups: an example's place tells its"
    same_group = np.bincount((ones - others) % cycle, minlength=cycle)
    assert stats.chisquare(same_group).pvalue > LEVEL, "groups: not the trial's secret"


def _sample(world: World, num: int, rate: float, secret: Secret) -> torch.Tensor:
    """True where example i is in the batch of step t, shape (T, N)."""
    step = world.step(examples(), rate=rate, secret=secret, cyclic=True)
    step = replace(step, plan=replace(step.plan, num_examples=num))
    joined_TN = torch.zeros(STEPS, num, dtype=torch.bool)
    for t in range(STEPS):
        joined_TN[t, step.batch(t)] = True
    return joined_TN


def check_accounting(world: World) -> None:
    """A run is charged as what one example meets: so many samples, at the rate of its group."""
    trial = world.config
    train = trial.train.model_copy(update={"epochs": 0.5})
    plan = plan_privacy(trial.model_copy(update={"train": train}))
    rate = plan.sampling_rate
    step = replace(world.step(examples(), cyclic=True), plan=plan)
    meets = int(np.bincount(np.arange(plan.steps) % plan.correlation.cycle).max())
    assert plan.run.steps >= meets, f"accounting: {plan.run.steps} of {meets} samples are charged"
    assert plan.run.sampling_rate >= rate, "accounting: the rate is that of all examples"
    sizes = sum(len(step.batch(t)) for t in range(plan.steps))
    # as many as of independent batches: B a step; six deviations
    mean = plan.steps * trial.train.batch_size
    assert abs(sizes - mean) < 6 * math.sqrt(mean), "accounting: batches have another size"


class _Deaf:
    """An engine that hears nobody, for speed, and keeps who was asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.batches = engine, []

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    def clipped_sum(self, points, weights, inputs_B, targets_B, clip):
        self.batches.append(inputs_B)
        return self.engine.clipped_sum(points, weights, inputs_B[:0], targets_B[:0], clip)
