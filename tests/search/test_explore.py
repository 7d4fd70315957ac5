"""Exploring trials choose a config, one final run gets the rest, and a crash costs nothing."""

import io
import re

import pytest
from rich.console import Console

from dpsweep.cli.verbs.sweeps import print_privacy
from dpsweep.config.plan import plan_privacy
from dpsweep.config.source import parse_yaml
from dpsweep.config.sweep import load_sweep
from dpsweep.config.trial import dump_trial, load_trial
from dpsweep.core.errors import ConfigError
from dpsweep.privacy.accounting import compose_runs
from dpsweep.privacy.statement import format_epsilon
from dpsweep.results.best_trials import list_best_by_budget
from dpsweep.results.export import origin_of, to_yaml
from dpsweep.results.figures import figures
from dpsweep.results.groups import groups_of
from dpsweep.results.page import page
from dpsweep.results.tables import trial_table
from dpsweep.search.charge import get_charged_run, make_ledger_entry
from dpsweep.search.ranking import surrogates
from dpsweep.store.study import Study

SHARED, EXPLORE = "privacy.scope=sweep", "budget={explore: {trials: 4, share: 0.1}}"
BATCHES = "search={train.batch_size: {choice: [64, 128]}, optimizer.lr: {log_uniform: [0.1, 10]}}"
LR = "search={optimizer.lr: {log_uniform: [0.1, 10]}}"


@pytest.fixture
def load(sweep_file):
    def load_it(*settings):
        return load_sweep(sweep_file, [SHARED, EXPLORE, *settings])

    return load_it


def run_all(study, *accuracies):
    """Runs so many trials; each is dispatched, and comes to its accuracy (None: it fails)."""
    for accuracy in accuracies:
        asked = study.ask() if study.num_to_ask() else study.ask_to_confirm()
        end(study, asked, accuracy)


def end(study, asked, accuracy):
    study.dispatch(asked, void=False)
    if accuracy is None:
        study.tell(asked.number, "failed")
        return
    row = {
        "epoch": 1,
        "step": 11,
        "valid/accuracy": accuracy,
        "valid/loss": 1.0,
        "noise_multiplier": asked.config.privacy.noise_multiplier,
        "privacy/epsilon_spent": 1.0,
        "seconds": 0.5,
    }
    study.report(asked.number, row)
    study.tell(asked.number, "complete")


def test_the_final_run_has_the_chosen_config_its_own_noise_and_a_step_that_fits_it(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3)
    final = study.ask_to_confirm()
    chosen = study.record(1)
    assert (final.confirms, final.final, final.state) == (1, True, "running")
    assert final.hyperparams == chosen.hyperparams
    noise = chosen.config.privacy.noise_multiplier, final.config.privacy.noise_multiplier
    whole = study.sweep.search_budget
    (schedule,) = whole.schedules
    assert noise == (whole.noise(schedule), whole.noise(schedule, final=True))
    assert noise[0] > 3 * noise[1]
    searched = chosen.hyperparams["optimizer.lr"]
    assert final.config.optimizer.lr == pytest.approx(searched, rel=1e-11)
    assert chosen.config.optimizer.lr * noise[0] == pytest.approx(searched * noise[1], rel=1e-11)
    same = {"privacy", "optimizer"}
    assert final.config.model_dump(exclude=same) == chosen.config.model_dump(exclude=same)
    assert load_trial(parse_yaml(dump_trial(final.config), "x")) == final.config
    assert plan_privacy(final.config).epsilon > 3.5


