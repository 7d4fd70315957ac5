"""The contract of docs/concepts/privacy.md, as functions that raise AssertionError if it is broken.

Each takes a world and checks one promise through the real step. test_privacy_contract.py
runs them in every world, test_planted_faults.py in worlds with a fault each. The messages begin
with what is promised.

What docs/concepts/methods.md says is in textbook.py; the statistical checks are in chance.py.
"""

import io
import math
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import torch
from textbook import answer_of, asked, look_ahead_weight, momentum, reference, textbook
from torch import Tensor, nn
from torch.func import functional_call
from world import (
    BATCH_SIZE,
    NOTHING,
    NUM_EXAMPLES,
    SECRET,
    SIGMA,
    World,
    copied,
    examples,
    flat,
    joined,
    only,
    same,
    without,
)

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped, Released, Tensors
from dpsweep.privacy.clip import INSIDE, split_count
from dpsweep.privacy.query import SplitQuery
from dpsweep.privacy.release import GRID_BITS
from dpsweep.training import step as step_module
from dpsweep.training.assemble import assemble_step

REACH = 0.9
"""Of the clip norm: some example moves the sum by as much in every world (0.955 at the least)."""

ROUNDING = {"float64": 1e-12, "float32": 1e-5}
"""Of a sum, relative to its largest entry."""


# 2. One example moves the sum by at most C.


def check_sensitivity(world: World) -> None:
    """No example moves the sum that is noised by more than the norm that the noise is scaled by.

    And some example moves it by nearly as much, or the check could not fail.
    """
    data = examples()
    everyone = world.total(data)
    others = [world.total(without(data, i)) for i in range(NUM_EXAMPLES)]
    assert {other.clip_norm for other in others} == {everyone.clip_norm}
    moved = max(_distance(everyone.total, other.total) for other in others) / everyone.clip_norm
    slack = ROUNDING[world.dtype] * _largest(everyone.total) / everyone.clip_norm
    assert moved <= 1 + slack, f"sensitivity: one example moves the sum by {moved:.4f} C"
    assert moved > REACH, f"reach: no example moves the sum by more than {moved:.4f} C"


def check_bad_examples(world: World) -> None:
    """An answer that is not finite counts as zero, and none spoils the others' answers."""
    base = world.total(examples())
    slack = ROUNDING[world.dtype] * _largest(base.total)
    cases = {f"pixels {p:g}": (p, 0) for p in (math.nan, math.inf, -math.inf, 1e30, 1e200)}
    for what, (pixel, target) in {**cases, "no gradient": (8.0, NOTHING)}.items():
        more = world.total(joined(examples(), pixel, target))
        moved = _distance(more.total, base.total)
        assert moved <= base.clip_norm + slack, f"bad example: {what} move the sum by {moved:.3g}"
        if what.removeprefix("pixels ") in ("nan", "inf", "-inf", "no gradient"):
            rest, _ = split_count(Released(more.total))
            apart = _distance(rest, split_count(Released(base.total))[0])
            assert apart <= slack, f"bad example: {what} do not count as zero but {apart:.3g}"


def check_reference(world: World) -> None:
    """The noise-free gradient is that of examples taken one by one, clipped as in the textbook.

    The clip norm is such that half of the answers lie inside. Spectral worlds need keep = 1: then
    what is released is the gradient itself. With records in reduced precision an answer is what
    they say in double, so the tolerance is that of norms in float32, and a sum in bf16 shows.
    """
    start = world.underway(world.step(examples()))
    iterates = [copied(x) for x in start.iterates]
    (asks, *_) = textbook(world.method, start.step)
    answers = [answer_of(world, only(examples(), [i]), iterates, asks) for i in range(NUM_EXAMPLES)]
    median = float(np.median([math.hypot(*norms.values()) for _, norms in answers]))
    world = replace(world, clip_norm=1.0001 * median)
    expected, inside = reference(world, iterates, start.step)
    tape = world.run(examples(), sigma=0)
    (gradient,), (recording,) = tape.gradients, tape.releases
    off = _distance(gradient, expected) / _largest(expected)
    allowed = {"float64": 1e-9, "float32": 1e-4}[world.dtype]
    assert off < allowed, f"reference: the release is off by {off:.2g} of its largest entry"
    if world.style == "adaptive":
        share = world.config.privacy.clipping.build(world.clip_norm, 0.0, BATCH_SIZE).share
        count = 2 * math.sqrt(share) * recording.clip_norm * (inside - NUM_EXAMPLES / 2)
        assert inside == NUM_EXAMPLES // 2 + 1
        assert math.isclose(recording.total[INSIDE], count, rel_tol=1e-9), "reference: the count"


