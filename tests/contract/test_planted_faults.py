"""Each fault found in public code of these methods is caught, once it is planted here.

They stand in docs/concepts/faults.md. A fault is planted by patching the package inside a test; the
check that is named must then fail with the words given, and must pass in the same world without.
(`check_x` is a function of tests/contract/checks.py or chance.py; faults.py plants them.)

| fault | caught by | which says |
|---|---|---|
| each gradient clipped, then combined with signed weights | check_sensitivity | sensitivity |
| each of k points' gradients clipped, then summed: k C | check_sensitivity | sensitivity |
| bound C given to each layer: sqrt(L) C | check_sensitivity | sensitivity |
| the adaptive norm's count not paid for | check_sensitivity | sensitivity |
| NaN passes the comparison with the norm | check_bad_examples | bad example |
| gradients of a mean loss clipped, so that nothing is | check_reference | reference |
| noise scaled by abs(1-c) after it was added | check_noise | not N(0, sigma C) |
| noise added per example at 1/B: sqrt(B) too small | check_noise | not N(0, sigma C) |
| noise scaled by 2/3; by 3/2 | check_noise | not N(0, sigma C) |
| noise masked before it is added | check_noise | tells of its neighbour |
| one coefficient of the band passes un-noised | check_noise | quieter |
| half of the spectral coordinates un-noised | check_noise | not N(0, sigma C) |
| noise on the spectrum's real part only | check_noise | not N(0, sigma C) |
| the same at full strength, so that each draw serves twice | check_noise | go together |
| noise generator seeded afresh for each tensor | check_noise | go together |
| noise generator seeded afresh at each step | check_noise | tells of the next |
| fixed seed for all trials | check_fresh_noise | secret |
| noise that ignores the trial's secret | check_fresh_noise | secret |
| noise drawn anew when a step is replayed | check_fresh_noise | replay |
| secret shown beside the result | check_secret_is_said_nowhere | secret |
| secret saved with the weights | check_secret_is_said_nowhere | secret |
| the same batches in the same order | check_sampling | sampling |
| epochs of shuffled batches | check_sampling | sampling |
| random batches of fixed size | check_sampling | sampling |
| inner weights reversed | check_asks | weights |
| inner weights overwritten by equal ones | check_points | points |
| a point moved by the batch's own gradient | check_batch_has_no_say | points |
| the true batch size as the divisor | check_divisor | divisor |
| an empty batch skips its step | check_empty_batch | empty batch |
| raw gradients in the prediction (first FFTKF) | check_only_the_release_leaves | post-processing |
| adaptive norm moved by the un-noised count | check_only_the_release_leaves | post-processing |
| learning rate scaled by the true batch size | check_only_the_release_leaves | post-processing |
| a layer frozen, dense or spectral | check_every_parameter_moves | frozen |
| a kernel's lags restored in mirrored order | check_unclipped_gradient | unclipped |
| a head of 100 classes on data of 10 | check_classes | classes |
| the optimizer's moments not saved | check_resume | resume |
| the average over the iterates not saved | check_resume | resume |
| copies of an example clipped as examples of their own | check_sensitivity | sensitivity |
| each copy of an example clipped, and the mean taken | check_reference | reference |
| augmentation drawn by an example's place | check_sensitivity | sensitivity |
| the last microbatch dropped when it is not full | check_microbatches | microbatches |
| attributes initialised from the first batch, as in ActNorm | check_sensitivity | sensitivity |
| a running mean of the inputs, in an attribute | check_sensitivity | sensitivity |
| a temperature that falls with the number of calls | check_microbatches | microbatches |
| C z in the place of C^-1 z | check_noise | tells of the next |
| a strategy matrix whose column is longer than 1 | check_noise | not N(0, sigma C) |
| the norms of the last columns applied to the first steps | check_noise | quieter |
| ordinary Poisson batches with banded noise | check_groups | groups |
| more bands than groups | check_groups | groups |
| groups by an example's place | check_groups | groups |
| groups from a public seed | check_groups | groups |
| groups drawn anew in each cycle | check_groups | groups |
| banded noise calibrated for T steps at rate q | check_accounting | accounting |
| the noise history lost when a trial is resumed | check_resume | resume |
| the noise history drawn anew when a trial is resumed | check_resume | resume |
| noise added on each device that shares a batch | check_noise | not N(0, sigma C) |
| a portion computed by two devices | check_sensitivity | sensitivity |
| the devices' sums added in order of arrival | check_devices | devices |
| norms from records in bf16, sums from others in float32 | check_sensitivity | sensitivity |
| norms from records in float32, sums from those in bf16 | check_sensitivity | sensitivity |
| clipped gradients added in bf16 | check_reference | reference |
| noise in bf16, added before the sum is rounded | check_empty_batch | not noise alone |
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import chance
import checks
import faults
import pytest
from remembering import ActNorm, Cooling, Tracking
from world import World
from worlds import METHOD_WORLDS, UNFILTERED, WORLDS, rounded

from dpsweep.config.trial import TrialConfig

SIGNED = METHOD_WORLDS["disk-weights-of-both-signs"]
PAPER = METHOD_WORLDS["disk-published"]
MOMENTUM = METHOD_WORLDS["innerouter"]
SGD = METHOD_WORLDS["dp_sgd"]
SPLIT = METHOD_WORLDS["fftkf-split"]
SPECTRAL = METHOD_WORLDS["spectral_dp"]
AUGMENTED = METHOD_WORLDS["dp_sgd-augmented"]
BANDED = METHOD_WORLDS["bandmf"]
ADAPTIVE = WORLDS["dp_sgd-adaptive"]
BF16 = rounded(SGD, "bf16")
SEVERAL_DEVICES = METHOD_WORLDS["dp_sgd-three-devices"]


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Attributes:
        plant: Puts it into the package, for the length of a test.
        check: Must catch it.
        says: The words it must be caught with.
        world: Where it would do harm.
    """

    plant: faults.Plant
    check: Callable[[World], None]
    says: str
    world: World = SGD


