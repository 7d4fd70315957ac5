"""Deterministic checks of one config's own step, on random inputs: what it releases, and of whom.

    noise         a release of zeros has standard deviation sigma C / B in every parameter, and
                  its coordinates and steps are independent; correlated noise x as C x
    sensitivity   |S(D + x) - S(D)| <= C for black, bright, wild and searched x, at several
                  iterates, and at a clip norm so small that every gradient reaches it; searched
                  so that each parameter in turn has most of the gradient
    divisor       without noise a release is the clipped sum over B, whatever the batch's size
    sampling      batches are Poisson samples at rate q; where they are cyclic, each of one group,
                  at rate b q

Model, data shape, clip norm, engine, device and precision are the config's. Nothing private is
read, so the results may be published. The statistical part errs once in 10^7 checks.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.func import functional_call

from dpsweep.config.plan import plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.core.inputs import (
    Inputs,
    draw_inputs,
    extreme_inputs,
    list_tensors,
    replace_row,
    take_rows,
)
from dpsweep.core.seeds import Secret, derive_public_seed
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.data import DataConfig
from dpsweep.data.read import Dataset
from dpsweep.data.units import fill_unit, group_rows
from dpsweep.privacy.clip import Clip
from dpsweep.privacy.engine.size import fill_tiles
from dpsweep.privacy.history import NoiseHistory
from dpsweep.privacy.noise import NoiseDraw
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step_on, initial_params
from dpsweep.training.device import open_device
from dpsweep.training.step import Progress, Step

SECONDS = 1.0
"""Time limit of each check, after its first pass."""

_NUM_OTHERS = 8
_NUM_BESIDE = 2
_SMALL = 1e-4  # a clip norm that gradients reach
_ERRORS = 6.0  # standard errors; 2e-9 for a normal
_ROUNDED = 2e-3  # of a clip norm, in float32
_NUM_DRAWS = 400_000
_NUM_BATCHES = 64
_NUM_ASCENTS = 6


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str  # which
    measured: float  # the worst that was found
    allowed: float  # what it may be at most
    unit: str  # of both
    seconds: float  # how long it took

    @property
    def holds(self) -> bool:
        """False for NaN too."""
        return self.measured <= self.allowed


@dataclass(frozen=True)
class _Recording(Step):
    """The real step, which keeps its last sum and release."""

    def sum_clipped(self, batch: torch.Tensor, progress: Progress) -> Clipped:
        found = super().sum_clipped(batch, progress)
        vars(self)["last_sum"] = {k: x.clone() for k, x in found.items()}
        return found

    def release_sum(
        self, clipped: Clipped, clip: Clip, progress: Progress, noise: NoiseDraw | None = None
    ) -> Released:
        found = super().release_sum(clipped, clip, progress, noise)
        vars(self)["last_release"] = found
        return found

    def _apply_update(self, progress: Progress, direction: Tensors, noise_std: float) -> None:
        """Count the step: an update is post-processing, and nothing here needs an optimizer."""
        progress.step += 1


def check_releases(
    config: TrialConfig, seconds: float = SECONDS, num_devices: int = 1
) -> list[Check]:
    """Check what one trial of `config` would release; a few seconds.

    Args:
        config: A valid trial with a budget of its own.
        seconds: For each check, after its first pass.
        num_devices: That share its batches.

    Raises:
        ConfigError: If its pieces do not fit one another, as `check_fit` tells.
    """
    device = open_device(config.train.device, 1.0, num_devices=num_devices)
    each = fill_tiles(-(-(_NUM_OTHERS + 1) // num_devices))
    few = config.train.model_copy(update={"max_physical_batch": each})
    config = config.model_copy(update={"train": few})  # a portion of hundreds is filled up
    step = assemble_step_on(
        stand_in(config).to(device),
        plan_privacy(config),
        config,
        Secret.draw(),
        Allowance(num_devices=num_devices),
    )
    checks = [_sensitivity, _divisor, _sampling]
    if step.plan.run.noise_multiplier > 0:  # else the statement says that nothing is private
        checks.insert(0, _noise)
    found = []
    for check in checks:
        start = time.thread_time()
        measured, allowed, unit = check(step, start + seconds)
        name = check.__name__.removeprefix("_")
        found.append(Check(name, measured, allowed, unit, time.thread_time() - start))
    return found


def try_engine(config: TrialConfig) -> None:
    """Build model and engine of a trial, and try both on random inputs, on the CPU.

    Raises:
        ConfigError, InvalidKey: What the trial would fail with before its first step.
    """
    assemble_step_on(stand_in(config), plan_privacy(config), config, Secret.draw())


def table_of_checks(checks: list[Check]) -> str:
    """In Markdown."""
    rows = [
        f"| {c.name} | {c.measured:.4g} | {c.allowed:.4g} | {c.unit} | {c.seconds:.1f} | "
        f"{'holds' if c.holds else '**VIOLATED**'} |"
        for c in checks
    ]
    head = ["| check | measured | at most | unit | seconds | |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows])


def stand_in(config: TrialConfig) -> Dataset:
    """Random inputs in the data's form; the last one is the example that comes and goes."""
    rng = torch.Generator().manual_seed(derive_public_seed(0, "release checks"))
    data, num = config.data, _NUM_OTHERS + 1
    inputs = random_inputs(data, num * data.copies, rng)
    targets = data.task.draw_targets(num * data.copies, data.spec.outputs)
    k = data.copies
    units = [[*range(i * k, (i + 1) * k - i % k)] for i in range(num)]  # of k rows, of k - 1, ...
    private = group_rows((inputs, targets), units, k)
    return Dataset(
        *private,
        inputs,
        targets,
        brightest=data.spec.brightest,
        normalise=data.normalise,
        are_features=not data.are_pixels,
        task=data.task,
        fields=data.spec.fields or None,
        copies=data.copies,
    )


