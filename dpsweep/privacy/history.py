"""The noise history of correlated noise: what a trial must remember of its own noise.

    banded      x_t = (z_t - c_1 x_(t-1) - ... - c_(b-1) x_(t-b+1)) / c_0     the last b - 1 x
    buffered    x_t = z_t / c_0 - sum_j s_j u_j,     u_j <- d_j u_j + x_t       the d sums u

It is as secret as the noise: who has it takes the noise off the releases. It lives in the trial's
private checkpoint and is deleted with the secret. All of it is in double precision, before a
release rounds to its grid, and stays on the device where the release is made.
"""

from __future__ import annotations

from typing import Any

import torch

from dpsweep.core.errors import StateError
from dpsweep.privacy.correlated import Correlation

_TOLERANCE = 1e-6
"""Difference of coefficients that another machine's optimiser may find."""

_BLOCK = 1 << 16
"""Values at a time on a CPU: what is added up stays in a core's cache."""


class NoiseHistory:
    """Makes correlated noise from white noise, step by step.

    Args:
        correlation: Of the run.
        step: The step that comes next; 0 in a run.
    """

    def __init__(self, correlation: Correlation, step: int = 0) -> None:
        self.correlation, self.step = correlation, step
        self._kept: torch.Tensor | None = None  # its length is known when noise is first drawn

    def correlate(self, white: torch.Tensor, step: int) -> torch.Tensor:
        """Return x_t for the white noise z_t of step `step`, in its place, and remember it.

        Args:
            white: z_t, float64, flat; used up.
            step: t, each step once and in order.
        """
        if step != self.step:
            raise StateError(
                f"noise of step {step} was asked for, and the noise history is at step "
                f"{self.step}: the noise would not cancel as it was accounted for"
            )
        if self._kept is None:
            self._kept = white.new_zeros(self.correlation.num_kept, white.numel())
        make = self._make_buffered if self.correlation.decays else self._make_banded
        block = _BLOCK if white.is_cpu else max(1, white.numel())
        for start in range(0, white.numel(), block):
            make(white[start : start + block], self._kept[:, start : start + block])
        self.step += 1
        return white

    def _make_banded(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        """Take back the noise of the steps before; x_t replaces the oldest of them."""
        first, *others = self.correlation.coefficients
        for back, coefficient in enumerate(others, start=1):
            if back <= self.step:
                # elementwise, so that the sum is the same whatever a tensor's place in memory
                x.sub_(kept[(self.step - back) % len(others)], alpha=coefficient)
        x.div_(first)
        kept[self.step % len(others)] = x

    def _make_buffered(self, x: torch.Tensor, kept: torch.Tensor) -> None:
        first, *scales = self.correlation.coefficients
        x.div_(first)
        for total, scale in zip(kept, scales, strict=True):
            x.sub_(total, alpha=scale)
        for total, decay in zip(kept, self.correlation.decays, strict=True):
            total.mul_(decay).add_(x)

    def state_dict(self) -> dict[str, Any]:
        """Convert to plain values for the private checkpoint."""
        found = self.correlation
        lists = {"coefficients": list(found.coefficients), "decays": list(found.decays)}
        return {"step": self.step, "kept": self._kept, **lists}

    @classmethod
    def resume(
        cls, correlation: Correlation, saved: dict[str, Any] | None, step: int
    ) -> NoiseHistory:
        """Restore what `state_dict` saved before step `step`.

        The coefficients are those it was made with, to the last bit: another machine may have
        optimized them anew.

        Raises:
            StateError: If nothing was saved, or of another step or correlation.
        """
        if saved is None:
            raise StateError(
                "the checkpoint has no noise history, and its noise is correlated: without it the "
                "noise to come would not cancel as it was accounted for. Train in another folder"
            )
        kept = {k: torch.tensor(saved[k], dtype=torch.float64) for k in ("coefficients", "decays")}
        ours = {k: torch.tensor(getattr(correlation, k), dtype=torch.float64) for k in kept}
        alike = all(
            kept[k].shape == ours[k].shape and bool((kept[k] - ours[k]).abs().le(_TOLERANCE).all())
            for k in kept
        )
        if saved["step"] != step or not alike:
            raise StateError(
                f"the checkpoint's noise history is that of step {saved['step']} with "
                f"{len(saved['coefficients'])} coefficients, and the run is at step {step} with "
                f"{len(correlation.coefficients)}: it belongs to another run. Train in another "
                f"folder"
            )
        made = cls(_with_numbers(correlation, saved), step)
        made._kept = saved["kept"]
        return made


def _with_numbers(correlation: Correlation, saved: dict[str, Any]) -> Correlation:
    return Correlation(
        correlation.steps,
        correlation.cycle,
        correlation.sampling_rate,
        tuple(saved["coefficients"]),
        tuple(saved["decays"]),
    )
