"""Replaces what mixes examples or draws at random in models that are not ours (own.py)."""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.dropout import _DropoutNd

from dpsweep.core.errors import InvalidKey
from dpsweep.models.parts import largest_divisor

_MOST_GROUPS, _CHANNELS_OF_A_GROUP = 32, 4
_LEAVES_OUT = ("StochasticDepth", "DropPath", "DropBlock2d", "DropBlock3d", "PatchDropout")


class FixedNorm(nn.Module):
    """Batch norm whose mean and variance are constants, so that no example hears of another."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        self.eps = norm.eps
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) -> the same shape."""
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )


def make_private(model: nn.Module, *, keep_statistics: bool = False) -> nn.Module:
    """`model` with its batch norms, dropouts and in-place layers replaced, where that can be.

    Args:
        model: Changed.
        keep_statistics: True if public weights are loaded into it: batch norms keep the means and
            variances that come with those. Otherwise they become group norms.

    Raises:
        InvalidKey: If a batch norm has no size, or no statistics to keep.
    """
    for name, layer in list(model.named_modules()):
        for own, child in list(layer.named_children()):
            if isinstance(child, _BatchNorm):
                place = f"{name}.{own}" if name else own
                setattr(layer, own, _replace_norm(place, child, keep_statistics))
        if isinstance(layer, _DropoutNd) or type(layer).__name__ in _LEAVES_OUT:
            _disable_dropout(layer)
        if isinstance(getattr(layer, "dropout", None), float):
            layer.dropout = 0.0
        if getattr(layer, "inplace", False) is True:
            layer.inplace = False
    return model


def _replace_norm(place: str, norm: _BatchNorm, keep_statistics: bool) -> nn.Module:
    if isinstance(norm, _LazyNormBase) or not norm.num_features:
        raise InvalidKey(
            "model",
            f"layer {place!r} is a {type(norm).__name__} whose size is not known yet: it cannot be "
            f"replaced by a group norm. Give it its number of channels",
        )
    if keep_statistics:
        if norm.running_mean is None:
            raise InvalidKey(
                "model", f"batch norm {place!r} keeps no statistics that weights could bring"
            )
        return FixedNorm(norm)
    most = min(_MOST_GROUPS, max(1, norm.num_features // _CHANNELS_OF_A_GROUP))
    groups = largest_divisor(most, norm.num_features)
    return nn.GroupNorm(groups, norm.num_features, norm.eps, affine=norm.affine)


def _disable_dropout(layer: nn.Module) -> None:
    for key in ("p", "drop_prob", "prob"):
        if isinstance(getattr(layer, key, None), float):
            setattr(layer, key, 0.0)
