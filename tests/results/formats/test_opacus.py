"""The script for Opacus is the trial: sigma, rate, steps, clip norm, schedule, optimizer, model."""

import math
import os
import re
import statistics
import subprocess
import sys

import pytest

from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.release import GRID_BITS
from dpsweep.results.formats.opacus import to_opacus

REFUSED = {
    "method={name: disk, kappa: 0.7, gamma: 0.5}": "method.name: disk is not in Opacus",
    "method={compose: {}}": "method.name: compose is not in Opacus",
    "privacy.clipping=automatic": "privacy.clipping: automatic is not what Opacus does",
    "privacy.noise={source: secure}": "privacy.noise.source: secure draws from a cipher",
    "data.task={name: classification, class_weights: [1, 1, 1, 1, 1, 1, 1, 1, 1, 2]}": (
        "data.task.class_weights: the script's loss is plain cross-entropy"
    ),
    "train.augment={flips: true, multiplicity: 2}": "train.augment: Opacus clips each copy",
    "model={name: vit_small, width: 24, depth: 1, heads: 3}": "layers that Opacus refuses",
    "model.train=['0']": "model.train: the script starts from fresh weights",
}


def trial(*settings):
    base = read_yaml("configs/digits_cnn.yaml")
    return load_trial(resolve_trial_source(base, ["method={name: dp_sgd}", *settings]))


def constant(script, name):
    return float(re.search(rf"^{name} = (\S+)", script, re.M)[1])


def loaded(script):
    """The script's functions, without running it."""
    space = {"__name__": "script"}
    exec(compile(script, "script", "exec"), space)
    return space


@pytest.mark.parametrize("setting", REFUSED)
def test_what_opacus_lacks_is_refused_with_the_reason_and_the_remedy(setting):
    with pytest.raises(ConfigError) as told:
        to_opacus(trial(setting))
    assert REFUSED[setting] in str(told.value)
    assert "dpsweep train" in str(told.value)


MIXER = """
from torch import nn

class Center(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def make(shape, num_classes, mixes):
    middle = Center() if mixes else nn.Identity()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), middle, nn.Linear(8, num_classes))
"""


