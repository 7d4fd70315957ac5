"""Figures show what the study knows: each trial where it belongs, and nothing that is not there."""

import math

import numpy as np
import pytest
import torch

from dpsweep.config.sweep import load_sweep
from dpsweep.filters.lti import Ema, Momentum
from dpsweep.filters.spectral import Shelf
from dpsweep.methods import PUBLISHED
from dpsweep.results.figures import CAPTIONS, TITLES, caption_of, figures
from dpsweep.results.importance import importances
from dpsweep.results.page import page
from dpsweep.results.plots.axes import KeyAxis
from dpsweep.results.plots.filters import ACROSS, OVER_TIME, noise_gain, responses
from dpsweep.results.tables import heading, hyperparam_names
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study
from dpsweep.training.trial_dir import ConfusionMatrix, TrialDir

LR = "search={optimizer.lr: {log_uniform: [0.3, 3]}}"
TEN = [0.5, 0.9, 0.8, 0.6, 0.7, 0.55, 0.65, 0.75, 0.85, 0.3]


def trace(figure, name):
    return next(t for t in figure.data if t.name and t.name.startswith(name))


def test_every_figure_has_a_title_and_a_caption_and_axes_are_named(study_of):
    wide = "search={method.kappa: {uniform: [0.3, 1]}, method.gamma: {choice: [one_point, -1, 2]},\
        method.cut: {uniform: [0.1, 0.9]}, method.depth: {uniform: [0, 0.9]},\
        train.batch_size: {choice: [64, 128]}, optimizer.lr: {log_uniform: [0.3, 3]}}"
    drawn = figures(study_of(TEN, wide, "privacy.epsilon={each: [1, 4]}"))
    absent = ("methods", "posterior", "batch_size-total_step", "confusion")
    assert list(drawn) == [name for name in TITLES if name not in absent]
    assert set(TITLES) == set(CAPTIONS)
    for name, figure in drawn.items():
        assert figure.data, name
        titles = [axis.title.text for axis in figure.select_yaxes() if axis.visible is not False]
        assert any(titles) or name in ("importance", "parallel"), name
    assert drawn["kappa-gamma"].layout.yaxis.title.text == "γ, look-ahead (last steps)"
    assert drawn["kappa-gamma"].layout.yaxis.ticktext[0] == "one_point"


def test_the_history_shows_each_trial_as_it_ended_and_the_best_so_far(study_of):
    study = study_of([0.5, None, ("pruned", 0.2), 0.9, 0.7])
    figure = figures(study)["history"]
    assert (*trace(figure, "complete").x,) == (0, 3, 4)
    assert (*trace(figure, "complete").y,) == (0.5, 0.9, 0.7)
    assert (*trace(figure, "best so far").y,) == (0.5, 0.9, 0.9)
    assert (*trace(figure, "pruned").x,) == (2,)
    assert (*trace(figure, "failed").x,) == (1,)


def test_the_posterior_shows_the_total_step_with_all_trials_and_the_chosen_one(study_of):
    study = study_of([*TEN, 0.7, 0.8], LR, "confirm={seeds: 2}", repeats=[0.6, 0.7])
    drawn = figures(study)
    assert next(iter(drawn)) == "posterior"
    made, best = drawn["posterior"], study.best()[0]
    assert made.layout.xaxis.title.text == "total_step, how far the weights may travel"
    line, trials = trace(made, "posterior mean"), trace(made, "trials")
    steps = [math.log10(r.config.total_step) for r in study.best()]
    assert (line.x[0], line.x[-1]) == pytest.approx((min(steps), max(steps)))
    assert sorted(trials.x) == pytest.approx(sorted(steps))
    chosen = trace(made, f"chosen, trial {best.number}")
    assert chosen.x[0] == pytest.approx(math.log10(best.config.total_step))
    at_best = np.interp(chosen.x[0], line.x, line.y)
    assert at_best == pytest.approx(best.expected, abs=1e-3)
    assert trace(made, "repeated").y[0] == pytest.approx(0.65)
    assert "posterior" not in figures(study_of([*TEN, 0.7], LR, name="few"))


def test_repeats_are_shown_by_their_mean_and_are_no_trials(study_of):
    study = study_of([0.5, 0.9, 0.8], "confirm={top: 2, seeds: 2}", repeats=[0.6, 0.7, 0.64, 0.74])
    shown = trace(figures(study)["history"], "repeated")
    assert (*shown.x,) == (1, 2)
    assert [round(y, 3) for y in shown.y] == [0.62, 0.72]
    assert shown.error_y.array[0] == pytest.approx(0.02 * math.sqrt(2))
    assert (*trace(figures(study)["history"], "complete").x,) == (0, 1, 2)


