"""Scattering features of images, computed by kymatio. Importing this takes a second: scipy.

Kymatio's own entry point (kymatio.torch) also imports its part for three dimensions, which newer
versions of scipy have shut; two dimensions are imported from where they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, avg_pool2d, conv2d, group_norm, pad

from dpsweep.core.progress import run_chunks
from dpsweep.core.seeds import derive_public_seed
from dpsweep.data.features import Patches, Scattering

_CHUNK = 250

_NOISE_IMAGES = 2_000
"""Images of noise; each gives a vector of channels for each of its places."""

_OPPONENT = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])
_OPPONENT /= _OPPONENT.norm(dim=1, keepdim=True)
"""Brightness, red against blue, and green against both: orthonormal rows."""

_COLORS = 1.0, 0.25, 0.1
"""Their contrasts in the noise images."""

_CONVOLVED = 10
"""Images that are convolved at once."""

_COLUMNS = 16
"""A product's columns are padded to a multiple: each then has the same last bits at any place."""

_FAINT = 0.3
"""Added to each patch's root mean square, which is about 0.34 on whitened noise in colour."""


def compute_scattering(
    images: Tensor,
    advance: Callable[[int], None],
    *,
    numbers: Callable[[Tensor], Tensor],
    config: Scattering,
    brightest: int = 255,
) -> Tensor:
    """Features of each image, float16, shape (N, *config.shape(image)).

    Half precision is a relative error of 0.0005 at most, and half the memory.

    Args:
        images: As bytes, shape (N, C, H, W).
        advance: Is given how many more are done, by several threads.
        numbers: Some of them as float32, of the size of 1.
        brightest: Largest pixel value.
    """
    channels, height, width = images.shape[1:]
    shape = (channels, height, width)
    transform = ScatteringTorch2D(J=config.depth, shape=(height, width), L=config.rotations)

    def scatter_once(pixels: Tensor) -> Tensor:
        found_BCHW = transform(pixels.contiguous()).flatten(1, 2)
        return group_norm(found_BCHW, config.groups) if config.groups else found_BCHW

    def scatter(some: Tensor) -> Tensor:
        pixels = numbers(some)
        if config.colors == "opponent":
            pixels = _mix_channels(pixels, _OPPONENT)
        found_BCHW = scatter_once(pixels)
        return (found_BCHW + scatter_once(pixels.flip(-1))) / 2 if config.mirror else found_BCHW

    layers: list[Callable[[Tensor], Tensor]] = [scatter]
    if config.whiten is not None:
        noise = draw_noise_images(_NOISE_IMAGES, shape) * brightest
        features = _in_chunks(scatter, noise)
        kind = Whitening if config.whiten_by == "channel" else FrequencyWhitening
        layers.append(kind.of(features, config.whiten).apply)
        if config.patches is not None:
            features = _in_chunks(layers[-1], features)
            layers.append(Filters.draw(features, config.patches).apply)
            features = _in_chunks(layers[-1], features)
            layers.append(Whitening.of(features, config.whiten).apply)

    made = torch.empty(len(images), *config.shape(shape), dtype=torch.float16)

    def write(rows: slice) -> None:
        made[rows] = reduce(lambda x, layer: layer(x), layers, images[rows])

    run_chunks(write, len(images), _CHUNK, advance)
    return made


def _mix_channels(images_NCHW: Tensor, matrix: Tensor) -> Tensor:
    """Each row of the matrix times the channels; by sums of images, the same in any batch."""
    channels = images_NCHW.unbind(1)
    mixed = [sum(w * c for w, c in zip(row, channels, strict=True)) for row in matrix.tolist()]
    return torch.stack(mixed, 1)


