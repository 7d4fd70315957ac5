"""Assemble one trial: data, model, geometry, engine, privacy plan."""

import math
from dataclasses import replace

import torch
from torch import nn

from dpsweep.config.keys import AUGMENT, ENGINE, PRECISION
from dpsweep.config.plan import PrivacyPlan, plan_privacy
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.inputs import list_tensors
from dpsweep.core.seeds import Secret
from dpsweep.core.types import EngineName, InputSpec, Tensors
from dpsweep.data.read import Dataset, load_dataset
from dpsweep.methods import build_method, compose
from dpsweep.models import build_model
from dpsweep.models.own import name_model
from dpsweep.privacy.clip import PerLayer
from dpsweep.privacy.engine import (
    Engine,
    VmapEngine,
    join_engines,
    make_engine,
    make_unchecked_engine,
    refuse_geometry,
    refuse_unsupported_layers,
    replicate_engine,
)
from dpsweep.privacy.engine.precision import refuse_precision
from dpsweep.privacy.engine.records import Unrecordable
from dpsweep.privacy.engine.size import choose_batch, choose_gpu_batch, even_part, whole_tiles
from dpsweep.privacy.engine.state_guard import deep_copy
from dpsweep.privacy.geometry import Geometry, make_geometry
from dpsweep.training.allowance import WHOLE, Allowance
from dpsweep.training.device import list_devices
from dpsweep.training.frozen import compute_frozen_outputs, find_step_cut
from dpsweep.training.step import Step

_DEVIATIONS = 8
"""Standard deviations above its mean that no batch of any trial exceeds."""


def assemble_step(
    config: TrialConfig,
    secret: Secret,
    device: torch.device,
    plan: PrivacyPlan | None = None,
    allowance: Allowance = WHOLE,
) -> Step:
    """Assemble the step of one trial, data and model on `device`, by its `plan` if that is known.

    Raises:
        ConfigError: If data are missing, or model, method, clipping and engine do not fit one
            another; `check_fit` tells most of it before.
    """
    data = load_dataset(config.data, config.seed).to(device)
    try:
        step = assemble_step_on(data, plan or plan_privacy(config), config, secret, allowance)
    except InvalidKey as e:  # what `check_fit` cannot see, as it computes nothing
        raise ConfigError(f"{e.key}: {str(e).removesuffix('.')}.") from e
    # After the step, whose checks must see the whole model: a tail may be fit where it is not.
    found = find_step_cut(step)
    if found is None:
        return step
    with allowance.excused():
        data = compute_frozen_outputs(found, step)
    engine = _make_engine(config, found.tail, step.geometry, data, allowance, found.shape)
    return replace(step, data=data, engine=engine, uncut_model=step.engine.model)


def assemble_step_on(
    data: Dataset,
    plan: PrivacyPlan,
    config: TrialConfig,
    secret: Secret,
    allowance: Allowance = WHOLE,
) -> Step:
    """Assemble the step of one trial from loaded data and a known privacy plan, where the data are.

    No frozen part is computed ahead.
    """
    model = _build_model(config)
    device = data.device
    geometry = _make_geometry(config, model).to(device)
    model = model.to(device, getattr(torch, config.train.dtype))
    engine = _make_engine(config, model, geometry, data, allowance)
    config.privacy.clipping.build(
        config.privacy.clip_norm, plan.run.noise_multiplier, config.train.batch_size
    )  # raises where counting would cost more than there is
    return Step(config, plan, data, engine, secret, geometry)


def initial_params(step: Step) -> Tensors:
    """Return the iterate before the first step: the model's public initial weights."""
    return {k: p.detach().clone() for k, p in step.engine.model.named_parameters()}


