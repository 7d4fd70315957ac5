"""Texts that are written after validation prompts, and their BLEU and ROUGE-L."""

import math

import pytest
import torch
from torch import nn

from dpsweep.config.search import ObjectiveConfig
from dpsweep.core.errors import ConfigError
from dpsweep.data.read import Dataset
from dpsweep.data.tasks import IGNORED, CausalLM
from dpsweep.data.text import GenerationData
from dpsweep.training.generate import (
    collect_references,
    compute_bleu,
    compute_rouge_l,
    decode_greedily,
)

END = 9


class Counter(nn.Module):
    """Says the last own token plus `step`, and END behind 7."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(1.0))
        self.calls = []

    def forward(self, input_ids, attention_mask):
        self.calls.append(input_ids.shape)
        # by its mask, so that what stands behind an example's own tokens cannot matter
        said = (input_ids * attention_mask + self.step.round().long()).clamp(max=8)
        said = torch.where(said == 8, END, said)
        return nn.functional.one_hot(said, 10).float() * self.step


def written(prompts, length=8, max_tokens=20, step=1.0):
    params = {"step": torch.tensor(step)}
    return decode_greedily(Counter(), params, prompts, END, length, max_tokens, torch.device("cpu"))


def test_greedy_texts_stop_at_the_end_at_the_most_tokens_and_at_the_length():
    assert written([(5,), (1, 6), (7,)]) == [[6, 7], [7], []]
    assert written([(1,)], max_tokens=3) == [[2, 3, 4]]
    assert written([(0, 0, 0, 0, 0, 1)]) == [[2, 3]]
    assert written([(2,)], step=3.0) == [[5]]


def test_a_text_is_the_same_whatever_is_written_beside_it():
    alone = [written([prompt])[0] for prompt in [(5,), (1, 6), (1,), (0, 0, 2)]]
    assert written([(5,), (1, 6), (1,), (0, 0, 2)]) == alone


def dataset(rows, prompts, length=6):
    """Rows of ids with so many tokens of prompt each."""
    ids, targets = torch.full((len(rows), length), 0), torch.full((len(rows), length), IGNORED)
    for i, (row, first) in enumerate(zip(rows, prompts, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        targets[i, first - 1 : len(row) - 1] = torch.tensor(row[first:])
    none = torch.empty(0)
    return Dataset(none, none, {"input_ids": ids}, targets, 1)


def test_all_targets_of_one_prompt_are_its_references():
    data = dataset([[1, 2, 3, END], [4, 5, END], [1, 2, 6, 7, END], [8, 3, END]], [2, 1, 2, 1])
    found = collect_references(data, 2, END)
    assert found == {(1, 2): [[3], [6, 7]], (4,): [[5]]}
    cut = dataset([[1, 2, 3, 4, 5, 6]], [2])  # its end was cut off
    assert collect_references(cut, 9, END) == {(1, 2): [[3, 4, 5, 6]]}


def test_bleu_and_rouge_are_those_of_their_packages():
    sacrebleu = pytest.importorskip("sacrebleu", reason="extra generation")
    pytest.importorskip("rouge_score", reason="extra generation")
    texts = ["the cat sat on the mat", "there is a pub near the river"]
    references = [
        ["the cat sat on a mat"],
        ["a pub is near the river", "there is a pub by a river"],
    ]
    columns = [[r[0] for r in references], [None, references[1][1]]]
    assert compute_bleu(texts, references) == sacrebleu.corpus_bleu(texts, columns).score
    assert compute_bleu(["the cat sat on a mat"], references[:1]) == pytest.approx(100)
    assert compute_rouge_l(["a b c d"], [["a b", "a x c d"]]) == pytest.approx(0.75)
    assert compute_rouge_l(["a b", "z"], [["a b"], ["y"]]) == pytest.approx(0.5)
    assert compute_bleu([""], [["a b c d"]]) == 0


def test_metrics_of_texts_are_named_by_the_task_and_can_be_the_objective():
    task = CausalLM(metrics=("bleu", "perplexity"))
    assert task.metric_names == ("bleu", "perplexity", "loss")
    assert (task.generates, CausalLM().generates) == (True, False)
    sums = {"loss": 2.0, "tokens": torch.tensor(2.0), "count": torch.tensor(1.0)}
    found = task.compute_metrics({**sums, "bleu": torch.tensor(30.0)}, 4)
    assert found == {"bleu": 30.0, "perplexity": pytest.approx(math.exp(2)), "loss": 0.5}
    assert ObjectiveConfig(metric="valid/bleu").direction == "maximize"
    assert ObjectiveConfig(metric="valid/rouge_l").direction == "maximize"


def test_a_package_that_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "dpsweep.data.text.find_spec", lambda name: None if name == "sacrebleu" else object()
    )
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "rows.csv").write_text("a,b\n")
    config = GenerationData(
        file=str(tmp_path / "rows.csv"),
        source="a",
        target="b",
        tokenizer=str(tmp_path),
        length=4,
        num_train=9,
        validation="holdout",
        task={"name": "causal_lm", "metrics": ["bleu"]},
    )
    with pytest.raises(ConfigError, match=r"data.task.metrics: bleu .*\'dpsweep\[generation\]\'"):
        config.refuse_missing()