def check_unclipped_gradient(world: World) -> None:
    """Where nothing is clipped or noised, what is released is autograd's gradient over B.

    Spectral worlds need keep = 1.
    """
    world = replace(world, clip_norm=1e6)
    tape = world.run(examples(), sigma=0)
    start = world.underway(world.step(examples()))
    c = look_ahead_weight(world.method, start.step)[0]
    calls = textbook(world.method, start.step)
    asks = calls[0] if len(calls) == 1 else [(1 - c, *calls[0][0][1:]), (c, *calls[1][0][1:])]
    net, data = world.model, examples()
    expected = {k: torch.zeros_like(p) for k, p in net.named_parameters()}
    for weight, age, ahead in asks:
        now, before = start.iterates[-1], start.iterates[max(-2, -len(start.iterates))]
        point = {
            k: (x + ahead * (now[k] - before[k])).requires_grad_()
            for k, x in start.iterates[-1 - age].items()
        }
        inputs, targets = asked(world, data)
        outputs = functional_call(net, point, (inputs,))
        value = nn.functional.cross_entropy(outputs, targets, reduction="sum")
        value = value * len(data.targets) / len(targets)
        for k, g in zip(point, torch.autograd.grad(value, list(point.values())), strict=True):
            expected[k] += weight * g / BATCH_SIZE
    off = _distance(tape.gradients[0], expected) / _largest(expected)
    assert off < 1e-9, f"unclipped: the release is not the gradient, off by {off:.2g}"


def check_microbatches(world: World) -> None:
    """How many examples are in memory at once changes nothing; batches of 0 and 1 are batches."""
    for num in (0, 1, NUM_EXAMPLES):
        data = only(examples(), range(num))
        how = {"rate": 1.0} if num else {"rate": 1e-12}
        data = data if num else examples()
        whole = world.total(data, physical=256, **how).total
        for physical in (1, 7):
            parts = world.total(data, physical=physical, **how).total
            assert parts.keys() == whole.keys()
            worst = max(float((parts[k] - whole[k]).abs().max()) for k in whole)
            slack = ROUNDING[world.dtype] * _largest(whole)
            assert worst <= slack, f"microbatches of {physical} of {num} examples: off {worst:.2g}"
        if not num:
            parameters = split_count(Released(whole))[0]
            assert not flat(parameters).any(), "empty batch: its sum is not zero"


def check_devices(world: World) -> None:
    """Devices that share a batch sum it to the bits of one device with the same portions."""
    for num in (1, NUM_EXAMPLES):
        data = only(examples(), range(num))
        alone = world.total(data, physical=2, num_devices=1).total
        for num_devices in (2, 3, 3):  # twice: the order of arrival need not be the same
            shared = world.total(data, physical=2, num_devices=num_devices).total
            assert same(shared, alone), f"devices: another sum of {num} examples on {num_devices}"


# 3. The noise is isotropic where clipping happened, and nothing shrinks it.


# 1. The points depend on past releases alone.


