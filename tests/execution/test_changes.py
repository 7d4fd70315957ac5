"""A changed sweep file is taken over where it says how much is run, refused where it says what."""

import pytest
import yaml

from dpsweep.config.sweep import change_sweep, load_sweep
from dpsweep.core.errors import ConfigError, StateError
from dpsweep.execution.changes import check_changes, list_changes
from dpsweep.execution.launch import reopen_session
from dpsweep.store.state_dir import StateFolder
from dpsweep.store.study import Study, read_stored_sweep


@pytest.fixture
def state(tmp_path):
    return StateFolder(tmp_path / "state")


@pytest.fixture
def launched(state, sweep_file):
    """Launches the sweep file with some settings; its folder."""

    def launch(*settings):
        sweep = load_sweep(sweep_file, list(settings))
        folder = state.sweep("tiny")
        folder.create(sweep.file, sweep.base, None)
        return folder

    return launch


def stored(folder):
    """The sweep as it is stored there now."""
    return read_stored_sweep(folder.name, folder.state)


HARMLESS = {
    "budget.trials=9": "budget.trials: 2 -> 9",
    "budget.hours=1.5": "budget.hours: nothing -> 1.5",
    "confirm={top: 1, seeds: 2}": "confirm.seeds: nothing -> 2; confirm.top: nothing -> 1",
    "resources.cpu=2": "resources.cpu: nothing -> 2",
    "keep_weights=1": "keep_weights: nothing -> 1",
}
HARMFUL = {
    "search.method.kappa={uniform: [0.3, 0.9]}": "search.method.kappa.uniform",
    "search.method.cut={uniform: [0.1, 0.2]}": "search.method.cut.uniform",
    "where=method.kappa < 0.9": "where",
    "start=[{method.kappa: 0.5}]": "start",
    "objective.metric=valid/loss": "objective.metric",
    "sampler.name=tpe": "sampler.name",
    "pruner.name=median": "pruner.name",
    "accounting=none": "accounting",
    "privacy.epsilon=5": "base.privacy.epsilon",
    "privacy.delta=1e-6": "base.privacy.delta",
    "data.validation=holdout": "base.data.validation",
    "model.width=5": "base.model.width",
    "train.epochs=3": "base.train.epochs",
    "optimizer.schedule.name=cosine": "base.optimizer.schedule.name",
    "method.name=disk": "base.method.name",
}


@pytest.mark.parametrize(("setting", "words"), HARMLESS.items())
def test_how_much_is_run_may_change_once_that_is_accepted(launched, sweep_file, setting, words):
    folder, changed = launched(), load_sweep(sweep_file, [setting])
    with pytest.raises(StateError, match="with --accept-changes, or go on with what") as told:
        check_changes(folder, stored(folder), changed, accepted=False)
    assert words in str(told.value)
    assert list_changes(stored(folder), changed), "and nothing is taken over that was not accepted"
    check_changes(folder, stored(folder), changed, accepted=True)
    assert list_changes(stored(folder), changed) == {}
    assert folder.read_files()[0].tree == changed.file.tree


@pytest.mark.parametrize(("setting", "key"), HARMFUL.items())
def test_what_is_run_cannot_change_under_trials_that_have_run(launched, sweep_file, setting, key):
    folder, changed = launched(), load_sweep(sweep_file, [setting])
    before = folder.read_files()
    for accepted in (False, True):
        with pytest.raises(StateError, match=r"cannot change under trials that have run") as told:
            check_changes(folder, stored(folder), changed, accepted=accepted)
    assert f"{key} cannot change" in str(told.value)
    assert "dpsweep launch FILE --name tiny-2 --from tiny" in str(told.value)
    assert folder.read_files() == before


def test_one_harmful_change_among_harmless_ones_is_named_and_nothing_is_taken(launched, sweep_file):
    folder = launched()
    changed = load_sweep(sweep_file, ["budget.trials=9", "sampler.name=tpe"])
    with pytest.raises(StateError, match=r"\)\. sampler\.name cannot change"):
        check_changes(folder, stored(folder), changed, accepted=True)
    assert (
        read_stored_sweep("tiny", StateFolder(folder.path.parent.parent)).config.budget.trials == 2
    )


SHARED = [
    ["privacy.scope=sweep"],
    ["accounting=private_selection"],
    ["accounting=private_selection", "privacy.scope=sweep"],
]


@pytest.mark.parametrize("shared", SHARED)
def test_the_number_of_runs_cannot_change_where_the_noise_was_made_for_it(
    launched, sweep_file, shared
):
    folder = launched(*shared)
    more = load_sweep(sweep_file, [*shared, "budget.trials=3"])
    with pytest.raises(StateError, match=r"\)\. budget\.trials cannot change"):
        check_changes(folder, stored(folder), more, accepted=True)
    kept = load_sweep(sweep_file, [*shared, "keep_weights=1", "resources.cpu=2"])
    check_changes(folder, stored(folder), kept, accepted=True)
    assert list_changes(stored(folder), kept) == {}


