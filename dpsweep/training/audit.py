"""A white-box audit: does the training step lose as little privacy as it claims?

Many short runs of the real step, with fresh secrets, half of them with one more example, the
canary. The auditor sees every release, knows the code, the iterates and all other examples,
and sums the log-likelihood ratio of "with" against "without" over a run's steps. From how far
the two kinds of run lie apart follows a lower bound on epsilon (privacy/audit.py). A bound
above the claim proves a fault; one just under it shows that the noise is no larger than needed.

Only what passes through the release is scored, in float64 and, by default, at q = 1.

The runs start at iterates that lie far apart, so that a query's points differ, and with a
clip norm so small that every gradient reaches it. Data: a few of scikit-learn's digits, and an
image of one brightness as the canary.
"""

import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import Literal

import numpy as np
import torch
from torch import nn

from dpsweep.config.clipping import PerLayerClipping
from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.errors import ConfigError
from dpsweep.core.inputs import draw_inputs, extreme_inputs, one_tensor, replace_row, take_rows
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.data.read import Dataset, load_dataset
from dpsweep.data.units import fill_unit
from dpsweep.methods import build_method
from dpsweep.privacy.accounting import Run, calibrate_noise
from dpsweep.privacy.audit import Audit, OneRun, bound_epsilon, bound_one_run, compute_log_ratio
from dpsweep.privacy.clip import Clip
from dpsweep.privacy.correlated import INDEPENDENT, Banded, Correlation, PublicSettings
from dpsweep.privacy.engine import make_engine
from dpsweep.privacy.geometry import make_geometry
from dpsweep.privacy.noise import NoiseDraw
from dpsweep.privacy.sampling import draw_groups
from dpsweep.training.assemble import assemble_step_on, initial_params
from dpsweep.training.device import open_device
from dpsweep.training.release_check import stand_in
from dpsweep.training.step import Progress, Step

NUM_OTHERS = 8
"""Examples beside the canary, all of them known to the auditor."""

Canary = Literal["bright", "black", "noise"]

_CLIP_NORM = 1e-6
_CHUNK = 100
_BUFFERED_CYCLE = 4
"""Groups that take turns where an audit has DP-FTRL's noise; a batch there has a fourth."""


@dataclass(frozen=True)
class Plan:
    """Settings of an audit."""

    # its method, optimizer and clipping are audited, on the audit's own data and model
    config: TrialConfig
    canary: Canary = "bright"  # the image that comes and goes
    # True to audit its model, data shape, clip norm, engine, device and precision as well, on
    # random inputs
    own: bool = False
    epsilon: float = 4.0  # claimed for a whole run
    delta: float = 1e-5  # failure probability of the claim
    sampling_rate: float = 1.0  # q; the bounds are tightest at 1
    steps: int = 2  # T, of one run
    runs: int = 5000  # with the canary, and as many without
    confidence: float = 0.99  # of the bound


@dataclass(frozen=True)
class AuditedStep(Step):
    """The real step, whose releases the auditor records.

    A sum that was computed for the auditor is not computed again for the step. `fixed` holds the
    batch, where it is not sampled: an audit by one run decides itself who is in.
    """

    seen: list[Released] = field(default_factory=list)
    sums: dict[tuple[int, ...], Clipped] = field(default_factory=dict)
    fixed: list[torch.Tensor] = field(default_factory=list)

    def batch(self, step: int) -> torch.Tensor:
        return self.fixed[-1] if self.fixed else super().batch(step)

    def sum_clipped(self, batch: torch.Tensor, progress: Progress) -> Clipped:
        key = (progress.step, *batch.tolist())
        if key not in self.sums:
            self.sums[key] = super().sum_clipped(batch, progress)
        return self.sums[key]

    def release_sum(
        self, clipped: Clipped, clip: Clip, progress: Progress, noise: NoiseDraw | None = None
    ) -> Released:
        released = super().release_sum(clipped, clip, progress, noise)
        self.seen.append(released)
        return released


def run_audit(plan: Plan) -> Audit:
    """Run both worlds on every core, and compare the claim with what was seen.

    Raises:
        ConfigError: If the clipping names layers, which the audit's own model does not have.
    """
    clipping = plan.config.privacy.clipping
    bounded = isinstance(clipping, PerLayerClipping) and clipping.bounds is not None
    if bounded and not plan.own:
        raise ConfigError(
            "privacy.clipping.bounds: name layers of your model, and the audit trains one of its "
            "own. Audit with --set privacy.clipping=per_layer; the contract suite tests bounds"
        )
    sizes = [min(_CHUNK, plan.runs - done) for done in range(0, plan.runs, _CHUNK)]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        chunks = list(pool.map(partial(sample_scores, plan), sizes))
    absent, present = (np.concatenate(part) for part in zip(*chunks, strict=True))
    return bound_epsilon(
        plan.config.method.name, absent, present, plan.epsilon, plan.delta, plan.confidence
    )


