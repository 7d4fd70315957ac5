"""Small worlds in which the contract is checked: a method, a style of clipping, a net, examples.

The step is the package's own, `dpsweep.training.step.Step`. It is watched at three places: where
examples are asked (the engine), where noise is added (`release`, which sees the space that was
clipped, count included) and where filters begin. Nothing it computes is changed.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.data.read import Dataset
from dpsweep.filters.base import Chain, Public, State
from dpsweep.methods import build_method
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.clip import Clip, layer_of
from dpsweep.privacy.correlated import Correlation, PublicSettings
from dpsweep.privacy.engine import Engine, make_engine, replicate_engine
from dpsweep.privacy.geometry import Geometry, make_geometry
from dpsweep.training import step as step_module
from dpsweep.training.step import Progress, Step

SIGMA = 1.7
CLIP_NORM = 0.5
BATCH_SIZE = 5  # B, on purpose not the number of examples: dividing by |S_t| would show
NUM_EXAMPLES = 9
NUM_CLASSES = 8  # two blocks of the head: over all classes the gradient of a loss sums to zero
SHAPE = (1, 4, 4)
STEPS = 120
"""Steps of a whole run."""

PHYSICAL = 256
"""Examples that are computed at once, unless a check says otherwise."""

CYCLE = 4
"""Groups that take turns where noise is buffered."""

UNDERWAY = 4
"""The step before which checks look at a run."""

NOTHING = -1
"""The label of an example whose gradient is zero."""

SECRET = Secret.fixed("contract")


@dataclass(frozen=True)
class Recording:
    """What one call of `release` was given, and what it gave."""

    total: Clipped
    released: Released
    clip_norm: float

    @property
    def noise(self) -> Tensors:
        """In units of the clip norm, in the space where clipping happened."""
        return {
            k: (BATCH_SIZE * self.released[k].double() - x.double()) / self.clip_norm
            for k, x in self.total.items()
        }


@dataclass
class Tape:
    """What was seen of a run, one entry a step.

    Attributes:
        releases: At the boundary.
        gradients: What the first filter was given.
        asked: (points, weights) of each call of the engine; two a step where two are clipped.
        batches: The inputs of the examples of those calls.
        trails: The iterates that were kept when the step began, newest last.
        progress: Where the run ended.
    """

    releases: list[Recording] = field(default_factory=list)
    gradients: list[Released] = field(default_factory=list)
    asked: list[tuple[list[Tensors], list[float]]] = field(default_factory=list)
    batches: list[Tensor] = field(default_factory=list)
    trails: list[list[Tensors]] = field(default_factory=list)
    progress: Progress | None = None


@dataclass(frozen=True)
class Noting:
    """An engine that keeps whom it asks, and where."""

    engine: Engine
    tape: Tape

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    def clipped_sum(
        self,
        points: Sequence[Tensors],
        weights: Sequence[float],
        inputs_B: Tensor,
        targets_B: Tensor,
        clip: Clip,
    ) -> Clipped:
        self.tape.asked.append(([copied(point) for point in points], list(weights)))
        self.tape.batches.append(inputs_B)
        return self.engine.clipped_sum(points, weights, inputs_B, targets_B, clip)


class TensorCores(TorchDispatchMode):
    """Rounds the operands of float32 products to TF32's ten bits, where a card would.

    That is where torch's setting for products says so, or `always`. They are summed in double: on a
    card a product has one kernel for all rows, and here float32 is rounded otherwise in some.
    """

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        on = self.always or torch.backends.cuda.matmul.fp32_precision == "tf32"
        if not on or func.overloadpacket.__name__ not in self.PRODUCTS:
            return func(*args, **(kwargs or {}))
        found = func(*tree_map_only(Tensor, _round_to_ten_bits, args), **(kwargs or {}))
        single = {torch.float64: torch.float32, torch.complex128: torch.complex64}
        return tree_map_only(Tensor, lambda x: x.to(single[x.dtype]), found)


def _round_to_ten_bits(x: Tensor) -> Tensor:
    """In double; each part of complex numbers."""
    if x.is_complex():
        return torch.view_as_complex(_round_to_ten_bits(torch.view_as_real(x.resolve_conj())))
    assert x.dtype == torch.float32, "a product of other numbers in a forward or backward pass"
    words = x.clone(memory_format=torch.preserve_format).view(torch.int32)
    return words.add_(0x1000).bitwise_and_(~0x1FFF).view(torch.float32).double()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, and nothing at all for an example labelled NOTHING."""
    counted = (targets != NOTHING).to(outputs)
    return nn.functional.cross_entropy(outputs, targets.clamp(min=0)) * counted.mean()