LAW = r"not N\(0, sigma C\)"
OUTSIDE = "post-processing: something beside the release tells"

FAULTS = {
    "clip-each-then-combine": Fault(
        faults.clip_each_then_combine, checks.check_sensitivity, "sensitivity: one example", SIGNED
    ),
    "clip-each-then-combine-ahead": Fault(
        faults.clip_each_then_combine,
        checks.check_sensitivity,
        "sensitivity: one example",
        METHOD_WORLDS["disk-behind"],
    ),
    "clip-each-then-combine-spectral": Fault(
        faults.clip_each_then_combine,
        checks.check_sensitivity,
        "sensitivity: one example",
        METHOD_WORLDS["compose-look-ahead-spectral-low-pass"],
    ),
    "sum-clipped-points": Fault(
        faults.sum_clipped_points, checks.check_sensitivity, "sensitivity: one example", MOMENTUM
    ),
    "whole-bound-for-each-layer": Fault(
        faults.whole_bound_for_each_layer,
        checks.check_sensitivity,
        "sensitivity: one example",
        WORLDS["dp_sgd-per_layer"],
    ),
    "whole-bound-for-each-layer-spectral": Fault(
        faults.whole_bound_for_each_layer,
        checks.check_sensitivity,
        "sensitivity: one example",
        SPECTRAL,
    ),
    "count-for-nothing": Fault(
        faults.count_for_nothing, checks.check_sensitivity, "sensitivity: one example", ADAPTIVE
    ),
    "nan-passes": Fault(faults.nan_passes, checks.check_bad_examples, "bad example: pixels nan"),
    "mean-loss": Fault(faults.mean_loss, checks.check_reference, "reference: the release is off"),
    "mean-loss-by-reach": Fault(
        faults.mean_loss, checks.check_sensitivity, "reach: no example moves"
    ),
    "noise-scaled-by-1-c": Fault(
        faults.changed_noise(lambda z, _: abs(1 - 0.3 / 0.35) * z),
        chance.check_noise,
        LAW,
        PAPER,
    ),
    "noise-per-example": Fault(faults.mean_of_noisy_examples, chance.check_noise, LAW),
    "noise-times-2-3": Fault(faults.changed_noise(lambda z, _: z * 2 / 3), chance.check_noise, LAW),
    "noise-times-3-2": Fault(faults.changed_noise(lambda z, _: z * 3 / 2), chance.check_noise, LAW),
    "noise-times-2-3-spectral": Fault(
        faults.changed_noise(lambda z, _: z * 2 / 3), chance.check_noise, LAW, SPECTRAL
    ),
    "noise-masked": Fault(
        faults.changed_noise(faults.masked), chance.check_noise, "tells of its neighbour's"
    ),
    "one-coefficient-passes": Fault(
        faults.changed_noise(faults.one_passes),
        chance.check_noise,
        "a coordinate is quieter",
        SPECTRAL,
    ),
    "half-passes": Fault(
        faults.changed_noise(faults.half_passes), chance.check_noise, LAW, SPECTRAL
    ),
    "real-part": Fault(faults.changed_noise(faults.real_part), chance.check_noise, LAW, SPECTRAL),
    "strong-real-part": Fault(
        faults.changed_noise(faults.strong_real_part), chance.check_noise, "go together", SPECTRAL
    ),
    "seeded-per-tensor": Fault(faults.seeded_per_tensor, chance.check_noise, "go together"),
    "seeded-per-step": Fault(faults.seeded_per_step, chance.check_noise, "tells of the next one's"),
    "fixed-secret": Fault(
        faults.fixed_secret, chance.check_fresh_noise, "secret: two trials have one"
    ),
    "secret-ignored": Fault(faults.secret_ignored, chance.check_fresh_noise, "secret: fixed noise"),
    "fresh-at-every-replay": Fault(
        faults.fresh_at_every_replay, chance.check_fresh_noise, "replay: "
    ),
    "secret-shown": Fault(
        faults.secret_shown, checks.check_secret_is_said_nowhere, "secret: said in a text"
    ),
    "secret-saved": Fault(
        faults.secret_saved, checks.check_secret_is_said_nowhere, "secret: saved"
    ),
    "batches-in-order": Fault(faults.sampler(faults.in_order), chance.check_sampling, "sampling: "),
    "batches-shuffled": Fault(faults.sampler(faults.shuffled), chance.check_sampling, "sampling: "),
    "batches-of-fixed-size": Fault(
        faults.sampler(faults.of_fixed_size), chance.check_sampling, "sampling: "
    ),
    "reversed-weights": Fault(
        faults.reversed_weights, checks.check_asks, "weights: the newest iterate does not", MOMENTUM
    ),
    "overwritten-weights": Fault(
        faults.overwritten_weights,
        checks.check_points,
        "points: a weight",
        METHOD_WORLDS["dp_pmlf"],
    ),
    "point-moved-by-the-batch": Fault(
        faults.point_moved_by_the_batch,
        checks.check_batch_has_no_say,
        "points: of a batch",
        PAPER,
    ),
    "true-divisor": Fault(faults.true_divisor, checks.check_divisor, "divisor: not B"),
    "empty-batch-skipped": Fault(
        faults.empty_batch_skipped, checks.check_empty_batch, "empty batch: "
    ),
    "raw-prediction": Fault(
        faults.raw_prediction, checks.check_only_the_release_leaves, OUTSIDE, SPLIT
    ),
    "raw-count": Fault(faults.raw_count, checks.check_only_the_release_leaves, OUTSIDE, ADAPTIVE),
    "rate-of-the-true-batch": Fault(
        faults.rate_of_the_true_batch, checks.check_only_the_release_leaves, OUTSIDE
    ),
    "frozen-layer": Fault(
        faults.frozen_layer, checks.check_every_parameter_moves, "frozen: nothing"
    ),
    "frozen-norm-layer": Fault(
        faults.frozen_norm_layer, checks.check_every_parameter_moves, "frozen: nothing", SPECTRAL
    ),
    "kernel-turned": Fault(
        faults.kernel_turned,
        checks.check_unclipped_gradient,
        "unclipped: the release is not the gradient",
        UNFILTERED["spectral_dp-flat"],
    ),
    "moments-not-saved": Fault(
        faults.moments_not_saved,
        checks.check_resume,
        "resume: other weights",
        METHOD_WORLDS["dp_adambc"],
    ),
    "average-not-saved": Fault(
        faults.average_not_saved, checks.check_resume, "resume: another average", AUGMENTED
    ),
    "copies-as-examples": Fault(
        faults.copies_as_examples, checks.check_sensitivity, "sensitivity: one example", AUGMENTED
    ),
    "mean-of-clipped-copies": Fault(
        faults.mean_of_clipped_copies, checks.check_reference, "reference: the release", AUGMENTED
    ),
    "augmentation-by-place": Fault(
        faults.augmentation_by_place,
        checks.check_sensitivity,
        "sensitivity: one example",
        AUGMENTED,
    ),
    "last-microbatch-dropped": Fault(
        faults.last_microbatch_dropped, checks.check_microbatches, "microbatches of 7"
    ),
    "first-batch-remembered": Fault(
        faults.remembering(lambda: ActNorm(only_learning=False)),
        checks.check_sensitivity,
        "sensitivity: one example",
    ),
    "mean-remembered": Fault(
        faults.remembering(lambda: Tracking("tensor", after=0)),
        checks.check_sensitivity,
        "sensitivity: one example",
    ),
    "calls-remembered": Fault(
        faults.remembering(Cooling), checks.check_microbatches, "microbatches of 1 of 9"
    ),
    "corrupted-strategy": Fault(
        faults.corrupted_strategy, chance.check_noise, "tells of the next one's", BANDED
    ),
    "long-column": Fault(faults.long_column, chance.check_noise, LAW, BANDED),
    "first-columns-cut-off": Fault(
        faults.first_columns_cut_off, chance.check_noise, "a step is quieter", BANDED
    ),
    "ungrouped-batches": Fault(
        faults.ungrouped_batches, chance.check_groups, "less than 8 apart", BANDED
    ),
    "more-bands-than-groups": Fault(
        faults.more_bands_than_groups, chance.check_groups, "less than 8 apart", BANDED
    ),
    "groups-by-place": Fault(
        faults.groups_by(faults.groups_by_place), chance.check_groups, "groups: ", BANDED
    ),
    "groups-of-a-public-seed": Fault(
        faults.groups_by(faults.groups_of_a_public_seed),
        chance.check_groups,
        "groups: not the trial's secret",
        BANDED,
    ),
    "groups-drawn-each-cycle": Fault(
        faults.groups_drawn_each_cycle, chance.check_groups, "less than 8 apart", BANDED
    ),
    "schedule-of-independent-noise": Fault(
        faults.schedule_of_independent_noise, chance.check_accounting, "accounting: ", BANDED
    ),
    "history-lost": Fault(
        faults.history_lost, checks.check_resume, "resume: other weights", BANDED
    ),
    "history-drawn-anew": Fault(
        faults.history_drawn_anew, checks.check_resume, "resume: other weights", BANDED
    ),
    "noise-for-each-device": Fault(
        faults.noise_for_each_device, chance.check_noise, LAW, SEVERAL_DEVICES
    ),
    "part-answered-twice": Fault(
        faults.part_answered_twice,
        checks.check_sensitivity,
        "sensitivity: one example",
        SEVERAL_DEVICES,
    ),
    "added-in-order-of-arrival": Fault(
        faults.added_in_order_of_arrival,
        checks.check_devices,
        "devices: another sum",
        SEVERAL_DEVICES,
    ),
    "norms-of-other-records": Fault(
        faults.norms_of_other_records,
        checks.check_sensitivity,
        "sensitivity: one example",
        replace(SGD, dtype="float32"),
    ),
    "norms-of-exact-records": Fault(
        faults.norms_of_exact_records, checks.check_sensitivity, "sensitivity: one example", BF16
    ),
    "sums-in-bf16": Fault(
        faults.sums_in_bf16, checks.check_reference, "reference: the release is off", BF16
    ),
    "noise-in-bf16": Fault(
        faults.noise_in_bf16, checks.check_empty_batch, "its release is not noise alone", BF16
    ),
}
FAULTS |= {
    f"{name}-in-bf16": replace(FAULTS[name], world=rounded(FAULTS[name].world, "bf16"))
    for name in ("raw-prediction", "true-divisor", "overwritten-weights")
}
every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


