"""Steps of several kinds, side by side: ours, plain SGD, and Opacus as its users call it.

Every runner takes one whole step on images of noise, from choosing the batch to moving the
weights. They take turns, so that a busy machine slows all of them alike, and each one's median
is told.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.source import Source
from dpsweep.config.trial import TrialConfig, load_trial, resolve_trial_source
from dpsweep.core import memory
from dpsweep.core.errors import ConfigError, unknown_name_error
from dpsweep.core.inputs import one_tensor
from dpsweep.core.seeds import Secret
from dpsweep.data.read import Dataset
from dpsweep.methods import METHODS
from dpsweep.models import build_model
from dpsweep.privacy.accounting import Run
from dpsweep.training.assemble import assemble_step_on, initial_params
from dpsweep.training.check import check_parts
from dpsweep.training.device import open_device, use_torch_defaults
from dpsweep.training.step import Step

Take = Callable[[], None]
"""Takes one step."""

RUNNERS = (
    "NAME of a method; NAME:KEY=VALUE:... sets keys of it, as in innerouter:points=3; ...@ENGINE "
    "is another engine, ...@fixed is batches of one size, ...@secure is noise drawn by a cipher"
)
"""Spelling of our own runners."""

_LR, _CLIP_NORM, _NOISE_MULTIPLIER = 0.01, 1.0, 1.0
_STEPS = 3  # whose peak of memory is measured
_BATCHES = 8  # in the data set; enough that a Poisson batch differs from the next


@dataclass(frozen=True)
class Race:
    """Settings of a comparison.

    Attributes:
        data: Whose shape the images have, such as cifar10; nothing is read.
        model: Tree of the model's config.
        batch_size: Expected, or fixed for those that have no Poisson batches.
        device: cpu or cuda.
        max_physical_batch: For our own steps; auto or a number.
        settings: KEY=VALUE, set in each trial, such as model.block=10.
    """

    data: str
    model: Mapping[str, Any]
    batch_size: int
    device: str = "cpu"
    max_physical_batch: int | str = "auto"
    settings: tuple[str, ...] = ()

    @property
    def without_method(self) -> "Race":
        """Settings for runners without a method of ours."""
        kept = tuple(key for key in self.settings if not key.startswith("method."))
        return replace(self, settings=kept)

    def config(self, method: str, engine: str = "auto", own: Sequence[str] = ()) -> TrialConfig:
        """A trial of this race.

        Args:
            method: Its name.
            engine: Its engine.
            own: KEY=VALUE of the method, which win over `settings`.

        Raises:
            ConfigError: If its pieces are unknown or do not fit one another.
        """
        bare = Source(
            "step.py",
            {
                "data": {"name": self.data},
                "model": dict(self.model),
                "privacy": {"noise_multiplier": _NOISE_MULTIPLIER, "clip_norm": _CLIP_NORM},
                "train": {
                    "batch_size": self.batch_size,
                    "epochs": 1,
                    "engine": engine,
                    "max_physical_batch": self.max_physical_batch,
                    "device": self.device,
                },
                "optimizer": {"lr": _LR},
                "method": {"name": method},
            },
            {},
        )
        owned = [f"method.{setting}" for setting in own]
        source = resolve_trial_source(bare, [*self.settings, *owned])
        place = ":".join([f"step.py: {method}", *own]) + ": "  # not --set, for errors to name
        told = dict.fromkeys(resolve_trial_source(bare, owned).elsewhere, place)
        source = replace(source, elsewhere={**source.elsewhere, **told})
        config = load_trial(source)
        check_parts(config, source)
        return config


def make_runner(race: Race, name: str) -> Take:
    """The step of that name, ready to be taken.

    Args:
        race: The circumstances.
        name: One of `PEERS`, or of ours, as `RUNNERS` has it.

    Raises:
        ConfigError: If there is no such runner, or its method has no such key.
    """
    torch.manual_seed(0)
    if name in PEERS:
        return PEERS[name](race)
    spelled, _, how = name.partition("@")
    method, *own = spelled.split(":")
    if method in PEERS:
        raise ConfigError(
            f"step.py: {name}: {method} is not ours and has no settings. Use {method} alone"
        )
    if method not in METHODS:
        raise unknown_name_error("runner", method, [*PEERS, *METHODS], where="step.py")
    _refuse_keys(race, name, method, own)
    if how == "fixed":
        return _ours(race.config(method, own=own), race, FixedBatchStep)
    if how == "secure":
        race = replace(race, settings=(*race.settings, "privacy.noise.source=secure"))
    engine = how if how and how != "secure" else "auto"
    if engine == "opacus":  # as its users do: the whole batch at once
        race = replace(race, max_physical_batch=2 * race.batch_size)
    return _ours(race.config(method, engine, own), race, Step)


def measure_medians(
    runners: Mapping[str, Take], repeats: int, sync: Callable[[], None]
) -> dict[str, list[float]]:
    """Seconds of each runner's steps, who take turns; one round before that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repeats + 1):
        for name, take in runners.items():
            sync()
            start = time.perf_counter()
            take()
            sync()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