def dense() -> nn.Module:
    """158 weights in four tensors, bent enough for gradients to differ from point to point."""
    return nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            body=nn.Linear(16, 6),
            bend=nn.Softplus(),
            head=nn.Linear(6, NUM_CLASSES),
        )
    )


def spectral() -> nn.Module:
    """A convolution, a norm layer, whose geometry is the identity, and a circulant head."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3, padding=1),
            norm=nn.GroupNorm(2, 4),
            bend=nn.Softplus(),
            pool=nn.AvgPool2d(2),
            flat=nn.Flatten(),
            head=CirculantLinear(16, NUM_CLASSES, 4),
        )
    )


@dataclass(frozen=True)
class World:
    """One method with one style of clipping.

    Attributes:
        method: As a file has it.
        style: Of clipping, by its name in CLIPPINGS.
        net: Makes the net.
        dtype: Of weights and gradients.
        clip_norm: C.
        source: Of noise and batches.
        train: More of the file's section of that name.
        num_devices: That share a batch.
    """

    method: dict[str, object]
    style: str = "flat"
    net: Callable[[], nn.Module] = dense
    dtype: str = "float64"
    clip_norm: float = CLIP_NORM
    source: str = "fast"
    train: dict[str, object] = field(default_factory=dict)
    num_devices: int = 1

    @cached_property
    def config(self) -> TrialConfig:
        """The trial, but for data and model, which are this module's."""
        return TrialConfig.model_validate(
            {
                "data": {"name": "digits"},
                "model": {"name": "cnn_small"},
                "privacy": {
                    "noise_multiplier": SIGMA,
                    "clip_norm": self.clip_norm,
                    "clipping": self._clipping(),
                    "noise": {"source": self.source},
                },
                "train": {"batch_size": BATCH_SIZE, "epochs": 1, "dtype": self.dtype} | self.train,
                "optimizer": {"lr": 0.1},
                "method": self.method,
            }
        )

    def _clipping(self) -> dict[str, object]:
        if self.style == "adaptive":
            return {"name": "adaptive", "count_noise": 2.0}  # a share of 18 % for the count
        if self.style != "per_layer-given":
            return {"name": self.style}
        return {"name": "per_layer", "bounds": self.shares}

    @property
    def shares(self) -> dict[str, float]:
        """Layer -> its bound in units of the clip norm, where clipping is per layer."""
        layers = list(dict.fromkeys(layer_of(k) for k, _ in self.model.named_parameters()))
        sizes = [n if self.style == "per_layer-given" else 1 for n in range(1, len(layers) + 1)]
        whole = math.sqrt(sum(n**2 for n in sizes))
        return {k: n / whole for k, n in zip(layers, sizes, strict=True)}

    @cached_property
    def model(self) -> nn.Module:
        """Its weights are larger than torch's, so that answers are long; always the same."""
        net = self.net()
        rng = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for k, p in net.named_parameters():
                scale = 0.6 if p.dim() > 1 else 0.3
                start = 1.0 if k == "norm.weight" else 0.0
                p.copy_(start + scale * torch.randn(p.shape, generator=rng, dtype=torch.float64))
        return net.to(getattr(torch, self.dtype))

    def rounding(self) -> AbstractContextManager[object]:
        """In which a forward or backward pass rounds as `train.precision` says."""
        match self.config.train.forward_precision:
            case "bf16":
                return torch.autocast("cpu", torch.bfloat16)
            case "tf32":
                return TensorCores(always=True)
        return nullcontext()

    def cores(self) -> AbstractContextManager[object]:
        """In which products are computed; a mode doubles the time, and double has no TF32."""
        return TensorCores() if self.dtype == "float32" else nullcontext()

    def step(
        self,
        data: Dataset,
        *,
        sigma: float = SIGMA,
        rate: float = 1.0,
        physical: int = PHYSICAL,
        secret: Secret = SECRET,
        cyclic: bool = False,
        num_devices: int | None = None,
    ) -> Step:
        """The real step on `data`, in microbatches of `physical`.

        Where noise is correlated all examples are in one group, so that a batch may have them all,
        unless `cyclic`. `num_devices` is the world's, if None.
        """
        num_devices = num_devices or self.num_devices
        if num_devices > 1:
            physical = min(physical, 2)  # or there would be work for one
        num_examples = len(data.targets)
        run = Run(sampling_rate=rate, noise_multiplier=sigma, steps=STEPS)
        cycle = self.correlation and (self.correlation.cycle if cyclic else 1)
        correlation = self.correlation and replace(
            self.correlation, cycle=cycle, sampling_rate=rate
        )
        budget = PrivacyPlan(num_examples, run, math.inf, 1e-5, correlation)
        train = self.config.train

        def make(own: nn.Module) -> Engine:
            return make_engine(
                own,
                loss,
                self.geometry,
                physical,
                SHAPE,
                train.engine,
                kind=self.net.__name__,  # tried once in a process: hundreds of steps have this net
                copies=train.copies,
                precision=train.forward_precision,
            )

        with self.cores():
            engine = replicate_engine(make, self.model, [torch.device("cpu")] * num_devices)
        return Step(self.config, budget, data, engine, secret, self.geometry)

    @cached_property
    def correlation(self) -> Correlation | None:
        """Of the method's noise over STEPS steps."""
        noise = self.config.noise
        cycle = getattr(noise, "bands", CYCLE)
        settings = PublicSettings(cycle, 1, STEPS / cycle)
        assert settings.steps == STEPS
        return noise.correlate(settings)

    @cached_property
    def strategy(self) -> np.ndarray:
        """First column of C, scaled so that a run costs what its rounds cost."""
        return find_strategy(self.correlation)

    @cached_property
    def geometry(self) -> Geometry:
        """Of the method on this net."""
        return make_geometry(build_method(self.config.method).geometry, self.model, SHAPE)

    def begin(self, step: Step) -> Progress:
        """Before the first step."""
        return step.start({k: p.detach().clone() for k, p in self.model.named_parameters()})

    def underway(self, step: Step, at: int = UNDERWAY) -> Progress:
        """Before step `at`, the last iterates far enough apart for gradients to turn."""
        progress = self.begin(step)
        rng, now = torch.Generator().manual_seed(2), progress.params
        past = [
            {
                k: x + 0.7 * torch.randn(x.shape, generator=rng, dtype=torch.float64).to(x)
                for k, x in now.items()
            }
            for _ in range(4)
        ]
        progress.iterates.clear()
        progress.iterates.extend([*past, now])  # as many of them as the query remembers stay
        progress.step = at
        if self.correlation is not None:
            progress.history.step = at  # as if no noise had been drawn before
        return progress

    def run(
        self,
        data: Dataset,
        *,
        steps: int = 1,
        progress: Progress | None = None,
        at: int = UNDERWAY,
        **how: object,
    ) -> Tape:
        """Takes `steps` steps from `progress`, or from underway, and tells what was seen."""
        with watched(self.step(data, **how)) as (step, tape), self.cores():
            tape.progress = self.underway(step, at) if progress is None else progress
            for _ in range(steps):
                tape.trails.append([copied(x) for x in tape.progress.iterates])
                step(tape.progress)
        return tape

    def total(self, data: Dataset, **how: object) -> Recording:
        """The release of one step underway, whose batch is all of `data`."""
        (recording,) = self.run(data, **how).releases
        return recording


