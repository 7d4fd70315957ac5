"""A sweep may begin from what an earlier one found, and counts none of its trials as its own."""

import optuna
import pytest
from optuna.trial import TrialState

from dpsweep.config.sweep import change_sweep, load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.execution.preflight import make_plan
from dpsweep.results.export import origin_of
from dpsweep.search.warm_start import collect_earlier_trials, make_history
from dpsweep.store.statement import format_headline, is_ex_post, sum_with_earlier
from dpsweep.store.study import Study

TPE = "sampler={name: tpe, startup_trials: 4}"


def load(sweep_file, *settings):
    return load_sweep(sweep_file, ["budget.trials=40", TPE, *settings])


def kappa(record):
    return record.hyperparams["method.kappa"]


@pytest.fixture
def earlier(sweep_file, search):
    """Twelve trials in a narrower range; small kappas did badly."""
    sweep = load(sweep_file, "name=old", "search.method.kappa={uniform: [0.4, 0.9]}")
    study = search(sweep, 12, kappa, name="old")
    study.ask()  # a running trial tells nothing
    return study


def created(sweep, earlier, tmp_path, name):
    study = Study.create(f"sqlite:///{tmp_path}/{name}.db", sweep)
    study.learn_from(earlier, sum_with_earlier(earlier), ex_post=is_ex_post(earlier))
    return study


def test_the_sampler_knows_the_earlier_trials_from_the_first_on(sweep_file, earlier, tmp_path):
    sweep = load(sweep_file)
    warm = created(sweep, earlier, tmp_path, "warm").ask()
    cold = Study.create(f"sqlite:///{tmp_path}/cold.db", sweep).ask()
    assert warm.number == cold.number == 0
    assert warm.hyperparams != cold.hyperparams
    trials = make_history(sweep, collect_earlier_trials(sweep, earlier.sweep, earlier.records()))
    assert [t.number for t in trials] == list(range(-12, 0))
    assert [t.value for t in trials] == [r.value for r in earlier.records()[:12]]
    assert trials[0].distributions["method.kappa"] == optuna.distributions.FloatDistribution(0.3, 1)


def test_they_are_no_trials_of_the_new_sweep(sweep_file, earlier, tmp_path):
    study = created(load(sweep_file), earlier, tmp_path, "new")
    assert study.records() == []
    assert study.num_asked() == 0
    assert study.best() == []
    stored = optuna.load_study(study_name="tiny", storage=f"sqlite:///{tmp_path}/new.db")
    assert stored.get_trials(states=[TrialState.COMPLETE]) == []


def test_a_resumed_search_knows_them_when_the_earlier_sweep_is_gone(sweep_file, earlier, tmp_path):
    sweep = load(sweep_file)
    straight = created(sweep, earlier, tmp_path, "a")
    created(sweep, earlier, tmp_path, "b")
    (tmp_path / "old.db").unlink()
    for _ in range(3):
        reopened = Study.open(f"sqlite:///{tmp_path}/b.db", sweep)
        assert reopened.ask().hyperparams == straight.ask().hyperparams


def test_the_statement_says_that_the_earlier_cost_adds_up(sweep_file, earlier, tmp_path):
    study = created(load(sweep_file), earlier, tmp_path, "new")
    spent = [*sum_with_earlier(earlier)]
    known = {"sweeps": ["old"], "trials": 13, "void": False, "spent": spent, "ex_post": False}
    assert study.warm_start == known
    words = origin_of(study).search_words
    assert "began from the results of sweep old on the same data (13 trials in the last)" in words
    assert "adds to it" in words
    plain = Study.create(f"sqlite:///{tmp_path}/plain.db", load(sweep_file))
    assert plain.warm_start is None
    assert "began from" not in origin_of(plain).search_words


def test_the_first_figure_of_a_warm_started_search_counts_the_earlier_sweeps(
    sweep_file, search, tmp_path
):
    """It said epsilon 4 of a second sweep whose trials were chosen by another 4."""
    shared = ["privacy.scope=sweep", "budget.trials=2", "sampler.startup_trials=1"]
    studies = []
    for name in ("first", "second", "third"):
        sweep = load_sweep(sweep_file, [TPE, *shared, f"name={name}"])
        study = search(sweep, 0, kappa, name=name)
        if studies:
            study.learn_from(studies[-1], sum_with_earlier(studies[-1]))
        for _ in range(2):
            study.dispatch(study.ask(), void=False)
        studies.append(study)
    assert [format_headline(study)[0] for study in studies] == ["4.00", "8.00", "12.00"]
    deltas = [float(format_headline(study)[1]) for study in studies]
    assert deltas == pytest.approx([deltas[0], 2 * deltas[0], 3 * deltas[0]], rel=0.1)
    words = origin_of(studies[2]).search_words
    assert "results of sweep second, before it first" in words
    delta = format_headline(studies[2])[1]
    assert (
        f"Together, by basic composition: (12.00, {delta})-DP, if epsilon and the number" in words
    )
    study = studies[1]._study  # as an earlier version noted it, which kept no figure
    study.set_user_attr("warm_start", {**studies[1].warm_start, "spent": None})
    assert sum_with_earlier(studies[1]) is None
    assert format_headline(studies[1])[0] == "> 4.00"
    random = change_sweep(studies[2].sweep, ["sampler={name: random}"])  # it learns nothing
    assert format_headline(Study.open(f"sqlite:///{tmp_path}/third.db", random))[0] == "4.00"