def count_step_operations(race: Race) -> int:
    """Floating-point operations of one plain SGD step, which is what training needs at least."""
    take = _sgd(race)
    with FlopCounterMode(display=False) as counter:
        take()
    return int(counter.get_total_flops())


def compute_ratios(seconds: Mapping[str, Sequence[float]], name: str) -> dict[str, float]:
    """Divide each runner's median step time by that of runner `name`."""
    unit = median(seconds[name])
    return {other: median(times) / unit for other, times in seconds.items()}


def measure_peak_bytes(race: Race, name: str) -> int:
    """Peak memory of a few steps, over what data, model and optimizer took before them, in bytes.

    On a GPU what torch's allocator held, on a CPU what the process did. Measured in a new process,
    so that nobody else's memory counts.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured_peak, race, name).result()


def _measured_peak(race: Race, name: str) -> int:
    take = make_runner(race, name)
    if race.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(_STEPS):
            take()
        return torch.cuda.max_memory_allocated() - before
    before = memory.reset_peak_bytes()
    for _ in range(_STEPS):
        take()
    return max(0, memory.peak_bytes() - before)


class FixedBatchStep(Step):
    """The step with batches of one size, to see what changing sizes cost. No privacy."""

    def batch(self, step: int) -> Tensor:
        size = self.config.train.batch_size
        start = step * size % (self.plan.num_examples - size)
        return torch.arange(start, start + size, device=self.data.device)


def _refuse_keys(race: Race, name: str, method: str, own: Sequence[str]) -> None:
    """Raises ConfigError if a setting, the runner's own or all runners', is none of `method`'s."""
    known = _keys(method)
    for setting in own:
        key, equals, value = setting.partition("=")
        if not (key and equals and value):
            raise ConfigError(
                f"step.py: {name}: {setting!r} is not KEY=VALUE. A runner is {RUNNERS}"
            )
        if not known:
            raise ConfigError(f"step.py: {name}: {method} has no keys. Use {method} alone")
        if key.split(".")[0] not in known:
            raise unknown_name_error(f"key of {method}", key, known, where=f"step.py: {name}")
    for setting in race.settings:
        key = setting.partition("=")[0].removeprefix("method.").split(".")[0]
        others = [other for other in METHODS if key in _keys(other)]
        if setting.startswith("method.") and key not in known and others:
            example = f"{others[0]}:{setting.removeprefix('method.')}"
            raise ConfigError(
                f"--set {setting}: is for all runners, and {name} has no {key}. Give it to one "
                f"runner that has, as in --method {method},{example}"
            )


def _keys(method: str) -> set[str]:
    """List the keys of a method: fields, by name or by letter."""
    config = METHODS[method].config
    return {*config.model_fields, *getattr(config, "letters", {})} - {"name"}


