"""Tasks: what a model is trained and measured by.

A task has the loss of one example, the targets that checks draw, and its metrics. A loss sees one
example at a time, and engines call it so: a mean over the batch, or over its tokens, would let one
example change another's gradient. Metrics are computed from sums over the validation data, so that
no more than a few outputs are in memory at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import InvalidKey
from dpsweep.core.own_code import import_function
from dpsweep.core.strict import Strict, is_unused

if TYPE_CHECKING:
    from torch import Tensor

MOST_CONFUSED = 200
"""Classes up to which a confusion matrix is counted, whatever the metrics."""

ClassMetric = Literal["accuracy", "f1", "matthews"]
TextMetric = Literal["perplexity", "bleu", "rouge_l"]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Numbers = Annotated[tuple[float, ...], Field(strict=False)]


class Task(Strict):
    """Base of every task."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics, without `valid/`."""
        raise NotImplementedError

    @property
    def outputs_words(self) -> str:
        """Meaning of a model's outputs, in words."""
        return "a logit for each class"

    def check_outputs(self, num_outputs: int) -> None:
        """Raise InvalidKey if the task does not fit a model of so many outputs."""

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        """Loss of each example by itself, shape (B,).

        Args:
            outputs_B: What the model returns, shape (B, ...).
            targets_B: Shape (B, ...).
        """
        raise NotImplementedError

    def loss(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        """Mean of `losses`, a scalar: what engines call, with one example at a time."""
        return self.losses(outputs_B, targets_B).mean()

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        """Draw public targets for checks, shape (num, ...); neighbours differ where they can.

        Args:
            outputs: Shape of what the model returns for one example.
        """
        raise NotImplementedError

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        """Sums over some examples from which the metrics are computed, by name."""
        raise NotImplementedError

    def compute_metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        """Compute the metrics of `num` examples from their sums, in double, by name."""
        raise NotImplementedError


class Classification(Task):
    """One class for each example; cross-entropy, in nats."""

    name: Literal["classification"] = "classification"

    classes: Names | None = Field(default=None, min_length=2, exclude_if=is_unused)
    """Labels in the order of their numbers, such as [negative, positive]. If missing, labels are
    numbers from 0 to data.num_classes - 1."""

    class_weights: Numbers | None = Field(default=None, exclude_if=is_unused)
    """Factor of the loss of each class's examples. Declared, as counts of classes are private. The
    loss is not divided by the weights of a batch, which would mix its examples."""

    metrics: Annotated[tuple[ClassMetric, ...], Field(strict=False)] = Field(
        default=("accuracy",), min_length=1, exclude_if=lambda x: x == ("accuracy",)
    )
    """Beside the loss: accuracy, f1 (of class 1 if there are two, else the mean over classes),
    matthews (Matthews correlation, -1 to 1)."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*self.metrics, "loss")

    def check_outputs(self, num_outputs: int) -> None:
        given = self.class_weights
        if given is not None and (len(given) != num_outputs or not all(x >= 0 for x in given)):
            raise InvalidKey(
                "class_weights",
                f"takes a number from 0 up for each of {num_outputs} classes, got {list(given)}",
            )

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        from dpsweep.privacy.engine.base import CrossEntropy

        losses_B = CrossEntropy().losses_under_vmap(outputs_B, targets_B)
        if self.class_weights is None:
            return losses_B
        return losses_B * losses_B.new_tensor(self.class_weights)[targets_B]

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        import torch

        return torch.arange(num) % outputs[-1]

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        import torch
        from torch.nn.functional import cross_entropy

        guesses_B = outputs_B.argmax(1)
        found = {"right": (guesses_B == targets_B).sum()}
        if self.class_weights is None:
            found["loss"] = cross_entropy(outputs_B, targets_B, reduction="sum")
        else:
            found["loss"] = self.losses(outputs_B, targets_B).sum()
        num = outputs_B.shape[1]
        if num <= MOST_CONFUSED or set(self.metrics) - {"accuracy"}:
            pairs_B = targets_B * num + guesses_B
            found["confusion"] = torch.bincount(pairs_B, minlength=num**2).view(num, num)
        return found

    def compute_metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        found = {"accuracy": float(sums["right"]) / num}
        if set(self.metrics) - {"accuracy"}:
            pairs_KK = sums["confusion"]
            found |= {"f1": _f1(pairs_KK), "matthews": _matthews(pairs_KK)}
        return {**{k: found[k] for k in self.metrics}, "loss": float(sums["loss"]) / num}


class Regression(Task):
    """One number for each example, or several; errors are in units of half the declared range.

    A model's outputs are (target - middle of the range) / half the range, so that the clip norm
    and the learning rate suit targets of any unit. MAE and R2 are those of the targets themselves.
    """

    name: Literal["regression"] = "regression"

    range: Annotated[tuple[float, float], Field(strict=False)]
    """[LOW, HIGH] of the targets, declared from public knowledge and not computed from the rows."""

    kind: Literal["squared", "huber"] = "squared"
    """Error of one number: squared, (o - y)^2 / 2; huber, the same up to `huber_delta` and linear
    beyond."""

    huber_delta: float = Field(default=1.0, gt=0)
    """Error at which huber becomes linear, in units of half the range."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("mae", "r2", "loss")

    @property
    def outputs_words(self) -> str:
        middle, half = (self.range[0] + self.range[1]) / 2, (self.range[1] - self.range[0]) / 2
        return f"(y - {middle:g}) / {half:g} for a target y"

    @model_validator(mode="after")
    def _range_is_one(self) -> Self:
        if not self.range[0] < self.range[1]:
            raise InvalidKey("range", f"takes [LOW, HIGH] with LOW below HIGH, got {self.range}")
        return self

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        from torch.nn.functional import huber_loss

        errors = outputs_B - self._scale(targets_B).to(outputs_B)
        if self.kind == "squared":
            return errors.square().flatten(1).mean(1) / 2
        zeros = errors.new_zeros(())
        each = huber_loss(errors, zeros.expand_as(errors), "none", self.huber_delta)
        return each.flatten(1).mean(1)

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        import torch

        low, high = self.range
        shares = torch.arange(num).remainder(3)[:, None].expand(num, *outputs) / 2
        return low + (high - low) * shares.double()

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        # deviations from the middle, so that squares of large numbers do not cancel
        scaled_B = self._scale(targets_B.double())
        errors_B = outputs_B.double() - scaled_B
        return {
            "loss": self.losses(outputs_B, targets_B).double().sum(),
            "absolute": errors_B.abs().sum(),
            "squared": errors_B.square().sum(0),
            "targets": scaled_B.sum(0),
            "squares": scaled_B.square().sum(0),
            "numbers": errors_B.new_tensor(errors_B.numel()),
        }

    def compute_metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        half = (self.range[1] - self.range[0]) / 2
        spread = sums["squares"] - sums["targets"].square() / num
        r2 = (1 - sums["squared"] / spread).mean()  # nan if all targets are equal
        mae = half * float(sums["absolute"]) / float(sums["numbers"])
        return {"mae": mae, "r2": float(r2), "loss": float(sums["loss"]) / num}

    def _scale(self, targets: Tensor) -> Tensor:
        low, high = self.range
        return (targets - (low + high) / 2) / ((high - low) / 2)


class MultiLabel(Task):
    """Any number of labels for each example; the mean of their binary cross-entropies, in nats."""

    name: Literal["multi_label"] = "multi_label"

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("accuracy", "f1", "loss")

    @property
    def outputs_words(self) -> str:
        return "a logit for each label"

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        from torch.nn.functional import binary_cross_entropy_with_logits

        targets = targets_B.to(outputs_B)
        return binary_cross_entropy_with_logits(outputs_B, targets, reduction="none").mean(1)

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        import torch

        return (torch.arange(num)[:, None] + torch.arange(outputs[-1])) % 2

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        guesses_B, truths_B = outputs_B > 0, targets_B > 0
        return {
            "loss": self.losses(outputs_B, targets_B).sum(),
            "right": (guesses_B == truths_B).double().mean(1).sum(),
            "both": (guesses_B & truths_B).sum(),
            "either": guesses_B.sum() + truths_B.sum(),
        }

    def compute_metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        """Accuracy over all labels, and F1 over all labels together (micro)."""
        f1 = 2 * float(sums["both"]) / max(1.0, float(sums["either"]))
        return {"accuracy": float(sums["right"]) / num, "f1": f1, "loss": float(sums["loss"]) / num}


class CausalLM(Task):
    """The next token at each position; an example's loss is the mean over its own target tokens.

    Prompt and padding count nowhere: their targets are IGNORED. The mean is over the tokens of one
    example and never over those of a batch.
    """

    name: Literal["causal_lm"] = "causal_lm"

    metrics: Annotated[tuple[TextMetric, ...], Field(strict=False)] = Field(
        default=("perplexity",), min_length=1, exclude_if=lambda x: x == ("perplexity",)
    )
    """Beside the loss: perplexity; bleu (0 to 100, of sacrebleu) and rouge_l (F measure, 0 to 1, of
    rouge-score) of texts that the model writes after the validation prompts."""

    num_prompts: int = Field(default=200, gt=0, exclude_if=lambda x: x == 200)
    """Most prompts that texts are written for at each evaluation: the first different ones of the
    validation data. All targets of a prompt are its references."""

    max_tokens: int = Field(default=64, gt=0, exclude_if=lambda x: x == 64)
    """Most tokens of a text that the model writes; data.length bounds prompt and text together."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (*self.metrics, "loss")

    @property
    def generates(self) -> bool:
        """True if texts are written to be measured."""
        return bool({"bleu", "rouge_l"} & {*self.metrics})

    @property
    def outputs_words(self) -> str:
        return "logits of the next token at each position"

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        return _token_losses(outputs_B, targets_B).sum(1) / _count_targets(targets_B).clamp(min=1)

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        import torch

        length, vocabulary = outputs
        targets = (torch.arange(num)[:, None] * 7 + torch.arange(length)) % vocabulary
        targets[:, : length // 3] = IGNORED  # a prompt
        targets[1::2, length - length // 3 :] = IGNORED  # padding of every second example
        return targets

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        tokens_BT, counts_B = _token_losses(outputs_B, targets_B), _count_targets(targets_B)
        losses_B = tokens_BT.sum(1) / counts_B.clamp(min=1)
        return {"loss": losses_B.sum(), "tokens": tokens_BT.sum(), "count": counts_B.sum()}

    def compute_metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        """Perplexity of all target tokens together, and the mean of the examples' losses.

        Metrics of texts are computed by training/generate.py, and stand among the sums.
        """
        found = {**sums, "perplexity": (sums["tokens"] / sums["count"]).exp()}
        return {**{k: float(found[k]) for k in self.metrics}, "loss": float(sums["loss"]) / num}


IGNORED = -100
"""Target at a position that is not learned, as torch has it."""


def _token_losses(outputs_B: Tensor, targets_B: Tensor) -> Tensor:
    from torch.nn.functional import cross_entropy

    logits = outputs_B.transpose(1, 2)
    return cross_entropy(logits, targets_B, ignore_index=IGNORED, reduction="none")


def _count_targets(targets_B: Tensor) -> Tensor:
    return (targets_B != IGNORED).sum(1)


class OwnTask(Task):
    """A loss of yours. Naming it runs that code."""

    name: Literal["own"] = "own"

    function: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """MODULE:FUNCTION. It is called with the outputs and the target of one example, without a batch
    axis, and returns its loss, a scalar tensor: so it cannot mix examples."""

    folder: str | None = None
    """Folder of the module, if it is not installed. Relative to where you run."""

    num_outputs: int = Field(gt=0)
    """K: how many numbers a model gives for an example."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def outputs_words(self) -> str:
        return f"what {self.function} takes as outputs"

    def losses(self, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        from torch.func import vmap

        found: Tensor = vmap(import_function(self.function, self.folder))(outputs_B, targets_B)
        return found

    def draw_targets(self, num: int, outputs: tuple[int, ...]) -> Tensor:
        import torch

        return torch.arange(num).remainder(2).double()

    def sums(self, outputs_B: Tensor, targets_B: Tensor) -> dict[str, Tensor]:
        return {"loss": self.losses(outputs_B, targets_B).sum()}

    def compute_metrics(self, sums: dict[str, Tensor], num: int) -> dict[str, float]:
        return {"loss": float(sums["loss"]) / num}


TaskConfig = Annotated[
    Classification | Regression | MultiLabel | CausalLM | OwnTask, Field(discriminator="name")
]
"""Any task, told apart by `name`."""

CLASSIFICATION, CAUSAL_LM = Classification(), CausalLM()


def _f1(pairs_KK: Tensor) -> float:
    """F1 of class 1 if there are two classes, or the mean over classes; 0 for one never seen."""
    right_K = pairs_KK.diagonal()
    each_K = 2 * right_K / (pairs_KK.sum(0) + pairs_KK.sum(1)).clamp(min=1)
    return float(each_K[1] if len(each_K) == 2 else each_K.mean())


def _matthews(pairs_KK: Tensor) -> float:
    """Matthews correlation of K classes (Gorodkin 2004); 0 where it is not defined."""
    num, right = pairs_KK.sum(), pairs_KK.diagonal().sum()
    true_K, guessed_K = pairs_KK.sum(1), pairs_KK.sum(0)
    above = right * num - (true_K * guessed_K).sum()
    spreads = (num**2 - true_K.square().sum()) * (num**2 - guessed_K.square().sum())
    return float(above / spreads.sqrt()) if spreads > 0 else 0.0