def check_points(world: World) -> None:
    """The engine is asked where and with what weight the textbook says: at past iterates."""
    tape = world.run(examples(), steps=5, progress=world.begin(world.step(examples())))
    iterates, asked = [iterates[-1] for iterates in tape.trails], iter(tape.asked)
    for t in range(5):
        for asks in textbook(world.method, t):
            points, weights = next(asked)
            known = [(w, age, ahead) for w, age, ahead in asks if age <= t]
            scale = sum(w for w, _, _ in asks) / sum(w for w, _, _ in known)
            if t == 0:
                known, scale = [(sum(w for w, _, _ in asks), 0, 0.0)], 1.0
            assert len(points) == len(known), f"points: {len(points)} at step {t}"
            for point, weight, (w, age, ahead) in zip(points, weights, known, strict=True):
                before = iterates[t - 1] if t else iterates[t]
                place = {
                    k: x + ahead * (iterates[t][k] - before[k])
                    for k, x in iterates[t - age].items()
                }
                slack = ROUNDING[world.dtype] * _largest(place)
                assert _distance(point, place) < slack, f"points: not where they should be, {t}"
                assert math.isclose(weight, scale * w, rel_tol=1e-9), f"points: a weight, step {t}"
    assert next(asked, None) is None


def check_asks(world: World) -> None:
    """A constant gradient is kept whole, and of several iterates the newest weighs most."""
    method = world.step(examples()).method
    for t in (0, 1, 10):
        asks = method.query.evaluation_points(t)
        whole = sum(ask.weight for ask in asks)
        assert math.isclose(whole, 1), f"weights: they sum to {whole}"
        if isinstance(method.query, SplitQuery) or any(ask.ahead for ask in asks):
            continue
        by_age = [ask.weight for ask in sorted(asks, key=lambda ask: ask.age)]
        steady = momentum(world.method).get("decay") == 1
        falls = all(a > b or (steady and a == b) for a, b in pairwise(by_age))
        assert falls, f"weights: the newest iterate does not weigh most, {by_age}"


def check_batch_has_no_say(world: World) -> None:
    """Two data sets that share nothing, met at the third step, are asked at the same points."""
    asked = []
    for seed in (0, 1):
        start = world.begin(world.step(examples()))
        common = world.run(examples(), steps=2, progress=start)
        tape = world.run(examples(seed=seed), steps=2, progress=common.progress)
        calls = len(tape.asked) // 2
        asked.append((tape.asked[:calls], tape.asked[calls:]))
    for one, other in zip(*(third for third, _ in asked), strict=True):
        assert all(same(a, b) for a, b in zip(one[0], other[0], strict=True)), "points: of a batch"
        assert one[1] == other[1], "weights: of a batch"
    # The recording is not blind: one step later the data have had their say.
    for one, other in zip(*(fourth for _, fourth in asked), strict=True):
        assert not same(one[0][0], other[0][0]), "the newest point never changes"


# 4. The divisor is constant, and an empty batch takes its step.


def check_divisor(world: World) -> None:
    """The sum is divided by B, whatever the true size of the batch: in double, then rounded."""
    dtype = getattr(torch, world.dtype)
    for num in (3, NUM_EXAMPLES):
        recording = world.total(only(examples(), range(num)), sigma=0)
        divided = {k: (x.double() / BATCH_SIZE).to(dtype) for k, x in recording.total.items()}
        assert same(recording.released, divided), f"divisor: not B for {num} examples"


def check_empty_batch(world: World) -> None:
    """An empty batch is released as noise alone, and takes its step."""
    step = world.step(examples())
    start = world.underway(step)
    before = copied(start.params)
    tape = world.run(examples(), rate=1e-12, progress=start)
    assert len(tape.releases) == 1, "empty batch: nothing is released"
    (recording,) = tape.releases
    rng = step.draws(4, "noise")
    gain = 1.0 if world.correlation is None else 1 / world.strategy[0]
    for k, noise in recording.noise.items():
        draw = torch.from_numpy(np.asarray(rng.standard_normal(tuple(noise.shape))))
        off = float((noise - gain * SIGMA * draw).abs().max())
        assert off <= gain * SIGMA * 2.0**-GRID_BITS, (
            f"empty batch: its release is not noise alone in {k}"
        )
    assert start.step == 5, "empty batch: no step is taken"
    for k, x in start.params.items():
        assert x.isfinite().all(), f"empty batch: {k} is not finite"
        assert (x != before[k]).all(), f"empty batch: {k} does not move"