def sample_scores(plan: Plan, runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Sample the statistic of `runs` runs without the canary, and of as many with it."""
    torch.set_num_threads(1)
    plan = replace(plan, config=plan.config.with_own_bands())
    run, _ = calibrate_noise(plan.epsilon, plan.delta, plan.sampling_rate, plan.steps)
    return (
        np.array([_compute_score(plan, run, canary=False) for _ in range(runs)]),
        np.array([_compute_score(plan, run, canary=True) for _ in range(runs)]),
    )


def _compute_score(plan: Plan, run: Run, *, canary: bool) -> float:
    """Compute the log-likelihood ratio of one run's releases."""
    step = _make_step(plan, run, canary=canary)
    progress = _make_progress(step)
    correlation, rate = step.plan.correlation, plan.sampling_rate
    moves, contributions = list[torch.Tensor](), list[torch.Tensor]()
    for _ in range(step.plan.steps):
        noise = run.noise_multiplier * step.clip(progress).clip_norm
        batch_size = step.config.train.batch_size
        if rate == 1 and progress.step == 0 and correlation is None:
            base, alone = _compute_first_known(plan)
        else:
            base, alone = _compute_known(step, progress)
        step(progress)
        release = step.seen.pop()
        moves.append(_flatten({k: batch_size * y - base[k] for k, y in release.items()}) / noise)
        contributions.append(_flatten(alone) / noise)
    if correlation is None:
        return sum(_log_ratio([m], [a], rate) for m, a in zip(moves, contributions, strict=True))
    group = int(step.groups[NUM_OTHERS]) if canary else _draw_group(step)
    return _compute_correlated_score(correlation, moves, contributions, group)


def _compute_correlated_score(
    correlation: Correlation,
    moves: list[torch.Tensor],
    contributions: list[torch.Tensor],
    group: int,
) -> float:
    """Compute the log-likelihood ratio of whitened releases, the canary's group being known.

    At step t of its group the canary moves the rows from t on by c times its clipped gradient.
    With bands these rows are blocks that do not meet; with buffers there is one block.
    """
    steps, cycle = correlation.steps, correlation.cycle
    white = list(correlation.whiten(torch.stack(moves)))
    column = correlation.column(steps)
    entered = range(group, steps, cycle)
    if not correlation.decays:
        blocks = (range(t, min(t + cycle, steps)) for t in entered)
        return sum(
            _log_ratio(
                [white[i] for i in block],
                [float(column[i - block[0]]) * contributions[block[0]] for i in block],
                correlation.sampling_rate,
            )
            for block in blocks
        )
    shifts = [
        sum(
            (float(column[i - t]) * contributions[t] for t in entered if t <= i),
            0 * contributions[0],
        )
        for i in range(steps)
    ]
    return _log_ratio(white, shifts, 1.0)


def _log_ratio(rows: list[torch.Tensor], shifts: list[torch.Tensor], rate: float) -> float:
    """Log-likelihood ratio of rows of standard normals that are shifted at once, at `rate`."""
    row, shift = torch.cat(rows), torch.cat(shifts)
    return float(compute_log_ratio(float(shift @ shift), float(row @ shift), rate))


def _draw_group(step: Step) -> int:
    """Draw the group that the absent canary would have had."""
    assert step.plan.correlation is not None
    return int(draw_groups(1, step.plan.correlation.cycle, step.draws(1, "groups"))[0])


def _compute_known(step: Step, progress: Progress) -> tuple[Clipped, Clipped]:
    """Compute the sum without the canary, and the canary's own clipped gradient."""
    batch = step.batch(progress.step)
    canary = torch.tensor([NUM_OTHERS])
    return (
        step.sum_clipped(batch[batch != NUM_OTHERS], progress),
        step.sum_clipped(canary, progress),
    )


@cache
def _compute_first_known(plan: Plan) -> tuple[Clipped, Clipped]:
    """Compute `_compute_known` at the first step, which is the same in every run."""
    run, _ = calibrate_noise(plan.epsilon, plan.delta, plan.sampling_rate, plan.steps)
    step = _make_step(plan, run, canary=False)
    return _compute_known(step, _make_progress(step))


def _make_step(plan: Plan, run: Run, *, canary: bool) -> AuditedStep:
    """Make a fresh run's step: a secret of its own, with or without the canary."""
    with_all = _assemble_audited(plan, run.noise_multiplier)
    num_examples = NUM_OTHERS + canary
    correlation = _make_correlation(plan)
    own = PrivacyPlan(num_examples, run, plan.epsilon, plan.delta, correlation)
    return AuditedStep(
        config=_scale_learning_rate(with_all, run),
        plan=own,
        data=with_all.data,
        engine=with_all.engine,
        secret=Secret.draw(),
        geometry=with_all.geometry,
    )


@cache
def _make_correlation(plan: Plan) -> Correlation | None:
    """Make the correlation of a run in which the canary takes part in `plan.steps` steps."""
    noise = plan.config.noise
    cycle = noise.bands if isinstance(noise, Banded) else _BUFFERED_CYCLE
    assert cycle != "auto", "with_own_bands has counted them"
    # batches of one among as many examples as there are groups: each is in one batch a cycle
    own = PublicSettings(cycle, 1, plan.steps, momentum=plan.config.settings.momentum)
    correlation = noise.correlate(own)
    return correlation and replace(correlation, sampling_rate=plan.sampling_rate)


@cache
def _assemble_audited(plan: Plan, noise_multiplier: float) -> Step:
    """Assemble the audited config on the audit's data and model, or its own; last is the canary."""
    tree = plan.config.model_dump(exclude_none=True)
    if not plan.own:
        tree["data"] = {"name": "digits"}
        tree["model"] = {"name": "cnn_small"}  # a name only: what is trained is `_build_network`
    clipping = tree["privacy"]["clipping"]
    if clipping["name"] == "adaptive":  # a sixteenth of the cost, as the audit's batches are small
        clipping["count_noise"] = 2 * noise_multiplier
    clip_norm = plan.config.privacy.clip_norm if plan.own else _CLIP_NORM
    tree["privacy"] = {"noise_multiplier": 1.0, "clip_norm": clip_norm, "clipping": clipping}
    train = plan.config.train
    how = {"engine": train.engine, "dtype": "float64", "device": "cpu"}
    if plan.own:
        how |= {"dtype": train.dtype, "device": train.device}
    tree["train"] = {"batch_size": NUM_OTHERS, "epochs": 1, **how}
    trial = TrialConfig.model_validate(tree)
    own = PrivacyPlan(NUM_OTHERS, Run(1.0, 1.0, 1), math.inf, 0.5)
    if plan.own:
        device = open_device(train.device, 1.0)
        data = _with_canary(stand_in(trial), plan.canary).to(device)
        return assemble_step_on(data, own, trial, Secret.draw())
    model = _build_network()
    geometry = make_geometry(build_method(trial.method).geometry, model, trial.data.spec.inputs)
    engine = make_engine(
        model,
        trial.data.task.loss,
        geometry,
        NUM_OTHERS + 1,
        trial.data.spec.inputs,
        trial.train.engine,
    )
    data = load_dataset(trial.data, trial.seed)
    few, classes = (take_rows(x, slice(NUM_OTHERS + 1)) for x in (data.inputs, data.targets))
    data = _with_canary(replace(data, inputs=few, targets=classes), plan.canary)
    return Step(trial, own, data, engine, Secret.draw(), geometry)


def _with_canary(data: Dataset, canary: Canary) -> Dataset:
    """`data` with the canary's inputs as the last ones; of tokens: all the last, the first, any."""
    rng = torch.Generator().manual_seed(1)
    if isinstance(data.inputs, dict):
        bright, black, _ = extreme_inputs(data.spec, torch.zeros(()))
        noise = draw_inputs(data.spec, 1, rng, torch.zeros(()))
        example = {"bright": bright, "black": black, "noise": noise}[canary]
    else:
        shape = (1, *one_tensor(data.valid_inputs).shape[1:])
        example = {
            "bright": torch.full(shape, float(data.brightest)),
            "black": torch.zeros(shape),
            "noise": data.brightest * torch.rand(shape[1:], generator=rng)[None],
        }[canary]
    unit, _ = fill_unit((example, torch.zeros(1)), data.copies)
    return replace(data, inputs=replace_row(data.inputs, NUM_OTHERS, unit))


def _build_network() -> nn.Module:
    """Build one convolution over the whole image and a circulant layer, at public weights.

    The canary's image is constant, and the convolution's weights are a cosine over its ten
    channels. So the canary's gradient in either layer is one low frequency, which passes
    whole through the spectral methods' filters: it is as long in their coordinates as
    clipping lets any gradient be.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        convolution = nn.Conv2d(1, 10, 8)
        model = nn.Sequential(convolution, nn.Flatten(), CirculantLinear(10, 10, 10))
    angles = torch.arange(10) * (2 * math.pi / 10)
    with torch.no_grad():
        convolution.weight[:] = (angles.cos() / 32).view(10, 1, 1, 1)
    return model.double()


def _scale_learning_rate(step: Step, run: Run) -> TrialConfig:
    """Scale the learning rate so that one step's noise moves the weights by the spread."""
    noise, spread = (
        run.noise_multiplier * step.config.privacy.clip_norm / NUM_OTHERS,
        _iterate_spread(step),
    )
    base = step.config.optimizer
    lr = spread / noise if base.name == "sgd" else spread
    return step.config.model_copy(update={"optimizer": base.model_copy(update={"lr": lr})})


def _iterate_spread(step: Step) -> float:
    """Choose the distance of iterates, per coordinate: wide, unless the canary's cosine counts."""
    own = step.config.privacy.clip_norm != _CLIP_NORM
    return 0.01 if step.geometry.maps or own else 0.3


def _make_progress(step: Step) -> Progress:
    """Make the progress before a step, at public iterates so far apart that points differ."""
    rng = torch.Generator().manual_seed(0)

    def draw_away(params: Tensors) -> Tensors:
        size = _iterate_spread(step)
        return {k: x + size * torch.randn(x.shape, generator=rng).to(x) for k, x in params.items()}

    past = [initial_params(step)]
    for _ in range(1, step.method.query.memory):
        past.append(draw_away(past[0]))
    progress = step.start(past[-1])
    progress.iterates.clear()
    progress.iterates.extend(past)
    return progress


def _flatten(tree: Tensors) -> torch.Tensor:
    return torch.cat([x.flatten().double().cpu() for x in tree.values()])


def audit_one_run(plan: Plan, canaries: int = 200) -> OneRun:
    """Bound epsilon from below by one run (Steinke et al. 2023), at the plan's own step.

    Each canary is an image of noise with a random target. The auditor fits, by least squares, how
    much of each canary's clipped gradient is in a release, adds that up over the steps, and guesses
    a canary in where it is much and out where it is little: as many as bound epsilon best, which is
    paid for by splitting the error among the numbers that are tried.

    Raises:
        ConfigError: If its noise is correlated: then no example takes part in every step.
    """
    if plan.config.noise != INDEPENDENT:
        raise ConfigError(
            f"method.name: {plan.config.method.name} has correlated noise, and an audit by one run "
            f"has its canaries in every step. Audit it by many runs, without --one-run"
        )
    run, _ = calibrate_noise(plan.epsilon, plan.delta, 1.0, plan.steps)
    whole = _assemble_audited(plan, run.noise_multiplier)
    rng, coins = torch.Generator().manual_seed(2), Secret.draw().stream(0, "sample")
    data = whole.data
    if isinstance(data.inputs, dict):
        inputs = draw_inputs(data.spec, canaries, rng, torch.zeros(()))
    else:
        like = one_tensor(data.valid_inputs)
        inputs = (data.brightest * torch.rand(canaries, *like.shape[1:], generator=rng)).to(like)
    outputs = whole.config.data.spec.outputs
    choices = data.task.draw_targets(canaries, outputs)
    targets = choices[torch.randperm(canaries, generator=rng)]
    units = fill_unit((inputs, targets), data.copies)
    data = replace(data, inputs=units[0], targets=units[1]).to(whole.data.device)
    inside = coins.random(canaries) < 0.5
    own = PrivacyPlan(canaries, run, plan.epsilon, plan.delta)
    paced = _scale_learning_rate(whole, run)
    step = AuditedStep(paced, own, data, whole.engine, Secret.draw(), whole.geometry)
    progress, present = (
        _make_progress(step),
        torch.from_numpy(inside.nonzero()[0]).to(data.device),
    )
    scores = np.zeros(canaries)
    for _ in range(plan.steps):
        each = [torch.tensor([i], device=present.device) for i in range(canaries)]
        alone = torch.stack([_flatten(step.sum_clipped(i, progress)) for i in each])
        step.fixed.append(present)
        step(progress)
        release = _flatten(step.seen.pop()) * step.config.train.batch_size
        gram = alone @ alone.T
        ridge = 1e-6 * gram.diagonal().mean() * torch.eye(canaries, dtype=gram.dtype)
        scores += torch.linalg.solve(gram + ridge, alone @ release).numpy()
        step.sums.clear()
    return bound_one_run(scores, inside, plan.delta, plan.confidence)
