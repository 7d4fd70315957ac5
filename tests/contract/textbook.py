"""Queries and clipping of docs/concepts/methods.md, written again, slowly and by example."""

import math

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from world import BATCH_SIZE, NUM_EXAMPLES, PHYSICAL, UNDERWAY, World, examples, loss, only

from dpsweep.core.types import Tensors
from dpsweep.data.augment import hash_images
from dpsweep.data.read import Dataset
from dpsweep.privacy.clip import INSIDE, layer_of

Points = list[tuple[float, int, float]]
"""(weight, age, look-ahead) of each point of one clipped answer."""


def textbook(method: dict[str, object], step: int) -> list[Points]:
    """docs/concepts/methods.md: (weight, age, look-ahead) of each point of each clipped answer."""
    query = momentum(method)
    if query:
        decay, num = query.get("decay", 0.3), query.get("points", 2)
        whole = sum(decay**j for j in range(num))
        return [[(decay**j / whole, j, 0.0) for j in range(num)]]
    if not _looks_ahead(method):
        return [[(1.0, 0, 0.0)]]
    c, gamma = look_ahead_weight(method, step)
    if method.get("predictor") == "split":
        return [[(1.0, 0, 0.0)], [(1.0, 0, gamma)]]
    if math.isclose(c, 1):
        return [[(1.0, 0, gamma)]]
    return [[(1 - c, 0, 0.0), (c, 0, gamma)]]


def look_ahead_weight(method: dict[str, object], step: int) -> tuple[float, float]:
    """The two-point query's c and gamma."""
    query = _query(method)
    gain, gamma = query.get("kappa", 0.7), query.get("gamma", 0.5)
    if query.get("gain") == "riccati":
        v, h, p = query.get("process", 0.5) ** 2, query.get("hessian", 0.1) ** 2, 1.0
        for _ in range(step):
            p = (1 - h) * (p + v + h) / (p + v + 1)
        gain = (p + v + h) / (p + v + 1)
    gamma = (1 - gain) / gain if gamma == "one_point" else gamma
    return (1 - gain) / (gain * gamma), gamma


def momentum(method: dict[str, object]) -> dict[str, object]:
    query = _query(method)
    return query if query.get("name") in ("innerouter", "dp_pmlf", "momentum") else {}


def _looks_ahead(method: dict[str, object]) -> bool:
    query = _query(method)
    looks = query.get("name") in ("disk", "fftkf", "look_ahead")
    return looks and query.get("predictor") != "none"


def _query(method: dict[str, object]) -> dict[str, object]:
    return method.get("compose", {}).get("query", {}) if "compose" in method else method


def reference(world: World, iterates: list[Tensors], step: int) -> tuple[Tensors, int]:
    """1/B sum of clipped answers, one example at a time, and how many answers lie inside."""
    calls, inside, sums = textbook(world.method, step), 0, []
    data = examples()
    for asks in calls:
        total = {k: torch.zeros_like(x) for k, x in iterates[-1].items()}
        for i in range(NUM_EXAMPLES):
            answer, norms = answer_of(world, only(data, [i]), iterates, asks)
            factors = _factors(world, norms)
            inside += factors.pop(INSIDE, 0)
            for k, u in answer.items():
                total[k] += factors[k] * u
        sums.append(total)
    weights = [1.0]
    if len(sums) == 2:  # clipped apart: r + c h, h the difference
        c = look_ahead_weight(world.method, step)[0]
        weights = [1 - c, c]
    whole = {
        k: sum(w * part[k] for w, part in zip(weights, sums, strict=True)) for k in iterates[-1]
    }
    return {k: x / BATCH_SIZE for k, x in whole.items()}, inside


def answer_of(
    world: World, one: Dataset, iterates: list[Tensors], asks: Points
) -> tuple[Tensors, dict[str, float]]:
    """One example's weighted gradient, and the norm of each parameter's part of its answer."""
    answer: Tensors = {}
    whole: Tensors = {}  # the same, but all lags of a convolution's correlation
    for weight, age, ahead in asks:
        now, before = iterates[-1], iterates[-2] if len(iterates) > 1 else iterates[-1]
        point = {k: x + ahead * (now[k] - before[k]) for k, x in iterates[-1 - age].items()}
        for k, (g, lags) in _autograd(world, point, one).items():
            answer[k] = answer.get(k, 0) + weight * g
            whole[k] = whole.get(k, 0) + weight * lags
    return answer, {k: float(x.norm()) for k, x in whole.items()}


