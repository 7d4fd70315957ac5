"""Linear layers that round an example alike at every place of its batch.

Libraries choose the kernel of a matrix product by where rows begin in memory. Rows whose length
is a multiple of four numbers all begin alike; of others, MKL computes some otherwise where a thread
has 2 to 11 columns of the result. One example more moves those after it by a place, so in a model
that amplifies a last bit all their gradients would change. Zeros that fill up the rows change no
result.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

_ALIGNED = 4
"""Numbers after which rows begin alike. On 1 to 8 threads neither x W^T nor the gradient of x
depended on a row's place where x had a multiple of four columns, whatever the outputs."""


def find_unaligned(model: nn.Module) -> list[nn.Linear]:
    """List the linear layers with inputs that do not all begin alike."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and "forward" not in vars(layer)
        and layer.in_features % _ALIGNED
    ]


@contextmanager
def aligned(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Have these layers called by `aligned_linear` within this context."""
    with ExitStack() as stack:
        for layer in layers:
            vars(layer)["forward"] = lambda x, own=layer: aligned_linear(x, own.weight, own.bias)
            stack.callback(vars(layer).pop, "forward")
        yield


def aligned_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W^T + b from aligned rows, (..., I) -> (..., O); on a CPU."""
    missing = -x.shape[-1] % _ALIGNED
    if missing and not x.is_cuda:
        x, weight = F.pad(x, (0, missing)), F.pad(weight, (0, missing))
    return F.linear(x, weight, bias)
