"""The search's statement claims no more than its composition proves."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.privacy.accounting import Run, compose
from dpsweep.privacy.statement import shown_epsilon
from dpsweep.tune.charge import search_promise

RUNS = [Run(0.02, 4.145, 2500)] * 10


@pytest.mark.parametrize(
    ("settings", "claim"),
    [
        (["sampler.name=tpe"], "-DP by composition"),
        (["sampler.name=random"], "independent trials"),
        (
            ["sampler.name=tpe", "search={train.batch_size: {choice: [64, 128]}}"],
            "that figure is an estimate; proven is (40.00,",
        ),
        (["sampler.name=random", "search={train.batch_size: {choice: [64, 128]}}"], "independent"),
        (
            [
                "sampler.name=tpe",
                "search={train.epochs: {choice: [1, 2]}}",
                "privacy={noise_multiplier: 1.0}",
            ],
            "nothing is proven",
        ),
    ],
)
def test_what_is_proven_depends_on_who_chose_the_runs(sweep_file, settings, claim):
    words = search_promise(load_sweep(sweep_file, settings), RUNS)
    assert claim in words
    assert ("estimate" in words) == ("proven" in words) == ("proven" in claim)


def test_the_figure_is_that_of_the_reference(sweep_file):
    sweep = load_sweep(sweep_file, ["privacy.delta=1e-5"])
    # METHODS.md section 4: ten trials of base epsilon 1 cost 3.27 by PLD.
    assert compose(RUNS, 1e-5) == pytest.approx(3.27, rel=0.01)
    assert f"({shown_epsilon(compose(RUNS, 1e-5))}, 1.0e-05)-DP" in search_promise(sweep, RUNS)