def check_fit(config: TrialConfig) -> None:
    """Check that model, method and clipping fit one another; nothing is computed.

    Raises:
        InvalidKey: Naming the key at fault.
    """
    try:
        with torch.device("meta"):  # shapes without memory: a file is checked in a second
            model = _build_model(config)
    except InvalidKey:
        raise
    except ValueError as e:
        raise InvalidKey("model", f"{config.model.name} cannot be built: {e}") from e
    if config.train.augment is not None:
        if config.data.features is not None:
            raise InvalidKey(
                AUGMENT,
                "flips and shifts images, and data.features are made of images once, before "
                "training. Delete one of the two",
            )
        if not config.data.are_pixels:
            raise InvalidKey(AUGMENT, f"flips and shifts images, and {config.data.name} has none")
        try:
            config.train.augment.refuse_larger(config.data.spec.shape)
        except InvalidKey as e:
            raise InvalidKey(f"train.augment.{e.key}", str(e)) from e
    geometry = _make_geometry(config, model)
    try:
        refuse_geometry(config.train.engine, geometry)
    except ValueError as e:
        raise InvalidKey(ENGINE, str(e)) from e


def _build_model(config: TrialConfig) -> nn.Module:
    """Build the model.

    Raises:
        InvalidKey: Naming the dotted key at fault, which may be one of the data.
        ValueError: From a model's own code; a trial does not record its words.
    """
    try:
        return build_model(config.model, config.data.spec, config.seed)
    except ConfigError as e:  # begins with its key; whoever checks a file adds name and line
        key, _, words = str(e).partition(": ")
        raise InvalidKey(key, words) from e
    except InvalidKey as e:
        raise InvalidKey(f"model.{e.key}", f"{config.model.name} cannot be built: {e}") from e


def _make_engine(
    config: TrialConfig,
    model: nn.Module,
    geometry: Geometry,
    data: Dataset,
    allowance: Allowance,
    crossing: tuple[int, ...] | None = None,
) -> Engine:
    """Make the engine for `model`, or for the tail of a cut model with inputs like `crossing`."""
    train, spec, task = config.train, crossing or data.spec, data.task
    planned, num_devices = train.max_physical_batch, allowance.num_devices
    on_gpu = data.device.type == "cuda"
    kind = f"{config.model.model_dump_json()} {task!r}" + " behind the cut" * bool(crossing)

    def choose_at_once(tried: EngineName) -> int:
        if planned != "auto":
            # it is the most: all portions are filled up, and no device is to wait for another's
            physical = min(planned, even_part(train.batch_size, num_devices=num_devices))
        elif on_gpu:
            physical = _choose_gpu_batch(config, model, geometry, data, allowance, spec, tried)
        else:
            name = "bookkeeping" if tried == "auto" else tried
            physical = choose_batch(model, spec, train.batch_size, name, config.copies, num_devices)
        # memory for more rows than any batch has would be held for nothing
        held = min(allowance.portion(physical, train.batch_size), _bound_batch_size(config))
        return whole_tiles(held)

    def make(own: nn.Module) -> Engine:
        place = next(own.parameters()).device
        return make_engine(
            own,
            data.engine_loss,
            geometry if place == data.device else geometry.to(place),
            at_once,
            spec,
            train.engine,
            kind,
            config.copies,
            task.draw_targets,
            train.forward_precision,
        )

    try:
        refuse_precision(train.forward_precision, data.device, num_devices)
    except ValueError as e:
        raise InvalidKey(PRECISION, str(e)) from e
    try:
        at_once = choose_at_once(train.engine)
        engine = replicate_engine(make, model, list_devices(data.device, num_devices))
        written_out = isinstance(engine.replicas[0], VmapEngine)
        if written_out and on_gpu and planned == train.engine == "auto":
            # auto chose the engine that writes gradients out, after the other one was measured
            at_once = choose_at_once("vmap")
            own = [replace(one, max_physical_batch=at_once) for one in engine.replicas]
            engine = join_engines(own)
        return engine
    except ValueError as e:
        if train.engine == "auto":
            key, code = name_model(config.model)
            raise InvalidKey(key, f"{code} cannot be trained privately: {e}") from e
        raise InvalidKey(ENGINE, f"{train.engine} does not fit {config.model.name}: {e}") from e


