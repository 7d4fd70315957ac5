"""LoRA: a frozen linear layer plus a trained product of two thin ones (Hu et al. 2021, 2106.09685).

The trained layers are plain linear layers, so the engine has rules for them; the frozen one keeps
its weights in buffers, for which no gradient is asked and no noise is drawn.
"""

from collections.abc import Iterable, Iterator
from math import sqrt

from torch import Tensor, nn

from dpsweep.core.errors import InvalidKey, suggest_names


class LoraLinear(nn.Module):
    """A -> base(a) + scale * B A a, with B of zeros at the start; names are those of peft."""

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        inputs, outputs = layer_sizes(base)
        self.scale = alpha / rank
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=sqrt(5))  # as peft
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        y: Tensor = self.base(x) + self.scale * self.lora_B(self.lora_A(x))
        return y

    def merged_weight(self) -> Tensor:
        """Weight of one layer that computes the same, in the base's own layout."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        change = self.scale * self.lora_B.weight @ self.lora_A.weight
        return weight + (change.T if is_transposed(self.base) else change)


def is_transposed(layer: nn.Module) -> bool:
    """True for GPT-2's own linear layer, whose weight has shape (inputs, outputs)."""
    return type(layer).__qualname__ == "Conv1D" and type(layer).__module__.startswith(
        "transformers"
    )


def layer_sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    assert isinstance(layer.weight, Tensor)
    rows, columns = layer.weight.shape
    return (rows, columns) if is_transposed(layer) else (columns, rows)


def find_linear(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers that can have an adapter, with their paths."""
    for path, layer in model.named_modules():
        if type(layer) is nn.Linear or is_transposed(layer):
            yield path, layer


def add_lora(
    model: nn.Module, targets: Iterable[str], rank: int, alpha: float, last: int | None = None
) -> None:
    """Put a `LoraLinear` in the place of each layer whose path ends in one of `targets`.

    Args:
        last: Number of the model's last blocks that are adapted; all if None.

    Raises:
        InvalidKey: If a target matches no linear layer, the rank exceeds a layer's sizes, or there
            are fewer blocks than `last`.
    """
    layers = dict(find_linear(model))
    if last is not None:
        inside = tuple(f"{path}." for path in _list_blocks(model, last))
        layers = {path: layer for path, layer in layers.items() if path.startswith(inside)}
    for target in targets:
        paths = [p for p in layers if p == target or p.endswith(f".{target}")]
        if not paths:
            known = dict.fromkeys(p.rpartition(".")[2] for p in layers)
            raise InvalidKey(
                "adapter.targets",
                f"{target!r} is no linear layer of the model, which has: {', '.join(known)}."
                f"{suggest_names(target, known)}".rstrip("."),
            )
        for path in paths:
            sizes = layer_sizes(layers[path])
            if rank > min(sizes):
                raise InvalidKey(
                    "adapter.rank",
                    f"{rank} exceeds the layer {path}, which is {sizes[0]} x {sizes[1]}. Give at "
                    f"most {min(sizes)}",
                )
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, LoraLinear(layers[path], rank, alpha))


def _list_blocks(model: nn.Module, last: int) -> list[str]:
    """Paths of the last blocks of a transformer: of its outermost list of modules."""
    stacks = ((path, m) for path, m in model.named_modules() if isinstance(m, nn.ModuleList))
    path, blocks = next(stacks, ("", nn.ModuleList()))
    if last > len(blocks):
        raise InvalidKey(
            "adapter.layers", f"{last} exceeds the model's {len(blocks)} layers. Give fewer"
        )
    return [f"{path}.{i}" for i in range(len(blocks) - last, len(blocks))]


def merge_lora(model: nn.Module) -> None:
    """Put each adapter's product into its frozen layer, and that layer back in its place."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, LoraLinear):
            parent, _, name = path.rpartition(".")
            layer.base.weight = nn.Parameter(layer.merged_weight(), requires_grad=False)
            setattr(model.get_submodule(parent), name, layer.base)
