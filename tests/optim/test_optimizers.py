"""Base optimizers are torch's own, with the hyperparameters of their config."""

import subprocess
import sys

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from dpsweep.optim import OptimizerConfig
from dpsweep.optim.adam import Adam, AdamW
from dpsweep.optim.base import Base
from dpsweep.optim.sgd import Sgd

MOMENTS = {"beta1": 0.8, "beta2": 0.99, "eps": 1e-5}
CASES = [
    (
        Sgd(lr=0.3, momentum=0.7, weight_decay=0.01),
        torch.optim.SGD,
        {"lr": 0.3, "momentum": 0.7, "weight_decay": 0.01, "dampening": 0, "nesterov": False},
    ),
    (
        Adam(lr=0.3, weight_decay=0.01, **MOMENTS),
        torch.optim.Adam,
        {"lr": 0.3, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.01, "amsgrad": False},
    ),
    (
        AdamW(lr=0.3, weight_decay=0.01, **MOMENTS),
        torch.optim.AdamW,
        {"lr": 0.3, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.01, "amsgrad": False},
    ),
]
every_case = pytest.mark.parametrize(
    ("config", "kind", "expected"), CASES, ids=[type(config).__name__ for config, *_ in CASES]
)


@every_case
def test_build_gives_torchs_optimizer_with_the_configs_numbers(config, kind, expected):
    params = [torch.ones(3), torch.ones(())]
    optimizer = config.build(params, config.lr)
    assert isinstance(optimizer, kind)
    (group,) = optimizer.param_groups
    assert {key: group[key] for key in expected} == expected
    assert not group["maximize"]
    assert [id(p) for p in group["params"]] == [id(p) for p in params]


@every_case
def test_step_moves_against_the_gradient(config, kind, expected):
    x = torch.zeros(2)
    x.grad = torch.tensor([1.0, -2.0])
    config.build([x], config.lr).step()
    assert x[0] < 0 < x[1]


@every_case
def test_steps_have_the_bits_of_torchs_own_optimizer(config, kind, expected):
    """Over steps, and over a state that is saved and loaded, with a learning rate that changes."""
    rng = torch.Generator().manual_seed(0)
    starts = [torch.randn(7, 3, generator=rng), torch.randn(5, generator=rng)]
    ours, theirs = [x.clone() for x in starts], [x.clone() for x in starts]
    betas = {"betas": expected["betas"], "eps": expected["eps"]} if "betas" in expected else {}
    more = betas or {"momentum": expected["momentum"]}
    reference = kind(theirs, lr=config.lr, weight_decay=expected["weight_decay"], **more)
    optimizer = config.build(ours, config.lr)
    for t in range(6):
        if t == 3:
            saved = optimizer.state_dict()
            optimizer = config.build(ours, config.lr)
            optimizer.load_state_dict(saved)
        for x, y in zip(ours, theirs, strict=True):
            x.grad = torch.randn(x.shape, generator=rng)
            y.grad = x.grad.clone()
        for one in (optimizer, reference):
            one.param_groups[0]["lr"] = 0.3 / (t + 1)
            one.step()
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))
    assert {str(k) for k in optimizer.state_dict()} == {str(k) for k in reference.state_dict()}


def test_training_and_its_checks_import_no_compiler(tmp_path):
    """Importing torch's compiler and sympy takes each worker longer than a small trial."""
    code = """if True:
        import sys
        from pathlib import Path
        from dpsweep.config.trial import TrialConfig
        from dpsweep.training.loop import train
        from dpsweep.training.release_check import check_releases
        from dpsweep.training.trial_dir import TrialDir
        for name in ("dp_sgd", "dp_adam", "dp_adambc"):
            config = TrialConfig.model_validate(
                {"data": {"name": "digits"}, "model": {"name": "cnn_small", "width": 4},
                 "privacy": {"epsilon": 4}, "method": {"name": name},
                 "train": {"batch_size": 64, "epochs": 0.1}})
            if name == "dp_sgd":
                check_releases(config, 0.1)
            place = TrialDir(Path(sys.argv[1]) / name)
            place.make_secret()
            with place.lock(1):
                train(config, place, lambda row: None)
            found = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
            assert not found, (name, found)
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_plain_sgd_steps_by_lr_times_gradient():
    x = torch.zeros(2)
    x.grad = torch.tensor([1.0, -2.0])
    Sgd(lr=0.5).build([x], 0.5).step()
    assert x.tolist() == [-0.5, 1.0]


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (Sgd, {"momentum": 0.0}),
        (Adam, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
        (AdamW, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    ],
)
def test_defaults_are_the_papers_and_name_the_kind(kind, defaults):
    config = TypeAdapter(OptimizerConfig).validate_python({"name": kind.__name__.lower(), "lr": 1})
    assert config == kind(lr=1.0)
    given = config.model_dump(exclude={"name", "lr", "total_step", "schedule"})
    assert given == {"weight_decay": 0.0, **defaults}


def test_eta_is_the_learning_rate():
    assert Sgd(eta=0.3) == Sgd(lr=0.3)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Sgd, {"lr": 0.0}),
        (Sgd, {"lr": 1.0, "momentum": 1.0}),
        (Adam, {"lr": 1.0, "beta1": 1.0}),
        (Adam, {"lr": 1.0, "eps": 0.0}),
        (AdamW, {"lr": 1.0, "weight_decay": -0.1}),
    ],
)
def test_numbers_outside_their_range_are_refused(kind, wrong):
    key = list(wrong)[-1]
    with pytest.raises(ValidationError, match=rf"{key}\n  Input should be (greater|less) than"):
        kind(**wrong)


def test_base_itself_builds_nothing():
    with pytest.raises(NotImplementedError):
        Base(lr=1.0).build([], 1.0)