def asked(world: World, data: Dataset) -> tuple[Tensor, Tensor]:
    """All copies of all examples as step UNDERWAY asks them, one after another, and their targets.

    Each is cut out of the image mirrored beyond its edge, and then turned round.
    """
    augment, copies = world.config.train.augment, []
    dtype = getattr(torch, world.dtype)
    if augment is None:
        return data.scaled(data.inputs, dtype), data.targets
    drawn = augment.draws(hash_images(data.inputs), UNDERWAY, world.config.seed)
    height, width = data.inputs.shape[2:]
    for i, image in enumerate(data.inputs):
        wide = nn.functional.pad(image[None], [augment.crops] * 4, mode="reflect")[0]
        for flipped, down, right in zip(*(d[i].tolist() for d in drawn), strict=True):
            top, left = augment.crops + down, augment.crops + right
            copy = wide[:, top : top + height, left : left + width]
            copies.append(copy.flip(2) if flipped else copy)
    targets = data.targets.repeat_interleave(augment.multiplicity)
    return data.scaled(torch.stack(copies), dtype), targets


def _factors(world: World, norms: dict[str, float]) -> dict[str, float]:
    """What each parameter's part is multiplied by, and under INSIDE whether nothing is cut."""
    norm, c = math.hypot(*norms.values()), world.clip_norm
    match world.style:
        case "automatic":
            return dict.fromkeys(norms, c / (norm + 0.01))
        case "flat" | "adaptive":
            return {**dict.fromkeys(norms, min(1.0, c / norm)), INSIDE: int(norm <= c)}
    by_layer = {
        layer: math.hypot(*(n for k, n in norms.items() if layer_of(k) == layer))
        for layer in world.shares
    }
    return {k: min(1.0, world.shares[layer_of(k)] * c / by_layer[layer_of(k)]) for k in norms}


def _autograd(world: World, point: Tensors, one: Dataset) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameter -> its gradient, and what of it is clipped: for a convolution, every lag.

    In reduced precision a gradient is what a layer's records say: what it was given and the
    gradient of its output are rounded, and the layer alone is led back in double. They are rounded
    as in a step, so the examples stand in as many rows: a kernel may round otherwise in fewer.
    """
    net, seen = world.model, {}
    hooks = [
        m.register_forward_hook(lambda m, a, out, n=n: seen.update({n: (m, a[0], out)}))
        for n, m in net.named_children()
        if list(m.parameters())
    ]
    leaves = {k: x.clone().requires_grad_() for k, x in point.items()}
    inputs, targets = asked(world, one)
    num, rounded = len(inputs), world.config.train.forward_precision is not None
    if rounded:
        inputs = inputs.repeat(PHYSICAL, 1, 1, 1)
    try:
        with world.rounding():
            outputs = functional_call(net, leaves, (inputs,))[:num]
    finally:
        for hook in hooks:
            hook.remove()
    rows = zip(outputs.to(inputs).split(1), targets.split(1), strict=True)
    value = sum(loss(*row) for row in rows)  # a mean would be rounded otherwise
    outs = [out for *_, out in seen.values()]
    with world.rounding():
        grads = torch.autograd.grad(value, outs, retain_graph=True)
    records = dict(zip(seen, (g / num for g in grads), strict=True))
    if rounded:
        parts = {}
        for (name, (module, x, _)), grad in zip(list(seen.items()), grads, strict=True):
            x, a = x[:num].detach().double(), grad[:num].double() / num
            seen[name], records[name] = (module, x, None), a
            own = {k: leaves[f"{name}.{k}"].detach().double() for k, _ in module.named_parameters()}
            back = vjp(lambda own, m=module, x=x: functional_call(m, own, (x,)), own)[1]
            parts |= {f"{name}.{k}": (g, g) for k, g in back(a)[0].items()}
    else:
        grads = torch.autograd.grad(value / num, list(leaves.values()))
        parts = {k: (g, g) for k, g in zip(leaves, grads, strict=True)}
    for name, (module, x, _) in seen.items():
        if isinstance(module, nn.Conv2d) and world.geometry.maps:
            a = records[name]
            pad = [p + n - 1 for p, n in zip(module.padding, a.shape[2:], strict=True)]
            lags = nn.functional.conv2d(x.transpose(0, 1), a.transpose(0, 1), padding=pad)
            parts[f"{name}.weight"] = (parts[f"{name}.weight"][0], lags)
    return parts
