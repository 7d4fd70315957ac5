"""Texts that a language model writes after validation prompts, and their BLEU and ROUGE-L.

Decoding is greedy and of bounded length, so a metric is a function of the released iterate and the
validation data alone. Texts are not kept: those after held-out prompts may quote them.
"""

from collections.abc import Sequence
from importlib import import_module
from statistics import fmean

import torch
from torch import Tensor, nn

from dpsweep.core.inputs import apply_model
from dpsweep.core.types import Tensors
from dpsweep.data.read import Dataset
from dpsweep.data.tasks import IGNORED
from dpsweep.data.text import GenerationData


def measure_texts(
    model: nn.Module, params: Tensors, data: Dataset, config: GenerationData, at_once: int
) -> dict[str, float]:
    """Compute the metrics of texts that `config.task` names, by name.

    Hypotheses and references are compared as the tokenizer decodes them.

    Args:
        at_once: Texts that are written together.
    """
    coder, end = config.load_coder()
    found = collect_references(data, config.task.num_prompts, end)
    prompts = [*found]
    written: list[list[int]] = []
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        written += decode_greedily(
            model, params, some, end, config.length, config.task.max_tokens, data.device
        )
    texts = [coder.decode(ids) for ids in written]
    references = [[coder.decode(ids) for ids in each] for each in found.values()]
    metrics = {"bleu": compute_bleu, "rouge_l": compute_rouge_l}
    return {k: metrics[k](texts, references) for k in config.task.metrics if k in metrics}


def collect_references(data: Dataset, num: int, end: int) -> dict[tuple[int, ...], list[list[int]]]:
    """Collect the first `num` different prompts, and all targets of each without their end."""
    assert isinstance(data.valid_inputs, dict), "texts are named tensors"
    found: dict[tuple[int, ...], list[list[int]]] = {}
    ids = data.valid_inputs["input_ids"].tolist()
    for row, targets in zip(ids, data.valid_targets.tolist(), strict=True):
        learned = [place for place, target in enumerate(targets) if target != IGNORED]
        if not learned:
            continue
        prompt = tuple(row[: learned[0] + 1])
        if prompt in found or len(found) < num:
            answer = [targets[place] for place in learned]
            found.setdefault(prompt, []).append(answer[:-1] if answer[-1] == end else answer)
    return found


@torch.no_grad()
def decode_greedily(
    model: nn.Module,
    params: Tensors,
    prompts: Sequence[tuple[int, ...]],
    end: int,
    length: int,
    max_tokens: int,
    device: torch.device,
) -> list[list[int]]:
    """Write the likeliest next token after each prompt, until `end` or the most tokens.

    Returns:
        Ids behind each prompt, without the end.
    """
    ids_BT = torch.full((len(prompts), length), end, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids_BT[row, : len(prompt)] = torch.tensor(prompt)
    firsts_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    limits_B = (firsts_B + max_tokens).clamp(max=length)
    lengths_B, rows_B = firsts_B.clone(), torch.arange(len(prompts), device=device)
    running_B = lengths_B < limits_B
    places_T = torch.arange(length, device=device)
    while bool(running_B.any()):
        rows = rows_B[running_B]
        mask_BT = (places_T < lengths_B[rows, None]).long()
        given = {"input_ids": ids_BT[rows], "attention_mask": mask_BT}
        outputs: Tensor = apply_model(model, given, params)
        next_B = outputs[torch.arange(len(rows), device=device), lengths_B[rows] - 1].argmax(1)
        ids_BT[rows, lengths_B[rows]] = next_B
        goes_on = next_B != end
        lengths_B[rows] += goes_on.long()
        running_B[rows] = goes_on & (lengths_B[rows] < limits_B[rows])
    spans = zip(ids_BT.tolist(), firsts_B.tolist(), lengths_B.tolist(), strict=True)
    return [row[first:last] for row, first, last in spans]


def compute_bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU of sacrebleu with its own tokenisation, 0 to 100; any number of references."""
    most = max(map(len, references))
    columns = [[each[i] if i < len(each) else None for each in references] for i in range(most)]
    bleu = import_module("sacrebleu.metrics").BLEU()
    return float(bleu.corpus_score(list(texts), columns).score)


def compute_rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean F measure of ROUGE-L, each with its best reference, 0 to 1."""
    scorer = import_module("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = zip(texts, references, strict=True)
    return fmean(scorer.score_multi(list(each), text)["rougeL"].fmeasure for text, each in pairs)
