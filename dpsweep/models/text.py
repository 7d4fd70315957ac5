"""A transformer of the package transformers as a function of each example alone.

What its library leaves to the batch is fixed here: positions have a batch dimension, masks are
additive and of four dimensions, nothing is cached, and nothing is dropped at random. That the
result is still the library's is tried on random tokens each time a model is read.
"""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpsweep.core.errors import InvalidKey, summarize_error
from dpsweep.core.seeds import derive_public_seed
from dpsweep.models.lora import add_lora, find_linear
from dpsweep.models.transfer import freeze

_AGREED = 1e-3
"""Largest difference to the library's own hidden states, relative to their size."""

_TARGETS = (
    ("query", "value"),
    ("q_proj", "v_proj"),
    ("q_lin", "v_lin"),
    ("c_attn",),
    ("query_key_value",),
    ("Wqkv",),
)
"""Names of the layers that make queries and values, in the families of models."""

_OTHERS = "Give a model of another kind, such as BERT, RoBERTa, GPT-2 or Llama"

_PASSING = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "use_cache"}


class TextModel(nn.Module):
    """Token ids and their mask -> logits of each example, or of each position.

    Args:
        body: AutoModel, or AutoModelForCausalLM if there is no head.
        head: Linear, on the pooled last hidden states; None for a causal language model.
        pool: Hidden states of an example that are pooled: their mean, the first, the last.
    """

    def __init__(self, body: Any, head: nn.Linear | None, pool: str) -> None:
        super().__init__()
        self.body, self.pool = body, pool
        if head is not None:
            self.head = head
        takes = _PASSING & signature(body.forward).parameters.keys()
        # GPT-2 takes segments too, and looks them up among its words
        segments = getattr(body.config, "type_vocab_size", 0) or 0
        self.num_segments = segments if "token_type_ids" in takes else 0
        self._positions = "position_ids" in takes
        self._caches = "use_cache" in takes
        places = [m for k, m in body.named_modules() if k.endswith("position_embeddings")]
        padding = getattr(places[0], "padding_idx", None) if places else None
        # positions of the table before the first token's: RoBERTa's begin behind the padding's
        self.num_unused_positions = 0 if padding is None else padding + 1
        self._is_causal = any(getattr(m, "is_causal", False) for m in body.modules())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """(B, T) and 1 at an example's own positions, which come first -> (B, K), or (B, T, K).

        Models without two segments, such as RoBERTa's, are given none.
        """
        num, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        given: dict[str, Any] = {"use_cache": False} if self._caches else {}
        if self._positions:
            numbers = self.num_unused_positions + torch.arange(length, device=input_ids.device)
            given["position_ids"] = numbers.expand(num, length)
        if self.num_segments:
            known = token_type_ids if self.num_segments > 1 else None
            given["token_type_ids"] = torch.zeros_like(input_ids) if known is None else known
        mask = self._additive_mask(attention_mask)
        output = self.body(input_ids=input_ids, attention_mask=mask, **given)
        if "head" not in self._modules:
            logits: Tensor = output.logits
            return logits
        logits = self.head(pool_hidden(output.last_hidden_state, attention_mask, self.pool))
        return logits

    def _additive_mask(self, mask_BT: Tensor) -> Tensor:
        """0 where a position may be looked at, else a large negative number, (B, 1, T, T).

        Each position may look at itself: a row without any key would be a mean over all of them.
        """
        length = mask_BT.shape[1]
        seen = mask_BT[:, None, None, :].bool().expand(-1, 1, length, length)
        if self._is_causal:
            seen = seen & torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
        seen = seen | torch.eye(length, dtype=torch.bool, device=seen.device)
        dtype = self.body.get_input_embeddings().weight.dtype
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def pool_hidden(hidden_BTE: Tensor, mask_BT: Tensor, pool: str) -> Tensor:
    """One vector for each example, from its own positions alone, shape (B, E)."""
    if pool == "first":
        return hidden_BTE[:, 0]
    if pool == "last":
        last_B = mask_BT.long().sum(1).clamp(min=1) - 1
        return hidden_BTE[torch.arange(len(last_B), device=last_B.device), last_B]
    weight_BT = mask_BT.to(hidden_BTE)
    total_BE: Tensor = (hidden_BTE * weight_BT[:, :, None]).sum(1)
    return total_BE / weight_BT.sum(1, keepdim=True).clamp(min=1)


