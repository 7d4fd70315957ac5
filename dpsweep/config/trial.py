"""One trial: data, model, privacy, training, optimizer, method. The file that is exported."""

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from dpsweep.config.aliases import resolve_path_aliases, resolve_source_aliases
from dpsweep.config.keys import BATCH_SIZE, CLIPPING, DELTA, EPOCHS, OPTIMIZER_NAME, path_of
from dpsweep.config.privacy import GOOD_CLIP_NORM, PrivacyConfig
from dpsweep.config.source import (
    Source,
    Tree,
    dump_yaml,
    validate_source,
    with_overrides,
    with_value,
)
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict, is_unused
from dpsweep.core.types import EngineName, Precision
from dpsweep.data import DataConfig
from dpsweep.data.augment import Augment
from dpsweep.data.tasks import Regression
from dpsweep.methods import METHODS, MethodConfig, build_method, compose
from dpsweep.models import ModelConfig
from dpsweep.models.huggingface import HuggingFace
from dpsweep.optim import OptimizerConfig
from dpsweep.optim.schedule import sum_factors
from dpsweep.optim.sgd import Sgd
from dpsweep.privacy.accounting import (
    HIDDEN_A_STEP,
    LEAST_DELTA_A_STEP,
    MOST_STEPS,
    Run,
    limit_noise,
)
from dpsweep.privacy.correlated import INDEPENDENT, Banded, Noise, PublicSettings
from dpsweep.privacy.query import SplitQuery


class _Tolerance(NamedTuple):
    """Noise and steps that a model tolerates, in units of its weights."""

    noise: float  # of each weight, in a whole run
    step: float  # in one step of SGD
    total: float  # in a whole run of Adam
    width: float = math.inf  # the same, times the cube root of its number of inputs


_LINEAR = _Tolerance(0.4, 50, 4, 16)
_CONVOLUTIONS = _Tolerance(0.2, 5, 4, 10)
_DENSE = _Tolerance(0.2, 5, 4, 4)
_DEEP = _Tolerance(0.2, 2.5, 0.4, 4)
_ADAPTED = _Tolerance(0.2, 2.5, 0.4)
_HEAD = _Tolerance(0.2, 5, 4)
_MODELS = {
    "linear": _LINEAR,
    **dict.fromkeys(("cnn_small", "cnn_papernot", "lenet5"), _CONVOLUTIONS),
    **dict.fromkeys(("mlp4", "mlp4_circulant"), _DENSE),
}
"""Models by name; the others are _DEEP."""

_NOISE_SECTIONS = {"compose": "method.compose.noise"}
"""Section of a file that has the noise of a method, if not `method`."""

_MOST_TOTAL_STEP = 1600.0

_LEAST_FLOOR = 1e-8


class PrecisionConfig(Strict):
    """Precision of the products of a step, where it is not that of the weights."""

    forward: Precision
    """bf16 or tf32, of forward and backward passes. Norms and sums stay in IEEE float32."""