def random_inputs(data: DataConfig, num: int, rng: torch.Generator) -> Inputs:
    """Draw inputs as they are stored: bytes of pixels, features, or named tensors."""
    if not data.are_pixels:
        like = torch.zeros((), dtype=torch.float16 if data.features else torch.float32)
        # short texts, so that a long one shows if the others are padded to it
        return draw_inputs(data.spec.inputs, num, rng, like, longest=0.5)
    shape = (num, *data.spec.shape)
    return torch.randint(0, data.spec.brightest + 1, shape, generator=rng).to(torch.uint8)


def _iterates(step: Step) -> Iterator[Progress]:
    """Public iterates: the model's own and some away from it, each at two clip norms."""
    rng = torch.Generator().manual_seed(derive_public_seed(1, "release checks"))

    def draw_away(params: Tensors, size: float) -> Tensors:
        return {
            k: x + size * (0.02 + x.abs().mean()) * torch.randn(x.shape, generator=rng).to(x)
            for k, x in params.items()
        }

    correlation = step.plan.correlation
    for size in (0.3, 10.0):  # near the model's own weights, and where a query's points differ
        for bound in (step.config.privacy.clip_norm, _SMALL):
            iterates = [initial_params(step)]
            while len(iterates) < step.method.query.memory:
                iterates.append(draw_away(iterates[0], size))
            if len(iterates) == 1:
                iterates = [draw_away(iterates[0], size - 0.3)]
            yield Progress(
                step=len(iterates),
                iterates=deque(iterates, maxlen=step.method.query.memory),
                filter_state=step.method.chain.init(iterates[-1]),
                # torch imports its compiler, in seconds, with the first one that is initialised
                optimizer=torch.optim.Optimizer.__new__(torch.optim.Optimizer),
                bound=bound,
                history=None if correlation is None else NoiseHistory(correlation),
            )


def _flat(tree: Tensors) -> torch.Tensor:
    return torch.cat([x.detach().flatten().double().cpu() for x in tree.values()])


def _noise(step: Step, until: float) -> tuple[float, float, str]:
    """The largest deviation from independent standard normals, in standard errors."""
    progress = next(_iterates(step))
    clip, correlation = step.clip(progress), step.plan.correlation
    scale = step.plan.run.noise_multiplier * clip.clip_norm / step.config.train.batch_size
    nobody = torch.arange(0, device=step.data.device)
    zeros = step.sum_clipped(nobody, progress)
    assert all(not bool(x.any()) for x in zeros.values()), "the sum over nobody is zero"
    draws: dict[str, list[torch.Tensor]] = {k: [] for k in zeros}
    num = 0
    for t in range(2000):
        progress.step = t
        total = Clipped({k: x.clone() for k, x in zeros.items()})
        for k, x in step.release_sum(total, clip, progress).items():
            draws[k].append(x.double().flatten().cpu() / scale)
            num += x.numel()
        if t and (num > _NUM_DRAWS or time.thread_time() > until):
            break
    leaves = [torch.stack(parts) for parts in draws.values()]
    if correlation is not None:
        norm = math.sqrt(math.fsum(c**2 for c in correlation.coefficients))
        if not correlation.decays and not (
            norm <= 1 and len(correlation.coefficients) <= correlation.cycle
        ):
            return math.inf, 1.0, f"bands of norm {norm:.3g} in {correlation.cycle} groups"
        leaves = [correlation.whiten(leaf) for leaf in leaves]
    whole = torch.cat(leaves, 1)
    products = [whole[1:] * whole[:-1], whole[:, 1:] * whole[:, :-1]]
    worst = max(abs(float(x.mean())) * math.sqrt(x.numel()) for x in products if x.numel())
    for leaf in [whole, *leaves]:
        count = leaf.numel()
        worst = max(worst, abs(float(leaf.mean())) * math.sqrt(count))
        worst = max(worst, _deviation_of_squares(float(leaf.square().sum()), count))
    return worst, _ERRORS, "standard errors"


