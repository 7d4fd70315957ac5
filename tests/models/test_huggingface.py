"""Language models of transformers: functions of each example alone, adapters, and what is refused.

Small random models are made from their configs and read from a folder, as a user's are. Skipped
where the extra `text` is not installed.
"""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from torch import nn
from torch.nn.functional import cross_entropy

from dpsweep.config.source import parse_yaml
from dpsweep.config.trial import load_trial
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.core.types import Field
from dpsweep.data.base import Spec
from dpsweep.data.read import Dataset
from dpsweep.models import MODELS, ModelConfig, build_model
from dpsweep.models.frozen import find_cut
from dpsweep.models.lora import LoraLinear, merge_lora
from dpsweep.models.parts import saved_tensors
from dpsweep.models.text import TextModel
from dpsweep.models.text_cut import TextTail, find_text_cut
from dpsweep.privacy.clip import Flat
from dpsweep.privacy.engine import BookkeepingEngine, bookkeeping, make_engine
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.privacy.engine.gradients import WrittenOut
from dpsweep.privacy.engine.layers import find_black_boxes
from dpsweep.privacy.geometry import IDENTITY
from dpsweep.training.check import check_trial
from dpsweep.training.frozen import trimmed_chunks

transformers = pytest.importorskip("transformers", reason="extra text")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own

