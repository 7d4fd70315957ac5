"""Language models in MLflow's registry, stored as pipelines of transformers that take texts."""

import json
from zipfile import ZipFile, is_zipfile

import pytest
import torch
from text_models import predict, write_greedily

from dpsweep.config.sweep import load_sweep
from dpsweep.data.read import load_dataset
from dpsweep.execution.tracking import TrackingWatcher
from dpsweep.results.formats.huggingface import load_trained
from dpsweep.results.register import register_best
from dpsweep.store.state_dir import StateFolder
from dpsweep.tracking.mlflow import MlflowSink
from dpsweep.tracking.tracker import Tracker

transformers = pytest.importorskip("transformers", reason="extra text")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[END]", "bad", "good", "film", "a", "very", "=>"]
FILMS = ["a good film", "bad", "very very good", "a bad film", "good", "a very bad film"]
LONG = "bad " * 30 + "good"
SIZES = {"vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {"name": "text", "text": "text"}
CLASSES = {"task": {"name": "classification", "classes": ["poor", "great"]}, "label": "label"}
PAIRS = {**TEXT, **CLASSES, "text": ["text", "more"]}
STARS = {**TEXT, "task": {"name": "regression", "range": [0, 8]}, "label": "stars"}
LABELS = {**TEXT, "task": {"name": "multi_label"}, "label": ["funny", "long"]}
NEXT = {"name": "generation", "source": "text", "target": "more", "separator": " => "} | {
    **{"end": "[END]", "length": 40},
    "task": {"name": "causal_lm", "max_tokens": 4},
}


@pytest.fixture
def register(tmp_path, monkeypatch, really_trained):
    """Train a sweep of one trial on texts, and register its model; the MLflow client is set up."""
    import mlflow

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    load_dataset.cache_clear()
    before = mlflow.get_tracking_uri()

    def registered(data, model="bert", **keys):
        write_files(tmp_path)
        sweep = {
            "name": "films",
            "base": {
                "data": {"length": 8, **data, **list_files(tmp_path)},
                "model": {"name": "huggingface", "folder": str(tmp_path / model), **keys},
                "privacy": {"epsilon": 50, "delta": 1e-4},
                "train": {"batch_size": 60, "epochs": 6, "evaluate_every": 6, "device": "cpu"},
                "optimizer": {"lr": 1.0},
                "method": {"name": "dp_sgd"},
            },
            "search": {"optimizer.lr": {"choice": [1.0]}},
            "objective": {"metric": "valid/loss"},
            "budget": {"trials": 1},
        }
        (tmp_path / "films.yaml").write_text(json.dumps(sweep))
        state = StateFolder.at(str(tmp_path / "state"))
        study, folder = really_trained(load_sweep(tmp_path / "films.yaml"), state)
        sink = MlflowSink(state.tracking_uri, "films", folder.id, state.artifacts)
        tracker = Tracker(folder.path, sink)
        TrackingWatcher(tracker, study, folder).reconcile()
        assert tracker.close(120)
        (found,) = register_best(study, folder, state, "films")
        mlflow.set_tracking_uri(state.tracking_uri)
        config = study.best()[0].config
        trained = load_trained(config, folder.trial_dir(0) / "weights.pt").eval()
        version = mlflow.MlflowClient().get_model_version_by_alias("films", "champion")
        again = register_best(study, folder, state, "films")[0]
        assert (again.version, "was registered before" in again.words) == ("1", True)
        return found, version, config, trained

    yield registered
    mlflow.set_tracking_uri(before)
    load_dataset.cache_clear()


def list_files(place):
    files = {"file": str(place / "rows.jsonl"), "test_file": str(place / "test.jsonl")}
    return files | {"num_train": 120, "num_test": 7, "tokenizer": str(place / "coder")}


def write_files(place):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing

    coder = Tokenizer(WordLevel({w: i for i, w in enumerate(WORDS)}, "[UNK]"))
    coder.pre_tokenizer = WhitespaceSplit()
    coder.add_special_tokens(["[PAD]", "[CLS]", "[END]"])
    coder.post_processor = TemplateProcessing("[CLS] $A", "[CLS] $A $B:1", [("[CLS]", 2)])
    (place / "coder").mkdir()
    coder.save(str(place / "coder" / "tokenizer.json"))
    rows = [
        {
            **{"text": t, "more": "a film", "label": ["poor", "great"]["good" in t]},
            **{"stars": 6 if "good" in t else 1, "funny": int("a" in t), "long": int("very" in t)},
        }
        for t in [*FILMS, LONG]
    ]
    train = [row for row in rows if row["text"] != LONG] * 20
    (place / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in train))
    (place / "test.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    torch.manual_seed(0)
    bert = transformers.BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=40)
    transformers.AutoModel.from_config(bert).save_pretrained(place / "bert")
    gpt2 = transformers.GPT2Config(vocab_size=10, n_embd=16, n_layer=1, n_head=2, n_positions=40)
    transformers.AutoModelForCausalLM.from_config(gpt2).save_pretrained(place / "gpt2")


