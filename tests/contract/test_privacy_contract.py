"""The five points that make a method private, for every method and style, by the real step.

They stand in docs/concepts/privacy.md, and as functions in checks.py and chance.py; what they are
checked in is in worlds.py.
"""

from dataclasses import replace
from typing import get_args

import chance
import checks
import pytest
import torch
from pydantic import ValidationError
from worlds import METHOD_WORLDS, OFTEN, OWN, STYLES, UNFILTERED, WORLDS, keeping_all, rounded

from dpsweep.config.clipping import AdaptiveClipping, AutomaticClipping, ClippingConfig
from dpsweep.config.trial import TrialConfig
from dpsweep.core.types import PerExample, Released
from dpsweep.data.datasets import ImageData
from dpsweep.data.read import load_dataset
from dpsweep.methods import METHODS
from dpsweep.models import build_model
from dpsweep.privacy.accounting import Run
from dpsweep.privacy.clip import clipped_sum, split_count
from dpsweep.training.evaluate import evaluate
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

FEW = ("dp_sgd", "dp_sgd-secure-noise", "dp_adambc", "fftkf-split", "spectral_dp")
"""Variants that stand for the others where what is checked is the same for all."""


def cases(worlds, often):
    """`worlds` as parameters of a test; those not in `often` are slow."""
    return [
        pytest.param(world, id=name, marks=[] if name in often else pytest.mark.slow)
        for name, world in worlds.items()
    ]


def in_worlds(worlds, often=OWN):
    return pytest.mark.parametrize("world", cases(worlds, often))


every_world = in_worlds(WORLDS)
every_method = in_worlds(METHOD_WORLDS, METHOD_WORLDS)
in_both_precisions = pytest.mark.parametrize("dtype", ["float64", "float32"])
in_single_precision = in_worlds(METHOD_WORLDS, FEW)


def test_every_method_and_every_style_of_the_tables_is_tested_here():
    configs = [world.config for world in WORLDS.values()]
    assert {config.method.name for config in configs} == set(METHODS)
    styles = {style.model_fields["name"].default for style in get_args(get_args(ClippingConfig)[0])}
    assert {config.privacy.clipping.name for config in configs} == styles
    assert {world.style for world in WORLDS.values()} == set(STYLES)


# 1. The points depend on past releases alone.


@every_world
def test_points_of_a_step_do_not_depend_on_its_batch(world):
    checks.check_batch_has_no_say(world)


@every_world
def test_examples_are_asked_at_the_textbook_s_points_with_its_weights(world):
    checks.check_points(world)


@every_method
def test_weights_sum_to_one_and_the_newest_iterate_weighs_most(world):
    checks.check_asks(world)


# 2. Clipping is the last thing done to one example's answer.


@in_both_precisions
@in_worlds(WORLDS, OFTEN)
def test_one_example_moves_the_sum_by_at_most_the_clip_norm(world, dtype):
    checks.check_sensitivity(replace(world, dtype=dtype))


@in_both_precisions
@in_worlds(WORLDS, OFTEN)
def test_example_that_is_huge_or_not_finite_stays_bounded_and_alone(world, dtype):
    checks.check_bad_examples(replace(world, dtype=dtype))


@in_worlds(UNFILTERED, OFTEN)
def test_noise_free_release_is_the_sum_of_clipped_answers_taken_one_by_one(world):
    checks.check_reference(world)


@in_worlds({k: w for k, w in UNFILTERED.items() if w.style == "flat"}, UNFILTERED)
def test_release_without_clipping_and_noise_is_the_gradient_of_autograd(world):
    checks.check_unclipped_gradient(world)


@every_world
def test_microbatches_and_their_size_change_nothing(world):
    checks.check_microbatches(world)


@in_single_precision
def test_microbatches_and_their_size_change_nothing_in_single_precision(world):
    checks.check_microbatches(replace(world, dtype="float32"))