def _in_chunks(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([layer(x[i : i + _CHUNK]) for i in range(0, len(x), _CHUNK)])


@dataclass(frozen=True, eq=False)
class Whitening:
    """A linear map of the channels, the same at each place: (x - mean) times a symmetric matrix."""

    mean_C: Tensor
    matrix_CC: Tensor

    @classmethod
    def of(cls, features_BCHW: Tensor, share: float) -> "Whitening":
        """Compute (S + share * tr(S) / C)^(-1/2) for the channels' covariance S, in float64."""
        x_CN = features_BCHW.transpose(0, 1).flatten(1).double()
        mean_C = x_CN.mean(1)
        return cls(mean_C.float(), _inverse_root(x_CN - mean_C[:, None], share).float())

    def apply(self, features_BCHW: Tensor) -> Tensor:
        """Whiten features, shape (B, C, H, W).

        Places and images are padded to sizes at which the product's last bits depend on neither
        the number of images nor on where they lie in memory.
        """
        x_BCN = (features_BCHW - self.mean_C[:, None, None]).flatten(2)
        batch, _, places = x_BCN.shape
        x_BCN = pad(x_BCN, (0, -places % _COLUMNS, 0, 0, 0, max(0, 2 - batch)))
        made = torch.bmm(self.matrix_CC.expand(len(x_BCN), -1, -1), x_BCN)
        return made[:batch, :, :places].reshape(features_BCHW.shape)


@dataclass(frozen=True, eq=False)
class FrequencyWhitening:
    """A linear map of the channels at each spatial frequency of the feature maps.

    It lies between a cosine transform (DCT-II, orthonormal) over the places and its inverse. Images
    look statistically alike at all places, so that their frequencies are all but uncorrelated.
    """

    mean_CN: Tensor
    cosines_NN: Tensor  # a frequency a row
    matrices_FCC: Tensor

    @classmethod
    def of(cls, features_BCHW: Tensor, share: float) -> "FrequencyWhitening":
        """Compute (S_f + share * v)^(-1/2) for the channels' covariance S_f at each frequency.

        v is the mean variance over channels and frequencies. In float64.
        """
        height, width = features_BCHW.shape[2:]
        cosines_NN = torch.kron(_make_cosines(height), _make_cosines(width))
        x_BCN = features_BCHW.flatten(2).double()
        mean_CN = x_BCN.mean(0)
        x_FCB = ((x_BCN - mean_CN) @ cosines_NN.T).permute(2, 1, 0)
        return cls(mean_CN.float(), cosines_NN.float(), _inverse_root(x_FCB, share).float())

    def apply(self, features_BCHW: Tensor) -> Tensor:
        """Whiten features, shape (B, C, H, W); each product has the same shape for any B."""
        made = []
        for first in range(0, len(features_BCHW), _COLUMNS):
            some_BCHW = features_BCHW[first : first + _COLUMNS]
            x_BCN = some_BCHW.flatten(2) - self.mean_CN
            x_NCB = pad(x_BCN.permute(2, 1, 0), (0, _COLUMNS - len(x_BCN)))
            spectra_FCB = (self.cosines_NN @ x_NCB.flatten(1)).view_as(x_NCB)
            spectra_FCB = torch.bmm(self.matrices_FCC, spectra_FCB)
            x_NCB = (self.cosines_NN.T @ spectra_FCB.flatten(1)).view_as(x_NCB)
            made.append(x_NCB[:, :, : len(x_BCN)].permute(2, 1, 0).reshape(some_BCHW.shape))
        return torch.cat(made)


def _inverse_root(x: Tensor, share: float) -> Tensor:
    """(S + share * mean variance)^(-1/2) of S = x x^T / n, for x of shape (..., C, n)."""
    variances, axes = torch.linalg.eigh(x @ x.mT / x.shape[-1])
    scale = (variances + share * variances.mean()).rsqrt()
    root: Tensor = axes * scale[..., None, :] @ axes.mT
    return root


def _make_cosines(size: int) -> Tensor:
    """The orthonormal DCT-II, shape (size, size), in float64."""
    k = torch.arange(size, dtype=torch.float64)
    rows: Tensor = (torch.pi / size * k[:, None] * (k + 0.5)).cos() * (2 / size) ** 0.5
    rows[0] /= 2**0.5
    return rows


@dataclass(frozen=True, eq=False)
class Filters:
    """Filters over patches of size x size places; their outputs are rectified and averaged."""

    filters_KCSS: Tensor
    pool: int

    @classmethod
    def draw(cls, noise_BCHW: Tensor, config: Patches) -> "Filters":
        """Take `num` patches of the features of noise images, each scaled to length 1."""
        rng = torch.Generator().manual_seed(derive_public_seed(0, "patches"))
        num, size = config.num, config.size
        height, width = noise_BCHW.shape[2:]

        def choose(among: int) -> list[int]:
            chosen: list[int] = torch.randint(among, (num,), generator=rng).tolist()
            return chosen

        places = zip(
            choose(len(noise_BCHW)),
            choose(height - size + 1),
            choose(width - size + 1),
            strict=True,
        )
        patches_KCSS = torch.stack(
            [noise_BCHW[i, :, top : top + size, left : left + size] for i, top, left in places]
        )
        return cls(
            patches_KCSS / patches_KCSS.flatten(1).norm(dim=1)[:, None, None, None], config.pool
        )

    def apply(self, features_BCHW: Tensor) -> Tensor:
        """Features of shape (B, K, pool, pool); faint patches count less than others.

        The convolution's algorithm depends on how many images it gets: they are always as many, so
        that an image's features, to the last bit, do not depend on the number of others.
        """
        size = self.filters_KCSS.shape[2]
        made = []
        for first in range(0, len(features_BCHW), _CONVOLVED):
            some = features_BCHW[first : first + _CONVOLVED]
            x_BCHW = pad(some, (0, 0) * 3 + (0, _CONVOLVED - len(some)))
            contrast = avg_pool2d(x_BCHW.square().mean(1, keepdim=True), size, stride=1).sqrt()
            found = conv2d(x_BCHW, self.filters_KCSS) / (contrast + _FAINT)
            made.append(adaptive_avg_pool2d(found.relu(), self.pool)[: len(some)])
        return torch.cat(made)


def draw_noise_images(num: int, shape: tuple[int, int, int]) -> Tensor:
    """Draw public images of noise with values in [0, 1], shape (num, C, H, W).

    Amplitudes fall with the frequency f as f^-a, a in [1, 1.6], as those of natural images do
    (Field 1987, Relations between the statistics of natural images and the response properties of
    cortical cells). Brightness and contrast vary; in images of three channels, colours are weaker.
    """
    rng = torch.Generator().manual_seed(derive_public_seed(0, "noise images"))

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num, 1, 1, 1, generator=rng)

    channels, height, width = shape
    f_HW = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width))
    f_HW[0, 0] = 1 / max(height, width)
    weights = f_HW ** -uniform(1.0, 1.6)
    white = torch.randn(num, channels, height, width, generator=rng)
    made: Tensor = torch.fft.ifft2(torch.fft.fft2(white) * weights).real
    if channels == len(_COLORS):
        made = _mix_channels(made * torch.tensor(_COLORS)[:, None, None], _OPPONENT.T)
    made = made / made.std((1, 2, 3), keepdim=True)
    return (uniform(0.3, 0.65) + uniform(0.1, 0.3) * made).clamp(0, 1)
