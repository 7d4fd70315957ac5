"""A winner's language model as files of transformers and peft, with a model card.

FOLDER/README.md             the model card, with the privacy statement
FOLDER/model/                the whole model, adapter merged, as save_pretrained writes it
FOLDER/adapter/              LoRA alone, for peft's PeftModel.from_pretrained
FOLDER/head.safetensors      the linear head on the pooled hidden states

The tokenizer lies in model/ and adapter/. Where transformers does not read it as the trial did,
FOLDER/tokenizer.json is a copy, and the card's lines read that.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.types import Tensors
from dpsweep.data.tasks import Classification, MultiLabel, Regression
from dpsweep.data.text import GenerationData, TextData, TokenData
from dpsweep.models import build_model
from dpsweep.models.huggingface import HuggingFace
from dpsweep.models.lora import LoraLinear, is_transposed, merge_lora
from dpsweep.models.text import TextModel, make_text_model
from dpsweep.results.formats.model_card import ADAPTER, RANDOM_HEAD, ModelCode, name_outputs
from dpsweep.results.formats.tokenizer import block_tokenizer, copy_tokenizer, write_tokenizer

_PROBLEMS = {
    Classification: "single_label_classification",
    MultiLabel: "multi_label_classification",
    Regression: "regression",
}
_CLASSIFIER = '''"""A model of transformers with a linear head on its pooled hidden states."""

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class TextClassifier(PreTrainedModel):
    base_model_prefix = "body"

    def __init__(self, config):
        super().__init__(config)
        self.body = AutoModel.from_config(config)
        if getattr(self.body, "pooler", None) is not None:
            self.body.pooler = None
        self.head = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask, **segments):
        """Logits of each example, whose own tokens come first."""
        if input_ids.shape[1] > self.config.text_length:
            raise ValueError(
                f"a text has {input_ids.shape[1]} tokens, and this model was trained on the first "
                f"{self.config.text_length} of each: call it with truncation=True"
            )
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **segments}
        hidden = self.body(**given).last_hidden_state
        if self.config.pool == "first":
            pooled = hidden[:, 0]
        elif self.config.pool == "last":
            rows = torch.arange(len(hidden), device=hidden.device)
            pooled = hidden[rows, attention_mask.sum(1) - 1]
        else:
            weight = attention_mask[:, :, None].to(hidden)
            pooled = (hidden * weight).sum(1) / weight.sum(1)
        return SequenceClassifierOutput(logits=self.head(pooled))
'''
"""Written beside the weights of `write_pipeline`: no class of transformers pools and adds a linear
head alone."""


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


def write_huggingface(config: TrialConfig, model: TextModel, card: Path, facts: list[str]) -> None:
    """Write a trained model to the folder of `card`; its adapter is merged in the course of it.

    Args:
        config: The trial.
        model: Its trained model.
        card: README.md in a folder that is written to.
        facts: Paragraphs of the card: origin, figures, privacy.
    """
    folder, title, *rest = card.parent, *facts
    folder.mkdir(parents=True, exist_ok=True)
    assert isinstance(config.model, HuggingFace)
    has_head, has_adapter = "head" in model._modules, config.model.adapter.name == "lora"
    segments = _takes_segments(config, model)
    if has_head:
        _save(folder / "head.safetensors", _scale_head(config, model))
    if has_adapter:
        _write_adapter(model, config.model, folder / "adapter")
        if not has_head:
            _make_decoding(config).save_pretrained(folder / "adapter")
        _write_tokenizer(config, folder / "adapter", segments=segments)
    merge_lora(model.body)
    body = _merge_body(model, config)
    body.save_pretrained(folder / "model")
    missing = _write_tokenizer(config, folder / "model", segments=segments)
    if missing and isinstance(config.data, TokenData):
        copy_tokenizer(config.data, folder / "tokenizer.json")
    code = ModelCode(config, missing, segments)
    use = [code.write_block("model")]
    if missing:
        use.insert(0, f"AutoTokenizer of transformers does not read the tokenizer here: {missing}.")
    if has_head:
        use.append(RANDOM_HEAD)
    if has_adapter:
        use += [ADAPTER, code.write_block("adapter")]
    text = "\n\n".join([f"# {title}", *rest, "## Use", *use])
    card.write_text(f"{text}\n", encoding="utf-8")


def write_pipeline(config: TrialConfig, model: TextModel, folder: Path) -> str:
    """Write a trained model as one folder for a pipeline of transformers; merges its adapter.

    Returns:
        Why the tokenizer is not in it; empty if it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    segments = _takes_segments(config, model)
    merge_lora(model.body)
    body = _merge_body(model, config)
    if "head" in model._modules:
        assert isinstance(config.model, HuggingFace)
        assert isinstance(config.data, TextData)
        settings = body.config
        settings.architectures = ["TextClassifier"]
        settings.auto_map = {"AutoModelForSequenceClassification": "text_classifier.TextClassifier"}
        settings.pool, settings.text_length = config.model.pool, config.data.length
        settings.save_pretrained(folder)
        (folder / "text_classifier.py").write_text(_CLASSIFIER)
        weights = {f"body.{k}": x for k, x in body.state_dict().items()}
        head = {f"head.{k}": x for k, x in _scale_head(config, model).items()}
        _save(folder / "model.safetensors", weights | head)
    else:
        body.save_pretrained(folder)
    return _write_tokenizer(config, folder, segments=segments)


def _takes_segments(config: TrialConfig, model: TextModel) -> bool:
    """True if the trial's model was given token_type_ids that differ."""
    data = config.data
    return isinstance(data, TextData) and not isinstance(data.text, str) and model.num_segments > 1


def _write_tokenizer(config: TrialConfig, place: Path, *, segments: bool) -> str:
    if isinstance(config.data, TokenData):
        return write_tokenizer(config.data, place, segments=segments)
    return block_tokenizer(place, f"the tokens are made by data.name: {config.data.name}")


@torch.no_grad()
def _scale_head(config: TrialConfig, model: TextModel) -> Tensors:
    """Weights of the head, with regression's outputs in the targets' own unit."""
    found: Tensors = dict(model.head.named_parameters())
    if isinstance(config.data.task, Regression):
        low, high = config.data.task.range
        found = {k: x * (high - low) / 2 for k, x in found.items()}
        found["bias"] = found["bias"] + (low + high) / 2
    return found


def _make_decoding(config: TrialConfig) -> Any:
    """Settings of greedy decoding, as trials are measured; the public model's may sample."""
    import transformers

    assert isinstance(config.data, GenerationData)
    _, end = config.data.load_coder()
    return transformers.GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=end)


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
def _merge_body(model: TextModel, config: TrialConfig) -> Any:
    """Build the body with what was trained in it; frozen weights are buffers, so names decide."""
    assert isinstance(config.model, HuggingFace)
    outputs = model.head.out_features if "head" in model._modules else None
    kind = config.model
    body = make_text_model(kind.place, outputs, kind.pool, random=kind.random).body
    found: Tensors = dict(model.body.named_buffers()) | dict(model.body.named_parameters())
    for name, p in body.named_parameters():
        p.copy_(found[name])
    if outputs is None:
        body.generation_config = _make_decoding(config)
    elif names := name_outputs(config.data):
        body.config.id2label = dict(enumerate(names))
        body.config.label2id = {name: k for k, name in enumerate(names)}
        body.config.problem_type = _PROBLEMS[type(config.data.task)]
    return body


def _save(place: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    plain = {k: x.detach().contiguous().clone() for k, x in tensors.items()}
    save_file(plain, place, {"format": "pt"})
