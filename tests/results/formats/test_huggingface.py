"""Exported language models load with transformers and peft alone, and compute the same."""

import re

import pytest
import torch
from torch import nn

from dpsweep.config.trial import TrialConfig
from dpsweep.models import build_model
from dpsweep.results.formats.huggingface import write_huggingface

transformers = pytest.importorskip("transformers", reason="extra text")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own

FIELDS = {
    "input_ids": {"shape": [6], "num_ids": 40},
    "attention_mask": {"shape": [6], "mask": True},
}
CLASSIFY = {"name": "own", "function": "mine:tokens", "fields": FIELDS, "num_classes": 3} | {
    "task": {"name": "classification"}
}
GENERATE = {"name": "generation", "file": "x.csv", "source": "s", "target": "t", "length": 6} | {
    "end": "[END]"
}
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def bert(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=12)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


@pytest.fixture
def gpt2(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=12)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    return str(tmp_path / "gpt2")


def make_config(data, model, adapter, **keys):
    """A trial on tokens of a function of one's own, or on prompts with a tokenizer of 40 words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    if data is GENERATE:
        coder = Tokenizer(WordLevel({"[END]": 0} | {f"w{i}": i for i in range(1, 40)}, "w1"))
        coder.add_special_tokens(["[END]"])
        coder.save(f"{model}/words.json")
        data = {**data, "tokenizer": f"{model}/words.json"}
    return TrialConfig.model_validate(
        {
            "data": {**data, "num_train": 100, "validation": "holdout"},
            "model": {"name": "huggingface", "folder": model, "adapter": adapter, **keys},
            "privacy": {"epsilon": 1, "delta": 1e-3},
            "train": {"batch_size": 10, "epochs": 1},
            "method": {"name": "dp_sgd"},
        }
    )


def tokens():
    ids = torch.randint(4, 40, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(6) < torch.tensor([6, 1, 3])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}


def trained(config):
    """A model whose trained weights are random."""
    model = build_model(config.model, config.data.spec, 0)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p, std=0.3)
    return model


def blocks(card):
    return re.findall(r"```python\n(.*?)```", card.read_text(), re.S)


@pytest.mark.parametrize("pool", ["mean", "first", "last"])
@pytest.mark.parametrize("adapter", ["lora", "bitfit", "head", "full"])
def test_code_of_the_card_computes_what_was_trained(bert, tmp_path, monkeypatch, adapter, pool):
    config = make_config(CLASSIFY, bert, {"name": adapter}, pool=pool)
    model = trained(config)
    expected = model(**tokens())
    before = {k: x.clone() for k, x in model.state_dict().items()}
    card = tmp_path / "out" / "README.md"
    write_huggingface(config, model, card, ["dpsweep export: trial 3", "Private: (1, 1e-5)."])
    assert card.read_text().startswith("# dpsweep export: trial 3\n\nPrivate: (1, 1e-5).\n")
    assert "does not read the tokenizer here: the tokens are made by data.name: own." in (
        card.read_text()
    )
    with pytest.raises(Exception):  # noqa: B017, PT011  the library's own, of several kinds
        transformers.AutoTokenizer.from_pretrained(card.parent / "model")
    monkeypatch.chdir(card.parent)
    space = {}
    exec(blocks(card)[0], space)
    found = space["predict"](**tokens())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 3)
    paired = space["predict"](**tokens(), token_type_ids=segments)
    model = trained(config)
    with torch.no_grad():
        model.load_state_dict(before)
    torch.testing.assert_close(
        paired, model(**tokens(), token_type_ids=segments), rtol=1e-4, atol=1e-5
    )


def test_adapter_loads_with_peft(bert, gpt2, tmp_path):
    peft = pytest.importorskip("peft")
    for folder, data in ((bert, CLASSIFY), (gpt2, GENERATE)):
        config = make_config(data, folder, {"name": "lora", "rank": 3, "alpha": 7.0})
        model = trained(config)
        seen = []
        model.body.register_forward_hook(lambda _, given, output, seen=seen: seen.append(output[0]))
        model(**tokens())
        card = tmp_path / data["name"] / "README.md"
        write_huggingface(config, model, card, ["dpsweep export"])
        kind = "AutoModel" if data is CLASSIFY else "AutoModelForCausalLM"
        base = getattr(transformers, kind).from_pretrained(folder)
        adapted = peft.PeftModel.from_pretrained(base, card.parent / "adapter").eval()
        with torch.no_grad():
            found = adapted(**tokens())[0]
        own = tokens()["attention_mask"].bool()
        torch.testing.assert_close(found[own], seen[0][own], rtol=1e-4, atol=1e-5)


def test_merged_language_model_loads_and_keeps_its_ties(gpt2, tmp_path):
    for adapter in ("lora", "full"):
        config = make_config(GENERATE, gpt2, {"name": adapter})
        model = trained(config)
        expected = model(**tokens())
        card = tmp_path / adapter / "README.md"
        write_huggingface(config, model, card, ["dpsweep export"])
        merged = transformers.AutoModelForCausalLM.from_pretrained(card.parent / "model").eval()
        assert merged.lm_head.weight is merged.transformer.wte.weight
        own = tokens()["attention_mask"].bool()
        found = merged(**tokens()).logits
        torch.testing.assert_close(found[own], expected[own], rtol=1e-4, atol=1e-5)