def test_tables_and_the_posterior_show_the_step_that_was_searched(uri, load):
    """A table said 397 and the curve beside it 63: the final run's step and the trial's own."""
    explore = "budget={explore: {trials: 12, share: 0.1}}"
    study = Study.create(
        uri, load("search={optimizer.total_step: {log_uniform: [40, 4000]}}", explore)
    )
    run_all(study, *(0.5 + number / 100 for number in range(13)))
    study.store_choice()
    records = [r for r in study.records() if not r.final]
    searched = [r.hyperparams["optimizer.total_step"] for r in records]
    assert all(r.config.total_step < 0.5 * r.hyperparams["optimizer.total_step"] for r in records)
    (process,) = surrogates(study.sweep, records, 12).values()
    assert [r.config.total_step for r in process.records] == pytest.approx(searched)
    marks = [t for t in figures(study)["posterior"].data if (t.name or "").startswith("trials")]
    assert sorted(10**x for x in marks[0].x) == pytest.approx(sorted(searched))
    assert "total_step as the final run has it" in trial_table(records, "").caption
    final = [r for r in study.records() if r.final]
    assert "as the final run" not in trial_table(final, "").caption


def test_methods_are_compared_by_exploring_trials_where_one_of_them_has_the_final_run(uri, load):
    both = "search={optimizer.lr: {log_uniform: [0.1, 10]}, each_of: [{method: {name: dp_sgd}}, "
    study = Study.create(uri, load(both + "{method: {name: disk}}]}"))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.95)
    assert study.best()[0].final
    found = {group.method: group for group in groups_of(study, "here")}
    assert {name: (group.best.value, group.values) for name, group in found.items()} == {
        "dp_sgd": (0.4, []),
        "disk": (0.6, []),
    }
    assert all("exploring trials" in group.remarks[0] for group in found.values())
    alone = Study.create(uri, load(LR, "name=alone"))
    run_all(alone, 0.2, 0.6, 0.4, 0.3, 0.95)
    (group,) = groups_of(alone, "here")
    assert (group.best.value, group.remarks) == (0.95, ())


