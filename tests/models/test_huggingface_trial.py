"""A trial of a language model, from rows of text to an export that transformers loads."""

import json
import re

import pytest
import torch

from dpsweep.config.plan import statement_of_trial
from dpsweep.config.trial import TrialConfig
from dpsweep.data.read import load_dataset
from dpsweep.models import build_model
from dpsweep.models.lora import LoraLinear
from dpsweep.results.formats.huggingface import load_trained, write_huggingface
from dpsweep.training.frozen import find_step_cut
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

transformers = pytest.importorskip("transformers", reason="extra text")
load_file = pytest.importorskip("safetensors.torch", reason="extra text").load_file
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

WORDS = ["[PAD]", "[UNK]", "[END]", "bad", "good", "film", "a", "very"]
FILMS = ["a good film", "bad", "very very good", "a bad film", "good", "a very bad film"]
SIZES = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Rows, a tokenizer, and small random models of both kinds."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "language")
    load_dataset.cache_clear()
    coder = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    coder.pre_tokenizer = Whitespace()
    coder.add_special_tokens(["[PAD]", "[END]"])
    coder.save(str(tmp_path / "tokenizer.json"))
    rows = [{"text": t, "label": int("good" in t), "rest": "a film"} for t in FILMS * 20]
    lines = [f"{json.dumps(row)}\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    (tmp_path / "test.jsonl").write_text("".join(lines[::-1]))
    torch.manual_seed(0)
    bert = transformers.BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=12)
    transformers.AutoModel.from_config(bert).save_pretrained(tmp_path / "bert")
    gpt2 = transformers.GPT2Config(vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=12)
    transformers.AutoModelForCausalLM.from_config(gpt2).save_pretrained(tmp_path / "gpt2")
    yield tmp_path
    load_dataset.cache_clear()


def trial(place, model, adapter, **data):
    files = {"file": str(place / "rows.jsonl"), "test_file": str(place / "test.jsonl")}
    files |= {"num_train": 120, "num_test": 120}
    return TrialConfig.model_validate(
        {
            "data": {"tokenizer": str(place), "length": 8, **files, **data},
            "model": {"name": "huggingface", "folder": str(place / model), "adapter": adapter},
            "privacy": {"epsilon": 50, "delta": 1e-4},
            "train": {"batch_size": 60, "epochs": 12, "evaluate_every": 12, "device": "cpu"},
            "optimizer": {"lr": 1.0},
            "method": {"name": "dp_sgd"},
        }
    )


def classify(place, adapter):
    columns = {"name": "text", "text": "text", "label": "label", "num_classes": 2}
    return trial(place, "bert", adapter, **columns)


def run(config, place, name="trial"):
    trial_dir = TrialDir(place / name)
    trial_dir.make_secret()
    return train(config, trial_dir, lambda row: None), trial_dir


ADAPTERS = {
    "lora": r"head\.\w+|body\..*\.lora_[AB]\.weight",
    "head": r"head\.\w+",
    "bitfit": r"head\.\w+|body\..*bias",
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_classifier_learns_and_its_export_classifies_alike(place, monkeypatch, adapter):
    config = classify(place, {"name": adapter})
    assert f"{place / 'bert'} (model.folder)" in statement_of_trial(config, 50.0, 1.0)
    result, trial_dir = run(config, place)
    assert result.rows[-1]["valid/accuracy"] > 0.9
    weights = torch.load(trial_dir.weights, weights_only=True)
    assert all(re.fullmatch(ADAPTERS[adapter], name) for name in weights)
    start = dict(build_model(config.model, config.data.spec, config.seed).named_parameters())
    assert all((start[k] != x).any() for k, x in weights.items() if "head" in k)
    card = place / "out" / "README.md"
    write_huggingface(config, load_trained(config, trial_dir.weights), card, ["dpsweep export"])
    monkeypatch.chdir(card.parent)
    space = {}
    exec(re.findall(r"```python\n(.*?)```", card.read_text(), re.S)[0], space)
    data = load_dataset(config.data, config.seed)
    inputs = {k: x.long() for k, x in data.valid_inputs.items()}
    right = (space["predict"](**inputs).argmax(1) == data.valid_targets).double().mean()
    assert right == pytest.approx(result.rows[-1]["valid/accuracy"], abs=0.01)


def check_frozen_weights(place):
    """A trial with LoRA moves its products and its head, and none of the folder's weights."""
    config = classify(place, {"name": "lora"})
    start = build_model(config.model, config.data.spec, config.seed).state_dict()
    trial_dir = run(config, place)[1]
    model = load_trained(config, trial_dir.weights)
    assert all(not torch.equal(x, start[k]) for k, x in model.state_dict().items() if "lora_B" in k)
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    now = {k.removeprefix("body.").replace(".base.", "."): x for k, x in now.items()}
    public = load_file(place / "bert" / "model.safetensors")
    shared = [k for k in public if not k.startswith("pooler.")]
    moved = [k for k in shared if not torch.equal(now[k], public[k])]
    assert not moved, f"frozen: the trial has moved {', '.join(moved)}"


def test_frozen_weights_are_the_public_ones_after_a_trial(place):
    check_frozen_weights(place)


def test_frozen_matrix_that_is_trained_is_found(place, monkeypatch):
    """Planted fault: noise is drawn for it, clip norm is spent on it, and the adapter lacks it."""
    init = LoraLinear.__init__

    def thaw(self, base, rank, alpha):
        weight = base.weight
        del base.weight
        base.weight = torch.nn.Parameter(weight)
        init(self, base, rank, alpha)

    monkeypatch.setattr(LoraLinear, "__init__", thaw)
    with pytest.raises(AssertionError, match=r"frozen: the trial has moved .*query\.weight"):
        check_frozen_weights(place)


@pytest.mark.parametrize("adapter", [{"name": "head"}, {"name": "lora", "layers": 1}], ids=str)
def test_what_is_computed_once_gives_the_weights_of_what_is_computed_each_time(
    place, monkeypatch, adapter
):
    config = classify(place, adapter)
    cut = []
    monkeypatch.setattr(
        "dpsweep.training.assemble.find_step_cut",
        lambda step: cut.append(find_step_cut(step)) or cut[-1],
    )
    _, once = run(config, place, "once")
    assert cut[0] is not None
    monkeypatch.setattr("dpsweep.training.assemble.find_step_cut", lambda step: None)
    _, each = run(config, place, "each")
    ours, theirs = (torch.load(x.weights, weights_only=True) for x in (once, each))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def test_ranks_share_the_frozen_layers_that_are_computed_once(place):
    for rank in (2, 3):
        run(classify(place, {"name": "lora", "layers": 1, "rank": rank}), place, f"rank-{rank}")
    assert len(list((place / "cache").glob("made-*.pt"))) == 1


def test_language_model_learns_what_follows(place):
    columns = {"name": "generation", "source": "text", "target": "rest", "separator": " very "}
    config = trial(place, "gpt2", {"name": "full"}, **columns, end="[END]")
    result, trial_dir = run(config, place)
    assert result.rows[-1]["valid/perplexity"] < 6  # 8 tokens that are equally likely: 8
    card = place / "out" / "README.md"
    write_huggingface(config, load_trained(config, trial_dir.weights), card, ["dpsweep export"])
    transformers.AutoModelForCausalLM.from_pretrained(card.parent / "model")