def _bound_batch_size(config: TrialConfig) -> int:
    """Bound the size of the largest Poisson batch of a trial."""
    batch_size = config.train.batch_size
    return math.ceil(batch_size + _DEVIATIONS * math.sqrt(batch_size))


def _choose_gpu_batch(
    config: TrialConfig,
    model: nn.Module,
    geometry: Geometry,
    data: Dataset,
    allowance: Allowance,
    spec: InputSpec,
    choice: EngineName,
) -> int:
    """Choose the physical batch on the GPU that `data` lie on."""
    train, method, task = config.train, build_method(config.method), data.task
    num_devices = allowance.num_devices
    params = {k: p.detach() for k, p in model.named_parameters()}
    weights_bytes = sum(p.nbytes for p in params.values())
    state = torch.utils._pytree.tree_leaves(method.chain.init(params))
    num_kept = config.noise.count_kept(config.settings)
    history_bytes = num_kept * torch.float64.itemsize * sum(p.numel() for p in params.values())
    inputs, valid = list_tensors(data.inputs), list_tensors(data.valid_inputs)
    scaled = 2 * next(iter(params.values())).itemsize
    each = sum(math.prod(x.shape[1:]) * (x.itemsize + scaled) for x in inputs)
    held_bytes = (
        sum(x.nbytes for x in (*inputs, *list_tensors(data.targets), *valid, data.valid_targets))
        + sum(x.nbytes for x in state if isinstance(x, torch.Tensor))
        # iterates, the gradient, and two moments of Adam
        + (method.query.memory + 3) * weights_bytes
        + history_bytes
        # a whole batch as it is read, scaled, and laid out with its channels last
        + _bound_batch_size(config) * config.copies * each
        # sums that the other GPUs have computed, some of them in double
        + 2 * (num_devices - 1) * weights_bytes
    )
    total = torch.cuda.get_device_properties(data.device).total_memory
    # a first call of the model itself would hide an initialisation from data from check_stateless
    tried = deep_copy(model)
    try:
        return choose_gpu_batch(
            lambda rows: make_unchecked_engine(
                tried,
                data.engine_loss,
                geometry,
                rows,
                choice,
                config.copies,
                train.forward_precision,
            ),
            method.query,
            config.privacy.clipping.build(config.privacy.clip_norm, 1.0, train.batch_size),
            params,
            spec,
            train.batch_size,
            task.draw_targets,
            gpu_bytes=allowance.gpu_share * total,
            held_bytes=held_bytes,
            num_devices=num_devices,
        )
    except Unrecordable:
        if choice != "auto":
            raise
        return _choose_gpu_batch(config, model, geometry, data, allowance, spec, "vmap")


def _make_geometry(config: TrialConfig, model: nn.Module) -> Geometry:
    """Make the method's geometry on `model`, whose layers must suit it and the clipping."""
    # Made for its bounds alone, which do not depend on the noise.
    clip = config.privacy.clipping.build(config.privacy.clip_norm, 0.0, config.train.batch_size)
    if isinstance(clip, PerLayer):
        try:
            clip.resolve_bounds([k for k, _ in model.named_parameters()])
        except ValueError as e:
            raise InvalidKey("privacy.clipping.bounds", str(e)) from e
    method = build_method(config.method)
    try:
        refuse_unsupported_layers(model)
        return make_geometry(method.geometry, model, config.data.spec.inputs)
    except InvalidKey as e:
        composed = isinstance(config.method, compose.Config)
        name = e.key if composed or hasattr(config.method, e.key) else "keep"
        place = "method.compose.geometry" if composed else "method"
        raise InvalidKey(f"{place}.{name}", str(e).replace("keep", name)) from e
    except ValueError as e:
        raise InvalidKey(
            "model", f"{config.model.name} does not fit method {config.method.name}: {e}"
        ) from e