def test_adam_divides_by_the_noise_itself_so_its_step_stays(uri, load):
    study = Study.create(uri, load("method={name: dp_adam}", LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3)
    final, chosen = study.ask_to_confirm(), study.record(1)
    assert final.config.optimizer == chosen.config.optimizer
    assert final.config.optimizer.lr == chosen.hyperparams["optimizer.lr"]


def test_a_total_step_that_is_searched_is_fitted_as_a_learning_rate_is(uri, load):
    space = "search={optimizer.total_step: {log_uniform: [100, 1000]}}"
    study = Study.create(uri, load("optimizer={}", space))
    run_all(study, 0.2, 0.6, 0.4, 0.3)
    final, chosen = study.ask_to_confirm(), study.record(1)
    noise = [record.config.privacy.noise_multiplier for record in (chosen, final)]
    searched = chosen.hyperparams["optimizer.total_step"]
    assert final.config.total_step == pytest.approx(searched, rel=1e-11)
    assert chosen.config.total_step * noise[0] == pytest.approx(searched * noise[1], rel=1e-11)


def test_the_floor_of_adambc_is_fitted_to_the_noises_variance_and_its_step_is_not(uri, load):
    method, space = "method={name: dp_adambc}", "search={method: default}"
    study = Study.create(uri, load("optimizer={}", method, space))
    run_all(study, 0.2, 0.6, 0.4, 0.3)
    final, chosen = study.ask_to_confirm().config, study.record(1).config
    ratio = chosen.privacy.noise_multiplier / final.privacy.noise_multiplier
    assert chosen.optimizer.floor == pytest.approx(final.optimizer.floor * ratio**2)
    assert final.optimizer.floor == pytest.approx(study.record(1).hyperparams["optimizer.floor"])
    assert chosen.total_step == final.total_step
    first = study.record(0)
    own = study.sweep.with_searched_noise(first.config)
    assert first.hyperparams["optimizer.floor"] == own.default_floor


def test_the_first_trial_of_a_default_space_is_the_final_runs_default(uri, load):
    study = Study.create(uri, load("optimizer={}", "search={method: default}"))
    step = study.sweep.written.default_total_step
    first = study.ask()
    assert first.hyperparams["optimizer.total_step"] == pytest.approx(step, rel=0.15)
    assert first.hyperparams["privacy.clip_norm"] == 0.3
    final = study.sweep.final(first.config)
    assert final.total_step == pytest.approx(first.hyperparams["optimizer.total_step"])


def test_a_step_that_no_file_gives_is_the_final_runs_default_and_scaled_once(uri, load):
    study = Study.create(
        uri, load("optimizer={}", "search={privacy.clip_norm: {uniform: [0.1, 1]}}")
    )
    step = study.sweep.written.default_total_step
    run_all(study, 0.2, 0.6, 0.4, 0.3)
    final, chosen = study.ask_to_confirm(), study.record(1)
    assert final.config.total_step == pytest.approx(step, rel=0.15)
    noise = [record.config.privacy.noise_multiplier for record in (chosen, final)]
    assert chosen.config.total_step * noise[0] == pytest.approx(final.config.total_step * noise[1])


@pytest.mark.parametrize("space", [LR, BATCHES])
def test_one_epsilon_is_the_statement_of_all_runs_and_is_kept(uri, load, space):
    study = Study.create(uri, load(space))
    run_all(study, 0.2, 0.6, None, 0.3, 0.9)
    assert study.is_finished()
    runs = [get_charged_run(record) for record in study.records()]
    assert len(runs) == study.sweep.num_runs == 5
    assert study.sweep.search_budget.covers(runs)
    assert compose_runs(runs, study.sweep.written.delta) <= 4
    words = origin_of(study).search_words
    assert "of 4 exploring trials, which cost 0.1 of it together, and one final run, all" in words
    assert "Counted: 4 exploring trials and the final run over" in words
    assert re.findall(r"\(([\d.]+), [\d.e-]+\)-DP", words) == ["4.00"]
    proof = "at two noise levels fixed beforehand" if space == LR else "at an order fixed"
    assert proof in words


def test_what_is_exported_is_the_final_run_and_says_so(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.5)
    best = study.best()
    assert [record.number for record in best] == [4, 1, 2, 3, 0], "the final run, though 1 had more"
    assert [record.number for record in list_best_by_budget(study)] == [4]
    text, origin = to_yaml(best[0], 1, origin_of(study)), origin_of(study)
    flat = " ".join(text.replace("#", "").split())
    assert "trial 4 of sweep tiny, the final run, at the config of trial 1" in flat
    assert "is that of the final run, trained once at the config that 4 exploring trials" in flat
    assert load_trial(parse_yaml(text, "x")) == best[0].config
    assert study.confirmed() == {}
    assert origin.num_trials == 4
    assert "Exploring trial 1 came to 0.6, which is better" in flat
    assert "Search smaller values of optimizer.total_step" in flat


def test_nothing_is_said_of_a_final_run_that_did_best(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.7)
    assert "Exploring trial" not in origin_of(study).describe_selection_bias(study.best()[0])


def test_a_final_run_that_fails_is_not_run_again_and_nothing_is_passed_off_as_it(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3, None)
    assert study.ask_to_confirm() is None
    assert study.num_to_confirm() == 0
    assert study.is_finished()
    best = study.best()[0]
    assert best.number == 1
    assert "that of an exploring trial, which has much noise" in origin_of(
        study
    ).describe_selection_bias(best)
    assert study.sweep.search_budget.covers([get_charged_run(record) for record in study.records()])


def test_without_a_complete_exploring_trial_there_is_no_final_run(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, None, None, None, None)
    assert study.num_to_confirm() == 0
    assert study.ask_to_confirm() is None
    assert study.is_finished()


def test_exploring_that_ran_out_of_time_ends_for_good_with_the_final_run(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6)
    assert study.num_to_confirm() == 1
    final = study.ask_to_confirm()  # as a driver does after budget.hours
    again = Study.open(uri, study.sweep)
    assert again.num_to_ask() == again.num_to_confirm() == 0
    assert again.ask_to_confirm() is None, "one final run"
    assert again.running() == [final.number]
    end(again, again.record(final.number), 0.9)
    assert again.is_finished()
    assert again.sweep.search_budget.covers([get_charged_run(record) for record in again.records()])


def test_the_final_run_is_no_trial_that_a_sampler_sees(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.9)
    assert study.num_asked() == 4
    assert not study.should_prune(4)


def test_a_proposal_meets_conditions_on_the_step_that_is_searched(uri, load):
    study = Study.create(uri, load(LR, "where=optimizer.lr >= 2"))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.9)
    assert min(record.hyperparams["optimizer.lr"] for record in study.records()) >= 2
    assert study.record(0).config.optimizer.lr < 2
    assert study.record(4).config.optimizer.lr >= 2


