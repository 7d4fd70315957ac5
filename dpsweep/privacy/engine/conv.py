"""Convolutions: norms and sums of kernel gradients, with no copies of the windows.

    R[o, i, u, v] = sum_{y,x} G[o, y, x] X[i, s y + d u, s x + d v]

X is the padded input, s the stride, d the dilation. Laid out flat with row length w, and cut
into s x s phases, the windows of one lag (u, v) are one run of a phase, at an offset:

    t = w y + x,   lag (u, v) at  t + w (d u div s) + (d v div s)  of phase  (d u mod s, d v mod s)

if G has zeros where a row's run goes on beyond the output's width. So a lag of R is one matrix
product of views, and the Gram matrix of all windows is a sum of shifted parts of the Gram
matrix of pixels, k_h k_w times cheaper than of windows.

Shapes: B examples (times groups), O and I channels of a group, T = positions of a run,
L = pixels of a phase, K = k_h k_w lags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpsweep.core.convolution import kernel_gradient
from dpsweep.privacy.clip import SUMMED, summed_products, zero, zero_excluded
from dpsweep.privacy.engine.gradients import (
    NOTHING,
    Known,
    ParameterGradients,
    Rows,
    add_rounding_bound,
    num_together,
    sum_lengths,
    sum_that_may_cancel,
    take_examples,
)
from dpsweep.privacy.engine.records import LayerCall

_WRITTEN, _PRODUCT, _DOUBLE = 8.0, 1.5, 3.0
"""Cost of a number written, of a small product, and of double precision; in units of a
multiply-add of the library's own convolution. Measured on CPUs, docs/benchmarks/step.md."""


