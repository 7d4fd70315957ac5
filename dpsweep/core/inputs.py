"""Inputs of a batch: one tensor, or tensors named after the model's keyword arguments.

All code that takes rows of inputs, or calls a model, goes through here, so that images, rows of a
table and tokens with their masks are treated alike.
"""

import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpsweep.core.types import Field, InputSpec, Tensors

Inputs = Tensor | dict[str, Tensor]
"""Inputs of B examples, shape (B, ...): for model(inputs), or, if named, for model(**inputs)."""

AnyInputs = TypeVar("AnyInputs", bound=Inputs)

_EXTREMES = (math.nan, 1e30, 0.0)


def map_inputs(make: Callable[[Tensor], Tensor], inputs: AnyInputs) -> AnyInputs:
    """Apply `make` to the tensor, or to each of them. Targets and features pass as well."""
    if isinstance(inputs, dict):
        return {name: make(x) for name, x in inputs.items()}  # type: ignore[return-value]
    return make(inputs)  # type: ignore[return-value]


def list_tensors(inputs: Inputs) -> list[Tensor]:
    """List the tensor, or all of them in their order."""
    return list(inputs.values()) if isinstance(inputs, dict) else [inputs]


def take_rows(inputs: AnyInputs, rows: slice | Tensor) -> AnyInputs:
    """Take some examples: a range, or an index tensor of them."""
    if isinstance(rows, Tensor):
        return map_inputs(lambda x: x.index_select(0, rows), inputs)
    return map_inputs(lambda x: x[rows], inputs)


def pad_rows(inputs: AnyInputs, missing: int) -> AnyInputs:
    """Append the first row `missing` times."""

    def pad(x: Tensor) -> Tensor:
        # x[:1].expand(missing, ...), as one operation
        shape, strides = (missing, *x.shape[1:]), (0, *x.stride()[1:])
        return torch.cat([x, x.as_strided(shape, strides)])

    return map_inputs(pad, inputs)


def one_tensor(inputs: Inputs) -> Tensor:
    """Return inputs that are known to be one tensor, such as images."""
    assert isinstance(inputs, Tensor), "inputs are named tensors"
    return inputs


def count_rows(inputs: Inputs) -> int:
    """Count the examples."""
    return len(list_tensors(inputs)[0])


def device_of(inputs: Inputs) -> torch.device:
    """Return the device that they lie on."""
    return list_tensors(inputs)[0].device


def apply_model(model: nn.Module, inputs_B: Inputs, params: Tensors | None = None) -> Tensor:
    """Compute model(inputs) or model(**inputs), at `params` if they are given."""
    args, named = ((), inputs_B) if isinstance(inputs_B, dict) else ((inputs_B,), {})
    if params is None:
        outputs: Tensor = model(*args, **named)
        return outputs
    called: Tensor = functional_call(model, params, args, named)
    return called


def named_fields(spec: InputSpec) -> tuple[Field, ...]:
    """List the named tensors of an example; none if its inputs are one tensor of floats."""
    return tuple(field for field in spec if isinstance(field, Field))


def tensor_shape(spec: InputSpec) -> tuple[int, ...]:
    """Return the shape of an example's one tensor; ValueError if the inputs are named tensors."""
    if fields := named_fields(spec):
        names = ", ".join(field.name for field in fields)
        raise ValueError(f"it takes one tensor, and the data give {names}")
    return tuple(size for size in spec if isinstance(size, int))


def draw_inputs(
    spec: InputSpec, num: int, rng: torch.Generator, like: Tensor, *, longest: float = 1.0
) -> Inputs:
    """Draw public inputs for checks: standard normals, any ids, and masks of random lengths.

    Args:
        rng: Public generator, on the CPU.
        like: Gives device, and precision of floats.
        longest: Length of the longest mask, relative to its tensor's: if it is below 1, one example
            without padding is longer than all of these, which shows in those that depend on it.
    """

    def draw(field: Field) -> Tensor:
        shape = (num, *field.shape)
        if field.is_mask:
            length = field.shape[-1]
            most = math.ceil(longest * length)
            lengths = torch.randint(1, most + 1, (*shape[:-1], 1), generator=rng)
            return (torch.arange(length) < lengths).long().to(like.device)
        if field.num_ids is not None:
            return torch.randint(0, field.num_ids, shape, generator=rng).to(like.device)
        return torch.randn(shape, generator=rng).to(like)

    if fields := named_fields(spec):
        return {field.name: draw(field) for field in fields}
    return torch.randn(num, *tensor_shape(spec), generator=rng).to(like)


def zero_inputs(spec: InputSpec, num: int, like: Tensor) -> Inputs:
    """Make inputs of zeros, without padding, so that all positions are computed."""

    def make(field: Field) -> Tensor:
        dtype = like.dtype if field.num_ids is None and not field.is_mask else torch.int64
        shape = (num, *field.shape)
        return torch.full(shape, int(field.is_mask), dtype=dtype, device=like.device)

    if fields := named_fields(spec):
        return {field.name: make(field) for field in fields}
    return torch.zeros(num, *tensor_shape(spec), device=like.device, dtype=like.dtype)


def extreme_inputs(spec: InputSpec, like: Tensor) -> Iterator[Inputs]:
    """Yield inputs of one example that show in other examples' outputs if examples mix.

    Floats are NaN, huge and 0 in turn; ids the last, the first, the last; masks without padding,
    with all but one position padded, and without.
    """
    for value in _EXTREMES:
        inputs = zero_inputs(spec, 1, like)
        if isinstance(inputs, Tensor):
            yield torch.full_like(inputs, value)
            continue
        for field in named_fields(spec):
            x = inputs[field.name]
            if field.is_mask and value == 1e30:
                x[..., 1:] = 0
            elif field.num_ids is not None and value != 1e30:
                x[:] = field.num_ids - 1
            elif field.num_ids is None and not field.is_mask:
                x[:] = value
        yield inputs


def replace_row(inputs_B: AnyInputs, row: int, example: Inputs) -> AnyInputs:
    """Return a copy with another example at `row`.

    Args:
        inputs_B: Shape (B, ...).
        row: Which; -1 is the last.
        example: Shape (1, ...).
    """

    def put(x: Tensor, new: Tensor) -> Tensor:
        x = x.clone()
        x[row] = new[0].to(x)
        return x

    return _zip_inputs(put, inputs_B, example)


def select_rows(rows_B: Tensor, one_B: AnyInputs, other_B: Inputs) -> AnyInputs:
    """Take the rows of `one_B` where `rows_B` is True, and those of `other_B` elsewhere."""

    def select(one: Tensor, other: Tensor) -> Tensor:
        return torch.where(rows_B.view(-1, *(1,) * (one.dim() - 1)), one, other)

    return _zip_inputs(select, one_B, other_B)


def _zip_inputs(
    make: Callable[[Tensor, Tensor], Tensor], one: AnyInputs, other: Inputs
) -> AnyInputs:
    if isinstance(one, dict):
        assert isinstance(other, dict), "both are of one spec"
        return {name: make(x, other[name]) for name, x in one.items()}  # type: ignore[return-value]
    assert isinstance(other, Tensor), "both are of one spec"
    return make(one, other)  # type: ignore[return-value]