VOCABULARY, LENGTH, CLASSES = 40, 6, 3
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 12}
_IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**_SMALL, **_HEADS),
    "roberta": lambda: transformers.RobertaConfig(**_SMALL, **_HEADS, **_IDS, type_vocab_size=1),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=12, **_IDS
    ),
    "llama": lambda: transformers.LlamaConfig(**_SMALL, **_HEADS, **_IDS, num_key_value_heads=1),
}
SPEC = Spec(
    100,
    10,
    (),
    CLASSES,
    255,
    None,
    fields=(
        Field("input_ids", (LENGTH,), VOCABULARY),
        Field("attention_mask", (LENGTH,), is_mask=True),
    ),
)
LANGUAGE = Spec(100, 10, (), VOCABULARY, 255, None, fields=SPEC.fields, positions=LENGTH)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder of each family, as save_pretrained writes them."""
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        place = tmp_path_factory.mktemp(name)
        kind = transformers.AutoModel
        if name in ("gpt2", "llama"):
            kind = transformers.AutoModelForCausalLM
        kind.from_config(config()).save_pretrained(place)
        made[name] = str(place)
    return made


def configured(folder, **keys):
    config = {"name": "huggingface", "folder": folder, **keys}
    return TypeAdapter(ModelConfig).validate_python(config)


def built(folder, spec=SPEC, **keys):
    return build_model(configured(folder, **keys), spec, 0)


def tokens(num=4, length=LENGTH):
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY, (num, length), generator=rng)
    lengths = torch.tensor([length, 1, 3, 2])[:num, None]
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": torch.where(mask.bool(), ids, 1), "attention_mask": mask}


def token_loss(outputs_B, targets_B):
    """Mean over positions of the loss of each, of one example at a time."""
    return cross_entropy(outputs_B.flatten(0, 1), targets_B.flatten())


def draw_token_targets(num, outputs):
    rng = torch.Generator().manual_seed(2)
    return torch.randint(0, outputs[-1], (num, outputs[0]), generator=rng)


def autograd_sum(model, inputs, targets, loss, bound):
    """Sum of clipped gradients, one example at a time."""
    params = dict(model.named_parameters())
    total = {k: torch.zeros_like(p) for k, p in params.items()}
    for i in range(len(targets)):
        row = {k: x[i : i + 1] for k, x in inputs.items()}
        value = loss(model(**row), targets[i : i + 1])
        grads = torch.autograd.grad(value, list(params.values()), materialize_grads=True)
        size = torch.stack([g.norm() for g in grads]).norm()
        for key, grad in zip(params, grads, strict=True):
            total[key] += grad * min(1.0, float(bound / size))
    return total


ADAPTERS = {
    "lora": {"name": "lora", "rank": 3, "alpha": 6.0},
    "bitfit": {"name": "bitfit"},
    "head": {"name": "head"},
    "full": {"name": "full"},
}
CASES = [
    *[("bert", adapter, SPEC) for adapter in ADAPTERS],
    *[(family, "lora", SPEC) for family in ("roberta", "distilbert", "gpt2", "llama")],
    *[(family, adapter, LANGUAGE) for family in ("gpt2", "llama") for adapter in ("lora", "full")],
]


PAIRS = replace(SPEC, fields=(*SPEC.fields, Field("token_type_ids", (LENGTH,), 2)))


def test_segments_of_a_pair_reach_models_that_have_two_and_no_others(folders):
    segments = torch.tensor([0, 0, 1, 1, 1, 1]).expand(4, -1)
    for family, counts in (("bert", True), ("roberta", False), ("distilbert", False)):
        model = built(folders[family], PAIRS, adapter=ADAPTERS["full"])
        plain, paired = model(**tokens()), model(**tokens(), token_type_ids=segments)
        assert torch.equal(plain, paired) != counts
    bert = built(folders["bert"], PAIRS, adapter=ADAPTERS["full"])
    hidden = transformers.AutoModel.from_pretrained(folders["bert"]).eval()(
        **tokens(), token_type_ids=segments
    )[0]
    mask = tokens()["attention_mask"][:, :, None]
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    expected = bert.head(pooled)
    torch.testing.assert_close(
        bert(**tokens(), token_type_ids=segments), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("family", "adapter", "spec"), CASES)
def test_clipped_sums_are_those_of_autograd_one_example_at_a_time(folders, family, adapter, spec):
    model = built(folders[family], spec, adapter=ADAPTERS[adapter]).double()
    with torch.no_grad():
        for p in model.parameters():  # LoRA begins at zeros, which hide mistakes
            p += 0.05 * torch.randn_like(p)
    language = spec.positions is not None
    loss = token_loss if language else cross_entropy
    how = {"draw_targets": draw_token_targets} if language else {}
    engine = make_engine(model, loss, IDENTITY, 4, spec.fields, **how)
    assert isinstance(engine, BookkeepingEngine)
    inputs = tokens()
    targets = draw_token_targets(4, spec.outputs) if language else torch.arange(4) % CLASSES
    params = {k: p.detach() for k, p in model.named_parameters()}
    ours = engine.clipped_sum([params], [1.0], inputs, targets, Flat(0.1))
    theirs = autograd_sum(model, inputs, targets, loss, 0.1)
    for key, expected in theirs.items():
        torch.testing.assert_close(ours[key], expected, rtol=1e-6, atol=1e-9)


def test_no_layer_of_bert_or_gpt2_is_a_black_box(folders):
    for family in ("bert", "gpt2"):
        assert find_black_boxes(built(folders[family], adapter={"name": "full"})) == []


@pytest.mark.parametrize("family", CONFIGS)
def test_no_example_depends_on_anothers_length_or_on_padding(folders, family):
    model = built(folders[family], adapter={"name": "head"}).double()
    batch = tokens()
    whole = model(**batch)
    for i, num in enumerate((LENGTH, 1, 3, 2)):
        alone = {k: x[i : i + 1, :num] for k, x in batch.items()}
        torch.testing.assert_close(model(**alone), whole[i : i + 1])
    other = {**batch, "input_ids": torch.where(batch["attention_mask"] > 0, batch["input_ids"], 9)}
    torch.testing.assert_close(model(**other), whole)


@pytest.mark.parametrize(("adapter", "trained"), [
    ("lora", r"head\.\w+|.*\.lora_[AB]\.weight"),
    ("bitfit", r"head\.\w+|.*bias"),
    ("head", r"head\.\w+"),
    ("full", ".*"),
])  # fmt: skip
def test_only_what_learns_is_a_parameter_and_is_saved(folders, adapter, trained):
    model = built(folders["bert"], adapter={"name": adapter})
    names = [k for k, _ in model.named_parameters()]
    assert names
    assert all(re.fullmatch(trained, name) for name in names)
    assert sorted(saved_tensors(model)) == sorted(names)


def test_start_is_the_pretrained_model_and_a_merged_one_computes_the_same(folders):
    plain = built(folders["gpt2"], LANGUAGE, adapter={"name": "full"})
    model = built(folders["gpt2"], LANGUAGE)
    batch = tokens()
    torch.testing.assert_close(model(**batch), plain(**batch))
    with torch.no_grad():
        for k, p in model.named_parameters():
            if k.endswith("lora_B.weight"):
                nn.init.normal_(p)
    adapted = model(**batch)
    assert not torch.allclose(adapted, plain(**batch))
    merge_lora(model)
    assert not any(isinstance(m, LoraLinear) for m in model.modules())
    torch.testing.assert_close(model(**batch), adapted, rtol=1e-4, atol=1e-5)


def test_rank_alpha_and_targets_are_keys_of_the_config(folders):
    adapter = {"name": "lora", "rank": 2, "alpha": 5.0, "targets": ["query", "output.dense"]}
    model = built(folders["bert"], adapter=adapter)
    layers = {k: m for k, m in model.named_modules() if isinstance(m, LoraLinear)}
    assert len(layers) == 6  # of two blocks: query, and both layers called output.dense
    assert {m.lora_A.weight.shape[0] for m in layers.values()} == {2}
    assert {m.scale for m in layers.values()} == {2.5}


def test_frozen_part_before_a_trained_head_is_cut_off(folders):
    model = built(folders["bert"], adapter={"name": "head"})
    cut = find_cut(model, SPEC.fields)
    assert cut is not None
    assert cut.shape == (16,)
    assert configured(folders["bert"], adapter={"name": "head"}).freezes
    assert not configured(folders["bert"], adapter=ADAPTERS["full"]).freezes


@pytest.mark.parametrize(
    ("family", "spec"),
    [*((family, SPEC) for family in CONFIGS), *((f, LANGUAGE) for f in ("gpt2", "llama"))],
)
def test_frozen_layers_before_the_adapted_ones_are_cut_off(folders, family, spec):
    model = built(folders[family], spec, adapter={**ADAPTERS["lora"], "layers": 1}).double()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    cut = find_text_cut(model, spec.fields)
    assert cut is not None
    assert cut.shape == (LENGTH, 17)
    assert [k for k, _ in cut.tail.named_parameters()] == [k for k, _ in model.named_parameters()]
    inputs = tokens()
    crossing = cut.features(inputs)
    mask = inputs["attention_mask"].bool()
    whole, tail = model(**inputs), cut.tail(crossing)
    if spec is LANGUAGE:
        whole, tail = whole[mask], tail[mask]
    torch.testing.assert_close(tail, whole)
    shorter = {k: x[1:2, :1] for k, x in inputs.items()}  # without the padding
    torch.testing.assert_close(cut.features(shorter), crossing[1:2])
    language = spec is LANGUAGE
    loss = token_loss if language else cross_entropy
    how = {"draw_targets": draw_token_targets} if language else {}
    engine = make_engine(cut.tail, loss, IDENTITY, 4, cut.shape, **how)
    assert isinstance(engine, BookkeepingEngine)
    targets = draw_token_targets(4, spec.outputs) if language else torch.arange(4) % CLASSES
    params = {k: p.detach() for k, p in model.named_parameters()}
    ours = engine.clipped_sum([params], [1.0], crossing, targets, Flat(0.1))
    expected = autograd_sum(cut.tail, {"crossing_BTE": crossing}, targets, loss, 0.1)
    for key, total in expected.items():
        torch.testing.assert_close(ours[key], total, rtol=1e-6, atol=1e-9)


def test_no_cut_where_the_first_layer_learns(folders):
    for adapter in (ADAPTERS["lora"], {**ADAPTERS["lora"], "layers": 2}, ADAPTERS["bitfit"]):
        assert find_text_cut(built(folders["bert"], adapter=adapter), SPEC.fields) is None


def test_cut_that_would_compute_something_else_is_not_made(folders, monkeypatch):
    """Planted: a tail that forgets the mask, and a model whose tokens pass the layers by."""
    model = built(folders["bert"], adapter={**ADAPTERS["lora"], "layers": 1})
    assert find_text_cut(model, SPEC.fields) is not None
    whole, tail = TextModel.forward, TextTail.forward

    def forget_mask(self, crossing_BTE):
        return tail(self, torch.cat([crossing_BTE[:, :, :-1], crossing_BTE[:, :, :1] * 0 + 1], -1))

    def pass_by(self, input_ids, attention_mask=None):
        return whole(self, input_ids, attention_mask) + input_ids[:, :1]

    for kind, forward in ((TextTail, forget_mask), (TextModel, pass_by)):
        with monkeypatch.context() as at:
            at.setattr(kind, "forward", forward)
            assert find_text_cut(model, SPEC.fields) is None


def test_padding_is_cut_off_by_each_examples_own_length(folders):
    model = built(folders["bert"], adapter={"name": "head"})
    cut = find_cut(model, SPEC.fields)
    lengths = torch.tensor([1, 8, 9, 12, 3, 10])[:, None]
    mask = (torch.arange(12) < lengths).long()
    inputs = {"input_ids": torch.randint(4, VOCABULARY, (6, 12)), "attention_mask": mask}
    data = Dataset(inputs, torch.zeros(6), inputs, torch.zeros(6), 255, fields=SPEC.fields)
    seen = []
    for rows, some in trimmed_chunks(inputs, data):
        assert some["attention_mask"].sum(1).tolist() == lengths[rows, 0].tolist()
        seen += rows.tolist()
        torch.testing.assert_close(
            cut.features(some), cut.features(inputs)[rows], rtol=1e-4, atol=1e-5
        )
    assert sorted(seen) == list(range(6))
    assert [len(x["input_ids"][0]) for _, x in trimmed_chunks(inputs, data)] == [8, 12]


def test_random_weights_follow_the_seed_and_are_not_declared_public(folders):
    config = configured(folders["gpt2"], random=True, adapter={"name": "full"})
    one, same, other = (build_model(config, LANGUAGE, seed) for seed in (0, 0, 1))
    weights = [m.body.transformer.h[0].mlp.c_fc.weight for m in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert config.public_weights == ""
    assert configured(folders["gpt2"]).public_weights == f"{folders['gpt2']} (model.folder)"


REFUSED = {
    "unknown target": ("bert", SPEC, {"adapter": {"name": "lora", "targets": ["qury"]}},
                       r"'qury' is no linear layer .* query"),
    "rank": ("bert", SPEC, {"adapter": {"name": "lora", "rank": 17}},
             r"17 exceeds the layer body\S*|17 exceeds .* 16 x 16\. Give at most 16"),
    "layers": ("bert", SPEC, {"adapter": {"name": "lora", "layers": 3}},
               "3 exceeds the model's 2 layers"),
    "no biases": ("llama", SPEC, {"adapter": {"name": "bitfit"}}, "this model has none"),
    "tied head": ("gpt2", LANGUAGE, {"adapter": {"name": "head"}}, "shares its weights"),
    "no causal model": ("bert", LANGUAGE, {}, "lacks .* of the model's weights"),
    "images": ("bert", Spec(9, 9, (1, 8, 8), 10, 255, None), {}, "takes tokens, and the data give"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_right_is_refused_with_the_reason(folders, case):
    family, spec, keys, message = REFUSED[case]
    with pytest.raises(InvalidKey, match=message):
        built(folders[family], spec, **keys)


def fields(length, vocabulary):
    return Spec(9, 9, (), 2, 255, None, fields=(Field("input_ids", (length,), vocabulary),))


def test_tokenizer_and_length_must_fit(folders):
    with pytest.raises(InvalidKey, match=r"vocabulary of 40, and .* up to 41"):
        built(folders["bert"], fields(6, 41))


@pytest.mark.parametrize(("family", "most"), [("bert", 12), ("roberta", 10), ("gpt2", 12)])
def test_length_that_a_model_has_no_positions_for_is_refused(folders, family, most):
    """RoBERTa's positions begin behind the padding's: two of its twelve are never used."""
    spec = LANGUAGE if family == "gpt2" else SPEC
    long, fits = (
        replace(
            spec,
            fields=tuple(replace(field, shape=(length,)) for field in spec.fields),
            positions=length if spec is LANGUAGE else None,
        )
        for length in (most + 1, most)
    )
    built(folders[family], fits)(**tokens(length=most))
    with pytest.raises(
        ConfigError, match=rf"^data\.length: {most + 1} is more .*position.* 12.* most {most}$"
    ):
        built(folders[family], long)


FAULTS = {
    "length": ({"length": 13}, {}, r"x\.yaml:6: data\.length: 13 is more .* Give at most 12\.$"),
    "tokenizer": (
        {"tokenizer": "nope"},
        {},
        r"x\.yaml:11: data\.tokenizer: nope is neither a folder .* pip install 'dpsweep\[text\]'",
    ),
    "cut short": ({}, {"folder": "cut"}, r"x\.yaml:15: model\.folder: .* Copy the folder afresh"),
    "lacking": (
        {},
        {"folder": "lacking"},
        r"x\.yaml:15: model\.folder: .* lacks 1 .* Save the whole",
    ),
    "masks": (
        {},
        {"folder": "deberta"},
        r"x\.yaml:16: model\.name: .* Give a model of another kind",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_names_line_and_key_of_what_does_not_fit(folders, tmp_path, monkeypatch, fault):
    """Some faults show where sizes are compared, others only where weights are read and tried."""
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    for name in ("bert", "cut", "lacking"):
        shutil.copytree(folders["bert"], name)
    whole = Path("cut/model.safetensors").read_bytes()
    Path("cut/model.safetensors").write_bytes(whole[: len(whole) // 2])
    weights = load_file("lacking/model.safetensors")
    weights.pop("encoder.layer.1.output.dense.weight")
    save_file(weights, "lacking/model.safetensors", {"format": "pt"})
    deberta = transformers.DebertaV2Config(**_SMALL, **_HEADS)
    transformers.AutoModel.from_config(deberta).save_pretrained("deberta")
    Path("tokenizer.json").write_text(json.dumps({"model": {"vocab": {"good": 0, "bad": 1}}}))
    Path("rows.csv").write_text("text,label\n" + "good,1\nbad,0\n" * 20)
    data, model, message = FAULTS[fault]
    tree = {
        "data": {
            "file": "rows.csv",
            "holdout_fraction": 0.1,
            "label": "label",
            "name": "text",
            "length": 6,
            "num_classes": 2,
            "num_train": 40,
            "validation": "holdout",
            "text": "text",
            "tokenizer": "tokenizer.json",
        }
        | data,
        "model": {"adapter": {"name": "full"}, "folder": "bert", "name": "huggingface"} | model,
        "privacy": {"noise_multiplier": 1.0},
        "train": {"batch_size": 8, "epochs": 1},
        "method": {"name": "dp_sgd"},
    }
    source = parse_yaml(yaml.safe_dump(tree, sort_keys=False), "x.yaml")
    with pytest.raises(ConfigError, match=message):
        check_trial(load_trial(source), source)


def test_weights_that_are_missing_in_the_folder_are_no_random_ones(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{folders['bert']}/model.safetensors")
    weights.pop("encoder.layer.1.output.dense.weight")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(
        (transformers.AutoConfig.from_pretrained(folders["bert"])).to_json_string()
    )
    with pytest.raises(InvalidKey, match=r"lacks 1 .* encoder\.layer\.1\.output\.dense\.weight"):
        built(str(tmp_path))


def test_keys_that_do_not_fit_are_refused(folders, tmp_path):
    with pytest.raises(ValidationError, match="leaves lora nothing to adapt"):
        configured(folders["bert"], random=True)
    with pytest.raises(ValidationError, match="give one of"):
        configured(None)
    with pytest.raises(ValidationError, match="is for other models"):
        configured(folders["bert"], train=["head"])
    with pytest.raises(InvalidKey, match=r"has no config\.json"):
        built(str(tmp_path))
    with pytest.raises(InvalidKey, match=r"pip install 'dpsweep\[text\]' no-such-thing"):
        build_model(MODELS["huggingface"](package="no_such_thing"), SPEC, 0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such"}))
    with pytest.raises(InvalidKey, match="vocabulary of None"):
        built(str(tmp_path))


def test_model_that_needs_other_masks_is_refused(tmp_path):
    config = transformers.DebertaV2Config(**_SMALL, **_HEADS)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidKey, match="cannot make this model a function of each example"):
        built(str(tmp_path), adapter={"name": "full"})


# Planted faults.


def wrong(model, spec, **how):
    loss = token_loss if spec.positions else cross_entropy
    return find_wrong_gradients(model, loss, spec.fields, **how)


@torch.no_grad()
def check_scale(folder):
    """Layer and merged model compute W x + (alpha / rank) B A x, with W the folder's."""
    adapter = {"name": "lora", "rank": 3, "alpha": 6.0}
    model, plain = built(folder, adapter=adapter), built(folder, adapter=ADAPTERS["full"])
    for p in model.parameters():
        nn.init.normal_(p)
    plain.head = model.head
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            weight = plain.get_submodule(path).weight
            weight += 6.0 / 3 * layer.lora_B.weight @ layer.lora_A.weight
    expected = plain(**tokens())
    assert torch.allclose(model(**tokens()), expected, rtol=1e-3), "scale: of the layer"
    merge_lora(model)
    assert torch.allclose(model(**tokens()), expected, rtol=1e-3), "scale: of the merged model"


