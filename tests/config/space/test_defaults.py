"""Default spaces are valid where they are named, and can be overridden, mixed and compared."""

import pytest
import yaml
from typer.testing import CliRunner

from dpsweep.cli import app
from dpsweep.config.space.defaults import dump_default_space, get_default_space
from dpsweep.config.space.domains import OneOf
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.methods import METHODS, PUBLISHED
from dpsweep.search.propose import get_start_point

BASE = {
    "data": {"name": "digits"},
    "model": {"name": "cnn_small", "width": 5, "block": 10},
    "privacy": {"epsilon": 2},
    "train": {"batch_size": 128, "epochs": 2},
    "optimizer": {"lr": 1.0, "schedule": {"name": "cosine"}},
}


@pytest.fixture
def sweep_of(tmp_path):
    """Writes and loads a sweep with this search, around this method."""

    def load(search, method="dp_sgd", trials=20, *, sampler="random", space="full", **privacy):
        path = tmp_path / "sweep.yaml"
        tree = {
            "name": "t",
            "base": {**BASE, "method": {"name": method}, "privacy": {"epsilon": 2, **privacy}},
            "search": search,
            "space": space,
            "sampler": {"name": sampler},
            "budget": {"trials": trials},
        }
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return load_sweep(path)

    return load


@pytest.mark.parametrize("method", METHODS)
def test_default_space_of_every_method_is_valid_in_all_its_corners(sweep_of, method):
    sweep = sweep_of({"method": "default"}, method)
    assert {".".join(path) for path in sweep.space.domains} == set(get_default_space(method))
    assert all(trial.method.name == method for trial in [*sweep.corners, *sweep.samples(20)])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_printed_can_be_pasted(sweep_of, method):
    pasted = yaml.safe_load(dump_default_space(method))["search"]
    own = "optimizer.total_step", "optimizer.floor"  # of which a sweep has its own
    sizes = {key: pasted[key] for key in own if key in pasted}
    ours = sweep_of({"method": "default", **sizes}, method).space
    assert sweep_of(pasted, method).space == ours


def test_the_total_step_goes_from_a_quarter_of_the_trials_default_to_four_times_it(sweep_of):
    sweep = sweep_of({"method": "default"}, "dp_sgd")
    steps = [t.total_step for t in sweep.corners if t.privacy.clip_norm == 0.1]
    default = sweep.reference_trial.default_total_step
    assert (min(steps), max(steps)) == pytest.approx((default / 4, default * 4), rel=0.01)


@pytest.mark.parametrize("scope", ["trial", "sweep"])
def test_the_floor_goes_from_an_eighth_of_the_trials_default_to_eight_times_it(sweep_of, scope):
    """And as many times higher as there are shares, since the noise's variance is at most."""
    sweep = sweep_of({"method": "default"}, "dp_adambc", scope=scope)
    floors = [trial.optimizer.floor for trial in sweep.corners]
    shares = {"trial": 1, "sweep": sweep.config.budget.trials}[scope]
    own = sweep_of({"method": "default"}, "dp_adambc").start[0]["optimizer.floor"]
    assert (min(floors), max(floors)) == pytest.approx((own / 8, 8 * own * shares), rel=0.01)
    first = sweep.start[0]["optimizer.floor"]
    assert first == own if scope == "trial" else 4 * own < first < own * shares


def test_narrow_leaves_the_total_step_alone(sweep_of):
    sweep = sweep_of({"method": "default"}, "fftkf", space="narrow")
    assert list(sweep.space.domains) == [("optimizer", "total_step")]
    assert {trial.privacy.clip_norm for trial in sweep.corners} == {0.3}
    branches = sweep_of({"each_of": ["disk", "dp_adam"]}, space="narrow").space.domains[()].branches
    assert all(list(branch.inner) == [("optimizer", "total_step")] for branch in branches)


def test_the_first_trial_of_each_method_is_its_default(sweep_of):
    sweep = sweep_of({"each_of": ["disk", "dp_adam"]})
    first, second = (get_start_point(sweep, place) for place in (0, 1))
    assert first["method.kappa"] == 0.7
    assert first["privacy.clip_norm"] == 0.3
    assert second["optimizer.total_step"] == 2.5
    assert get_start_point(sweep, 2) == {}
    assert sweep_of({"optimizer.lr": {"log_uniform": [1, 2]}}).start == ()


@pytest.mark.parametrize("method", METHODS)
def test_the_first_trial_leaves_no_key_to_chance(sweep_of, method):
    assert sweep_of({"method": "default"}, method).starts_at_default


