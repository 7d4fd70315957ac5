"""Privacy config of one trial: target, clipping, noise."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpsweep.config.clipping import ClippingConfig, FlatClipping
from dpsweep.core.errors import InvalidKey
from dpsweep.core.strict import Strict
from dpsweep.privacy.accounting import LEAST_EPSILON, LEAST_NOISE
from dpsweep.privacy.clip import LEAST_NORM

_LEAST_DELTA = 1e-12


def _allow_name_alone(schema: dict[str, Any]) -> None:
    """Let editors take `clipping: flat` for `clipping: {name: flat}`."""
    schema["anyOf"] = [*schema.pop("oneOf", []), {"type": "string"}]


class NoiseConfig(Strict):
    """Randomness of the noise and of the batches."""

    source: Literal["fast", "secure"] = "fast"
    """fast: Philox, whose statistics are sound. secure: ChaCha20, and four draws for each value, so
    that nobody can compute the noise from releases; 3.6 times the time of fast draws."""


def _is_default(noise: NoiseConfig) -> bool:
    """Leave the key out of a trial's identity: one that began before it was there goes on."""
    return noise == NoiseConfig()


GOOD_CLIP_NORM = 0.3
"""A clip norm that does well without a search; the total step makes others nearly as good
(docs/benchmarks/search.md)."""


class PrivacyConfig(Strict):
    """Bound on how much one example may influence the trained model.

    Give the budget (`epsilon`) and the noise is calibrated, or give the noise and the
    budget is reported; giving both would let a file contradict itself.
    """

    letters: ClassVar[dict[str, str]] = {"C": "clip_norm", "sigma": "noise_multiplier"}

    epsilon: float | None = Field(default=None, gt=0, le=1000)
    """Budget at `delta`, add-or-remove-one-example neighbours; from 0.01 to 1000."""

    scope: Literal["trial", "sweep"] = "trial"
    """Runs that epsilon covers: each trial by itself, or all of a sweep together. With sweep, each
    trial gets the noise that keeps its share."""

    delta: Literal["auto"] | float = "auto"
    """Failure probability in (0, 1), well under 1 / num_examples. auto is num_examples^-1.1."""

    noise_multiplier: float | None = Field(default=None, ge=0)
    """Noise standard deviation on the summed gradient, in units of `clip_norm`. 0: not private;
    between 0 and 0.1: refused."""

    clip_norm: float = Field(default=1.0, ge=LEAST_NORM, le=1e12)
    """L2 bound on one example's gradient, in gradient units; the first, if clipping adapts. Without
    optimizer.lr the default is 0.3."""

    clipping: ClippingConfig = Field(default=FlatClipping(), json_schema_extra=_allow_name_alone)
    """flat, automatic, per_layer or adaptive; the spectral methods' own is per_layer."""

    noise: NoiseConfig = Field(default=NoiseConfig(), exclude_if=_is_default)
    """Source of its randomness."""

    @model_validator(mode="before")
    @classmethod
    def _expand_style_name(cls, data: Any) -> Any:
        match data:
            case {"clipping": str(name)}:
                return {**data, "clipping": {"name": name}}
        return data

    @model_validator(mode="after")
    def _check_budget_and_noise(self) -> Self:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidKey(
                "epsilon",
                "give exactly one of epsilon and noise_multiplier, "
                f"got epsilon={self.epsilon} and noise_multiplier={self.noise_multiplier}. "
                "With epsilon (say, epsilon: 4) the noise is calibrated to it",
            )
        if self.epsilon is not None and self.epsilon < LEAST_EPSILON:
            raise InvalidKey(
                "epsilon",
                f"must be at least {LEAST_EPSILON:g}, got {self.epsilon:g}: the accountant's grid "
                f"gets finer with epsilon, and a smaller one takes minutes and gigabytes. Write "
                f"epsilon: {LEAST_EPSILON:g}, or give noise_multiplier",
            )
        if self.noise_multiplier and self.noise_multiplier < LEAST_NOISE:
            raise InvalidKey(
                "noise_multiplier",
                f"must be 0 or at least {LEAST_NOISE:g}, got {self.noise_multiplier:g}: so little "
                f"noise protects nobody (epsilon is in the hundreds or thousands), and counting it "
                f"takes gigabytes. Write noise_multiplier: {LEAST_NOISE:g}, or 0 to train without "
                f"privacy",
            )
        if self.scope == "sweep" and self.epsilon is None:
            raise InvalidKey(
                "scope",
                f"sweep shares one epsilon among all runs and calibrates their noise to it, but "
                f"noise_multiplier: {self.noise_multiplier:g} gives the noise. Write epsilon: 4, "
                f"say, in its place, or scope: trial",
            )
        if self.delta != "auto" and 0 < self.delta < _LEAST_DELTA:
            raise InvalidKey(
                "delta",
                f"must be at least {_LEAST_DELTA:g}, got {self.delta}: below that the accountant's "
                f"rounding is larger. Write delta: auto for num_examples^-1.1",
            )
        if self.delta != "auto" and not 0 < self.delta < 1:
            raise InvalidKey(
                "delta",
                f"must lie in (0, 1), got {self.delta}. It is the chance that the guarantee "
                "fails; write delta: auto for num_examples^-1.1",
            )
        return self