class TrainConfig(Strict):
    """Length, batches, precision and device of the training."""

    letters: ClassVar[dict[str, str]] = {"B": "batch_size", "E": "epochs"}

    batch_size: int = Field(gt=0)
    """B: expected number of examples in a Poisson batch, at most num_examples."""

    epochs: float = Field(gt=0)
    """E: passes over the data in expectation; the run takes round(E N / B) steps, at least 1."""

    engine: EngineName = "auto"
    """Way to per-example gradients: bookkeeping (the fast one), vmap (any model), opacus (its
    hooks); auto is bookkeeping, or vmap where a model does not let it. All release the same, but
    that bookkeeping may count an example as zero that has an activation above 1e18."""

    max_physical_batch: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"
    """Most examples that are computed at once; auto is what fits a CPU's cache or a GPU's memory.
    Changes memory and speed; the result but for rounding not. From 4 on, a multiple of 4."""

    evaluate_every: int = Field(default=1, gt=0)
    """Epochs between two evaluations and reports."""

    device: Literal["cpu", "cuda", "auto"] = "auto"
    """Device to compute on. auto is cuda where torch sees one, cpu elsewhere."""

    threads: int | None = Field(default=None, gt=0)
    """CPU threads; torch's own choice if missing. Sums depend on it in the last bits."""

    dtype: Literal["float32", "float64"] = "float32"
    """Precision of weights and gradients."""

    precision: PrecisionConfig | None = Field(default=None, exclude_if=is_unused)
    """Lower precision of forward and backward passes, for speed on GPUs; or none."""

    augment: Augment | None = Field(default=None, exclude_if=is_unused)
    """Flips and crops, and how many copies are averaged into an example's gradient; or none."""

    ema: float | None = Field(default=None, gt=0, lt=1, exclude_if=is_unused)
    """Decay per step of an average over the iterates, such as 0.999, about 1 / (1 - ema) steps
    long: that average is measured and kept instead of the last iterate. It costs no privacy."""

    @model_validator(mode="after")
    def _check_precision(self) -> Self:
        if self.precision is None:
            return self
        forward = self.precision.forward
        if self.dtype != "float32":
            raise InvalidKey(
                "precision",
                f"computes in {forward} what dtype: {self.dtype} asks to be exact. Delete one",
            )
        if self.engine not in ("auto", "bookkeeping"):
            raise InvalidKey(
                "precision",
                f"engine {self.engine} keeps no records to sum in float32. Use engine: auto",
            )
        if forward == "tf32" and self.device == "cpu":
            raise InvalidKey(
                "precision.forward",
                "tf32 is a format of NVIDIA's GPUs, and device is cpu. Delete train.precision",
            )
        return self

    @property
    def forward_precision(self) -> Precision | None:
        """Precision of forward and backward passes; None if it is that of the weights."""
        return self.precision.forward if self.precision else None

    @property
    def copies(self) -> int:
        """K: copies of each example that are asked."""
        return self.augment.multiplicity if self.augment else 1