def test_the_ledger_charges_each_run_by_its_own_noise(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.9)
    for record in study.records():
        assert record.charged == make_ledger_entry(record.config)
    charged = [record.charged["noise_multiplier"] for record in study.records()]
    assert len(set(charged[:4])) == 1
    assert charged[4] < charged[0]


MISTAKES = [
    ([EXPLORE], r"privacy\.scope: trial gives each run an epsilon of its own.*scope: sweep"),
    ([SHARED, EXPLORE, "confirm={top: 1, seeds: 2}"], r"confirm: .* repeats have none\. Delete"),
    (
        [SHARED, EXPLORE, "accounting=private_selection", "sampler.name=random"],
        r"accounting: .*private_selection.* goes against budget\.explore: the exploring",
    ),
    (
        [SHARED, EXPLORE, "objective={metrics: [valid/accuracy, seconds]}"],
        r"objective\.metrics: .* goes against budget\.explore: one config is chosen",
    ),
    (
        [SHARED, "budget={trials: 9, explore: {trials: 4}}"],
        r"budget\.trials: is given beside explore.*Delete one of the two",
    ),
    ([SHARED, "budget={explore: {trials: 0}}"], r"budget\.\w+.*: .*greater than 0"),
    ([SHARED, "budget={explore: {trials: 3, share: 1.0}}"], r"explore\.share.*less than 1"),
    ([SHARED, EXPLORE, "accounting=none"], r"accounting: .*none.* goes against budget\.explore"),
    ([SHARED, EXPLORE, "privacy.epsilon={each: [1, 2]}"], r"one budget for all trials together"),
    (["budget={hours: 1}"], r"budget\.trials: is missing\. Write how many"),
]


@pytest.mark.parametrize(("settings", "words"), MISTAKES)
def test_combinations_that_make_no_sense_are_refused(sweep_file, settings, words):
    with pytest.raises(ConfigError, match=words):
        load_sweep(sweep_file, settings)


def test_the_page_shows_what_the_final_run_spent_by_itself(uri, load):
    study = Study.create(uri, load(LR))
    run_all(study, 0.2, 0.6, 0.4, 0.3, 0.5)
    spent = study.best()[0].row["privacy/epsilon_spent"]
    shown = page(study, {})
    assert f"ε = {format_epsilon(spent)}" in shown
    assert "given by the noise" not in shown


def test_one_epsilon_is_said_to_include_the_search_where_it_does(uri, load, tmp_path):
    """Not of an exploring trial, nor where held-out examples chose, nor of a test secret."""

    def say(study, record):
        out = Console(record=True, width=200, file=io.StringIO())
        print_privacy(study, record, "words", "tiny", out)
        return "The best model for one epsilon, the search included" in out.export_text()

    study = Study.create(uri, load())
    run_all(study, 0.6, 0.2, 0.4, 0.3)
    assert not say(study, study.record(0)), "the final run is missing"
    run_all(study, 0.9)
    assert say(study, study.record(4))
    held_out = Study.create(f"sqlite:///{tmp_path}/2.db", load("data.validation=holdout"))
    run_all(held_out, *[0.5] * 5)
    assert not say(held_out, held_out.record(4))
    study.note_test_secret()
    assert not say(study, study.record(4))