# 5. Nothing else leaves.


def check_only_the_release_leaves(world: World) -> None:
    """With the release held fixed, all that a step leaves behind is the same for any data."""
    dtype = getattr(torch, world.dtype)  # a release has that of the weights, its sum is in double

    def fixed(total: Clipped, **_: object) -> Released:
        return Released({k: torch.full_like(x, 0.1, dtype=dtype) for k, x in total.items()})

    states = []
    with mock.patch.object(step_module, "release", fixed):
        for data in (examples(), examples(4, seed=1)):
            step = world.step(data)
            progress = world.begin(step)
            for _ in range(3):
                step(progress)
            states.append(progress.state_dict())
    one, other = (torch.utils._pytree.tree_leaves(state) for state in states)
    for a, b in zip(one, other, strict=True):
        equal = torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert equal, "post-processing: something beside the release tells of the data"


# What a user may rely on besides.


def check_resume(world: World) -> None:
    """A trial saved before any of its first six steps goes on bit for bit."""
    data, how = examples(), {"rate": 0.6}
    step = world.step(data, **how)
    straight, saved = world.begin(step), []
    for _ in range(6):
        file = io.BytesIO()
        torch.save(straight.state_dict(), file)
        saved.append(file)
        step(straight)
    for t, file in enumerate(saved):
        file.seek(0)
        step = world.step(data, **how)
        resumed = step.resume(torch.load(file, weights_only=True))
        while resumed.step < 6:
            step(resumed)
        assert same(resumed.params, straight.params), f"resume: other weights from step {t} on"
        assert same(resumed.result, straight.result), f"resume: another average from step {t} on"
        assert resumed.bound == straight.bound, f"resume: another clip norm from step {t} on"


def check_every_parameter_moves(world: World) -> None:
    """Without noise, no leaf of the release is zero or mere rounding, and no weight stays."""
    step = world.step(examples(), sigma=0)
    start = world.underway(step)
    before = copied(start.params)
    tape = world.run(examples(), sigma=0, progress=start)
    answer, _ = split_count(tape.releases[0].released)
    for k, x in answer.items():
        share = float(x.abs().max()) / _largest(answer)
        assert share > 1e-4, f"frozen: nothing is released of {k}, or {share:.0e} of the largest"
    for k, x in start.params.items():
        assert not torch.equal(x, before[k]), f"frozen: {k} does not move"


def check_secret_is_said_nowhere(world: World) -> None:
    """No repr, config or saved state holds the key of the noise."""
    secret = Secret.fixed("told to nobody")
    step = world.step(examples(), secret=secret)
    progress = world.begin(step)
    step(progress)
    file = io.BytesIO()
    torch.save(progress.state_dict(), file)
    said = " ".join([repr(secret), str(secret), repr(step), world.config.model_dump_json()])
    for key in (secret.key, secret.stream_key(0, "noise"), secret.stream_key(0, "sample")):
        for telling in (repr(key), key.hex(), str(int.from_bytes(key))):
            assert telling not in said, "secret: said in a text"
            assert telling.encode() not in file.getvalue(), "secret: saved with the weights"
        assert key not in file.getvalue(), "secret: saved with the weights"


def check_classes(config: TrialConfig) -> None:
    """A model has one output for each class of its data, and no more."""
    step = assemble_step(config, SECRET, torch.device("cpu"))
    inputs = step.data.scaled(step.data.inputs[:2], step.dtype)
    outputs = step.engine.model(inputs).shape[1]
    classes = config.data.spec.num_classes
    assert outputs == classes, f"classes: {outputs} outputs for data of {classes} classes"
    assert int(step.data.targets.max()) == classes - 1


def _distance(one: Tensors, other: Tensors) -> float:
    assert one.keys() == other.keys()
    return float((flat(one) - flat(other)).norm())


def _largest(tree: Tensors) -> float:
    return float(flat(tree).abs().max())