def _ours(config: TrialConfig, race: Race, kind: type[Step]) -> Take:
    step = _assembled(config, race)
    step = kind(step.config, step.plan, step.data, step.engine, step.secret, step.geometry)
    progress = step.start(initial_params(step))
    return partial(step, progress)


def _assembled(config: TrialConfig, race: Race) -> Step:
    data = _data(race)
    num = len(data.targets)
    run = Run(race.batch_size / num, _NOISE_MULTIPLIER, 1000)
    plan = PrivacyPlan(num_examples=num, run=run, epsilon=float("inf"), delta=1e-5)
    return assemble_step_on(data, plan, config, Secret.draw())


def _data(race: Race) -> Dataset:
    spec = race.without_method.config("dp_sgd").data.spec
    num = _BATCHES * race.batch_size
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, spec.brightest + 1, (num, *spec.shape), generator=rng)
    targets = torch.randint(0, spec.num_classes, (num,), generator=rng)
    made = inputs.to(torch.uint8)
    data = Dataset(made, targets, made[:1], targets[:1], spec.brightest)
    return data.to(open_device(race.device, key="--device"))


@dataclass
class _Peer:
    """Parts that the other libraries' runners share: model, data, and batches of one size."""

    model: nn.Module
    data: Dataset
    batch_size: int
    step: int = 0

    @classmethod
    def of(cls, race: Race) -> "_Peer":
        config = race.without_method.config("dp_sgd")
        model = build_model(config.model, config.data.spec, config.seed)
        data = _data(race)
        return cls(model.to(data.device), data, race.batch_size)

    def batch(self) -> tuple[Tensor, Tensor]:
        start = self.step * self.batch_size % (len(self.data.targets) - self.batch_size)
        index = torch.arange(start, start + self.batch_size, device=self.data.device)
        self.step += 1
        images = one_tensor(self.data.inputs)[index]
        return one_tensor(self.data.scaled(images, torch.float32)), one_tensor(self.data.targets)[
            index
        ]


def _sgd(race: Race) -> Take:
    peer = _Peer.of(race)
    optimizer = torch.optim.SGD(peer.model.parameters(), lr=_LR)
    return partial(_stepped, peer, peer.model, optimizer, nn.CrossEntropyLoss())


def _sgd_channels_last(race: Race) -> Take:
    peer = _Peer.of(race)
    peer.model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(peer.model.parameters(), lr=_LR)
    return partial(_stepped, peer, peer.model, optimizer, nn.CrossEntropyLoss(), channels_last=True)


def _opacus(race: Race) -> Take:
    peer = _Peer.of(race)
    model = GradSampleModule(peer.model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=_LR),
        noise_multiplier=_NOISE_MULTIPLIER,
        max_grad_norm=_CLIP_NORM,
        expected_batch_size=race.batch_size,
    )
    return partial(_stepped, peer, model, optimizer, nn.CrossEntropyLoss())


def _opacus_ghost(race: Race) -> Take:
    peer = _Peer.of(race)
    model = GradSampleModuleFastGradientClipping(
        peer.model, max_grad_norm=_CLIP_NORM, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=_LR),
        noise_multiplier=_NOISE_MULTIPLIER,
        max_grad_norm=_CLIP_NORM,
        expected_batch_size=race.batch_size,
    )
    loss = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
    return partial(_stepped, peer, model, optimizer, loss)


def _stepped(
    peer: _Peer, model: Any, optimizer: Any, loss: Any, *, channels_last: bool = False
) -> None:
    with use_torch_defaults():
        inputs, targets = peer.batch()
        if channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


PEERS: dict[str, Callable[[Race], Take]] = {
    "sgd": _sgd,
    "sgd-channels-last": _sgd_channels_last,
    "opacus": _opacus,
    "opacus-ghost": _opacus_ghost,
}
"""The runners that ours are compared with."""
