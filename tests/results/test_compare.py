"""Sweeps side by side: what is equal, what differs by more than noise, what is no comparison."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from markupsafe import escape
from scipy import stats

from dpsweep.cli.verbs import compare as verb
from dpsweep.cli.verbs import sweeps
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.privacy.statement import SearchSpending
from dpsweep.results.compare import compare, compare_methods, uneven
from dpsweep.results.comparison import markdown, rows, sentences
from dpsweep.results.groups import TrialGroup, groups_of
from dpsweep.results.page import page
from dpsweep.results.significance import gap_between, half_width, holm
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study

SGD = "method={name: dp_sgd}"
LR_ALONE = "search={optimizer.lr: {log_uniform: [0.3, 3]}}"
FOUR = "confirm={top: 1, seeds: 4}"
GOOD, BAD = [0.90, 0.91, 0.92, 0.93], [0.80, 0.82, 0.81, 0.84]


def end(study, asked, accuracy):
    study.report(asked.number, row(accuracy))
    study.tell(asked.number, "complete")


def row(accuracy):
    found = {"epoch": 2, "step": 22, "valid/accuracy": accuracy, "valid/loss": 1.0}
    return found | {"noise_multiplier": 1.2, "privacy/epsilon_spent": 1.0, "seconds": 1.0}


@pytest.fixture
def searched(tmp_path, sweep_file):
    """A launched sweep whose trials come to `judge(record)`, and whose repeats to `repeats`."""

    def make(name, *settings, trials=2, judge=None, repeats=(), stop_after=None, state="state"):
        settings = [f"name={name}", f"budget.trials={trials}", *settings]
        sweep = load_sweep(sweep_file, settings)
        folder = StateFolder(tmp_path / state).sweep(name)
        folder.create(sweep.file, sweep.base, None)
        study = Study.create(folder.storage_uri, sweep, folder.id)
        for _ in range(trials if stop_after is None else stop_after):
            asked = study.ask()
            end(study, asked, judge(asked) if judge else 0.5 + asked.number / 100)
        for accuracy in repeats:
            end(study, study.ask_to_confirm(), accuracy)
        return study

    return make


def group(method, repeats, *, first_seed=1):
    """A group with nothing but repeats."""
    return TrialGroup(
        label=method,
        sweep=f"sweep-{method}",
        folder="state",
        method=method,
        target=(4.0, "trial", None),
        delta=1e-5,
        metric="valid/accuracy",
        sign=-1,
        data={"name": "digits"},
        model={"name": "linear"},
        epochs=(2.0, 2.0),
        searched=("optimizer.lr",),
        accounting="composition",
        trials=2,
        best=None,
        repeats=tuple(enumerate(repeats, first_seed)),
        num_failed=0,
        num_confirmed=1,
        shares={},
        remarks=(),
        spending=SearchSpending(num_runs=2, planned=2, epsilon=6.0, delta=1e-5),
    )


def groups(*studies):
    return [group for study in studies for group in groups_of(study, "state")]


def test_repeats_are_compared_in_pairs_by_their_seeds():
    found = compare([group("dp_sgd", GOOD), group("fftkf", BAD)])
    (each,) = found.compared
    assert (each.label, each.reference, each.gap.kind) == ("fftkf", "dp_sgd", "paired")
    assert each.gap.p == pytest.approx(stats.ttest_rel(BAD, GOOD).pvalue)
    assert each.gap.difference == pytest.approx(np.mean(BAD) - np.mean(GOOD))
    assert not each.better
    (words,) = (w for w in sentences(found) if "worse" in w)
    assert words.startswith("fftkf: worse than dp_sgd by 9.75 ± 1.52 points (p = ")
    assert "4 pairs of runs" in words


def test_what_the_compared_sweeps_spent_is_added_up_and_no_sweep_is_counted_twice():
    one, two = group("dp_sgd", GOOD), group("fftkf", BAD)
    told = "a choice among these 2 sweeps has seen all of them: on the same data they cost ({}, {})"
    words = sentences(compare([one, two]))
    assert any(w.startswith(told.format("12.00", "2.0e-05")) for w in words)
    warm = replace(two.spending, earlier=(6.0, 1e-5), warm_start=(("sweep-dp_sgd",), 2))
    words = sentences(compare([one, replace(two, spending=warm)]))  # it began from the other
    assert any(w.startswith(told.format("12.00", "2.0e-05")) for w in words)
    other = replace(warm, warm_start=(("before",), 2))  # which is not compared
    words = sentences(compare([one, replace(two, spending=other)]))
    assert any(w.startswith(told.format("18.00", "3.0e-05")) for w in words)
    for groups in ([one], [one, replace(two, spending=replace(warm, void=True))]):
        assert not any("seen all of them" in w for w in sentences(compare(groups)))


def test_a_reference_can_be_named_by_method_or_sweep_and_a_wrong_one_is_told():
    both = [group("dp_sgd", GOOD), group("fftkf", BAD)]
    for name in ("fftkf", "sweep-fftkf"):
        (each,) = compare(both, name).compared
        assert (each.label, each.better) == ("dp_sgd", True)
    with pytest.raises(
        ConfigError, match=r"--reference: unknown group 'dp_sdg'. Did you mean 'dp_s"
    ):
        compare(both, "dp_sdg")


def test_a_small_p_after_few_trials_is_said_to_be_blind_to_the_chance_of_the_search():
    few = [group("dp_sgd", GOOD), replace(group("fftkf", BAD), trials=8)]
    (words,) = (w for w in sentences(compare(few)) if "fewer than" in w)
    assert words.startswith("fewer than 8 trials were spent on dp_sgd: a difference may be that")
    for enough in (
        [replace(each, trials=8) for each in few],
        [replace(each, searched=()) for each in few],
        [replace(each, trials=None) for each in few],
    ):
        assert not any("fewer than" in w for w in sentences(compare(enough)))
    assert "they do not cover the chance in each search" in markdown(compare(few))


def test_noise_is_called_noise():
    same = [group("dp_sgd", [0.9, 0.91, 0.9, 0.92]), group("fftkf", [0.91, 0.9, 0.92, 0.89])]
    assert "no difference from dp_sgd that these 8 runs can show" in markdown(compare(same))


def test_repeats_without_common_seeds_are_compared_by_welchs_test_and_it_is_said():
    found = compare([group("dp_sgd", GOOD), group("fftkf", BAD, first_seed=101)])
    (each,) = found.compared
    assert each.gap.kind == "Welch"
    assert each.gap.p == pytest.approx(stats.ttest_ind(BAD, GOOD, equal_var=False).pvalue)
    assert any("have repeats with different public seeds" in words for words in sentences(found))


def test_equal_seeds_are_no_pairs():
    same = gap_between([(0, 0.9), (0, 0.8), (0, 0.7)], [(0, 0.5), (0, 0.6), (0, 0.4)])
    assert (same.kind, same.num_runs) == ("Welch", (3, 3))
    partly = gap_between([(1, 0.9), (2, 0.8), (3, 0.7)], [(1, 0.5), (2, 0.6), (4, 0.4)])
    assert (partly.kind, partly.num_runs) == ("paired", (2, 2))
    assert gap_between([(1, 0.9)], [(1, 0.8)]).kind == "none"


def test_differences_without_spread_are_not_a_proof():
    assert gap_between([(1, 0.75), (2, 0.5)], [(1, 0.5), (2, 0.25)]).p is None
    assert gap_between([(1, 0.75), (2, 0.5)], [(1, 0.75), (2, 0.5)]).p == 1.0


def test_intervals_are_students_and_many_tests_are_corrected():
    low, high = stats.t.interval(0.95, 3, np.mean(GOOD), stats.sem(GOOD))
    assert half_width(GOOD) == pytest.approx((high - low) / 2)
    assert half_width([0.9]) is None
    assert holm([0.5, 0.001, 0.02]) == pytest.approx([0.5, 0.003, 0.04])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_false_alarms_over_many_arms_are_as_rare_as_promised():
    """Five equal groups against a sixth, 150 times; 5 % would be 7.5, and 20 is 4.7 std away."""
    rng, alarms = np.random.default_rng(7), 0
    for _ in range(150):
        base, *others = rng.normal(0.9, 0.01, (6, 5))
        gaps = [gap_between(list(enumerate(a)), list(enumerate(base))) for a in others]
        alarms += min(holm([gap.p for gap in gaps])) < 0.05
    assert alarms < 20


def test_methods_taken_in_turn_and_budgets_are_arms_of_their_own(searched):
    study = searched(
        "both",
        "search={each_of: [dp_sgd, disk]}",
        "privacy.epsilon={each: [1, 4]}",
        trials=8,
        judge=lambda r: 0.5 + 0.1 * r.epsilon / 4 + 0.01 * (r.config.method.name == "disk"),
    )
    found = compare(groups(study))
    shown = [(each.target[0], each.label, each.trials) for each in found.groups]
    assert shown == [(1, "disk", 2), (1, "dp_sgd", 2), (4, "disk", 2), (4, "dp_sgd", 2)]
    assert found.compared == ()
    assert any("not repeated: disk, dp_sgd" in words for words in sentences(found))


def test_methods_of_one_sweep_are_compared_by_their_own_repeats(searched):
    study = searched(
        "both",
        "search={each_of: [dp_sgd, disk]}",
        "confirm={top: 1, seeds: 3, each_method: true}",
        judge=lambda r: 0.5 + 0.1 * (r.config.method.name == "disk"),
        repeats=[0.80, 0.60, 0.82, 0.61, 0.84, 0.62],
    )
    found = compare(groups(study), "dp_sgd")
    assert [(a.label, len(a.repeats)) for a in found.groups] == [("disk", 3), ("dp_sgd", 3)]
    (each,) = found.compared
    assert (each.label, each.gap.kind, each.better) == ("disk", "paired", True)
    assert each.gap.difference == pytest.approx(0.21)


def test_what_was_not_equal_is_said(searched):
    one = searched("one", SGD, LR_ALONE, FOUR, repeats=GOOD, trials=3)
    two = searched("two", "search={method.kappa: {uniform: [0.5, 0.9]}}", "train.epochs=4",
                   "privacy.delta=1e-5", trials=2)  # fmt: skip
    told = uneven(compare(groups(one, two)).by_target()[0])
    assert "not equal: trials (3: dp_sgd; 2: fftkf)" in told
    assert "not equal: epochs (2: dp_sgd; 4: fftkf)" in told
    assert "not equal: delta (0.000336: dp_sgd; 1e-05: fftkf)" in told
    assert "not equal: a search over optimizer.lr (yes: dp_sgd; no: fftkf)" in told
    assert uneven([group("dp_sgd", GOOD), group("fftkf", BAD)]) == []


def test_other_data_models_and_metrics_are_refused_by_name(searched):
    one = searched("one", SGD, LR_ALONE)
    with pytest.raises(
        ConfigError, match=r"model: dp_sgd \(sweep one\) has width: 4 and fftkf \(sw"
    ):
        compare(groups(one, searched("wide", "model.width=8")))
    with pytest.raises(ConfigError, match=r"metric: .* valid/accuracy and .* valid/loss: their re"):
        compare(groups(one, searched("loss", "objective.metric=valid/loss")))
    with pytest.raises(ConfigError, match=r"validation: test_split.* validation: holdout"):
        compare(groups(one, searched("held", "data.validation=holdout")))
    other = searched("other", "model={name: linear}")
    assert len(compare(groups(one, other), any_model=True).groups) == 2


def test_unfinished_and_void_sweeps_are_said(searched):
    half = searched("half", trials=6, stop_after=2)
    half.note_test_secret()
    told = sentences(compare(groups(half)))
    assert any("half: was stopped before its end: 4 trials are left" in w for w in told)
    assert any("half: void: a trial used a test seed" in w for w in told)


def test_which_keys_decided_a_search_is_of_its_own_trials(searched):
    """The learning rate decides everything, but only for the first method."""
    base = "optimizer: {lr: {log_uniform: [0.3, 3]}, momentum: {uniform: [0, 0.9]}}"
    spaces = f"{{method: {{name: %s}}, {base}}}"
    study = searched(
        "both",
        f"search={{each_of: [{spaces % 'dp_sgd'}, {spaces % 'disk'}]}}",
        trials=60,
        judge=lambda r: (
            r.config.optimizer.lr / 9
            if r.config.method.name == "dp_sgd"
            else r.config.optimizer.momentum
        ),
    )
    by_label = {each.label: next(iter(each.shares)) for each in groups(study)}
    assert by_label == {"dp_sgd": "optimizer.lr", "disk": "optimizer.momentum"}


def test_how_much_of_a_lead_the_chance_of_two_searches_makes_is_said(searched):
    rng = np.random.default_rng(0)

    def judge(level):
        return lambda r: level - 0.01 * np.log(r.hyperparams["optimizer.lr"]) ** 2 + noise()

    def noise():
        return 0.01 * rng.standard_normal()

    known = {"trials": 16, "repeats": [0.80, 0.81, 0.79, 0.80]}
    one = searched("one", SGD, LR_ALONE, FOUR, judge=judge(0.8), **known)
    near = searched("near", LR_ALONE, FOUR, judge=judge(0.8), **known | {"repeats": [0.803] * 4})
    far = searched("far", "method.name=disk", LR_ALONE, FOUR, judge=judge(0.9), trials=16)
    for study, values in ((far, [0.90, 0.91, 0.89, 0.90]),):
        for value in values:
            end(study, study.ask_to_confirm(), value)
    found = compare([each for study in (one, near, far) for each in groups(study)], "dp_sgd")
    by_label = {each.label: each for each in found.compared}
    for each in found.groups:
        assert each.selection_bias.overstatement == pytest.approx(
            0.015, rel=0.6
        )  # 1.77 sd, if all are equal
    lead = by_label["disk"].chance_lead
    assert 0.001 < lead < 0.03
    told = sentences(found)
    start = "which configs two searches find is chance too. Between equally good methods it makes"
    assert any(w.startswith(f"disk and dp_sgd: {start}") and "is more than that" in w for w in told)
    assert any(
        w.startswith(f"fftkf and dp_sgd: {start}") and "is no more than that" in w for w in told
    )
    assert any("The best result of 16 trials is better than its config by" in w for w in told)
    (row,) = (r for r in rows(found)["compared"] if r["label"] == "disk")
    assert row["chance_lead"] == lead
    (mine,) = (g for g in rows(found)["groups"] if g["label"] == "disk")
    assert mine["expected"] == far.best()[0].expected
    assert "as chosen: posterior mean;" in markdown(found)


def test_with_few_trials_nothing_is_known_of_the_chance(searched):
    both = [
        searched(n, m, LR_ALONE, FOUR, trials=7, repeats=GOOD)
        for n, m in (("a", SGD), ("b", LR_ALONE))
    ]
    found = compare([each for study in both for each in groups(study)])
    assert {each.selection_bias for each in found.groups} == {None}
    assert not any("chance too" in words for words in sentences(found))
    assert "as chosen: result of one run;" in markdown(found)


def test_several_folders_are_looked_in_and_programs_can_read_it(searched, tmp_path, capsys):
    searched("same", SGD, LR_ALONE, FOUR, repeats=GOOD, state="one")
    searched("same", FOUR, repeats=BAD, state="two")
    folders = [str(tmp_path / "one"), str(tmp_path / "two")]
    verb.compare(["same"], folders, None, any_model=False, form="json")
    told = json.loads(capsys.readouterr().out)
    assert [each["method"] for each in told["groups"]] == ["dp_sgd", "fftkf"]
    assert told["compared"][0]["significant"]
    verb.compare(["same"], folders, "dp_sgd", any_model=False, form="table")
    assert "worse than dp_sgd" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(
        StateError, match=r"no sweep called 'sam' in .*one, .*two. Known: same, same"
    ):
        verb.compare(["sam"], folders, None, any_model=False, form="table")


def test_a_private_selection_tells_no_number_of_trials(searched):
    study = searched("secret", "sampler.name=random", "accounting=private_selection", stop_after=0)
    with pytest.raises(StateError, match="has no trial yet"):
        groups(study)
    winner = replace(study.ask(), row=row(0.9))
    study.add_winner(winner, {"sampling_rate": 0.1, "noise_multiplier": 1.2, "steps": 22})
    (told,) = rows(compare(groups(study)))["groups"]
    assert (told["trials"], told["repeats"]) == (None, [])
    assert "only its winner is told" in told["remarks"][0]


PAIRS = [0.90, 0.80, 0.91, 0.80, 0.92, 0.80, 0.93, 0.82]


def test_the_end_of_a_sweep_and_compare_say_the_same(searched, tmp_path, capsys):
    """One comparison: `launch`, `best` and the page print what `compare` prints."""
    both = "search={each_of: [disk, dp_sgd]}"
    repeated = "confirm={top: 1, seeds: 4, each_method: true}"
    study = searched("both", both, repeated, trials=4, repeats=PAIRS)
    found = compare_methods(study)
    assert found is not None
    said = sentences(found)
    assert any(": worse than " in sentence for sentence in said), said
    assert any("a difference may be that one search met a good learning rate" in s for s in said)
    state = str(tmp_path / "state")
    verb.compare(["both"], [state], None, any_model=False, form="table")
    compared = capsys.readouterr().out
    sweeps.best("both", state, 1, False)
    best = capsys.readouterr().out
    assert compared.strip() in best
    assert all(f"<li>{escape(sentence)}</li>" in page(study) for sentence in said)


def test_uneven_trials_are_said_with_the_remedy(searched):
    first = "start=[{method.name: disk}, {method.name: disk}, {method.name: dp_sgd}]"
    study = searched("uneven", "search={one_of: [disk, dp_sgd]}", first, trials=3)
    (told,) = [s for s in sentences(compare_methods(study)) if "not equal: trials" in s]
    assert "each_of gives all the same number" in told


def test_a_search_over_one_method_compares_nothing(searched):
    assert compare_methods(searched("one")) is None
    empty = searched("none", "search={each_of: [disk, dp_sgd]}", stop_after=0)
    assert compare_methods(empty) is None


def test_compare_writes_a_page_that_stands_alone(searched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    searched("one", LR_ALONE, SGD, FOUR, repeats=GOOD)
    searched("two", LR_ALONE, "method={name: dp_adam}", FOUR, repeats=BAD)
    state = str(tmp_path / "state")
    out = tmp_path / "compare.html"
    verb.compare(["one", "two"], [state], None, any_model=False, form="table", out=out)
    text = out.read_text()
    assert "<title>one and two – dpsweep comparison</title>" in text
    assert "Written by: dpsweep compare one two -o" in text
    assert text.count("plotly.js v") == 1
    found = re.search(r'id="data-groups">(.*?)</script>', text).group(1)
    (marks,) = json.loads(found)["data"]
    assert sorted(marks["x"]) == pytest.approx([np.mean(BAD), np.mean(GOOD)])
    assert "0.9150" in text.partition("<script")[0]
    with pytest.raises(StateError, match="cannot be written"):
        verb.compare(["one"], [state], None, any_model=False, form="table", out=out / "x")