BF16 = {
    name: rounded(METHOD_WORLDS[name], "bf16")
    for name in ("dp_sgd", "disk-augmented", "fftkf-split", "bandmf", "spectral_dp")
}
TF32 = {
    name: rounded(METHOD_WORLDS[name], "tf32")
    for name in ("dp_sgd", "disk-augmented", "spectral_dp")
}
WITH_ROUNDED_RECORDS = [
    checks.check_sensitivity,
    checks.check_bad_examples,
    checks.check_reference,
    checks.check_microbatches,
    checks.check_devices,
    checks.check_points,
    checks.check_batch_has_no_say,
    checks.check_divisor,
    checks.check_empty_batch,
    checks.check_only_the_release_leaves,
    checks.check_resume,
    chance.check_noise,
]


def check_rounded(world, check):
    check(keeping_all(world) if check is checks.check_reference and world.geometry.maps else world)


@pytest.mark.parametrize("check", WITH_ROUNDED_RECORDS, ids=lambda check: check.__name__)
@in_worlds(BF16, ("dp_sgd", "disk-augmented"))
def test_all_of_it_holds_with_records_rounded_to_bf16(world, check):
    check_rounded(world, check)


@pytest.mark.parametrize("check", WITH_ROUNDED_RECORDS, ids=lambda check: check.__name__)
@in_worlds(TF32, ("dp_sgd",))
def test_all_of_it_holds_with_records_rounded_to_tf32(world, check):
    """On a CPU, whose products are rounded as a card's."""
    if check is checks.check_devices:
        pytest.skip("tf32 on several devices is refused: tests/gpu/test_precision.py")
    check_rounded(world, check)


@in_worlds(METHOD_WORLDS, (*FEW, "disk-augmented", "compose-momentum-spectral"))
@in_both_precisions
def test_devices_that_share_a_batch_sum_it_to_the_same_bits(world, dtype):
    checks.check_devices(replace(world, dtype=dtype))


# 3. The noise is isotropic where clipping happened, and nothing shrinks it.


@every_world
def test_noise_has_the_calibrated_law_in_every_coordinate_and_is_independent(world):
    chance.check_noise(world)


@every_method
def test_two_trials_draw_different_noise_and_a_replayed_step_the_same(world, monkeypatch):
    monkeypatch.delenv("DPSWEEP_TEST_SECRET", raising=False)
    chance.check_fresh_noise(world)


@pytest.mark.parametrize("name", ["dp_sgd", "dp_sgd-secure-noise", "fftkf-split", "spectral_dp"])
def test_every_batch_is_a_poisson_sample_of_its_own(name):
    chance.check_sampling(METHOD_WORLDS[name])


correlated = pytest.mark.parametrize(
    "world", [w for w in METHOD_WORLDS.values() if w.correlation], ids=lambda w: str(w.method)
)


@correlated
def test_example_is_sampled_at_steps_of_its_secret_group_alone(world):
    chance.check_groups(world)


@correlated
def test_correlated_noise_is_charged_as_the_samples_that_one_example_meets(world):
    chance.check_accounting(world)


# 4. The divisor is constant, and an empty batch takes its step.


@every_world
def test_divisor_is_the_expected_batch_size_whatever_the_true_one(world):
    checks.check_divisor(world)


@every_world
def test_empty_batch_is_released_as_noise_alone_and_takes_its_step(world):
    checks.check_empty_batch(world)


# 5. Nothing else computed from training data leaves the trial.


@every_world
def test_what_a_step_leaves_behind_is_a_function_of_the_release(world):
    checks.check_only_the_release_leaves(world)


@every_method
def test_secret_is_in_no_text_and_no_checkpoint(world):
    checks.check_secret_is_said_nowhere(world)


DIGITS = {"batch_size": 479, "epochs": 2, "device": "cpu", "dtype": "float64", "threads": 1}
FITTING = {"block_spectral_dp": {"keep_circulant": 0.5}}  # a quarter of a block of 2 is no bin


