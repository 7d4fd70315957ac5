"""A trial's tokenizer as files that transformers reads, tried to give the ids it was trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

from dpsweep.core.errors import summarize_error
from dpsweep.data.text import (
    GenerationData,
    TextData,
    TokenData,
    find_tokenizer,
    open_tokenizer,
    read_tokenizer,
)

_FILE = "tokenizer.json"
_PROBES = (
    "A good film, isn't it?",
    " two  spaces,\n a tab\tand NO end ",
    "Émile naïve ß Ω 東京 🙂 1,234.50 e-mail@example.org #1 §2",
    "word " * 2000,  # longer than any length: cut at the same place
)
_MOST_WORDS = 2000


def write_tokenizer(data: TokenData, place: Path, *, segments: bool) -> str:
    """Write the tokenizer to a folder for AutoTokenizer, and try it there on public texts.

    Where it gives other ids, the folder gets a file that AutoTokenizer fails on: without any,
    transformers makes up a tokenizer of five tokens, and says nothing.

    Args:
        data: The data set that the trial was trained on.
        place: Folder, with a model's config.json or without.
        segments: Whether the model is given token_type_ids.

    Returns:
        Why transformers does not read it as the same; empty if it does.
    """
    source = find_tokenizer(data.tokenizer)
    coder, tree = open_tokenizer(source), json.loads(source.read_bytes())
    tree["truncation"] = tree["padding"] = None  # asked for at each call
    if isinstance(data, GenerationData) and coder.num_special_tokens_to_add(is_pair=False):
        tree["post_processor"] = None  # the trial put nothing around its prompts
    padding = _choose_padding(coder, read_tokenizer(source).padding)
    if padding is None:
        return block_tokenizer(place, f"{_FILE} has no special token to pad with")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": data.length,
        "model_input_names": ["input_ids", *["token_type_ids"] * segments, "attention_mask"],
        "pad_token": padding,
        "padding_side": "right",
        "truncation_side": "right",
        "clean_up_tokenization_spaces": False,
    }
    if isinstance(data, GenerationData):
        settings["eos_token"] = data.end
    (place / _FILE).write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
    (place / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    try:
        differing = _find_difference(data, coder, place, segments=segments)
    except Exception as e:  # of any kind, as it is the library that fails
        differing = f"{type(e).__name__}: {summarize_error(e)[:200]}"
    return block_tokenizer(place, differing) if differing else ""


def block_tokenizer(place: Path, reason: str) -> str:
    """Make AutoTokenizer fail in a folder, whose file says why; return the reason."""
    (place / "tokenizer_config.json").unlink(missing_ok=True)
    words = f"No tokenizer that transformers can read: {reason}. See README.md."
    (place / _FILE).write_text(json.dumps({"missing": words}, indent=2) + "\n")
    return reason


def copy_tokenizer(data: TokenData, place: Path) -> None:
    """Copy the tokenizer's file as it is, for the package tokenizers."""
    shutil.copyfile(find_tokenizer(data.tokenizer), place)


def _choose_padding(coder: Any, padding: int) -> str | None:
    """Name of the token of id `padding`, or of a special token: masks hide which one it is.

    A token of the vocabulary alone would become a special one, and texts be split at it.
    """
    added = {number: token.content for number, token in coder.get_added_tokens_decoder().items()}
    return added.get(padding, next(iter(added.values()), None))


def _find_difference(data: TokenData, coder: Any, place: Path, *, segments: bool) -> str:
    """Say for which text AutoTokenizer gives other ids than the trial's; empty if for none."""
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True)
    vocabulary = sorted(coder.get_vocab())
    words = vocabulary[:: max(1, len(vocabulary) // _MOST_WORDS)]
    special = [token.content for token in coder.get_added_tokens_decoder().values()][:200]
    parts = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
    texts: list[Any] = [*_PROBES, *(f"a {token} b{token}" for token in special), *parts]
    coder.enable_truncation(data.length)
    given: tuple[list[Any], ...] = (texts,)
    if isinstance(data, TextData) and not isinstance(data.text, str):
        firsts, seconds = texts, texts[::-1]
        given, texts = (firsts, seconds), list(zip(firsts, seconds, strict=True))
    found = loaded(*given, padding="max_length", truncation=True, max_length=data.length)
    expected = coder.encode_batch(texts, add_special_tokens=not isinstance(data, GenerationData))
    for index, (text, one) in enumerate(zip(texts, expected, strict=True)):
        wanted = {"input_ids": one.ids} | ({"token_type_ids": one.type_ids} if segments else {})
        mask = [1] * len(one.ids) + [0] * (data.length - len(one.ids))
        if found["attention_mask"][index] != mask or any(
            found[name][index][: len(ids)] != ids for name, ids in wanted.items()
        ):
            return f"AutoTokenizer gives other ids for a text such as {str(text)[:60]!r}"
    return ""