def _deviation_of_squares(total: float, count: int) -> float:
    """Standard errors by which a sum of `count` squared normals is too small or too large."""
    if count >= 1000:
        return abs(total / count - 1) * math.sqrt(count / 2)
    # a bias may have few draws in the time, and none at all is to be seen in a single one;
    # scipy.stats, which has the same functions, takes half a second to load
    from scipy.special import chdtr, chdtrc, ndtri

    rare = min(float(chdtr(count, total)), float(chdtrc(count, total)))
    return -float(ndtri(rare))


def _sensitivity(step: Step, until: float) -> tuple[float, float, str]:
    """The largest move of a sum by one more example, in clip norms."""
    rng = torch.Generator().manual_seed(derive_public_seed(2, "release checks"))
    data = step.data
    # Fewer take less time; where devices share a batch, each of them is to have a part of it.
    beside = _NUM_BESIDE if step.engine.max_physical_batch > _NUM_OTHERS else _NUM_OTHERS
    others = torch.arange(beside, device=data.device)
    everyone = torch.tensor([*range(beside), _NUM_OTHERS], device=data.device)
    iterates = [(p, _flat(step.sum_clipped(others, p))) for p in _iterates(step)]
    choices = data.task.draw_targets(_NUM_OTHERS + 1, step.config.data.spec.outputs)
    copies = step.config.data.copies

    def measure_move(example: Inputs, target: int, which: int) -> float:
        progress, base = iterates[which]
        unit = fill_unit((example, choices[target][None]), copies)
        inputs = replace_row(data.inputs, -1, unit[0])
        targets = replace_row(data.targets, -1, unit[1])
        one_more = replace(step, data=replace(data, inputs=inputs, targets=targets))
        found = _flat(one_more.sum_clipped(everyone, progress)) - base
        return float(found.norm()) / step.clip(progress).clip_norm

    tries = [
        (measure_move(example, target, which), example, target, which)
        for which in range(len(iterates))
        for example in _example_inputs(data, rng)
        for target in ((0, -1) if which == 0 else (which % 2 - 1,))
    ]
    largest = max(tries, key=lambda found: found[0])
    worst, example, target, which = max(filter(_is_finite, tries), key=lambda f: f[0])
    if isinstance(example, dict):  # tokens: none is near another
        while time.thread_time() < until:
            found = draw_inputs(data.spec, 1, rng, torch.zeros(()))
            worst = max(worst, measure_move(found, target, which))
    else:
        reached = 1  # an iterate at which every gradient is clipped
        starts = [x for x in _example_inputs(data, rng) if isinstance(x, torch.Tensor)]
        for found in _ascend_shares(step, iterates[reached][0], starts, choices[target][None]):
            worst = max(worst, measure_move(found, target, reached))
            if time.thread_time() > until:
                break
    return max(largest[0], worst), 1 + _ROUNDED, "clip norms"


