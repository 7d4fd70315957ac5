"""Reduced precision on the virtual GPU: TF32 is on in forward and backward passes alone.

What TF32 and bf16 gain, only a card can show.
"""

import sys

import pytest
import torch
from digits import digits_trial, make_trial_dir, read_weights
from torch.utils._python_dispatch import TorchDispatchMode
from virtual import virtual_gpu

from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import Secret
from dpsweep.training.allowance import Allowance
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.device import open_device
from dpsweep.training.loop import train

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


def trial(precision, **settings):
    return digits_trial(
        {"name": "disk"}, device="cuda", precision={"forward": precision}, **settings
    )


class Flags(TorchDispatchMode):
    """Notes each product with the setting that a card would compute it in.

    Attributes:
        seen: (True in a forward or backward pass, precision of that kind of product).
    """

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        if name in PRODUCTS:
            kind = torch.backends.cudnn.conv if "conv" in name else torch.backends.cuda.matmul
            self.seen.add((name, in_a_pass(), kind.fp32_precision))
        return func(*args, **(kwargs or {}))


def in_a_pass():
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "record_calls":
        frame = frame.f_back
    return frame is not None


def test_tf32_is_on_in_forward_and_backward_passes_alone():
    with virtual_gpu():
        step = assemble_step(trial("tf32"), Secret.fixed("test"), open_device("cuda"))
        progress = step.start(initial_params(step))
        with Flags() as flags:
            for _ in range(2):
                step(progress)
    passes = {precision for _, inside, precision in flags.seen if inside}
    sums = {precision for _, inside, precision in flags.seen if not inside}
    assert passes == {"tf32"}
    assert sums == {"ieee"}
    assert {"convolution", "convolution_backward"} <= {name for name, *_ in flags.seen}
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_failing_pass_leaves_ieee_behind(monkeypatch):
    with virtual_gpu():
        step = assemble_step(trial("tf32"), Secret.fixed("test"), open_device("cuda"))
        progress = step.start(initial_params(step))
        last = list(step.engine.model.children())[-1]
        last.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(progress)
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn.conv):
        assert backend.fp32_precision == "ieee"


def test_tf32_is_refused_for_several_cards():
    allowance = Allowance(num_devices=2)
    with virtual_gpu(num_cards=2):
        device = open_device("cuda", num_devices=2)
        with pytest.raises(ConfigError, match=r"train\.precision\.forward: tf32 is switched on"):
            assemble_step(trial("tf32"), Secret.fixed("test"), device, allowance=allowance)


def test_two_cards_in_bf16_release_the_bits_of_one(tmp_path):
    config = trial("bf16", max_physical_batch=50)
    one = make_trial_dir(tmp_path / "one")
    two = make_trial_dir(tmp_path / "two", like=one)
    exact = make_trial_dir(tmp_path / "exact", like=one)
    with virtual_gpu(num_cards=2) as gpu:
        train(config, one, lambda row: None)
        train(config, two, lambda row: None, allowance=Allowance(num_devices=2))
        train(trial("tf32"), exact, lambda row: None)  # which the virtual card computes in float32
        assert gpu.mixed == gpu.unordered == []
    for name, tensor in read_weights(one).items():
        assert torch.equal(read_weights(two)[name], tensor), name
        assert tensor.dtype == torch.float32
    assert any(not torch.equal(read_weights(exact)[k], x) for k, x in read_weights(one).items())