@dataclass(frozen=True)
class PhaseLayout:
    """The layout of the module's docstring, for one layer and one size of its output.

    Attributes:
        stride: s, by axis.
        dilation: d, by axis.
        kernel: (k_h, k_w).
        output: (height, width).
        groups: Of the convolution.
    """

    stride: tuple[int, int]
    dilation: tuple[int, int]
    kernel: tuple[int, int]
    output: tuple[int, int]
    groups: int

    @classmethod
    def of(cls, layer: nn.Conv2d, output: torch.Size) -> PhaseLayout:
        """Make the layout of `layer` for outputs of shape (B, O, height, width)."""
        stride, dilation, kernel = layer.stride, layer.dilation, layer.kernel_size
        kind = SameSizeLayout if _keeps_size(layer) else PhaseLayout
        return kind(
            (stride[0], stride[1]),
            (dilation[0], dilation[1]),
            (kernel[0], kernel[1]),
            (output[2], output[3]),
            layer.groups,
        )

    @cached_property
    def phase(self) -> tuple[int, int]:
        """Height and width w of a phase."""
        sides = zip(self.output, self.kernel, self.dilation, self.stride, strict=True)
        height, width = (size + (k - 1) * d // s for size, k, d, s in sides)
        return height, width

    @property
    def padding(self) -> tuple[int, int]:
        """Padding that `prepared` leaves to the library's own kernel."""
        return 0, 0

    @property
    def pixels(self) -> int:
        """L, pixels of a phase."""
        return prod(self.phase)

    @property
    def length(self) -> int:
        """T, from the first position of the output to its last, row ends included."""
        height, width = self.output
        return (height - 1) * self.phase[1] + width

    @cached_property
    def lags(self) -> list[tuple[tuple[int, int], int]]:
        """(phase, offset) of each lag, the kernel's rows first."""
        (s_h, s_w), (d_h, d_w) = self.stride, self.dilation
        return [
            ((d_h * u % s_h, d_w * v % s_w), d_h * u // s_h * self.phase[1] + d_w * v // s_w)
            for u in range(self.kernel[0])
            for v in range(self.kernel[1])
        ]

    def pad_to_phases(self, inputs: Tensor, layer: nn.Conv2d) -> Tensor:
        """Pad as the layer does, then pad or crop to whole phases."""
        # private in torch, but the only place where 'same' is numbers: left, right, top, bottom
        before = layer._reversed_padding_repeated_twice
        if layer.padding_mode != "zeros":
            inputs = F.pad(inputs, before, mode=layer.padding_mode)
            before = [0, 0, 0, 0]
        height, width = (n * s for n, s in zip(self.phase, self.stride, strict=True))
        right = width - inputs.shape[3] - before[0]
        below = height - inputs.shape[2] - before[2]
        return F.pad(inputs, (before[0], right, before[2], below))

    def phases(self, padded: Tensor) -> dict[tuple[int, int], Tensor]:
        """Extract each phase that a lag needs, (B, L, I); views if stride and groups are 1."""
        (height, width), (s_h, s_w) = self.phase, self.stride
        pixels = padded.permute(0, 2, 3, 1)
        grid = pixels.view(len(pixels), height, s_h, width, s_w, -1)
        wanted = dict.fromkeys(phase for phase, _ in self.lags)
        return {(r, c): self._split_groups(grid[:, :, r, :, c]) for r, c in wanted}

    def pairs(self, inputs: Tensor, grads: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each lag its windows (B, T, I) and the output's gradient there (B, T, O)."""
        phases, run = self.phases(inputs), self.run(grads)
        for phase, at in self.lags:
            yield phases[phase][:, at : at + self.length], run

    def window_gram(self, left: Tensor, right: Tensor) -> Tensor:
        """Compute <window_t, window_t'> over channels and lags, shape (B, T, T), of two inputs."""
        one, other = self.phases(left), self.phases(right)
        pixels = {phase: torch.bmm(x, other[phase].transpose(1, 2)) for phase, x in one.items()}
        parts = (
            pixels[phase][:, at : at + self.length, at : at + self.length]
            for phase, at in self.lags
        )
        total = next(parts).clone()  # the first part is a view of `pixels`, which others still read
        for part in parts:
            total += part
        return total

    def run(self, grads: Tensor) -> Tensor:
        """Lay the output's gradient out as one run, shape (B, T, O)."""
        spread = F.pad(grads, (0, self.phase[1] - self.output[1]))
        return self._split_groups(spread.permute(0, 2, 3, 1))[:, : self.length]

    def _split_groups(self, leaf: Tensor) -> Tensor:
        """(B, height, width, channels) -> (B * groups, height * width, channels of a group)."""
        flat = leaf.flatten(1, 2)
        if self.groups == 1:
            return flat
        grouped = flat.view(*flat.shape[:2], self.groups, -1)
        return grouped.transpose(1, 2).flatten(0, 1)

    def cheaper_by_gram(self, shape: Sequence[int], num_points: int) -> bool:
        """True if norms by Gram matrices and one more sum cost less than gradients written out.

        Args:
            shape: Of the weight, (O, I, k_h, k_w).
            num_points: Points (times calls) of the query.
        """
        out, size, length = shape[0] // self.groups, prod(shape) // self.groups, self.length
        num_lags = len(self.lags)
        written = num_points * _PRODUCT * size * length + _WRITTEN * size
        pairs = num_points * (num_points + 1) // 2
        phases = len({phase for phase, _ in self.lags})
        products = phases * self.pixels**2 * shape[1] + length**2 * (out + num_lags)
        return num_points * size * prod(self.output) + pairs * _DOUBLE * products < written


class SameSizeLayout(PhaseLayout):
    """The layout where output and input have one size and zeros surround them: nothing is padded.

    The window of lag (u, v) of position t = w y + x is pixel t + w (d u - p) + (d v - p). Rows that
    fall outside are at the ends of the run; columns that do are where a copy of G has zeros.
    """

    @property
    def padding(self) -> tuple[int, int]:
        (d_h, d_w), (k_h, k_w) = self.dilation, self.kernel
        return d_h * (k_h - 1) // 2, d_w * (k_w - 1) // 2

    @property
    def pixels(self) -> int:
        return prod(self.output)

    @property
    def length(self) -> int:
        return prod(self.output)

    @cached_property
    def moves(self) -> tuple[list[int], list[int]]:
        """Offsets of the kernel's rows, and of its columns, in pixels."""
        (p_h, p_w), (d_h, d_w), (k_h, k_w) = self.padding, self.dilation, self.kernel
        return [d_h * u - p_h for u in range(k_h)], [d_w * v - p_w for v in range(k_w)]

    @cached_property
    def shifts(self) -> list[tuple[int, int]]:
        """(offset, columns moved) of each lag, the kernel's rows first."""
        width, (down, across) = self.output[1], self.moves
        return [(width * rows + columns, columns) for rows in down for columns in across]

    def pad_to_phases(self, inputs: Tensor, layer: nn.Conv2d) -> Tensor:
        return inputs

    def pairs(self, inputs: Tensor, grads: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        pixels = self._split_groups(inputs.permute(0, 2, 3, 1))
        runs: dict[int, Tensor] = {}
        for at, right in self.shifts:
            if right not in runs:
                runs[right] = self.run(_without_columns(grads, right))
            inside = self._inside(at)
            yield pixels[:, inside.start + at : inside.stop + at], runs[right][:, inside]

    def window_gram(self, left: Tensor, right: Tensor) -> Tensor:
        one, other = (self._split_groups(x.permute(0, 2, 3, 1)) for x in (left, right))
        pixels = torch.bmm(one, other.transpose(1, 2))
        width, (down, across) = self.output[1], self.moves
        # over a row of the kernel, then over rows of such sums: k_w + k_h sums in place of k_w k_h
        in_rows = self._add_shifted(pixels, [(columns, columns) for columns in across])
        return self._add_shifted(in_rows, [(width * rows, 0) for rows in down])

    def _add_shifted(self, gram_BTT: Tensor, shifts: list[tuple[int, int]]) -> Tensor:
        """Sum of <x_t, x_t'> at the pixels that lie at some shifts, where both are inside."""
        total = torch.zeros_like(gram_BTT)
        for at, columns in shifts:
            inside = self._inside(at)
            there = slice(inside.start + at, inside.stop + at)
            part = gram_BTT[:, there, there]
            if columns:
                valid = _valid_pairs(self.output, columns, inside.start, inside.stop, part.device)
                part = torch.where(valid, part, zero(part.dtype, part.device))
            total[:, inside, inside].add_(part)  # `+=` would copy the view onto itself as well
        return total

    def run(self, grads: Tensor) -> Tensor:
        return self._split_groups(grads.permute(0, 2, 3, 1))

    def _inside(self, at: int) -> slice:
        """Positions whose pixel at that offset exists; none, if the kernel reaches so far."""
        start = min(max(0, -at), self.length)
        return slice(start, max(start, self.length - max(0, at)))


def _keeps_size(layer: nn.Conv2d) -> bool:
    if set(layer.stride) != {1} or layer.padding_mode != "zeros" or layer.padding == "valid":
        return False
    sides = list(zip(layer.kernel_size, layer.dilation, strict=True))
    if isinstance(layer.padding, str):  # same
        return all(d * (k - 1) % 2 == 0 for k, d in sides)
    return all(2 * int(p) == d * (k - 1) for p, (k, d) in zip(layer.padding, sides, strict=True))


@lru_cache(maxsize=256)
def _valid_pairs(
    output: tuple[int, int], right: int, start: int, stop: int, device: torch.device
) -> Tensor:
    """Pairs of positions, from `start` on, that both have a pixel `right` columns on; (T, T)."""
    valid_T = _without_columns(torch.ones(1, 1, *output), right).flatten()[start:stop] > 0
    return (valid_T[:, None] & valid_T).to(device)


def _without_columns(leaf: Tensor, right: int) -> Tensor:
    """`leaf`, shape (B, O, height, width), with zeros where `right` columns on is outside."""
    if right == 0:
        return leaf
    left, width = leaf.clone(), leaf.shape[3]
    outside = slice(max(0, width - right), width) if right > 0 else slice(0, min(-right, width))
    left[..., outside] = 0
    return left


def _sum_groups(leaf_B: Tensor, groups: int) -> Tensor:
    """Sum over the groups of each example, shape (B * groups,) -> (B,)."""
    return leaf_B if groups == 1 else leaf_B.view(-1, groups).sum(1)


def make_kernel_gradients(layer: nn.Conv2d, calls: Sequence[LayerCall]) -> ParameterGradients:
    """Compute the per-example gradients of a convolution's weight, in the cheaper of two forms."""
    shape = tuple(layer.weight.shape)
    runs = [PhaseLayout.of(layer, call.grad.shape) for call in calls]
    inputs = [
        run.pad_to_phases(call.inputs[0], layer) for run, call in zip(runs, calls, strict=True)
    ]
    grads = [call.weighted(call.grad) for call in calls]
    if all(run == runs[0] for run in runs) and runs[0].cheaper_by_gram(shape, len(calls)):
        return GhostNormKernels(shape, runs[0], inputs, grads)
    return WrittenOutKernels.of(shape, runs, inputs, grads)


@dataclass(frozen=True, eq=False)
class WrittenOutKernels:
    """Per-example gradients written out, lag by lag.

    Attributes:
        shape: Of the weight.
        lags: The gradients, shape (K, B, I, O) if `output_last`, else (K, B, O, I).
        output_last: True where O is the longer side, which small products want last.
    """

    shape: tuple[int, ...]
    lags: Tensor
    output_last: bool

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        runs: Sequence[PhaseLayout],
        inputs: Sequence[Tensor],
        grads: Sequence[Tensor],
    ) -> WrittenOutKernels:
        """Compute from each point's layout, prepared input and weighted output gradient."""
        groups, num_lags = runs[0].groups, len(runs[0].lags)
        out, inside = shape[0] // groups, shape[1]
        sides = (inside, out) if out >= inside else (out, inside)
        lags = grads[0].new_empty(num_lags, len(grads[0]) * groups, *sides)
        for i, (run, x, g) in enumerate(zip(runs, inputs, grads, strict=True)):
            for lag, pair in zip(lags, run.pairs(x, g), strict=True):
                left, right = pair if out >= inside else pair[::-1]
                if i == 0:  # writes into uninitialised memory, so the first may not add
                    torch.bmm(left.transpose(1, 2), right, out=lag)
                else:
                    lag.baddbmm_(left.transpose(1, 2), right)
        return cls(shape, lags, out >= inside)

    @property
    def _groups(self) -> int:
        return self.shape[0] * self.shape[1] // prod(self.lags.shape[2:])

    def squares(self) -> Tensor:
        return _sum_groups(self.lags.square().sum((0, 2, 3)), self._groups)

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        lags = self._by_group if known.finite else zero_excluded(self._by_group, factor_B, dim=1)
        factors, flat = factor_B.to(lags), lags.flatten(2)
        if len(factors) <= SUMMED:  # one operation, where `@` takes several
            total = torch.bmm(factors.expand(len(flat), 1, -1), flat)
        else:
            total = summed_products(factors[:, None], flat)
        return self._in_place(total.view(len(lags), 1, *lags.shape[2:]))[0]

    def each(self) -> Tensor:
        return self._in_place(self._by_group)

    @property
    def _by_group(self) -> Tensor:
        """Shape (K, B, groups, side, side)."""
        return self.lags.view(len(self.lags), -1, self._groups, *self.lags.shape[2:])

    def _in_place(self, lags: Tensor) -> Tensor:
        """(K, B, groups, side, side) -> (B, *shape)."""
        order = (1, 2, 4, 3, 0) if self.output_last else (1, 2, 3, 4, 0)
        return lags.permute(order).reshape(-1, *self.shape)


@dataclass(frozen=True, eq=False)
class GhostNormKernels:
    """Norms from Gram matrices, the sum by the library's own weight gradient.

    Attributes:
        shape: Of the weight.
        runs: The layout, of every point.
        inputs: Prepared input at each point.
        grads: The output's gradient there, weights of the query included.
    """

    shape: tuple[int, ...]
    runs: PhaseLayout
    inputs: list[Tensor]
    grads: list[Tensor]

    def squares(self) -> Tensor:
        return self.norms[0]

    @property
    def may_cancel(self) -> bool:
        """True if terms may cancel, as in gradients.OuterProducts."""
        return self.grads[0].dtype != torch.float64

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Squares, and the norm sum_t |w_t| |g_t| |x_t| if nothing cancelled, shape (B,) each.

        Positions and points may cancel; see gradients.add_rounding_bound for what is added.
        """
        # in double: terms of both signs, whose sum may be far smaller than they are
        inputs = [x.double() for x in self.inputs]
        runs = [self.runs.run(g.double()) for g in self.grads]
        squares, lengths = [], []
        for i in range(len(inputs)):
            for j in range(i + 1):
                windows = self.runs.window_gram(inputs[i], inputs[j])
                outputs = torch.bmm(runs[i], runs[j].transpose(1, 2))
                pair_B = (windows * outputs).sum((1, 2))
                squares.append(pair_B if i == j else 2 * pair_B)
                if i == j:
                    lengths.append(sum_lengths(windows, outputs))
        square_B, longest_B = (reduce(torch.add, parts) for parts in (squares, lengths))
        square_B = add_rounding_bound(square_B, longest_B, self.grads[0].dtype, self.runs.length)
        groups = self.runs.groups
        return _sum_groups(square_B, groups), _sum_groups(longest_B, groups)

    def sum_scaled(self, factor_B: Tensor, known: Known = NOTHING) -> Tensor:
        inputs, grads = self.inputs, self.grads
        if not known.finite:
            inputs, grads = ([zero_excluded(x, factor_B) for x in z] for z in (inputs, grads))
        each = num_together(len(grads) * prod(self.runs.output)) if self.may_cancel else SUMMED

        def gradients(rows: Rows, factor_B: Tensor, dtype: torch.dtype) -> Tensor:
            total: Tensor | None = None
            for x, g in zip(inputs, grads, strict=True):
                scaled = take_examples(g, rows).to(dtype) * factor_B.to(dtype).view(-1, 1, 1, 1)
                asked = take_examples(x, rows)
                pairs = zip(torch.split(asked, each), torch.split(scaled, each), strict=True)
                for some, these in pairs:
                    part = kernel_gradient(
                        some.to(dtype),
                        these,
                        self.shape,
                        self.runs.stride,
                        self.runs.padding,
                        self.runs.dilation,
                        self.runs.groups,
                    )
                    total = part.double() if total is None else total.add_(part)
            assert total is not None, "a layer is called at one point at least"
            return total

        if not self.may_cancel:
            return gradients(None, factor_B, grads[0].dtype)
        return sum_that_may_cancel(gradients, factor_B, self.norms, known, grads[0].dtype)

    def each(self) -> Tensor:
        return WrittenOutKernels.of(
            self.shape, [self.runs] * len(self.grads), self.inputs, self.grads
        ).each()