def test_an_own_model_that_mixes_examples_is_refused_and_its_like_that_does_not_is_written(
    tmp_path,
):
    (tmp_path / "mixer.py").write_text(MIXER)
    own = f"name: own, function: 'mixer:make', folder: {tmp_path}"
    with pytest.raises(ConfigError, match="own does not suit it: Opacus does not answer rightly"):
        to_opacus(trial(f"model={{{own}, arguments: {{mixes: true}}}}"))
    script = to_opacus(trial(f"model={{{own}, arguments: {{mixes: false}}}}"))
    assert str(tmp_path) not in script


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_gradient_that_is_not_finite_counts_as_zero_in_every_layer(value):
    import torch
    from torch import nn

    space = loaded(to_opacus(trial()))
    model = space["GradSampleModule"](nn.Linear(3, 2), loss_reduction="sum")
    optimizer = space["Private"](
        torch.optim.SGD(model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    weight_B, bias_B = torch.randn(4, 2, 3), torch.randn(4, 2)
    weight_B[1, 0, 0] = value
    sums = []
    for rows in ([0, 1, 2, 3], [0, 2, 3], [1], []):
        optimizer.zero_grad()
        for p, leaf_B in zip(optimizer.params, (weight_B, bias_B), strict=True):
            p.grad_sample = leaf_B[rows].clone()
        optimizer.clip_and_accumulate()
        sums.append([p.summed_grad.clone() for p in optimizer.params])
    for p in range(2):
        torch.testing.assert_close(sums[0][p], sums[1][p])
        assert not sums[2][p].any()
        assert not sums[3][p].any()
    assert all(part.isfinite().all() and part.any() for part in sums[0])


def test_a_release_lies_on_the_grid_of_ours_and_no_finer():
    import torch
    from torch import nn

    space = loaded(to_opacus(trial()))
    model = space["GradSampleModule"](nn.Linear(300, 20, bias=False), loss_reduction="sum")
    optimizer = space["Private"](
        torch.optim.SGD(model.parameters()),
        noise_multiplier=3.0,
        max_grad_norm=0.7,
        expected_batch_size=4,
    )
    (weight,) = optimizer.params
    weight.data = weight.data.double()
    weight.summed_grad = torch.rand(20, 300, dtype=torch.float64)
    optimizer.add_noise()
    steps = weight.grad / 2.0 ** (math.floor(math.log2(3.0 * 0.7)) - GRID_BITS)
    assert torch.equal(steps, steps.round())
    assert (steps.long() % 2).any(), "the grid is coarser"


def test_it_names_no_dpsweep_and_the_very_numbers_of_the_trial():
    config = trial("train.batch_size=128", "train.epochs=7", "privacy.clip_norm=0.3")
    script, run = to_opacus(config), plan_privacy(config).run
    assert not re.search(r"import dpsweep|from dpsweep", script)
    assert abs(constant(script, "NOISE_MULTIPLIER") - run.noise_multiplier) < 1e-6
    assert constant(script, "STEPS") == run.steps
    assert constant(script, "CLIP_NORM") == 0.3
    assert constant(script, "BATCH_SIZE") / constant(script, "NUM_EXAMPLES") == run.sampling_rate


def test_it_prints_epsilon_and_delta_rounded_up():
    config = trial("privacy.epsilon=null", "privacy.noise_multiplier=1.2345")
    spent = plan_privacy(config).epsilon
    (printed,) = re.findall(r'print\("\(([\d.]+), ([\d.e-]+)\)-DP, for this run', to_opacus(config))
    assert spent <= float(printed[0]) <= spent + 0.01
    assert config.delta <= float(printed[1]) <= 1.1 * config.delta


def test_opacus_own_accountant_agrees_on_epsilon():
    from opacus.accountants import create_accountant

    script = to_opacus(trial())
    accountant = create_accountant("prv")
    rate = constant(script, "BATCH_SIZE") / constant(script, "NUM_EXAMPLES")
    accountant.history = [
        (constant(script, "NOISE_MULTIPLIER"), rate, int(constant(script, "STEPS")))
    ]
    assert abs(accountant.get_epsilon(delta=1437**-1.1) - 4) < 0.05


SCHEDULES = (
    "{name: constant}",
    "{name: constant, warmup: 0.1}",
    "{name: cosine, final: 0.2}",
    "{name: cosine, warmup: 0.3}",
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_its_learning_rate_is_the_trials_at_every_step(schedule):
    config = trial(f"optimizer.schedule={schedule}", "optimizer.lr=2.5")
    space, own = loaded(to_opacus(config)), config.optimizer
    steps = plan_privacy(config).run.steps
    for step in range(steps):
        assert space["learning_rate"](step) == pytest.approx(
            own.lr * own.schedule.factor(step, steps), abs=1e-12
        )


@pytest.mark.parametrize(
    "optimizer",
    [
        "optimizer={name: sgd, lr: 0.5, momentum: 0.9, weight_decay: 0.01}",
        "optimizer={name: adam, lr: 0.01, beta1: 0.8, eps: 1.0e-6}",
        "optimizer={name: adamw, lr: 0.01, beta2: 0.99, weight_decay: 0.1}",
    ],
)
def test_its_optimizer_is_the_trials(optimizer):
    method = "dp_sgd" if "sgd" in optimizer else "dp_adam"
    config = trial(f"method={{name: {method}}}", optimizer)
    space = loaded(to_opacus(config))
    mine, theirs = (
        make([space["make_model"]()[0].weight])
        for make in (
            lambda params: config.optimizer.build(params, config.learning_rate),
            space["make_optimizer"],
        )
    )
    assert isinstance(mine, type(theirs)), "dpsweep's own is torch's without its compiler"
    # foreach is one call for all parameters, of the same arithmetic
    assert {**mine.defaults, "foreach": None} == dict(theirs.defaults)


def test_it_starts_from_the_trials_own_weights():
    import torch

    from dpsweep.models import build_model

    config = trial("seed=3")
    ours = build_model(config.model, config.data.spec, config.seed).state_dict()
    theirs = loaded(to_opacus(config))["make_model"]().state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_one_step_without_noise_is_our_step():
    import torch

    from dpsweep.core.seeds import Secret
    from dpsweep.training.assemble import assemble_step, initial_params

    config = trial("privacy={noise_multiplier: 0, clip_norm: 0.1}", "train.batch_size=1437")
    space = loaded(to_opacus(config))  # every example is in the batch
    step = assemble_step(config, Secret.draw(), torch.device("cpu"))
    ours = step.start(initial_params(step))
    step(ours)

    model = space["GradSampleModule"](space["make_model"](), loss_reduction="sum")
    optimizer = space["Private"](
        space["make_optimizer"](model.parameters()),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        expected_batch_size=1437,
    )
    images, labels, _, _ = space["read"](None)
    with pytest.warns(UserWarning, match="Full backward hook"):
        space["private_step"](model, optimizer, images, labels)
    for mine, theirs in zip(ours.params.values(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=2e-6)


def test_an_empty_batch_takes_a_step_of_noise_alone():
    space = loaded(to_opacus(trial()))
    space["SAMPLING_RATE"] = 0.0
    model = space["GradSampleModule"](space["make_model"](), loss_reduction="sum")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = space["Private"](
        space["make_optimizer"](model.parameters()),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        expected_batch_size=256,
    )
    images, labels, _, _ = space["read"](None)
    space["private_step"](model, optimizer, images, labels)
    moved = [(p - b).detach().flatten() for p, b in zip(model.parameters(), before, strict=True)]
    spread = statistics.stdev(x for part in moved for x in part.tolist())
    assert spread == pytest.approx(2.0 / 256, rel=0.05)  # sigma C / B, at learning rate 1


def test_two_loads_draw_other_noise_and_nothing_seeds_the_secret():
    script = to_opacus(trial())
    one, other = (loaded(script)["SECRET"].standard_normal(4).tolist() for _ in range(2))
    assert one != other
    assert re.findall(r"Philox\((.*?)\)", script) == [""]
    assert re.findall(r"manual_seed\(\d+\)", script) == ["manual_seed(676567779)"]  # the weights'


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("method={name: dp_adam}", "optimizer.lr=0.02", "train.ema=0.9"),
    ],
    ids=["dp_sgd", "dp_adam"],
)
def test_it_trains_alone_as_well_as_we_do(tmp_path, settings):
    config = trial(*settings, "model.width=8", "train.epochs=12", "train.evaluate_every=12")
    (tmp_path / "train.py").write_text(to_opacus(config))
    (tmp_path / "dpsweep.py").write_text("raise SystemExit('dpsweep was imported')")
    theirs = [opacus_run(tmp_path) for _ in range(2)]
    ours = [our_run(config, tmp_path / f"run{i}") for i in range(2)]
    sigma = plan_privacy(config).run.noise_multiplier
    assert all(abs(found - sigma) < 1e-6 for _, found in theirs)
    difference = statistics.mean(a for a, _ in theirs) - statistics.mean(ours)
    assert abs(difference) < 0.06, (theirs, ours)  # one run's spread is about 0.015
    assert theirs[0][0] > 0.7


def opacus_run(folder):
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"^accuracy (\S+); sigma (\S+);", done.stdout, re.M)
    return float(found[1]), float(found[2])


def our_run(config, folder):
    from dpsweep.training.loop import train
    from dpsweep.training.trial_dir import TrialDir

    trial_dir = TrialDir(folder)
    trial_dir.make_secret()
    return train(config, trial_dir, lambda row: None).rows[-1]["valid/accuracy"]