def test_learning_curves_of_pruned_trials_are_grey(study_of):
    figure = figures(study_of([0.5, ("pruned", 0.2), 0.9]))["learning"]
    pruned = trace(figure, "pruned")
    assert pruned.line.color == "#8A8F98"
    assert ((*pruned.x,), (*pruned.y,)) == ((1, 2), (0.1, 0.2))
    assert trace(figure, "trial 2, the best").line.width == 3


def test_the_front_against_epsilon_has_the_trials_that_no_cheaper_one_beats(study_of):
    study = study_of([0.5, 0.9, 0.6, 0.55, 0.4, 0.8], "privacy.epsilon={each: [1, 2, 4]}")
    front = trace(figures(study)["tradeoff"], "front")
    assert list(zip(front.x, front.y, strict=True)) == [(1, 0.55), (2, 0.9)]
    assert "budgets" in figures(study)


def test_two_objectives_are_shown_against_each_other(study_of):
    study = study_of([0.5, 0.9, 0.6], "objective={metrics: [valid/accuracy, seconds]}")
    drawn = figures(study)
    assert drawn["tradeoff"].layout.xaxis.title.text == "time of a trial (seconds)"
    assert (*trace(drawn["tradeoff"], "front").x,) == (5, 6, 9)


@pytest.mark.parametrize("results", [[], [None, None], [0.5], [0.5, None], [0.5, 0.5]])
def test_few_or_failed_trials_draw_little_and_break_nothing(study_of, results):
    drawn = figures(study_of(results))
    assert ("history" in drawn) == any(r is not None for r in results)
    assert ("parallel" in drawn) == (len([r for r in results if r is not None]) > 1)
    assert "importance" not in drawn


def test_a_key_with_one_value_is_no_axis(study_of):
    study = study_of([0.5, 0.6], "search={train.batch_size: {choice: [64]}}")
    assert not {"parallel", "slices", "importance"} & set(figures(study))


def test_methods_with_spaces_of_their_own_share_the_figures(study_of):
    each = "search={each_of: default}"
    study = study_of([0.05 * i for i in range(1, 20)], each, "model.block=4")
    drawn = figures(study)
    assert len({t.name for t in drawn["methods"].data}) == len(PUBLISHED)
    assert len(drawn["filters"].data) >= 4
    branches = {one.branch for one in importances(study)}
    assert {None, "disk"} <= branches


def test_tables_and_figures_call_a_key_the_same(study_of):
    study = study_of(TEN, "privacy.epsilon={each: [1, 4]}")
    drawn = figures(study)["slices"]
    titles = {axis.title.text.partition(",")[0] for axis in drawn.select_xaxes()}
    assert titles == {heading(name) for name in hyperparam_names(study.records())}
    assert titles == {"κ", "lr", "target ε"}


def test_the_ranks_of_trials_are_over_the_two_most_important_keys(study_of):
    study = study_of(TEN)
    figure = figures(study)["rank"]
    keys = [one.key for one in importances(study)]
    assert figure.layout.xaxis.title.text.startswith(heading(keys[0]))
    assert figure.layout.yaxis.title.text.startswith(heading(keys[1]))
    ranks = {int(t.split()[3].strip(",")): c for t, c in rank_marks(figure)}
    assert [n for n, _ in sorted(ranks.items(), key=lambda item: item[1])][:3] == [1, 8, 2]
    assert "rank" not in figures(study_of(TEN, LR, name="one_key"))


def rank_marks(figure):
    return zip(figure.data[0].text, figure.data[0].marker.color, strict=True)


def test_the_distribution_is_the_share_of_trials_at_or_below(study_of):
    figure = figures(study_of([0.5, 0.9, 0.8, 0.6, 0.7]))["distribution"]
    (line,) = figure.data
    assert line.name == "fftkf (5 trials)"
    assert (*line.x,) == (0.5, 0.5, 0.6, 0.7, 0.8, 0.9)
    assert (*line.y,) == pytest.approx((0, 0.2, 0.4, 0.6, 0.8, 1))
    each = figures(study_of(TEN, "privacy.epsilon={each: [1, 4]}", name="budgets"))
    assert [t.name for t in each["distribution"].data] == [
        "target ε 1 (5 trials)",
        "target ε 4 (5 trials)",
    ]
    assert "distribution" not in figures(study_of([0.5, 0.6, 0.5], name="few"))


