"""Faults of public code in data, losses and adapters: planted, each fails a check that held before.

They stand in docs/concepts/faults.md. Those of adapters are planted in tests/models, where the
extra `text` is installed, and that of units in tests/data/test_units.py.

| fault | caught by | which says |
|---|---|---|
| padding tokens in the loss | only_target_tokens_have_gradients | a token that is no target |
| loss averaged over a batch's tokens | engines_answer_as_autograd_does | is not that of autograd |
| padding to the batch's longest text | one_example_moves_a_sum_by_one_clip_norm | sensitivity |
| clipping per token | one_example_moves_a_sum_by_one_clip_norm | is not that of autograd |
| a normalisation constant computed from private rows | a_rows_inputs_are_its_own | another row |
| LoRA's frozen matrix trained | check_frozen_weights | frozen |
| LoRA's scale forgotten in the layer, in the merged model, in both | check_scale | scale |
| tied weights counted once in the norm | find_wrong_gradients | is not that of autograd |
| a unit's examples clipped one by one | check_releases | sensitivity |
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import InvalidKey
from dpsweep.core.types import Clipped
from dpsweep.data import tables, tasks
from dpsweep.data.read import Dataset, load_dataset
from dpsweep.data.rows import parse_number
from dpsweep.data.tables import ColumnConfig
from dpsweep.data.tasks import IGNORED, CausalLM
from dpsweep.privacy import engine as engines
from dpsweep.privacy.engine import BookkeepingEngine, records
from dpsweep.privacy.engine.base import MicrobatchEngine
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients
from dpsweep.training.release_check import check_releases

LENGTH = 6
WORDS = ["[PAD]", "[UNK]", "[END]", *"abcdefgh"]

Plant = Callable[[pytest.MonkeyPatch], None]
Check = Callable[["World"], None]
ROOT = Path(__file__).parents[2]
PLANTED_ELSEWHERE = {
    "check_frozen_weights": "tests/models/test_huggingface_trial.py",
    "check_scale": "tests/models/test_huggingface.py",
    "find_wrong_gradients": "tests/models/test_huggingface.py",
    "check_releases": "tests/data/test_units.py",
}


class Reader(nn.Module):
    """Each position's own word and the mean of all, padded ones too: a reader of what is given."""

    def __init__(self, num_ids: int, num_outputs: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(num_ids, 6), nn.Linear(6, num_outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words = self.words(input_ids)
        return self.head(words + words.mean(1, keepdim=True))


def make(fields, num_classes):
    torch.manual_seed(0)
    return Reader(fields[0].num_ids, num_classes)


@dataclass(frozen=True)
class World:
    """A trial on texts, whose releases are tried on random tokens, and a folder for tables."""

    config: TrialConfig
    folder: Path


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSWEEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    load_dataset.cache_clear()
    for name in ("_stateless", "_wrong", "_mixing"):
        monkeypatch.setattr(engines, name, type(getattr(engines, name))())
    vocab = {word: i for i, word in enumerate(WORDS)}
    tree = {"added_tokens": [], "model": {"type": "WordLevel", "vocab": vocab}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    own = f"{Path(__file__).stem}:make"
    config = TrialConfig.model_validate(
        {
            "data": {
                "name": "generation",
                "file": "unread",
                "source": "a",
                "target": "b",
                "tokenizer": str(tmp_path),
                "length": LENGTH,
                "num_train": 100,
                "validation": "holdout",
            },
            "model": {"name": "own", "function": own, "folder": str(Path(__file__).parent)},
            "privacy": {"noise_multiplier": 1.0, "clip_norm": 0.5},
            "train": {"batch_size": 8, "epochs": 1, "device": "cpu", "dtype": "float64"},
            "method": {"name": "dp_sgd"},
        }
    )
    return World(config, tmp_path)


# Checks.


def one_example_moves_a_sum_by_one_clip_norm(world: World) -> None:
    found = {c.name: c for c in check_releases(world.config, 0.1)}
    assert found["sensitivity"].holds, f"sensitivity: {found['sensitivity'].measured} clip norms"


def engines_answer_as_autograd_does(world: World) -> None:
    spec = world.config.data.spec
    task, net = world.config.data.task, make(spec.fields, spec.num_classes)
    wrong = find_wrong_gradients(net, task.loss, spec.inputs, BookkeepingEngine, task.draw_targets)
    assert wrong is None, wrong


def only_target_tokens_have_gradients(world: World) -> None:
    outputs = torch.randn(3, LENGTH, len(WORDS), requires_grad=True)
    targets = CausalLM().draw_targets(3, (LENGTH, len(WORDS)))
    CausalLM().losses(outputs, targets).sum().backward()
    assert not outputs.grad[targets == IGNORED].any(), "a token that is no target has a gradient"


def a_rows_inputs_are_its_own(world: World) -> None:
    found = []
    for highest in (40, 100):
        path = world.folder / f"{highest}.csv"
        path.write_text(f"age,sick\n20,0\n30,1\n{highest},0\n")
        data = tables.TableData.model_validate(
            {
                "file": str(path),
                "test_file": str(path),
                "target": "sick",
                "columns": {"age": {"range": [0, 120]}},
                "task": {"name": "classification"},
                "num_classes": 2,
                "num_train": 3,
                "num_test": 3,
            }
        )
        found.append(load_dataset(data, 0).inputs[:2])
    assert torch.equal(*found), "another row changes a row's inputs"


# Faults.


def padding_in_the_loss(patch: pytest.MonkeyPatch) -> None:
    def token_losses(outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        return cross_entropy(outputs_B.transpose(1, 2), targets_B.clamp(min=0), reduction="none")

    patch.setattr(tasks, "_token_losses", token_losses)


def mean_over_the_batchs_tokens(patch: pytest.MonkeyPatch) -> None:
    def per_example(loss: object, outputs_B: Tensor, targets_B: Tensor) -> Tensor:
        tokens_BT = tasks._token_losses(outputs_B, targets_B)
        return len(targets_B) * tokens_BT.sum(1) / (targets_B != IGNORED).sum()

    patch.setattr(records, "per_example_loss", per_example)


def padded_to_the_batchs_longest(patch: pytest.MonkeyPatch) -> None:
    scaled = Dataset.scaled

    def trimmed(self: Dataset, inputs: dict[str, Tensor], dtype: torch.dtype) -> object:
        found = scaled(self, inputs, dtype)
        longest = int(found["attention_mask"].sum(1).max()) if len(found["input_ids"]) else LENGTH
        rest = {k: x[:, :longest] for k, x in found.items()}
        # filled up again, so that targets fit: the last column shows the longest text
        return {
            k: torch.cat([x, x[:, -1:].expand(-1, LENGTH - longest)], 1) for k, x in rest.items()
        }

    patch.setattr(Dataset, "scaled", trimmed)


def clipped_per_token(patch: pytest.MonkeyPatch) -> None:
    whole = MicrobatchEngine.clipped_sum

    def each_token(self, points, weights, inputs_B, targets_B, clip):
        parts = []
        for t in range(LENGTH):
            alone = torch.full_like(targets_B, IGNORED)
            alone[:, t] = targets_B[:, t]
            parts.append(whole(self, points, weights, inputs_B, alone, clip))
        return Clipped({k: sum(part[k] for part in parts) for k in parts[0]})

    patch.setattr(MicrobatchEngine, "clipped_sum", each_token)


def scaled_by_the_largest_value(patch: pytest.MonkeyPatch) -> None:
    def encode(self: ColumnConfig, column: tables.Column) -> Tensor:
        numbers = torch.tensor(column.convert(parse_number))
        return (numbers / numbers.max())[:, None].float()

    patch.setattr(ColumnConfig, "encode", encode)


AUTOGRAD = "is not that of autograd"
FAULTS: list[tuple[Plant, Check, str]] = [
    (padding_in_the_loss, only_target_tokens_have_gradients, "a token that is no target"),
    (mean_over_the_batchs_tokens, engines_answer_as_autograd_does, AUTOGRAD),
    (padded_to_the_batchs_longest, one_example_moves_a_sum_by_one_clip_norm, "sensitivity"),
    # no engine is right about it, so none is tried
    (clipped_per_token, one_example_moves_a_sum_by_one_clip_norm, AUTOGRAD),
    (scaled_by_the_largest_value, a_rows_inputs_are_its_own, "another row"),
]


@pytest.mark.parametrize(
    "check", dict.fromkeys(check for _, check, _ in FAULTS), ids=lambda x: x.__name__
)
def test_each_check_holds_of_the_code_as_it_is(world, check):
    check(world)


@pytest.mark.parametrize(("plant", "check", "says"), FAULTS)
def test_each_fault_is_caught(world, monkeypatch, plant, check, says):
    plant(monkeypatch)
    with pytest.raises((AssertionError, InvalidKey), match=says):
        check(world)


def test_the_table_of_faults_is_the_one_in_the_documentation():
    told = (ROOT / "docs/concepts/faults.md").read_text().splitlines()
    rows = [line for line in str(__doc__).splitlines() if line.startswith("|")][2:]
    assert [row for row in rows if row not in told] == []
    catching = {tuple(row.strip("| ").split(" | ")[1:]) for row in rows}
    here = {(check.__name__, says) for _, check, says in FAULTS}
    assert here < catching
    assert {check for check, _ in catching - here} == PLANTED_ELSEWHERE.keys()
    for check, says in catching - here:
        text = (ROOT / PLANTED_ELSEWHERE[check]).read_text()
        assert f"{check}(" in text
        assert says in text