def _ascend_shares(
    step: Step, progress: Progress, starts: list[torch.Tensor], target: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Yield inputs in which one parameter, each in turn, has ever more of the squared gradient.

    That is where a norm which leaves this parameter out, or weighs it too little, shows. Signed
    ascent on log(|g_k|^2 / |g|^2), where g is the model's own gradient: no engine is asked, so
    what an engine gets wrong is found with any. Where a layer has no second derivative, random
    steps are taken instead.
    """
    low, top = find_range(step.data)
    rng = torch.Generator().manual_seed(derive_public_seed(3, "release checks"))
    params = {k: x.detach().requires_grad_() for k, x in progress.params.items()}
    model, task = step.engine.model, step.data.task
    target = target.to(step.data.device)

    def log_shares(at: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = functional_call(model, params, (step.data.scaled(at, step.dtype),))
        loss, leaves = task.loss(outputs, target), list(params.values())
        own = torch.autograd.grad(
            loss, leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )
        squares = {k: x.square().sum() for k, x in zip(params, own, strict=True)}
        return {k: (x / sum(squares.values())).log() for k, x in squares.items()}

    def climb(name: str, at: torch.Tensor, size: float) -> tuple[float, torch.Tensor]:
        best, highest = at, -math.inf
        for _ in range(_NUM_ASCENTS):
            at = at.detach().requires_grad_()
            share = log_shares(at)[name]
            if float(share.detach()) > highest:
                best, highest = at.detach(), float(share.detach())
            try:
                (slope,) = torch.autograd.grad(share, at)
            except RuntimeError:  # no second derivative, or a constant share
                slope = torch.randn(at.shape, generator=rng).to(at)
            at = (at + size * slope.nan_to_num().sign()).clamp(low, top)
        return highest, best

    finite = [x.to(step.data.device) for x in starts if bool(x.isfinite().all())]
    best = {}
    for name in sorted(params, key=lambda k: params[k].numel()):
        _, best[name] = max((climb(name, x, top / 8) for x in finite), key=lambda found: found[0])
        yield best[name].cpu()
    for size in itertools.cycle((top / 8, top / 16, top / 32)):
        for name, at in best.items():
            _, best[name] = climb(name, at, size)
            yield best[name].cpu()


def find_range(data: Dataset) -> tuple[float, float]:
    """The smallest and largest number of an input; of features, those of half precision."""
    return (-6e4, 6e4) if data.are_features else (0.0, float(data.brightest))


def _example_inputs(data: Dataset, rng: torch.Generator) -> list[Inputs]:
    """Inputs of one example: zeros, the largest, both in turns, the data's last, and extremes."""
    last = take_rows(data.valid_inputs, slice(-1, None))
    if isinstance(last, dict):
        return [last, *extreme_inputs(data.spec, torch.zeros(()))]
    (_, top), shape = find_range(data), (1, *last.shape[1:])
    wild = top * torch.randint(0, 2, shape, generator=rng)
    found: list[Inputs] = [torch.zeros(shape), torch.full(shape, top), wild, last.float().cpu()]
    return [*found, torch.full(shape, math.inf)] if data.are_features else found


def _is_finite(tried: tuple[float, Inputs, int, int]) -> bool:
    return all(bool(x.isfinite().all()) for x in list_tensors(tried[1]))


def _divisor(step: Step, until: float) -> tuple[float, float, str]:
    """The largest distance of B times a noiseless release from its sum, over a few steps."""
    run = replace(step.plan.run, noise_multiplier=0.0, sampling_rate=0.5)
    plan = replace(step.plan, run=run, num_examples=_NUM_OTHERS + 1, correlation=None)
    quiet = _Recording(**{k: vars(step)[k] for k in step.__dataclass_fields__} | {"plan": plan})
    progress, worst = next(_iterates(step)), 0.0
    for _ in range(4):  # batches of several sizes
        quiet(progress)
        total, release = _flat(vars(quiet)["last_sum"]), _flat(vars(quiet)["last_release"])
        size = max(float(total.norm()), 1e-30)
        gap = float((step.config.train.batch_size * release - total).norm())
        worst = max(worst, gap / size)
        if time.thread_time() > until:
            break
    return worst, 1e-5, "of the sum"


def _sampling(step: Step, until: float) -> tuple[float, float, str]:
    """Distance of batch sizes from binomial ones, in standard errors."""
    num, rate = step.plan.num_examples, step.plan.sampling_rate
    correlation, sizes = step.plan.correlation, list[float]()
    for t in range(_NUM_BATCHES):
        batch = step.batch(t)
        if correlation is None:
            sizes.append(len(batch))
            continue
        group = step.groups == t % correlation.cycle
        if not bool(group[batch.cpu()].all()):
            return math.inf, 0.0, "examples of another group"
        # standardised to the size of a whole group, since groups differ in size
        size = int(group.sum())
        spread = math.sqrt(size * rate * (1 - rate))
        sizes.append((len(batch) - size * rate) / spread if spread else 0.0)
        if t > 16 and time.thread_time() > until:
            break
    count, variance = len(sizes), num * rate * (1 - rate)
    if correlation is not None:  # sizes are standard normals, nearly
        num, variance = 0, float(variance > 0)
    mean = sum(sizes) / count
    if variance == 0:
        return abs(mean - num * rate), 0.0, "examples"
    spread = sum((size - mean) ** 2 for size in sizes) / (count - 1)
    if spread == 0 and (variance > 4 or correlation is not None):
        return math.inf, _ERRORS, "standard errors"
    off = abs(mean - num * rate) / math.sqrt(variance / count)
    uneven = (spread / variance - 1) * math.sqrt((count - 1) / 2)
    return max(off, abs(uneven) - 1), _ERRORS, "standard errors"