def test_repeats_cannot_be_added_to_a_budget_that_all_share(launched, sweep_file):
    folder = launched("privacy.scope=sweep")
    more = load_sweep(sweep_file, ["privacy.scope=sweep", "confirm={top: 1, seeds: 2}"])
    with pytest.raises(StateError, match=r"\)\. confirm\.seeds, confirm\.top cannot change"):
        check_changes(folder, stored(folder), more, accepted=True)
    late = load_sweep(sweep_file, ["privacy.scope=sweep", "budget.hours=2"])
    check_changes(folder, stored(folder), late, accepted=True)


def test_a_shared_budget_cannot_be_left_by_changing_the_scope_as_well(launched, sweep_file):
    folder = launched("privacy.scope=sweep")
    with pytest.raises(StateError, match=r"\)\. base\.privacy\.scope cannot change"):
        check_changes(
            folder, stored(folder), load_sweep(sweep_file, ["budget.trials=9"]), accepted=True
        )
    other = launched_as(folder, "other", sweep_file, "accounting=private_selection")
    with pytest.raises(StateError, match=r"\)\. accounting cannot change"):
        check_changes(
            other, stored(other), load_sweep(sweep_file, ["budget.trials=9"]), accepted=True
        )


def launched_as(folder, name, sweep_file, *settings):
    sweep = load_sweep(sweep_file, [f"name={name}", *settings])
    made = StateFolder(folder.path.parent.parent).sweep(name)
    made.create(sweep.file, sweep.base, None)
    return made


@pytest.fixture
def with_base_file(tmp_path, sweep_file):
    """The sweep file, with its base in a file of its own of a given name; changed, if asked."""

    def write(name, **changed):
        tree = yaml.safe_load(sweep_file.read_text())
        base = tree["base"] if isinstance(tree["base"], dict) else write.base
        write.base = base
        (tmp_path / name).write_text(yaml.safe_dump({**base, **changed}))
        sweep_file.write_text(yaml.safe_dump({**tree, "base": name}))
        return load_sweep(sweep_file)

    return write


def test_a_base_file_of_another_name_and_the_same_content_is_no_change(launched, with_base_file):
    folder = launched()  # with the base inside the sweep file
    assert list_changes(stored(folder), with_base_file("one.yaml")) == {}
    check_changes(folder, stored(folder), with_base_file("two.yaml"), accepted=False)


def test_a_base_file_of_the_same_name_and_another_content_is_one(launched, with_base_file):
    with_base_file("one.yaml")
    folder = launched()
    changed = with_base_file("one.yaml", optimizer={"lr": 2.0})
    assert list_changes(stored(folder), changed) == {"base.optimizer.lr": ("1.0", "2.0")}


def test_what_was_said_and_is_not_said_any_more_is_a_change(launched, sweep_file):
    folder = launched("resources.cpu=2", "sampler.startup_trials=5")
    assert list_changes(stored(folder), load_sweep(sweep_file)) == {
        "resources.cpu": ("2", "nothing"),
        "sampler.startup_trials": ("5", "nothing"),
    }


def test_comments_order_and_the_name_are_no_changes(launched, sweep_file, state):
    folder = launched()
    tree = yaml.safe_load(sweep_file.read_text())
    turned = dict(reversed(tree.items()))
    sweep_file.write_text("# another comment\n" + yaml.safe_dump(turned, sort_keys=False))
    check_changes(folder, stored(folder), load_sweep(sweep_file), accepted=False)
    assert list_changes(stored(folder), load_sweep(sweep_file, ["name=tiny-2"])) == {}


def test_data_that_are_gone_at_a_resume_are_named_with_the_line_of_their_key(launched, state):
    folder = launched("data={name: mnist, root: /nowhere}")
    Study.create(folder.storage_uri, stored(folder), folder.id)
    message = r"tiny\.yaml:\d+: data\.root: '/nowhere' does not hold mnist"
    with pytest.raises(ConfigError, match=message), reopen_session("tiny", state):
        pass


def test_a_later_resume_by_name_goes_on_with_what_was_accepted(launched, sweep_file, state):
    folder = launched()
    folder.check_data("fingerprint")
    identity = folder.id
    sweep = load_sweep(sweep_file, ["budget.trials=9", "keep_weights=1"])
    check_changes(folder, stored(folder), sweep, accepted=True)
    known = read_stored_sweep("tiny", state)
    assert (known.config.budget.trials, known.config.keep_weights) == (9, 1)
    assert known.config == sweep.config
    assert folder.id == identity, "its runs on the tracking server are still its own"
    folder.check_data("fingerprint")
    with pytest.raises(StateError, match="the data are not those"):
        folder.check_data("another")
    check_changes(folder, stored(folder), load_sweep(folder.path / "sweep.yaml"), accepted=False)
    with pytest.raises(StateError, match=r"budget\.trials: 9 -> 2"):
        check_changes(folder, stored(folder), load_sweep(sweep_file), accepted=False)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("budget.trials=9", "budget.trials=4"),
        ("confirm={top: 2, seeds: 3}", "confirm=null"),
        ("confirm={top: 2, seeds: 3}", "confirm={top: 2, seeds: 2}"),
    ],
)
def test_less_cannot_be_run_than_was_planned_since_results_may_have_had_a_say(
    launched, sweep_file, then, now
):
    folder = launched(then)
    with pytest.raises(StateError, match=r"(budget|confirm).* cannot change under trials"):
        check_changes(folder, stored(folder), load_sweep(sweep_file, [now]), accepted=True)