def read_all(place):
    """Bytes of all files below a folder, archives unpacked."""
    stored = [path for path in place.rglob("*") if path.is_file()]
    parts = [path.read_bytes() for path in stored]
    for path in filter(is_zipfile, stored):
        with ZipFile(path) as archive:
            parts += [archive.read(name) for name in archive.namelist()]
    return b"".join(parts)


def test_a_classifier_is_loaded_by_its_alias_and_takes_texts(register, tmp_path):
    import mlflow

    found, version, config, model = register(
        {**TEXT, **CLASSES}, adapter={"name": "lora", "rank": 2}
    )
    logits = predict(config, model)
    expected = [CLASSES["task"]["classes"][k] for k in logits.argmax(1)]
    assert len(set(expected)) == 2
    texts = [*FILMS, LONG]
    served = mlflow.pyfunc.load_model(found.uri)
    answers = served.predict(texts)
    assert answers["label"].tolist() == expected
    scores = logits.softmax(1).max(1).values
    torch.testing.assert_close(
        torch.tensor(answers["score"].tolist()), scores, rtol=1e-4, atol=1e-5
    )
    pipeline = mlflow.transformers.load_model(found.uri)
    assert [x["label"] for x in pipeline(texts, truncation=True)] == expected
    assert pipeline.tokenizer("a good film").input_ids == [2, 7, 5, 6]
    with pytest.raises(ValueError, match="trained on the first 8 of each: call it with truncation"):
        pipeline(LONG)

    assert "-differentially private" in version.description
    assert "Takes texts, and gives label and score" in version.description
    assert version.tags["epsilon"] == "50.00"
    stored = tmp_path / "stored"
    mlflow.artifacts.download_artifacts(found.uri, dst_path=str(stored))
    assert version.description in (stored / "model_card.md").read_text()
    assert served.metadata.metadata["privacy"] == version.description
    assert served.metadata.metadata["classes"] == json.dumps(["poor", "great"])
    assert "transformers" in served.metadata.flavors
    told = read_all(stored)
    assert b"source_model_name: films" in told
    assert [x for x in ("/tmp/tmp", "huggingface.co", str(stored)) if x.encode() in told] == []


def test_a_classifier_of_pairs_takes_both_texts(register):
    import mlflow

    found, version, config, model = register(PAIRS, adapter={"name": "full"}, pool="first")
    expected = [CLASSES["task"]["classes"][k] for k in predict(config, model).argmax(1)]
    pairs = [{"text": t, "text_pair": "a film"} for t in [*FILMS, LONG]]
    answers = mlflow.pyfunc.load_model(found.uri).predict(pairs)
    assert answers["label"].tolist() == expected
    assert "as text (text) and text_pair (more)" in version.description


def test_regression_gives_the_target_in_its_own_unit(register):
    import mlflow

    found, _, config, model = register(STARS, adapter={"name": "bitfit"})
    answers = mlflow.pyfunc.load_model(found.uri).predict([*FILMS, LONG])
    assert set(answers["label"]) == {"stars"}
    expected = 4 + 4 * predict(config, model)[:, 0]
    scores = torch.tensor(answers["score"].tolist())
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)


def test_a_language_model_goes_on_with_a_prompt(register):
    import mlflow

    found, _, config, model = register(NEXT, "gpt2", adapter={"name": "full"})
    prompts = ["a good", "bad", "very film"]
    expected = write_greedily(config, model, prompts, length=40, max_tokens=4)
    assert all(expected)
    answers = mlflow.pyfunc.load_model(found.uri).predict(prompts)
    assert [x.strip() for x in answers] == expected


def test_several_labels_stay_a_graph_and_the_message_says_why(register):
    import mlflow

    found, version, config, model = register(LABELS, adapter={"name": "full"})
    why = "MLflow's transformers flavour gives one label or one number for a text"
    assert f"It takes token ids, not texts: {why}, and the task is multi_label" in found.words
    assert "input_ids, attention_mask, stacked in this order" in version.description
    inputs, _ = config.data.read("num_test")
    stacked = torch.stack([inputs["input_ids"].long(), inputs["attention_mask"].long()], 1)
    served = mlflow.pyfunc.load_model(found.uri)
    assert "pytorch" in served.metadata.flavors
    assert "transformers" not in served.metadata.flavors
    outputs = torch.from_numpy(served.predict(stacked.numpy()))
    torch.testing.assert_close(outputs, predict(config, model), rtol=1e-4, atol=1e-4)