def make_text_model(
    place: Path, outputs: int | None, pool: str, *, random: bool, key: str = "folder"
) -> TextModel:
    """Read a model of a folder, in float32, without dropout, and without a pooler of its own.

    Args:
        place: Folder.
        outputs: Size of the new head; None for a causal language model with its own.
        pool: See `TextModel`.
        random: True for random weights.
        key: Key that names the folder.

    Raises:
        InvalidKey: If transformers cannot read it, or weights are missing in it.
    """
    import transformers
    from safetensors import SafetensorError

    kind = transformers.AutoModel if outputs is not None else transformers.AutoModelForCausalLM
    transformers.logging.set_verbosity_error()  # what it finds missing is said below
    transformers.logging.disable_progress_bar()
    how: dict[str, Any] = {"dtype": torch.float32}
    try:
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=True)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        config.use_cache = False
        if random or torch.empty(0).is_meta:  # a check of sizes reads no weights
            body, missing = kind.from_config(config, **how), set[str]()
        else:
            body, read = kind.from_pretrained(
                place,
                config=config,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **how,
            )
            missing = set(read["missing_keys"]) | set(read["mismatched_keys"])
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as e:
        first = summarize_error(e)[:300].rstrip(".")
        raise InvalidKey(
            key,
            f"{place}: transformers cannot read it: {first}. Copy the folder afresh, or write it "
            f"with save_pretrained",
        ) from e
    if getattr(body, "pooler", None) is not None:
        body.pooler = None
    if lacking := sorted(name for name in missing if not name.startswith("pooler.")):
        raise InvalidKey(
            key,
            f"{place}: lacks {len(lacking)} of the model's weights, such as {lacking[0]}. It was "
            f"saved from a model of another kind, or from a part of one. Save the whole model with "
            f"save_pretrained",
        )
    head = None if outputs is None else nn.Linear(body.config.hidden_size, outputs)
    return TextModel(body.eval(), head, pool).eval()


def train_only(model: TextModel, adapter: Any) -> None:
    """Freeze all of a model but what its adapter trains; frozen weights are not saved again.

    Raises:
        InvalidKey: If the adapter does not fit the model.
    """
    if adapter.name == "full":
        return
    names = dict(model.named_parameters())
    own_head = [k for k in names if k.startswith("head.")]
    if adapter.name == "bitfit":
        biases = [k for k in names if k.endswith("bias") and k not in own_head]
        trained = biases + own_head
        if not biases:
            raise InvalidKey("adapter.name", "bitfit trains biases, and this model has none")
    elif adapter.name == "head":
        trained = own_head or _find_output_weights(model)
    else:
        trained = own_head
    freeze(model, trained, persistent=False)
    if adapter.name == "lora":
        targets = adapter.targets or _find_targets(model)
        add_lora(model.body, targets, adapter.rank, adapter.alpha, adapter.layers)


def _find_targets(model: TextModel) -> tuple[str, ...]:
    found = {path.rpartition(".")[2] for path, _ in find_linear(model.body)}
    for names in _TARGETS:
        if found.issuperset(names):
            return names
    raise InvalidKey(
        "adapter.targets",
        f"is missing, and this model has no layers of the usual names. Choose among: "
        f"{', '.join(sorted(found))}",
    )


def _find_output_weights(model: TextModel) -> list[str]:
    """Names of a language model's output layer.

    Raises:
        InvalidKey: If its weights are those of its embeddings.
    """
    head = model.body.get_output_embeddings()
    if head.weight is model.body.get_input_embeddings().weight:
        raise InvalidKey(
            "adapter.name",
            "head trains the output layer alone, and this model shares its weights with the "
            "embeddings. Choose lora, bitfit or full",
        )
    prefix = next(k for k, m in model.named_modules() if m is head)
    return [prefix]


@torch.no_grad()
def check_agreement(model: TextModel, num_ids: int, length: int) -> None:
    """Compare with the library's own call, on random tokens of examples of several lengths.

    Raises:
        InvalidKey: If it computes something else.
    """
    rng = torch.Generator().manual_seed(derive_public_seed(0, "tokens"))
    length = min(length, 16)
    ids = torch.randint(0, num_ids, (3, length), generator=rng)
    if (padding := getattr(model.body.config, "pad_token_id", None)) is not None:
        ids = torch.where(ids == padding, (padding + 1) % num_ids, ids)
    lengths = torch.tensor([length, 1, (length + 1) // 2])[:, None]
    mask = (torch.arange(length) < lengths).long()
    if padding is not None:
        ids = torch.where(mask.bool(), ids, padding)
    given = {"input_ids": ids, "attention_mask": mask}
    if model.num_segments > 1:
        given["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=rng)
    seen: list[Tensor] = []
    hook = model.body.register_forward_hook(lambda _, given, output: seen.append(output[0]))
    try:
        model(**given)
        model.body(**given)
    except Exception as e:
        first = (str(e).strip().splitlines() or ["no message"])[0][:200]
        raise InvalidKey(
            "name",
            f"cannot make this model a function of each example alone: with masks of four "
            f"dimensions it fails ({type(e).__name__}: {first}). {_OTHERS}",
        ) from e
    finally:
        hook.remove()
    ours, theirs = (x[mask.bool()] for x in seen)
    if not (ours - theirs).abs().max() <= _AGREED * theirs.abs().max():
        raise InvalidKey(
            "name",
            f"cannot make this model a function of each example alone: with masks of four "
            f"dimensions it does not compute what transformers does. {_OTHERS}",
        )