class TrialConfig(Strict):
    """Config of one trial, complete and without any search."""

    data: DataConfig
    """Data set: its private training examples, and those that measure the result."""

    model: ModelConfig
    """Model to train."""

    privacy: PrivacyConfig
    """Privacy target: epsilon and delta, or a noise multiplier."""

    train: TrainConfig
    """Length, batches, precision and device of the training."""

    optimizer: OptimizerConfig = Sgd()
    """The base optimizer and the size of its steps; the method's own if missing."""

    method: MethodConfig
    """The DP method and its tunables."""

    seed: int = Field(default=0, ge=0)
    """Public seed: weights at the start, held-out split. Never the noise or the sampling."""

    @property
    def settings(self) -> PublicSettings:
        """Public numbers that its noise and its schedule depend on."""
        privacy = self.privacy
        return PublicSettings(
            num_examples=self.data.num_examples,
            batch_size=self.train.batch_size,
            epochs=self.train.epochs,
            epsilon=privacy.epsilon if privacy.scope == "trial" else None,
            delta=self.delta,
            noise_multiplier=privacy.noise_multiplier,
            momentum=self.optimizer.momentum if isinstance(self.optimizer, Sgd) else 0.0,
        )

    @property
    def noise(self) -> Noise:
        """Its noise: independent from step to step, or correlated."""
        return build_method(self.method).noise

    @property
    def steps_and_rate(self) -> tuple[int, float]:
        """Steps and sampling rate as the accountant counts them: T and q with independent noise.

        With correlated noise an example takes part in fewer steps, at a higher rate. How many
        steps a run takes is `num_steps`.
        """
        return self.noise.schedule(self.settings)

    @property
    def num_steps(self) -> int:
        """T: its number of steps."""
        return self.settings.steps

    @property
    def copies(self) -> int:
        """K: copies of an example, or rows of a unit, whose mean gradient is clipped once."""
        return self.train.copies * self.data.copies

    @property
    def learning_rate(self) -> float:
        """Peak learning rate; under adaptive clipping with total_step, that at the first norm."""
        if self.optimizer.lr is not None:
            return self.optimizer.lr
        assert self.optimizer.total_step is not None, "the method's default is filled in"
        return self.optimizer.total_step / self._reach

    @property
    def total_step(self) -> float:
        """Total step r = lr G S (optim/base.py); with lr, as if an adaptive clip norm stayed."""
        given = self.optimizer.total_step
        return self.learning_rate * self._reach if given is None else given

    @property
    def default_total_step(self) -> float:
        """Total step that does well without a search, as docs/benchmarks/search.md measures it.

        With SGD min(k N mu, m S, 1600), in three digits. In a whole run the noise moves each weight
        by r / (N mu), for a run of mu-Gaussian privacy on N examples, whatever clip norm, batch
        size and length: k is what a model bears of it. m is what it bears in one step of S, times
        1 + beta with a heavy ball, which spreads a release over steps. With Adam's family
        min(t, w / F^(1/3)) with F inputs, as Adam moves all weights by as much, however many an
        input reaches. In regression, lr is at most 1 / (1 + F).
        """
        tolerance, inputs = self._tolerance, self.data.num_inputs
        if self.optimizer.name != "sgd":
            return min(tolerance.total, float(f"{tolerance.width / inputs ** (1 / 3):.2g}"))
        factors = sum_factors(self.optimizer.schedule, self.num_steps)
        gain = self.optimizer.reach(build_method(self.method).chain.dc_gain)
        most = tolerance.step * (2 - 1 / gain) * factors  # 1 / (1 - beta) is a heavy ball's gain
        if isinstance(self.data.task, Regression):
            # above 2 / (1 + F) a step on squared errors of F inputs in [-1, 1] may overshoot
            lr = 1 / (1 + inputs)
            most = min(most, lr * self.optimizer.reach(self.privacy.clip_norm) * factors)
        by_noise = tolerance.noise * self.data.num_examples * self._limit_mu
        return float(f"{min(by_noise, most, _MOST_TOTAL_STEP):.3g}")

    @property
    def _tolerance(self) -> _Tolerance:
        model = self.model
        if isinstance(model, HuggingFace):
            return _HEAD if model.adapter.name == "head" else _ADAPTED
        return _MODELS.get(model.name, _DEEP)

    @property
    def default_floor(self) -> float:
        """AdamBC's floor that does well without a search: twice the variance of a gradient's noise.

        By 2 (sigma C / B)^2, with sigma of the Gaussian limit, in two digits; 1e-8 at least. With
        less, v^ - Phi is mostly the error of v^.
        """
        sigma = self.privacy.noise_multiplier
        if sigma is None:
            sigma = limit_noise(self._limit_mu, *self.steps_and_rate)
        noise = sigma * self.privacy.clip_norm / self.train.batch_size
        return float(f"{max(2 * noise**2, _LEAST_FLOOR):.2g}")

    @property
    def _limit_mu(self) -> float:
        """Mu of the run's privacy in the Gaussian limit; inf without noise."""
        if self.privacy.epsilon is not None:
            return _mu_of_epsilon(self.privacy.epsilon, self.delta)
        steps, rate = self.steps_and_rate
        return Run(rate, self.privacy.noise_multiplier or 0.0, steps).limit_mu

    def with_total_step(self, total_step: float) -> Self:
        """The same with another total step."""
        size = {"lr": None, "total_step": total_step}
        return self.model_copy(update={"optimizer": self.optimizer.model_copy(update=size)})

    def with_clip_norm(self, clip_norm: float) -> Self:
        """The same with another clip norm."""
        privacy = self.privacy.model_copy(update={"clip_norm": clip_norm})
        return self.model_copy(update={"privacy": privacy})

    def with_own_bands(self) -> Self:
        """The same with the number of bands that `bands: auto` stands for."""
        noise, method = self.noise, self.method
        if not isinstance(noise, Banded) or noise.bands != "auto":
            return self
        bands = {"bands": noise.count_bands(self.settings)}
        if isinstance(method, compose.Config):
            own = method.compose.noise.model_copy(update=bands)
            parts = method.compose.model_copy(update={"noise": own})
            method = method.model_copy(update={"compose": parts})
        else:
            method = method.model_copy(update=bands)
        return self.model_copy(update={"method": method})

    @property
    def step_size(self) -> str:
        """Describe the step size that the file gives, such as `lr 0.52`."""
        given = self.optimizer.total_step
        return f"lr {self.optimizer.lr:.3g}" if given is None else f"total_step {given:.3g}"

    @property
    def _reach(self) -> float:
        """G S: the total step at learning rate 1, with every clipped gradient C long.

        C is clip_norm under each style of clipping. Flat and automatic clipping bring an example's
        whole gradient to it, per_layer the squares of its layers to a sum of C^2; adaptive clipping
        starts there, and the learning rate follows its norm (training/step.py).
        """
        length = self.privacy.clip_norm * build_method(self.method).chain.dc_gain
        return self.optimizer.reach(length) * sum_factors(self.optimizer.schedule, self.num_steps)

    @property
    def delta(self) -> float:
        """The failure probability, N^-1.1 if it is left to us."""
        delta = self.privacy.delta
        return self.data.num_examples**-1.1 if delta == "auto" else delta

    @model_validator(mode="before")
    @classmethod
    def _fill_method_defaults(cls, data: Any) -> Any:
        """The method's own optimizer and style of clipping where the file leaves them open."""
        match data:
            case {"method": {"compose": parts}}:
                data = {**data, "method": {"name": "compose", **data["method"]}}
                base = parts.get("base") if isinstance(parts, dict) else None
                known = base in METHODS["compose"].bases  # a wrong one is told at its own key
                own = {"optimizer": {"name": base if known else "sgd"}}
            case {"method": {"name": str(name)}} if name in METHODS:
                own = {
                    "optimizer": {"name": METHODS[name].bases[0]},
                    "privacy": {"clipping": METHODS[name].clipping},
                }
            case _:
                own = {"optimizer": {"name": "sgd"}}
        if isinstance(data, dict):
            data = {**data, "optimizer": data.get("optimizer", {})}
        for section, default in own.items():
            if isinstance(data, dict) and isinstance(data.get(section), dict):
                data = {**data, section: {**default, **data[section]}}
        return data

    @model_validator(mode="after")
    def _check_sections_fit(self) -> Self:
        bases = METHODS[self.method.name].bases
        if isinstance(self.method, compose.Config):
            bases = (self.method.compose.base,)
        if self.optimizer.name not in bases:
            raise InvalidKey(
                OPTIMIZER_NAME,
                f"{self.method.name} steps with {' or '.join(bases)}, got {self.optimizer.name}. "
                f"Delete optimizer.name, or choose another method.name",
            )
        num_examples = self.data.num_examples
        if self.train.batch_size > num_examples:
            raise InvalidKey(
                BATCH_SIZE,
                f"{self.train.batch_size} exceeds the {num_examples} private {self.data.protected} "
                f"of {self.data.name}. The sampling rate batch_size / num_examples is a "
                f"probability; give at most {num_examples}",
            )
        method, adaptive = build_method(self.method), self.privacy.clipping.name == "adaptive"
        noise = method.noise
        try:
            noise.check(self.settings)
        except InvalidKey as e:
            raise InvalidKey(
                f"{_NOISE_SECTIONS.get(self.method.name, 'method')}.{e.key}", str(e)
            ) from e
        if noise != INDEPENDENT and adaptive:
            raise InvalidKey(
                CLIPPING,
                f"adaptive changes the clip norm from step to step, and {self.method.name} takes "
                f"back noise of the steps before, which had another. Use clipping: flat",
            )
        if isinstance(method.query, SplitQuery) and adaptive:
            raise InvalidKey(
                CLIPPING,
                "adaptive follows the norm of one gradient, and predictor: split clips two. Use "
                "clipping: flat, or predictor: joint",
            )
        return self

    @model_validator(mode="after")
    def _fill_clip_norm(self) -> Self:
        if self.optimizer.lr is None and "clip_norm" not in self.privacy.model_fields_set:
            # as below: a copy would be lost
            object.__setattr__(self, "privacy", self.with_clip_norm(GOOD_CLIP_NORM).privacy)
        return self

    @model_validator(mode="after")
    def _fill_floor(self) -> Self:
        optimizer = self.optimizer
        if optimizer.name != "adambc" or optimizer.lr is not None:
            return self
        if "floor" not in optimizer.model_fields_set:
            filled = optimizer.model_copy(update={"floor": self.default_floor})
            object.__setattr__(self, "optimizer", filled)
        return self

    @model_validator(mode="after")
    def _has_a_step_size(self) -> Self:
        if self.optimizer.lr is None and self.optimizer.total_step is None:
            # a frozen model changes while it is made; a copy would be lost to TrialConfig(...)
            object.__setattr__(
                self, "optimizer", self.with_total_step(self.default_total_step).optimizer
            )
        return self

    @model_validator(mode="after")
    def _check_num_steps_and_delta(self) -> Self:
        steps = self.num_steps
        if steps > MOST_STEPS:
            raise InvalidKey(
                EPOCHS,
                f"{self.train.epochs:g} epochs of batches of {self.train.batch_size} are {steps:,} "
                f"steps, and the accountant adds up {MOST_STEPS:,} at most: beyond, it takes "
                f"hours and all memory. Give fewer epochs or a larger {BATCH_SIZE}",
            )
        least = steps * LEAST_DELTA_A_STEP
        if self.delta < least and self.privacy.noise_multiplier != 0:
            raise InvalidKey(
                DELTA,
                f"{self.delta:g} is too small for {steps:,} steps: rounding may hide "
                f"{HIDDEN_A_STEP:.1e} of probability in each. Write "
                f"delta: {1.01 * least:.2g} or more, or fewer train.epochs",
            )
        return self


