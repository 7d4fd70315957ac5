"""Make a small causal model and a tokenizer for E2E: python benchmarks/e2e.py ROWS FOLDER.

ROWS is testset_w_refs.csv. Nothing is learned from the training rows: the tokenizer's 1,000 pieces
come from the test set, which is declared public, and the weights are random.
docs/benchmarks/pretrained.md has the trial.
"""

import csv
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END, PADDING = "<|endoftext|>", "<pad>"


def make_model(rows: Path, folder: Path) -> int:
    """Write tokenizer and random weights; return the number of weights."""
    with rows.open(newline="", encoding="utf-8") as file:
        texts = [text for row in csv.DictReader(file) for text in (row["mr"], row["ref"])]
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=[END, PADDING], initial_alphabet=letters
    )
    pieces.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token=END, pad_token=PADDING)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=pieces.get_vocab_size(),
        n_positions=112,
        n_embd=96,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    print(f"{make_model(Path(sys.argv[1]), Path(sys.argv[2]))} weights")