def find_strategy(correlation: Correlation) -> np.ndarray:
    """First column of C, scaled so that a run costs what its rounds cost, by the matrix itself."""
    c, steps = np.array(correlation.coefficients), correlation.steps
    if correlation.decays:
        powers = np.array(correlation.decays)[:, None] ** np.arange(steps - 1)
        c = np.concatenate([[1.0], c[1:] @ powers])
    column = np.concatenate([c, np.zeros(steps)])[:steps]
    row, at = np.indices((steps, steps))
    strategy = np.where(row >= at, column[np.clip(row - at, 0, None)], 0)
    entered = range(0, steps, correlation.cycle)  # the first group: the worst, as c falls
    parts = [strategy[:, t] for t in entered]
    spent = sum(parts) if correlation.decays else parts[0]
    rounds = len(parts) if correlation.decays else 1
    return column * math.sqrt(rounds / float(spent @ spent))


@contextmanager
def watched(step: Step) -> Iterator[tuple[Step, Tape]]:
    """The same step, and a tape of all it does within this context."""
    tape, real = Tape(), step_module.release

    def noting(total: Clipped, **how: object) -> Released:
        before = Clipped(copied(total))
        released = real(total, **how)
        tape.releases.append(Recording(before, Released(copied(released)), how["clip_norm"]))
        return released

    filtered = Chain.apply

    def tapped(self: Chain, grad: Released, state: State, public: Public) -> tuple[Released, State]:
        tape.gradients.append(Released(copied(grad)))
        return filtered(self, grad, state, public)

    with (
        mock.patch.object(step_module, "release", noting),
        mock.patch.object(Chain, "apply", tapped),
    ):
        yield replace(step, engine=Noting(step.engine, tape)), tape