def test_the_number_of_runs_cannot_change_where_a_proof_chose_its_order_by_it(launched, sweep_file):
    varied = "search={train.batch_size: {choice: [64, 256]}}"
    folder = launched(varied)
    more = load_sweep(sweep_file, [varied, "budget.trials=9"])
    with pytest.raises(StateError, match=r"budget\.trials cannot change .* --from tiny"):
        check_changes(folder, stored(folder), more, accepted=True)


FIXED = {
    "scope": (["privacy.scope=sweep"], "under privacy.scope: sweep the noise was made for 2 runs"),
    "selection": (["accounting=private_selection"], "proves its epsilon for this mean number"),
    "lengths": (
        ["search.train.batch_size={choice: [64, 128]}"],
        "batch size or epochs are searched, and the proof of the search's epsilon chose its Renyi "
        "order for 2 runs",
    ),
    "fewer": (["budget.trials=4"], "Trials and repeats can be added, not taken away"),
}


@pytest.mark.parametrize("case", FIXED)
def test_a_refused_number_of_trials_says_why_and_what_to_type(launched, case):
    settings, why = FIXED[case]
    folder = launched(*settings)
    changed = change_sweep(stored(folder), ["budget.trials=3"])
    with pytest.raises(StateError, match=r"budget\.trials cannot change") as told:
        check_changes(folder, stored(folder), changed, accepted=True)
    assert why in str(told.value)
    begins = "" if case == "selection" else " --from tiny"
    assert "a sweep of its own, whose epsilon adds to this one's" in str(told.value)
    assert f"dpsweep launch FILE --name tiny-2{begins}. Or go on" in str(told.value)


def test_settings_extend_a_launched_sweep_as_its_file_would(launched, sweep_file):
    folder = launched()
    changed = change_sweep(stored(folder), ["budget.trials=9", "resources.cpu=2"])
    assert (
        list_changes(load_sweep(sweep_file, ["budget.trials=9", "resources.cpu=2"]), changed) == {}
    )
    check_changes(folder, stored(folder), changed, accepted=True)
    assert stored(folder).config.budget.trials == 9
    with pytest.raises(
        ConfigError, match=r"--set name: a launched sweep keeps its name, tiny\. Lau"
    ):
        change_sweep(stored(folder), ["name=other"])
    harmful = change_sweep(stored(folder), ["model.width=5"])
    with pytest.raises(StateError, match=r"base\.model\.width cannot change"):
        check_changes(folder, stored(folder), harmful, accepted=True)


@pytest.mark.parametrize(
    "settings",
    [
        ["accounting=private_selection", "sampler.name=random"],
        ["accounting=private_selection", "sampler.name=random", "privacy.scope=sweep"],
        ["privacy.scope=sweep", "budget={explore: {trials: 4}}"],
        ["sampler.name=random", "accounting=none"],
        ["objective={metrics: [valid/accuracy, seconds]}"],
        ["start=published"],
        ["search={each_of: default}", "model={name: mlp4_circulant}"],
    ],
)
@pytest.mark.parametrize("space", ["narrow", "full"])
def test_every_kind_of_sweep_over_a_default_space_is_opened_again(launched, space, settings):
    """What is stored says `start`, which a private selection refuses."""
    folder = launched("search={method: default}", f"space={space}", *settings)
    sweep = stored(folder)
    again = load_sweep(folder.path / "sweep.yaml")
    assert again.file.tree.get("start") == sweep.file.tree.get("start")
    assert ("start" in sweep.file.tree) == (not sweep.is_private_selection)


@pytest.mark.parametrize("space", ["narrow", "full"])
def test_a_default_space_that_was_stored_is_opened_again_and_begins_at_the_default(launched, space):
    """A stored sweep has its space spelled out: it forgot its default, or was refused as narrow."""
    settings = ["search={method: default}", f"space={space}", "budget.trials=3"]
    folder = launched(*settings)
    sweep = stored(folder)
    assert sweep.starts_at_default
    written = load_sweep(folder.path / "sweep.yaml")
    assert written.starts_at_default
    assert written.space == sweep.space
    assert ("privacy.clip_norm" in sweep.file.tree["search"]) == (space == "full")