@pytest.mark.parametrize("name", cases({name: name for name in METHODS}, FEW))
def test_reports_can_be_recomputed_from_released_weights_and_public_numbers(
    name, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "contract")
    config = TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 2, "block": 2},
            "privacy": {"noise_multiplier": 1, "clip_norm": 0.5},
            "train": DIGITS,
            "optimizer": {"lr": 0.3},
            "method": {"name": name, **FITTING.get(name, {})},
        }
    )
    trial_dir, data = TrialDir(tmp_path / "trial"), load_dataset(ImageData(name="digits"), 0)
    model = build_model(config.model, config.data.spec, config.seed).double()
    run = Run(sampling_rate=479 / 1437, noise_multiplier=1.0, steps=6)
    rows = []

    def check(row: dict[str, float]) -> None:
        """By the time of a report, the trial's checkpoint holds the weights that it is about."""
        weights = trial_dir.load()["progress"]["iterates"][-1]
        score = evaluate(model, weights, data, torch.float64)
        (spent,) = run.epsilons_spent(1437**-1.1, [row["step"]])
        assert row.pop("seconds") >= 0
        assert row == {
            "epoch": len(rows) + 1,
            "step": 3 * (len(rows) + 1),
            "valid/accuracy": score["accuracy"],
            "valid/loss": score["loss"],
            "privacy/epsilon_spent": pytest.approx(spent, abs=0.02),
            "noise_multiplier": 1.0,
            "learning_rate": 0.3,
        }
        rows.append(row)

    trial_dir.make_secret()
    train(config, trial_dir, lambda row: check(dict(row)))
    assert len(rows) == 2
    files = {"secret", "stepped", "checkpoint.pt", "metrics.json", "weights.pt", "confusion.json"}
    assert {place.name for place in trial_dir.path.iterdir()} == files
    right = sum(row[i] for i, row in enumerate(trial_dir.confusion().counts))
    assert right / len(data.valid_targets) == rows[-1]["valid/accuracy"]  # of what is released
    assert capfd.readouterr() == ("", "")  # nothing is said on the side


# What a user may rely on besides.


@every_world
def test_trial_saved_at_any_step_goes_on_bit_for_bit(world):
    checks.check_resume(world)


@in_single_precision
def test_trial_saved_at_any_step_goes_on_bit_for_bit_in_single_precision(world):
    checks.check_resume(replace(world, dtype="float32"))


@every_world
def test_no_layer_is_frozen(world):
    checks.check_every_parameter_moves(world)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "cnn_small"},
        {"name": "cnn_small", "block": 2},
        {"name": "cnn5"},
        {"name": "wrn_16_4"},
        {"name": "model3", "block": 8},
    ],
)
def test_model_has_one_output_for_each_class(model):
    checks.check_classes(
        TrialConfig.model_validate(
            {
                "data": {"name": "digits"},
                "model": model,
                "privacy": {"noise_multiplier": 1},
                "train": {"batch_size": 100, "epochs": 1},
                "optimizer": {"lr": 0.1},
                "method": {"name": "dp_sgd"},
            }
        )
    )


# Where float32 ends: norms that it cannot square.


def test_answer_whose_square_underflows_stays_within_the_clip_norm():
    answer = PerExample({"w": torch.full((1, 100), 2e-23)})  # its norm is taken to be 0
    with pytest.raises(ValidationError, match="stability"):
        AutomaticClipping(stability=1e-7)
    config = AutomaticClipping(stability=1e-6)
    total = clipped_sum(answer, config.build(1.0, 1.0, 10))
    assert total["w"].norm() <= 1


def test_adaptive_norm_that_sinks_for_a_long_time_keeps_the_sum_finite_and_bounded():
    clip, calm = AdaptiveClipping().build(1e-6, 1.0, 100), torch.zeros(())
    for _ in range(2000):  # half of the answers inside and more: by a factor 0.9 a step
        bound = clip.update_bound(calm + clip.clip_norm, 100)
        clip = AdaptiveClipping().build(bound, 1.0, 100)
    nothing, something = torch.zeros(2, 3), torch.full((2, 3), 1e-22)
    for answer in (nothing, something):
        total, _ = split_count(Released(clipped_sum(PerExample({"w": answer[:1]}), clip)))
        assert total["w"].isfinite().all()
        assert total["w"].norm() <= clip.clip_norm * (1 + 1e-5)
