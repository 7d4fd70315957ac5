"""A winner's language model as files of transformers and peft, with a model card.

FOLDER/README.md             the model card, with the privacy statement
FOLDER/model/                the whole model, adapter merged, as save_pretrained writes it
FOLDER/adapter/              LoRA alone, for peft's PeftModel.from_pretrained
FOLDER/head.safetensors      the linear head on the pooled hidden states
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.types import Tensors
from dpsweep.models import build_model
from dpsweep.models.huggingface import HuggingFace
from dpsweep.models.lora import LoraLinear, is_transposed, merge_lora
from dpsweep.models.text import TextModel, make_text_model

_USE = {
    "mean": "(hidden * weight).sum(1) / weight.sum(1)",
    "first": "hidden[:, 0]",
    "last": "hidden[range(len(hidden)), attention_mask.sum(1) - 1]",
}
_CLASSIFY = '''
```python
import torch
from safetensors.torch import load_file
from transformers import AutoModel

body = AutoModel.from_pretrained("model").eval()
head = load_file("head.safetensors")


@torch.no_grad()
def predict(input_ids, attention_mask, **segments):
    """Logits of each example, whose own tokens come first; segments: token_type_ids of pairs."""
    given = {"input_ids": input_ids, "attention_mask": attention_mask, **segments}
    hidden = body(**given).last_hidden_state
    weight = attention_mask[:, :, None].to(hidden)
    return {pooled} @ head["weight"].T + head["bias"]
```
'''
_GENERATE = """
```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model").eval()
```
"""
_ADAPTER = """
`adapter/` has the trained part alone. It loads onto the public model that it was trained from:

```python
from peft import PeftModel

adapted = PeftModel.from_pretrained(PUBLIC_MODEL, "adapter")
```
"""


def load_trained(config: TrialConfig, weights: Path) -> TextModel:
    """Build a trial's model with its trained weights.

    Raises:
        ConfigError: If it is no model of transformers.
    """
    if not isinstance(config.model, HuggingFace):
        raise ConfigError(
            f"--format huggingface: writes models of the package transformers, and this sweep "
            f"trained {config.model.name}. Use --format torch"
        )
    model = build_model(config.model, config.data.spec, config.seed)
    assert isinstance(model, TextModel)
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model


def write_huggingface(config: HuggingFace, model: TextModel, card: Path, facts: list[str]) -> None:
    """Write a trained model to the folder of `card`; its adapter is merged in the course of it.

    Args:
        card: README.md in a folder that is written to.
        facts: Paragraphs of the card: origin, figures, privacy.
    """
    folder, title, *rest = card.parent, *facts
    folder.mkdir(parents=True, exist_ok=True)
    use = _GENERATE
    if "head" in model._modules:
        _save(folder / "head.safetensors", dict(model.head.named_parameters()))
        use = _CLASSIFY.replace("{pooled}", f"({_USE[config.pool]})")
    if config.adapter.name == "lora":
        _write_adapter(model, config, folder / "adapter")
        use += _ADAPTER
    merge_lora(model.body)
    _write_merged(model, config, folder / "model")
    card.write_text("\n\n".join([f"# {title}", *rest, "## Use", use.strip()]) + "\n")


def _write_adapter(model: TextModel, config: HuggingFace, place: Path) -> None:
    """Write LoRA's matrices under the names that peft gives them."""
    adapter = config.adapter
    assert adapter.name == "lora"
    layers = {k: m for k, m in model.body.named_modules() if isinstance(m, LoraLinear)}
    place.mkdir(exist_ok=True)
    _save(
        place / "adapter_model.safetensors",
        {
            f"base_model.model.{path}.{part}.weight": getattr(layer, part).weight
            for path, layer in layers.items()
            for part in ("lora_A", "lora_B")
        },
    )
    settings = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION" if "head" in model._modules else "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),
        "fan_in_fan_out": any(is_transposed(layer.base) for layer in layers.values()),
        "inference_mode": True,
    }
    (place / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@torch.no_grad()
def _write_merged(model: TextModel, config: HuggingFace, place: Path) -> None:
    """Write the body with what was trained in it; frozen weights are buffers, so names decide."""
    outputs = model.head.out_features if "head" in model._modules else None
    plain = make_text_model(config.place, outputs, config.pool, random=config.random).body
    found: Tensors = dict(model.body.named_buffers()) | dict(model.body.named_parameters())
    for name, p in plain.named_parameters():
        p.copy_(found[name])
    plain.save_pretrained(place)


def _save(place: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    plain = {k: x.detach().contiguous().clone() for k, x in tensors.items()}
    save_file(plain, place, {"format": "pt"})