def test_scale_is_alpha_over_rank(folders):
    check_scale(folders["bert"])


def forget_in_layer(patch):
    patch.setattr(LoraLinear, "forward", lambda self, x: self.base(x) + self.lora_B(self.lora_A(x)))


def forget_in_merged(patch):
    patch.setattr(
        LoraLinear,
        "merged_weight",
        lambda self: self.base.weight + self.lora_B.weight @ self.lora_A.weight,
    )


def forget_in_both(patch):
    forget_in_layer(patch)
    forget_in_merged(patch)


@pytest.mark.parametrize("forget", [forget_in_layer, forget_in_merged, forget_in_both])
def test_scale_that_is_forgotten_is_found(folders, monkeypatch, forget):
    forget(monkeypatch)
    with pytest.raises(AssertionError, match="scale"):
        check_scale(folders["bert"])


class _CountedOnce(WrittenOut):
    """Norm of the first use alone, sum of both."""

    def __init__(self, answers):
        super().__init__(torch.stack([answer.each() for answer in answers]).sum(0))
        object.__setattr__(self, "first", answers[0])

    def squares(self):
        return self.first.squares()


def test_tied_weights_counted_once_in_the_norm_are_found(folders, monkeypatch):
    model = built(folders["gpt2"], LANGUAGE, adapter={"name": "full"})
    how = {"draw_targets": draw_token_targets}
    assert wrong(model, LANGUAGE, **how) is None
    monkeypatch.setattr(
        bookkeeping, "add_shared", lambda some: some[0] if len(some) == 1 else _CountedOnce(some)
    )
    assert "is not that of autograd" in wrong(model, LANGUAGE, **how)
