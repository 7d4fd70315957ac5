"""Spectral-DP: a weight gradient released through the low frequencies of a longer signal.

The gradient of a convolution's kernel is a crop of a full correlation R, all lags of a
layer's output gradient against its input. Signal sits at R's low frequencies, noise is
spread evenly, so a low-pass M in front of the crop removes more noise than signal:

    clip |R|_2  ->  add white noise on all lags  ->  M  ->  crop to the kernel's lags

What leaves the crop is Gaussian with covariance K = crop M M' crop' per unit of noise
variance, K = V diag(lam) V'. Nothing of the size of R need ever be made, for the same law
comes from noise drawn after the crop, in the whitened coordinates

    y = W R,    W = diag(lam^-1/2) V' crop M,    W W' = I,    gradient = V diag(lam^1/2) y

Privacy: the rows of W are orthonormal, so |W R| <= |R| <= C, and y + sigma C z with z white is
the Gaussian mechanism with sensitivity C. `restore` is post-processing. Only directions with
lam > 1e-4 max(lam) become coordinates. At small `keep` the others are nearly empty of
signal and noise alike, and division by sqrt(lam) would blow up the rounding errors of the
sum, which no norm has bounded.

A layer's map gives `squares` for |R|, takes the clipping factors back, and gives the summed
`coordinates` to add noise to. Of a query of one point both are computed in the records' own
precision, of several points, which may nearly cancel, in float64. Spectra are computed in
slices of the batch, so that a few examples at a time are in memory; what rounding may hide is
added to |R|.

Shapes: B examples, P points of the query (times positions), O and I channels or blocks,
F frequencies, k lags, r whitened coordinates.
Source: Feng et al. 2023, Spectral-DP, Algorithms 2 and 3. The paper drops the last bins of the
transform; of a real signal the bins f and n - f are one frequency, so here they go together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, prod
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from dpsweep.core.circulant import CirculantLinear
from dpsweep.core.convolution import kernel_gradient
from dpsweep.privacy.clip import zero_excluded
from dpsweep.privacy.whitening import Whitening

_SLACK = 16  # in units of the precision; measured errors stay below 0.4


@dataclass(frozen=True, eq=False)
class Records:
    """Inputs and output gradients of one layer for B examples, at each point. Private.

    Attributes:
        weights: The query's weight w_m of each point m; may be negative.
        inputs: The layer's input at each point, leaf shape (B, ...).
        grads: Gradient of each example's own loss with respect to the layer's output at
            each point, leaf shape (B, ...).
    """

    weights: tuple[float, ...]
    inputs: tuple[Tensor, ...]
    grads: tuple[Tensor, ...]

    def slices(self, per_example: int) -> Iterator[tuple[slice, "Records"]]:
        """A few examples at a time, detached, where one takes `per_example` numbers of memory.

        A CPU keeps such a slice in its cache; a GPU wants more work at a time.
        """
        budget = 2**20 if self.grads[0].device.type == "cpu" else 2**26
        step = max(1, budget // per_example)
        for start in range(0, len(self.grads[0]), step):
            part = slice(start, start + step)
            yield part, self.rows(part).to_double()

    def rows(self, part: slice | Tensor) -> "Records":
        """Select the records of some examples."""
        inputs, grads = (tuple(z[part] for z in leaf) for leaf in (self.inputs, self.grads))
        return Records(self.weights, inputs, grads)

    def to_double(self) -> "Records":
        """Detach, in float64 if there are several points."""

        def made(leaf: Tensor) -> Tensor:
            return leaf.detach().double() if len(self.weights) > 1 else leaf.detach()

        return Records(self.weights, tuple(map(made, self.inputs)), tuple(map(made, self.grads)))

    def scaled(self) -> tuple["Records", Tensor]:
        """Scale the records to size 1; return them and the factor of their squares, float64, (B,).

        So that float32 can square them. Of several points, in float64, they stay as they are.
        """
        if len(self.weights) > 1:
            return self, torch.ones((), dtype=torch.float64, device=self.grads[0].device)
        (x, x_B), (g, g_B) = _scale_to_one(self.inputs[0]), _scale_to_one(self.grads[0])
        return Records(self.weights, (x,), (g,)), (x_B.double() * g_B.double()).square()

    @property
    def peak_B(self) -> Tensor:
        """The largest number that each example's records hold, shape (B,); NaN if one is."""
        return torch.stack([_find_peaks(z.detach()) for z in (*self.inputs, *self.grads)]).amax(0)

    def only(self, kept_B: Tensor) -> "Records":
        """Set the records of all other examples to zero."""

        def made(leaf: Tensor) -> Tensor:
            return torch.where(_expand_like(kept_B, leaf), leaf, 0)

        return Records(self.weights, tuple(map(made, self.inputs)), tuple(map(made, self.grads)))

    @property
    def longest_B(self) -> Tensor:
        """Norm of each example's gradient if none of its terms cancelled, at most; shape (B,)."""
        parts = [
            abs(w) * _long(x) * _long(g)
            for w, x, g in zip(self.weights, self.inputs, self.grads, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def double(self) -> "Records":
        """Convert the records to float64."""
        inputs, grads = (tuple(z.double() for z in leaf) for leaf in (self.inputs, self.grads))
        return Records(self.weights, inputs, grads)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the records."""
        return self.grads[0].dtype

    def zeros(self, *shape: int) -> Tensor:
        """Zeros in float64 on the records' device."""
        return self.grads[0].new_zeros(shape, dtype=torch.float64)


class LayerMap(Protocol):
    """The linear map from one example's gradient to its coordinates u, never written out."""

    @property
    def white_shape(self) -> tuple[int, ...]:
        """Shape of the whitened coordinates."""

    @property
    def noise_gain(self) -> float:
        """Mean variance of the restored gradient's entries per unit of white variance."""

    def squares(self, records: Records) -> Tensor:
        """|u|^2 of each example over all lags, shape (B,), float64; never too small.

        An example whose records are not finite gets NaN or infinity.
        """

    def coordinates(self, records: Records, factor_B: Tensor) -> Tensor:
        """White coordinates of sum_b factor_b u_b, shape `white_shape`, in the records' dtype.

        An example of factor 0 leaves no trace, not even of a NaN.
        """

    def restore(self, white: Tensor) -> Tensor:
        """The gradient that belongs to whitened coordinates, of the parameter's shape."""

    def to(self, device: torch.device) -> Self:
        """Copy the map with its constants to `device`."""


def low_pass_response(n: int, keep: float) -> Tensor:
    """Amplitude of a real, even low-pass at the n // 2 + 1 real frequencies of length n.

        sum over all n bins of amplitude^2 = keep n

    Counted from zero up, each frequency takes its bins (f and n - f together) while they fit;
    the one in which keep n is reached takes the rest.

    Args:
        n: Length of the signal, in samples.
        keep: Share of white noise's power that passes, in [1/n, 1]. 1 is no filter.

    Raises:
        ValueError: If `keep` is out of range or NaN; below 1/n a constant would shrink.

    >>> low_pass_response(8, keep=0.5)  # 4 bins: the zero, the pair +-1, and one bin's worth of +-2
    tensor([1.0000, 1.0000, 0.7071, 0.0000, 0.0000], dtype=torch.float64)
    """
    if not 0 < keep <= 1:  # asked this way round, NaN is refused too
        raise ValueError(
            f"keep must lie in (0, 1], got {keep}. It is the share of frequencies that "
            "pass along each axis; 1 filters nothing."
        )
    if keep * n < 1 - 1e-9:  # 1/n itself, rounded to a double, is served
        raise ValueError(
            f"keep = {keep} passes {keep * n:.3g} of this layer's {n} frequencies, so even a "
            f"constant would shrink. Raise keep to {ceil(1e4 / n) / 1e4} or more."
        )
    bins_F = _count_bins(n)
    below_F = bins_F.cumsum(0) - bins_F
    return ((keep * n - below_F) / bins_F).clamp(0, 1).sqrt()


@dataclass(frozen=True, eq=False)
class _Map:
    """Shared part of both layers' maps.

    Attributes:
        shape: The parameter's shape: (O, I, k_h, k_w) or (p, q, d).
        lags: White coordinates of the k lags that each pair of channels or blocks has.
    """

    shape: tuple[int, ...]
    lags: Whitening

    @property
    def white_shape(self) -> tuple[int, ...]:
        return (*self.shape[:2], len(self.lags.variances))

    @cached_property
    def noise_gain(self) -> float:
        return float(self.lags.variances.sum()) / len(self.lags.vectors)

    def to(self, device: torch.device) -> Self:
        own: dict[str, Any] = {
            k: x.to(device) for k, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, lags=self.lags.to(device), **own)

    def restore(self, white: Tensor) -> Tensor:
        return self.lags.restore(white).view(self.shape)


@dataclass(frozen=True, eq=False)
class ConvMap(_Map):
    """Full correlation of a stride-1 convolution, over a torus on which no lag wraps.

        R[o, i, u, v] = sum_{y,x} A[o, y, x] X[i, y + u, x + v]

    A is the output's gradient and X the zero-padded input. For a query of several points
    R = sum_m w_m R_m.

    Attributes:
        torus: (n_h, n_w), each at least padded input + output - 1.
        blur_h: The low-pass as a matrix from a column of the input to one of the padded input.
        blur_w: The same for rows. Together they give all of M X that the crop can reach.
    """

    torus: tuple[int, int]
    blur_h: Tensor
    blur_w: Tensor

    @classmethod
    def of(cls, layer: nn.Conv2d, input_shape: tuple[int, int, int], keep: float) -> Self:
        """Make the map of `layer` for inputs of `input_shape` (I, H, W).

        Args:
            layer: Of stride, dilation and groups 1, with any zero padding.
            input_shape: Of one example, before padding.
            keep: Share of frequencies that pass along each axis, so keep^2 of the noise.

        Raises:
            ValueError: If the layer is of another kind, or `keep` is out of range.
        """
        _refuse_other_convolutions(layer)
        _, height, width = input_shape
        pad_h, pad_w = _read_padding(layer)
        n_h, blur_h, covariance_h = _design_axis(height, pad_h, layer.kernel_size[0], keep)
        n_w, blur_w, covariance_w = _design_axis(width, pad_w, layer.kernel_size[1], keep)
        lags = Whitening.of(torch.kron(covariance_h, covariance_w))
        return cls(tuple(layer.weight.shape), lags, (n_h, n_w), blur_h, blur_w)

    def squares(self, records: Records) -> Tensor:
        bins_F = _torus_bins(*self.torus, records.grads[0].device)
        squares_B = records.zeros(len(records.grads[0]))
        per_example = len(records.weights) * sum(self.shape[:2]) * len(bins_F)
        for part, some in records.slices(per_example):
            scaled, scale_B = some.scaled()
            left, right = self._spectra(scaled.grads), self._spectra(scaled.inputs)
            squares_B[part] = scale_B * _sum_energy(some.weights, left, right, bins_F)
        return squares_B

    def _spectra(self, leaves: tuple[Tensor, ...]) -> list[Tensor]:
        """Transform each point, (B, channels, F). A shift, as by padding, keeps the energy."""
        n_h, n_w = self.torus
        # rows, then columns laid out as rows: each transform reads memory in order. A generator
        # holds one point's rows at a time
        # contiguous: convolutions like channels last, in which a row lies scattered
        rows = (torch.fft.rfft(leaf.contiguous(), n=n_w) for leaf in leaves)
        columns = (row.transpose(-1, -2).contiguous() for row in rows)
        return [torch.fft.fft(column, n=n_h).flatten(-2) for column in columns]

    def coordinates(self, records: Records, factor_B: Tensor) -> Tensor:
        total = records.zeros(*self.shape)
        exact = records.to_double()
        blur_h, blur_w = self.blur_h.to(exact.grads[0]), self.blur_w.to(exact.grads[0])
        for weight, inputs, grads in zip(exact.weights, exact.inputs, exact.grads, strict=True):
            blurred = blur_h @ zero_excluded(inputs, factor_B) @ blur_w.T
            scaled = zero_excluded(grads, factor_B) * _expand_like(
                weight * factor_B.to(grads), grads
            )
            total += kernel_gradient(blurred, scaled, self.shape)
        return self.lags.whiten(total.flatten(2)).to(records.dtype)


@dataclass(frozen=True, eq=False)
class CirculantMap(_Map):
    """Circular correlation of a layer of circulant blocks: the generators' whole gradient.

        R_ij[l] = sum_s delta_i[s] x_j[(s - l) mod d]

    delta_i is a run of the output's gradient and x_j one of the input; nothing is padded or
    cropped. Where an input has positions, as in a sequence, R is summed over them before the
    norm is taken.

    Attributes:
        amplitude_F: The low-pass at the real frequencies of length d.
    """

    amplitude_F: Tensor

    @classmethod
    def of(cls, layer: CirculantLinear, keep: float) -> Self:
        """Make the map of `layer`; `keep`, the share of noise that passes, lies in [1/d, 1].

        Raises:
            ValueError: If `keep` is out of range.
        """
        amplitude_F = low_pass_response(layer.block, keep)
        response_d = torch.fft.irfft(amplitude_F.square(), n=layer.block)
        lags = Whitening.of(_toeplitz(response_d, layer.block))
        return cls(tuple(layer.weight.shape), lags, amplitude_F)

    def squares(self, records: Records) -> Tensor:
        p, q, d = self.shape
        positions = prod(records.grads[0].shape[1:-1])
        weights = [weight for weight in records.weights for _ in range(positions)]
        squares_B = records.zeros(len(records.grads[0]))
        for part, some in records.slices(len(weights) * (p + q + len(weights)) * d):
            scaled, scale_B = some.scaled()
            left, right = self._spectra(scaled.grads), self._spectra(scaled.inputs)
            bins_F = _torus_bins(1, d, scale_B.device)
            squares_B[part] = scale_B * _sum_energy(weights, left, right, bins_F)
        return squares_B

    def _spectra(self, leaves: tuple[Tensor, ...]) -> list[Tensor]:
        """Transform each point and each position in it, (B, blocks, F)."""
        blocks = (leaf.reshape(len(leaf), -1, leaf.shape[-1]) for leaf in leaves)
        positions = [x for leaf in blocks for x in leaf.unbind(1)]
        return [torch.fft.rfft(x.reshape(len(x), -1, self.shape[2])) for x in positions]

    def coordinates(self, records: Records, factor_B: Tensor) -> Tensor:
        p, q, d = self.shape
        spectrum = records.zeros(p, q, d // 2 + 1).to(torch.complex128)
        exact = records.to_double()
        for weight, inputs, grads in zip(exact.weights, exact.inputs, exact.grads, strict=True):
            scaled = zero_excluded(grads, factor_B) * _expand_like(
                weight * factor_B.to(grads), grads
            )
            delta = torch.fft.rfft(scaled.reshape(-1, p, d))
            x = torch.fft.rfft(zero_excluded(inputs, factor_B).reshape(-1, q, d))
            spectrum += torch.einsum("bpf,bqf->pqf", delta, x.conj())
        total = torch.fft.irfft(self.amplitude_F * spectrum, n=d)
        return self.lags.whiten(total).to(records.dtype)


def _design_axis(
    size: int, pad: tuple[int, int], kernel: int, keep: float
) -> tuple[int, Tensor, Tensor]:
    """Design one axis: length of the torus, blur matrix, covariance of its lags."""
    padded = size + sum(pad)
    outputs = padded - kernel + 1
    from scipy.fft import next_fast_len

    # long enough that no lag wraps around; a fast length costs less than the shortest one
    n = next_fast_len(padded + outputs - 1, real=True)
    amplitude_F = low_pass_response(n, keep)
    # A lag u pairs outputs 0..outputs-1 with inputs u..u+outputs-1: never outside the padded
    # input, so what the low-pass spreads further over the torus is not needed.
    blur = _toeplitz(torch.fft.irfft(amplitude_F, n=n), padded)
    covariance = _toeplitz(torch.fft.irfft(amplitude_F.square(), n=n), kernel)
    return n, blur[:, pad[0] : pad[0] + size], covariance


def _toeplitz(response_n: Tensor, size: int) -> Tensor:
    """Convolution on the circle with `response_n`, seen through a window of `size` samples."""
    at = torch.arange(size)
    return response_n[(at[:, None] - at) % len(response_n)]


def _count_bins(n: int) -> Tensor:
    """Count the bins, of n, that each real frequency stands for: 2, but 1 for zero and Nyquist."""
    pairs, nyquist = (n - 1) // 2, (n + 1) % 2
    return torch.tensor([1.0] + [2.0] * pairs + [1.0] * nyquist, dtype=torch.float64)


@lru_cache(maxsize=256)  # asked at every step, and a copy to a GPU each time would wait for it
def _torus_bins(n_h: int, n_w: int, device: torch.device) -> Tensor:
    """Shares of the n_h n_w bins for which the transposed real spectrum of a torus stands."""
    return (_count_bins(n_w).repeat_interleave(n_h) / (n_h * n_w)).to(device)


def _sum_energy(
    weights: Sequence[float], left: list[Tensor], right: list[Tensor], bins_F: Tensor
) -> Tensor:
    """sum_f bins_f sum_{o,i} |sum_p weights_p conj(left_po(f)) right_pi(f)|^2, shape (B,), float64.

    `left` and `right` hold, for each point p, spectra of shape (B, O, F) and (B, I, F). With the
    square multiplied out, channels are summed first, G_pp' = sum_o conj(left_po) left_p'o and
    H_pp' likewise:

        sum_{p,p'} w_p w_p' Re[ G_pp'(f) conj(H_pp'(f)) ]

    Of several points, terms of both signs may cancel, so they are multiplied in double. What
    rounding may still hide is added, so that |R| is never reported too small: of each spectrum
    and each sum, eps |w_p R_p| where points cancel and eps |w_p| |g_p| |x_p| where a gradient has
    little in common with its input; of the products, tiny (sum_p |w_p R_p|)^2.
    """
    eps, tiny = torch.finfo(left[0].real.dtype).eps, torch.finfo(torch.float64).eps
    if len(weights) > 1:  # one point has nothing to cancel against
        left, right = ([x.to(torch.complex128) for x in leaf] for leaf in (left, right))
    energy_B = alone_B = product_B = bins_F.new_zeros(len(left[0]))
    for p, weight in enumerate(weights):
        g_BF, h_BF = _sum_power(left[p]), _sum_power(right[p])
        own_B = weight**2 * ((g_BF * h_BF) @ bins_F)
        energy_B = energy_B + own_B
        alone_B = alone_B + own_B.sqrt()
        product_B = product_B + abs(weight) * ((g_BF @ bins_F) * (h_BF @ bins_F)).sqrt()
        for o in range(p):  # each pair of points once, counted twice
            g = (left[o].conj() * left[p]).sum(1)
            h = (right[o].conj() * right[p]).sum(1)
            energy_B = energy_B + 2 * weights[o] * weight * ((g * h.conj()).real @ bins_F)
    hidden_B = (_SLACK * eps * (alone_B + product_B)).square()
    # points that cancel may round below 0, and the root of that would be NaN
    return energy_B.clamp(min=0) + hidden_B + _SLACK * tiny * alone_B.square()


def _scale_to_one(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each example by its largest entry, and return both; zeros stay zeros."""
    peak_B = _find_peaks(leaf)
    divisor_B = torch.where(peak_B > 0, peak_B, 1)
    return leaf / _expand_like(torch.where(peak_B.isnan(), peak_B, divisor_B), leaf), peak_B


def _find_peaks(leaf: Tensor) -> Tensor:
    """Each example's largest entry, shape (B,)."""
    return leaf.abs().flatten(1).amax(1) if leaf.numel() else leaf.new_zeros(len(leaf))


def _long(leaf: Tensor) -> Tensor:
    """Norm of each example, shape (B,), float64."""
    norm_B: Tensor = torch.linalg.vector_norm(leaf.detach().flatten(1), dim=1, dtype=torch.float64)
    return norm_B


def _sum_power(spectra: Tensor) -> Tensor:
    """Sum of |.|^2 over channels, shape (B, F), float64."""
    return torch.view_as_real(spectra).square().sum(1).sum(-1).double()


def _expand_like(value_B: Tensor, leaf: Tensor) -> Tensor:
    """View `value_B`, shape (B,), so that it broadcasts over `leaf`, shape (B, ...)."""
    return value_B.view(-1, *(1,) * (leaf.dim() - 1))


def _read_padding(layer: nn.Conv2d) -> list[tuple[int, int]]:
    """Read the zeros before and after each axis. 'same' puts the odd one after, as torch does."""
    if layer.padding == "same":
        return [((k - 1) // 2, k // 2) for k in layer.kernel_size]
    if layer.padding == "valid":
        return [(0, 0), (0, 0)]
    return [(int(p), int(p)) for p in layer.padding]


def _refuse_other_convolutions(layer: nn.Conv2d) -> None:
    choices = {
        "stride": ((1, 1), "Use stride 1 and pool afterwards"),
        "dilation": ((1, 1), "Use dilation 1 and a larger kernel"),
        "groups": (1, "Use groups 1"),
        "padding_mode": ("zeros", "Use zeros"),
    }
    for name, (handled, remedy) in choices.items():
        if getattr(layer, name) != handled:
            raise ValueError(
                f"Spectral-DP handles Conv2d with {name} = {handled}, "
                f"got {getattr(layer, name)}. {remedy}."
            )