def test_the_timeline_has_a_bar_for_each_run_from_asking_to_its_end(study_of):
    study = study_of([0.5, None, ("pruned", 0.2)], "confirm={top: 1, seeds: 2}", repeats=[0.6])
    figure = figures(study)["timeline"]
    bars = {t.name: (*t.y,) for t in figure.data}
    repeat = "repeat or final run"
    assert bars == {"complete": (0,), repeat: (3,), "pruned": (2,), "failed": (1,)}
    records = study.records()
    begin = trace(figure, repeat).base[0]
    assert begin == pytest.approx(records[3].asked - records[0].asked, abs=1e-6)
    length = records[3].ended - records[3].asked
    assert trace(figure, repeat).x[0] == pytest.approx(length, abs=1e-6)
    assert figure.layout.xaxis.title.text.startswith("seconds")


def test_the_confusion_matrix_is_that_of_the_best_trial(study_of, tmp_path):
    study = study_of([0.5, 0.9])
    folder = StateFolder(tmp_path / "state").sweep("tiny")
    assert "confusion" not in figures(study, folder)
    for number, counts in ((0, ((1, 1), (1, 1))), (1, ((8, 2), (0, 5)))):
        found = ConfusionMatrix(("cat", "dog"), counts)
        TrialDir(folder.trial_dir(number)).save_confusion(found)
    (cells,) = figures(study, folder)["confusion"].data
    assert (*cells.x,) == (*cells.y,) == ("cat", "dog")
    assert [[*row] for row in cells.z] == [[0.8, 0.2], [0, 1]]
    assert [[*row] for row in cells.text] == [[8, 2], [0, 5]]
    assert "background" not in caption_of("confusion", figures(study, folder)["confusion"])
    assert "confusion" not in figures(study)
    assert found.to_csv() == "true class,cat,dog\ncat,8,2\ndog,0,5\n"


def test_of_a_private_selection_nothing_is_drawn(study_of):
    secret = ("accounting=private_selection", "sampler={name: random}", "pruner={name: none}")
    assert figures(study_of([], *secret)) == {}


def test_importance_finds_the_key_that_decides(tmp_path, sweep_file):
    study = Study.create(f"sqlite:///{tmp_path}/i.db", load_sweep(sweep_file, ["budget.trials=60"]))
    for _ in range(24):
        asked = study.ask()
        row = {"epoch": 1, "valid/accuracy": asked.hyperparams["method.kappa"], "valid/loss": 1.0}
        study.report(asked.number, row | {"seconds": 1.0, "privacy/epsilon_spent": 1.0})
        study.tell(asked.number, "complete")
    first, second = importances(study)
    assert first.key == "method.kappa"
    assert first.share > 0.8
    assert first.share + second.share == pytest.approx(1)


def test_responses_are_those_of_the_filters_relative_to_a_constant_gradient():
    found = responses((Shelf(0.5, 0.4), Ema(0.5), Momentum(0.9)))
    assert found[OVER_TIME][0] == found[ACROSS][0] == 1
    nyquist = (0.5 / 1.5) * (0.1 / 1.9)  # of Ema, and of Momentum by its own 1 / (1 - beta)
    assert found[OVER_TIME][-1].item() == pytest.approx(nyquist)
    torch.testing.assert_close(found[ACROSS][-1].item(), 0.6)
    assert responses(()) == {}


def test_noise_gain_counts_what_a_constant_gradient_does_not_gain(study_of):
    study = study_of([0.5], "method={name: innerouter}", LR)
    record = study.record(0)
    beta = record.config.method.outer_decay
    assert noise_gain(record) == pytest.approx((1 - beta) ** 2 / (1 - beta**2))


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0.3, 1.0, False, ["0.4", "0.6", "0.8", "1"]),
        (-1.0, 3.0, False, ["-1", "0", "1", "2", "3"]),
        (math.log10(0.3), math.log10(6), True, ["0.3", "1", "3"]),
        (-5.0, 1.0, True, ["0.0001", "0.01", "1"]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(low, high, log, expected):
    assert KeyAxis("optimizer.lr", low, high, log).ticks()[1] == expected


def test_tags_in_values_are_not_read_as_tags(study_of):
    hostile = "search={model.width: {choice: [4, 8]}, method.shape: {choice: [step, butterworth]}}"
    figure = figures(study_of([0.5, 0.6], hostile))["history"]
    assert all("<" not in t.replace("<br>", "") for t in trace(figure, "complete").text)


STEPS = (
    "search={train.batch_size: {choice: [64, 128]}, optimizer.total_step: {log_uniform: [9, 99]}}"
)


def test_a_search_over_the_total_step_has_a_page_and_a_caption_promises_what_is_drawn(study_of):
    """As `dpsweep init` writes it; without a title the launch ended in a traceback."""
    few, many = study_of(TEN[:5], STEPS), study_of(TEN, STEPS, name="many")
    for study, told in ((few, False), (many, True)):
        drawn = figures(study)["batch_size-total_step"]
        assert ("The background is" in caption_of("batch_size-total_step", drawn)) is told
        assert "Batch size and total step" in page(study)
