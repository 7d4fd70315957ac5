"""What every engine must answer: gradients by plain autograd, one example at a time.

Shapes: B examples. Rows are computed apart and stacked, so that nothing here can mix examples.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.core.types import PerExample, Tensors
from dpsweep.privacy.clip import Automatic, Flat, PerLayer, Quantile
from dpsweep.privacy.engine.base import Loss
from dpsweep.privacy.engine.gradients import ParameterGradients
from dpsweep.privacy.engine.records import LayerCall

BOTH_SIGNS = [-3.7, 4.7, 1.3]
CLIPS = {
    "flat": Flat(0.8),
    "automatic": Automatic(0.8),
    "per layer": PerLayer(0.8),
    "adaptive": Quantile(0.8, share=0.2, quantile=0.5, rate=0.2),
}
QUERIES = {"one point": [1.0], "both signs": [-3.7, 4.7], "three points": [0.2, 1.5, -0.7]}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def params_of(model: nn.Module) -> Tensors:
    return {k: p.detach().clone() for k, p in model.named_parameters()}


def points_of(model: nn.Module, num: int) -> list[Tensors]:
    """Points far enough apart for gradients to differ; the first is the model's own."""
    rng = generator(3)
    return [
        {k: p + 0.3 * m * torch.randn(p.shape, generator=rng).to(p) for k, p in own.items()}
        for m, own in enumerate([params_of(model)] * num)
    ]


def flat(tree: Tensors) -> Tensor:
    return torch.cat([x.flatten().double() for x in tree.values()])


def alone(
    model: nn.Module,
    loss: Loss,
    points: Sequence[Tensors],
    weights: Sequence[float],
    inputs_B: Tensor,
    targets_B: Tensor,
) -> PerExample:
    """Each example's weighted sum of gradients, leaf shape (B, *param.shape)."""
    rows = []
    for x, y in zip(inputs_B.split(1), targets_B.split(1), strict=True):
        row = {k: torch.zeros_like(p) for k, p in points[0].items()}
        for point, weight in zip(points, weights, strict=True):
            leaves = {k: p.clone().requires_grad_() for k, p in point.items()}
            value = loss(functional_call(model, leaves, (x,)), y)
            found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
            for leaf, g in zip(row.values(), found, strict=True):
                leaf += weight * g
        rows.append(row)
    return PerExample({k: torch.stack([row[k] for row in rows]) for k in points[0]})


def single(uses: Sequence[LayerCall]) -> list[LayerCall]:
    """The same calls in single precision."""

    def rounded(x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x

    return [
        LayerCall(
            use.weight,
            tuple(map(rounded, use.inputs)),
            use.grad.float(),
            {k: p.float() for k, p in use.params.items()},
        )
        for use in uses
    ]


def spoiled(uses: Sequence[LayerCall], bad: float, where: str) -> list[LayerCall]:
    """The same calls, where the second example has `bad` once, in its "input" or "gradient"."""
    copies = [
        LayerCall(u.weight, tuple(x.clone() for x in u.inputs), u.grad.clone(), u.params)
        for u in uses
    ]
    place = copies[0].inputs[0] if where == "input" else copies[0].grad
    place[1].view(-1)[-1] = bad
    return copies


def uses_of(
    layer: nn.Module,
    weights: Sequence[float],
    inputs: Sequence[tuple[Tensor, ...]],
    apart: float = 0.0,
) -> list[LayerCall]:
    """One call of `layer` for each weight, with a random gradient of its output.

    Args:
        layer: Called here to learn the shape of its output.
        weights: Of the query.
        inputs: What the layer is given at each point.
        apart: Distance of the points from one another.
    """
    uses = []
    for m, (weight, given) in enumerate(zip(weights, inputs, strict=True)):
        params = {k: p + apart * m for k, p in params_of(layer).items()}
        output = functional_call(layer, params, given)
        grad = draw(*output.shape, seed=100 + m).to(output)
        if output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last):
            grad = grad.contiguous(memory_format=torch.channels_last)
        uses.append(LayerCall(weight, given, grad, params))
    return uses


def gradients(layer: nn.Module, uses: Sequence[LayerCall]) -> Tensors:
    """Each example's sum over the calls, by parameter of the layer, leaf shape (B, *shape)."""
    rows = []
    for b in range(len(uses[0].grad)):
        row = {k: torch.zeros_like(p) for k, p in uses[0].params.items()}
        for use in uses:
            leaves = {k: p.clone().requires_grad_() for k, p in use.params.items()}
            output = functional_call(layer, leaves, tuple(x[b : b + 1] for x in use.inputs))
            found = torch.autograd.grad(output, list(leaves.values()), use.grad[b : b + 1])
            for leaf, g in zip(row.values(), found, strict=True):
                leaf += use.weight * g
        rows.append(row)
    return {k: torch.stack([row[k] for row in rows]) for k in rows[0]}


def squared_norms(leaf_B: Tensor) -> Tensor:
    """Of each example's answer, shape (B,), float64."""
    return leaf_B.double().unsqueeze(-1).flatten(1).square().sum(1)


def check(answer: ParameterGradients, expected_B: Tensor, case: object = "") -> None:
    """Asserts that squares, the weighted sum and the answers written out are those expected."""
    near = {"rtol": TOLERANCE[expected_B.dtype], "msg": lambda text: f"{case}\n{text}"}
    size = expected_B.double().norm().item()
    factor_B = torch.linspace(0, 1.7, len(expected_B), dtype=torch.float64)
    total = torch.tensordot(factor_B, expected_B.double(), dims=1)
    squares_B = squared_norms(expected_B)
    small = near["rtol"] * size
    torch.testing.assert_close(answer.each().double(), expected_B.double(), atol=small, **near)
    torch.testing.assert_close(answer.squares().double(), squares_B, atol=small * size, **near)
    torch.testing.assert_close(answer.sum_scaled(factor_B).double(), total, atol=small, **near)