def test_a_plan_says_that_the_earlier_sweep_adds_to_its_figure(sweep_file):
    words = make_plan(load(sweep_file, "learn_from=old"), 1).search_words
    assert words.endswith("What sweep old spent adds to it.")


def test_each_budget_learns_from_its_own(sweep_file, search):
    each = "privacy.epsilon={each: [1, 8]}"
    old = search(load(sweep_file, "name=old", each), 6, kappa, name="old")
    sweep = load(sweep_file, each)
    told = make_history(sweep, collect_earlier_trials(sweep, old.sweep, old.records()))
    assert [t.user_attrs["hyperparams"]["privacy.epsilon"] for t in told] == [1, 8] * 3


def test_methods_in_turn_are_told_too(sweep_file, search):
    each = "search={each_of: [disk, dp_sgd]}"
    old = search(load(sweep_file, "name=old", each), 4, lambda r: 0.5, name="old")
    sweep = load(sweep_file, each)
    told = make_history(sweep, collect_earlier_trials(sweep, old.sweep, old.records()))
    assert [t.user_attrs["hyperparams"]["method.name"] for t in told] == ["disk", "dp_sgd"] * 2
    assert "one_of.disk.method.kappa" in told[0].params


DIFFERENT = [
    (
        ["search.method.kappa={uniform: [0.5, 0.6]}"],
        r"outside this space: method\.kappa = 0\.\d+ is",
    ),
    (["search.method.cut={uniform: [0.5, 0.6]}"], r"another set of searched keys: .*method\.kappa"),
    (["objective.metric=valid/loss"], r"another objective: valid/accuracy, and here it is valid/l"),
    (["privacy.epsilon=2"], r"another privacy\.epsilon: 4, and here it is 2"),
    (["data.validation=holdout"], r"another data: "),
]


@pytest.mark.parametrize(("settings", "message"), DIFFERENT)
def test_another_search_tells_nothing_and_the_difference_is_named(
    sweep_file, earlier, settings, message
):
    sweep = load(sweep_file, *settings)
    with pytest.raises(ConfigError, match=message):
        collect_earlier_trials(sweep, earlier.sweep, earlier.records())


def test_what_a_void_sweep_found_voids_the_sweep_that_learned_it(sweep_file, earlier, tmp_path):
    earlier.note_test_secret()
    study = created(load(sweep_file), earlier, tmp_path, "new")
    assert study.is_void
    assert "VOID" in origin_of(study).search_words


def test_another_seed_would_train_on_what_was_measured_where_examples_are_held_out(
    sweep_file, search
):
    """130 of 144 examples that a holdout of seed 0 measured are trained on with seed 1."""
    holdout = "data.validation=holdout"
    old = search(load(sweep_file, "name=old", holdout), 2, kappa, name="old")
    other = load(sweep_file, holdout, "seed=1")
    with pytest.raises(ConfigError, match="another seed, which says who is held out: 0, and here"):
        collect_earlier_trials(other, old.sweep, old.records())
    assert len(collect_earlier_trials(load(sweep_file, holdout), old.sweep, old.records())) == 2


def test_a_warm_start_from_a_search_that_grew_is_ex_post_and_so_is_what_begins_from_it(
    sweep_file, search, tmp_path
):
    def open_grown(num):
        return Study.open(
            f"sqlite:///{tmp_path}/grown.db", load(sweep_file, "name=grown", f"budget.trials={num}")
        )

    grown = search(load(sweep_file, "name=grown", "budget.trials=2"), 0, kappa, name="grown")
    grown.dispatch(grown.ask(), void=False)
    assert not is_ex_post(grown)
    grown = open_grown(3)
    grown.note_plan()
    assert is_ex_post(grown)
    second = created(load(sweep_file), grown, tmp_path, "second")
    second.dispatch(second.ask(), void=False)
    words = origin_of(second).search_words
    assert "-DP, ex post, as results chose the number of runs." in words
    assert is_ex_post(second)