@lru_cache(maxsize=256)
def _mu_of_epsilon(epsilon: float, delta: float) -> float:
    from dpsweep.privacy.audit import mu_of_epsilon  # with SciPy, which takes a while to import

    return mu_of_epsilon(epsilon, delta)


def resolve_trial_source(source: Source, settings: list[str]) -> Source:
    """A file that holds a trial, its letters spelled out, with the command line's settings."""
    spelled = resolve_source_aliases(source, TrialConfig)
    match spelled.tree:
        case {"privacy": {"clipping": str(name)}}:  # so that a key inside it can be set
            spelled = replace(
                spelled, tree=with_value(spelled.tree, path_of(CLIPPING), {"name": name})
            )
    changed = with_overrides(
        spelled, settings, lambda path: resolve_path_aliases(path, TrialConfig)
    )
    return resolve_source_aliases(changed, TrialConfig)  # once more, for letters inside a value


def load_trial(source: Source) -> TrialConfig:
    """The trial config in a file.

    Raises:
        ConfigError: Naming file, line, key, value and remedy of each mistake.
    """
    config: TrialConfig = validate_source(
        TrialConfig, replace(source, tree=_make_paths_absolute(source.tree))
    )
    return config


def refuse_shared_budget(config: TrialConfig, source: Source) -> None:
    """Raise ConfigError if the epsilon of a single trial is that of a whole sweep."""
    if config.privacy.scope == "sweep":
        raise ConfigError(
            f"{source.at(('privacy', 'scope'))}: sweep shares epsilon among the trials of a sweep, "
            f"and this is one trial. Write scope: trial, or make it the base of a sweep"
        )


def dump_trial(config: TrialConfig) -> str:
    """A trial config as YAML that `load_trial` reads back equal: a line a section, names first."""
    return dump_yaml(_sort_names_first(config.model_dump(mode="json", exclude_none=True)))


def _sort_names_first(tree: Tree) -> Tree:
    named = {"name": tree["name"], **tree} if "name" in tree else tree
    return {k: _sort_names_first(v) if isinstance(v, dict) else v for k, v in named.items()}


_PATHS = (
    ("data", "root"),
    ("data", "file"),
    ("data", "test_file"),
    ("data", "tokenizer"),
    ("model", "weights"),
    ("model", "folder"),
)


def _make_paths_absolute(tree: Tree) -> Tree:
    """`tree` with its paths made absolute, so that they mean the same in every process."""
    for section, key in _PATHS:
        inner = tree.get(section)
        if not isinstance(inner, dict) or not isinstance(inner.get(key), str):
            continue
        path = Path(inner[key]).expanduser()
        if key != "tokenizer" or path.exists():  # else it is a package
            tree = with_value(tree, (section, key), str(path.absolute()))
    return tree