def examples(num: int = NUM_EXAMPLES, seed: int = 0) -> Dataset:
    """Smooth images, from faint to bright, with labels that have nothing to do with them.

    Smooth, so that a low-pass leaves most of them; of all contrasts, so that some answers lie
    inside the clip norm and some outside.
    """
    rng = torch.Generator().manual_seed(seed)
    at = torch.arange(4, dtype=torch.float64) * (math.pi / 2)
    phase, tilt = torch.rand(2, num, 1, 1, generator=rng, dtype=torch.float64) * 2 * math.pi
    wave = 1.5 + torch.cos(at[:, None] + phase) + 0.6 * torch.cos(at + tilt)
    contrast = torch.linspace(0.02, 1.5, num, dtype=torch.float64)[:, None, None]
    inputs = (8 + 8 * contrast * wave)[:, None]  # `scaled` takes 8 to 0
    targets = torch.randint(0, NUM_CLASSES, (num,), generator=rng)
    return Dataset(inputs, targets, inputs[:0], targets[:0], brightest=16)


def joined(data: Dataset, pixel: float, target: int = 0) -> Dataset:
    """The neighbouring data set with one more example, in the middle of the batch."""
    half = len(data.targets) // 2
    inputs = torch.full((1, *SHAPE), pixel, dtype=data.inputs.dtype)
    return replace(
        data,
        inputs=torch.cat([data.inputs[:half], inputs, data.inputs[half:]]),
        targets=torch.cat([data.targets[:half], torch.tensor([target]), data.targets[half:]]),
    )


def only(data: Dataset, which: Sequence[int] | Tensor) -> Dataset:
    """The examples at these places."""
    index = torch.as_tensor(which, dtype=torch.int64)
    return replace(data, inputs=data.inputs[index], targets=data.targets[index])


def without(data: Dataset, i: int) -> Dataset:
    """The neighbouring data set that lacks example `i`."""
    return only(data, [j for j in range(len(data.targets)) if j != i])


def copied(tree: Tensors) -> Tensors:
    return {k: x.detach().clone() for k, x in tree.items()}


def flat(tree: Tensors) -> Tensor:
    """All leaves in a row, float64."""
    return torch.cat([x.flatten().double() for x in tree.values()])


def same(one: Tensors, other: Tensors) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