def test_each_epsilon_begins_with_its_own_default(sweep_of):
    sweep = sweep_of({"method": "default"}, epsilon={"each": [0.25, 2]})
    points = [get_start_point(sweep, place) for place in (0, 1)]
    assert [point["privacy.epsilon"] for point in points] == [0.25, 2]
    low, high = (point["optimizer.total_step"] for point in points)
    assert high > 1.5 * low


def test_a_key_beside_a_default_space_overrides_it(sweep_of):
    sweep = sweep_of({"method": "default", "method.kappa": {"uniform": [0.5, 0.6]}}, "disk")
    assert all(0.5 <= trial.method.kappa <= 0.6 for trial in sweep.samples(20))
    assert len(sweep.space.domains) == len(get_default_space("disk"))


def test_all_methods_take_turns_each_in_its_own_space(sweep_of):
    sweep = sweep_of({"each_of": "default"})
    (domain,) = sweep.space.domains.values()
    assert isinstance(domain, OneOf)
    assert domain.in_turn
    assert tuple(branch.label for branch in domain.branches) == PUBLISHED
    trials = {trial.method.name: trial for trial in sweep.corners}
    assert set(trials) == set(PUBLISHED)
    assert trials["dp_adambc"].optimizer.name == "adambc"
    assert trials["dp_adam"].total_step in (0.625, 10)
    assert trials["spectral_dp"].privacy.clipping.name == "per_layer"
    assert all(t.optimizer.schedule.name == "cosine" for t in trials.values())  # base is kept


def test_names_and_mappings_of_ones_own_may_stand_side_by_side(sweep_of):
    own = {"method": {"compose": {"base": "adambc"}}, "optimizer": {"lr": {"uniform": [0.1, 0.2]}}}
    sweep = sweep_of({"one_of": ["disk", own]})
    assert {t.method.name for t in sweep.corners} == {"disk", "compose"}
    assert {t.optimizer.name for t in sweep.corners} == {"sgd", "adambc"}


@pytest.mark.parametrize(
    ("search", "method", "message"),
    [
        ({"each_of": ["dsik"]}, "disk", r"search\.each_of\.0: unknown method 'dsik'. Did you mean"),
        ({"each_of": 3}, "disk", r"search\.each_of: takes a list of methods"),
        ({"method": "default"}, "dsik", r"names none of the table"),
        ({"method": "defualt"}, "disk", r"expected one way to vary it"),
        (
            {"each_of": [{"method": {"name": "disk"}, "privacy": {"epsilon": 8}}]},
            "disk",
            r"cannot be searched: privacy\.epsilon is the privacy target that all trials share",
        ),
        (
            {"each_of": [{"method": {"name": "disk"}, "seed": {"integer": [0, 9]}}]},
            "disk",
            r"cannot be searched: seed is what makes trials comparable",
        ),
        (
            {"one_of": [{"method": {"name": "disk"}, "privacy": {"sigma": 8.0}}, "dp_sgd"]},
            "disk",
            r"cannot be searched: privacy\.noise_multiplier is calibrated",
        ),
        ({"": {"one_of": ["disk"]}}, "disk", r"has an empty key"),
        ({"each_of": ["disk", "disk"]}, "disk", r"two mappings are called 'disk'"),
    ],
)
def test_mistakes_name_the_place(sweep_of, search, method, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of(search, method)


def test_the_verb_prints_what_a_sweep_file_takes():
    out = CliRunner().invoke(app, ["space", "fftkf"]).output
    assert yaml.safe_load(out)["search"] == dict(get_default_space("fftkf"))


def test_a_key_beside_a_top_level_choice_is_searched_in_all_its_mappings(sweep_of):
    lr = {"optimizer.lr": {"uniform": [1000, 1001]}}
    for search in ({**lr, "each_of": ["disk", "fftkf"]}, {"each_of": ["disk", "fftkf"], **lr}):
        sweep = sweep_of(search)
        assert all(trial.optimizer.lr >= 1000 for trial in [*sweep.corners, *sweep.samples(8)])
        assert "one_of.disk.optimizer.lr" not in drawn_names(sweep)


def drawn_names(sweep):
    names = []

    class Noting:
        def number(self, name, domain):
            names.append(name)
            return domain.low

        def option(self, name, labels):
            return 0

        choose_label = option

    sweep.space.draw(sweep.base.tree, Noting())
    return names


@pytest.mark.parametrize("beside", [{"method": "default"}, {"method": {"one_of": [{"name": "a"}]}}])
def test_two_choices_of_the_method_are_refused(sweep_of, beside):
    with pytest.raises(ConfigError, match=r"search\.method: "):
        sweep_of({"each_of": ["disk", "fftkf"], **beside})