@pytest.fixture(autouse=True)
def _fresh_secrets(monkeypatch):
    monkeypatch.delenv("DPSWEEP_TEST_SECRET", raising=False)


@every_fault
def test_planted_fault_is_caught_by_the_check_that_is_named(fault, monkeypatch):
    world = replace(fault.world)  # a copy, so that nothing computed under the fault is kept
    monkeypatch.setattr(
        "dpsweep.privacy.engine.find_wrong_gradients", lambda *_: None
    )  # it sees some
    fault.plant(monkeypatch)
    with pytest.raises(AssertionError, match=fault.says):
        fault.check(world)


SOUND = {f"{f.check.__name__}-{id(f.world)}": f for f in FAULTS.values()}
"""One fault of each pair of check and world."""


@pytest.mark.parametrize("fault", SOUND.values(), ids=lambda f: f.check.__name__)
def test_same_world_without_the_fault_passes_the_same_check(fault):
    fault.check(fault.world)


def test_head_of_100_classes_on_data_of_10_is_caught(monkeypatch):
    config = TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small"},
            "privacy": {"noise_multiplier": 1},
            "train": {"batch_size": 100, "epochs": 1},
            "optimizer": {"lr": 0.1},
            "method": {"name": "dp_sgd"},
        }
    )
    checks.check_classes(config)
    faults.hundred_classes(monkeypatch)
    with pytest.raises(AssertionError, match="classes: 100 outputs for data of 10"):
        checks.check_classes(config)


def test_every_check_of_the_contract_catches_a_fault():
    functions = [*inspect.getmembers(checks), *inspect.getmembers(chance)]
    named = {name for name, _ in functions if name.startswith("check_")}
    catching = {fault.check.__name__ for fault in FAULTS.values()} | {"check_classes"}
    assert named == catching
    table = sys.modules[__name__].__doc__
    assert all(name in table for name in catching)


def test_the_table_of_faults_is_the_one_in_the_documentation():
    told = (Path(__file__).parents[2] / "docs/concepts/faults.md").read_text().splitlines()
    rows = [line for line in str(__doc__).splitlines() if line.startswith("|")]
    assert len(rows) > 30
    assert [row for row in rows if row not in told] == []
