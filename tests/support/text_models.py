"""What a language model computes by this package, which exports of it are compared with."""

import torch

from dpsweep.training.generate import decode_greedily


def predict(config, model):
    """Outputs for the texts of the test split."""
    inputs, _ = config.data.read("num_test")
    with torch.no_grad():
        return model(**{k: x.long() for k, x in inputs.items()})


def write_greedily(config, model, prompts, length, max_tokens):
    """The text that follows each prompt, with the separator " => " between."""
    coder, end = config.data.load_coder()
    ids = [tuple(coder.encode(f"{p} => ", add_special_tokens=False).ids) for p in prompts]
    params = dict(model.named_parameters())
    written = decode_greedily(model, params, ids, end, length, max_tokens, torch.device("cpu"))
    return [coder.decode(each) for each in written]
