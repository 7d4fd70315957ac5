"""Resources of one trial on a cluster."""

from typing import Literal, Self

from pydantic import Field, model_validator

from dpsweep.config.units import Size, parse_size
from dpsweep.core.disk import format_bytes
from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict

_SMALLEST_SHARE = 0.0001
"""Of a GPU; Ray's own grain."""

_SMALLEST_MEMORY = 500_000_000
"""Bytes; torch, Ray and a small data set take most of it."""


class ResourcesConfig(Strict):
    """Resources of one trial; the cluster's resources decide how many run at once."""

    cpu: int = Field(default=1, gt=0)
    """Cores, and torch threads."""

    gpu: float | Literal["auto"] = 0.0
    """1; a share such as 0.25, which puts four trials on a GPU; or several GPUs of a node, such as
    4, which share each batch of a trial. auto measures how many trials a GPU is good for; on a
    cluster without one, that is none."""

    accelerator: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*$")
    """Type of GPU, as Ray names it: H100, A100-40G, T4, ... Trials run on nodes with such cards
    alone. Without it, on any."""

    memory: Size | None = None
    """Memory of the worker, such as 2GB: trials start where so much is free, and a worker that
    takes more is ended before it takes its node down. Without it, only Ray's own guard is there."""

    max_concurrent: int | None = Field(default=None, gt=0)
    """Trials of this sweep that run at once, at most; what is left is for other sweeps."""

    @model_validator(mode="after")
    def _check_obtainable(self) -> Self:
        if self.gpu != "auto" and self.gpu < 0:
            raise InvalidKey("gpu", f"{self.gpu:g} is below 0. Give 0, a share, 1 or auto")
        if self.gpu != "auto" and not (self.gpu <= 1 or self.gpu.is_integer()):
            raise InvalidKey(
                "gpu",
                f"{self.gpu:g} is no share of a GPU and no number of GPUs. Give a share up to 1, "
                f"such as 0.5, or several GPUs of a node, such as 2",
            )
        if self.gpu != "auto" and 0 < self.gpu < _SMALLEST_SHARE:
            raise InvalidKey("gpu", f"{self.gpu:g} is less than Ray can assign, {_SMALLEST_SHARE}")
        if self.accelerator is not None and self.gpu == 0:
            raise InvalidKey(
                "accelerator",
                f"is {self.accelerator}, and resources.gpu is 0: trials run on CPUs. Give "
                f"resources.gpu: 1, a share or auto",
            )
        if self.memory is not None and self.memory_bytes < _SMALLEST_MEMORY:
            raise InvalidKey(
                "memory",
                f"{self.memory} is less than a worker holds before its first step. Give at least "
                f"{format_bytes(_SMALLEST_MEMORY)}",
            )
        return self

    @property
    def memory_bytes(self) -> int:
        """Bytes of `memory`; 0 if none is given."""
        return parse_size(self.memory) if self.memory else 0

    @property
    def num_gpus(self) -> float:
        """GPUs of a trial; 0 for auto, which is not decided before there is a cluster."""
        return 0.0 if self.gpu == "auto" else self.gpu

    @property
    def num_devices(self) -> int:
        """Devices that share the batches of a trial."""
        return max(1, int(self.num_gpus))

    @property
    def device(self) -> Literal["cpu", "cuda", "auto"]:
        """Device of the trials whose config names none."""
        if self.gpu == "auto":
            return "auto"
        return "cuda" if self.gpu else "cpu"
