"""A sweep file is checked at every corner of its space, with its own lines in the errors."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from dpsweep.config.sweep import SweepConfig, load_sweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError

ROOT = Path(__file__).parents[2]


def load(sweep_file, *settings):
    return load_sweep(sweep_file, list(settings))


@pytest.mark.parametrize("path", sorted((ROOT / "sweeps").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_sweep_we_ship_is_valid_and_fits_its_schema(path):
    sweep = load_sweep(path)
    assert sweep.config.budget.trials >= 6
    jsonschema.validate(yaml.safe_load(path.read_text()), SweepConfig.model_json_schema())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_we_ship_fits_its_schema(path):
    jsonschema.validate(yaml.safe_load(path.read_text()), TrialConfig.model_json_schema())


def test_the_schema_takes_letters_and_refuses_unknown_keys():
    schema = TrialConfig.model_json_schema()
    tree = yaml.safe_load((ROOT / "configs/digits_cnn.yaml").read_text())
    tree["method"] = {"name": "fftkf", "rho": 0.5}
    jsonschema.validate(tree, schema)
    tree["method"]["rhoo"] = 0.5
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, schema)


def test_a_search_overrides_any_key_and_letters_meet_their_names(sweep_file):
    sweep = load(
        sweep_file,
        "method={name: fftkf, rho: 0.5}",
        "search={method.depth: {uniform: [0.1, 0.2]}, optimizer.weight_decay: {choice: [0.0]}}",
    )
    depths = {trial.method.depth for trial in sweep.corners}
    assert depths == {0.1, 0.2}
    by_letter = load(sweep_file, "search={method.rho: {uniform: [0.1, 0.2]}}")
    assert list(by_letter.space.domains) == [("method", "depth")]


def test_random_samples_stay_in_the_space_and_repeat(sweep_file):
    one, two = (load(sweep_file).samples(50) for _ in range(2))
    assert one == two
    assert all(0.3 <= t.method.kappa <= 1 and 0.3 <= t.optimizer.lr <= 3 for t in one)


def test_one_of_replaces_the_whole_section_and_searches_inside_the_chosen_one(sweep_file):
    space = """search={method: {one_of: [{name: dp_sgd}, {name: disk, kappa: {uniform: [0.5, 1]}},
        {name: fftkf, rho: {choice: [0.1, 0.2]}, lambda: 0.3}]}}"""
    sweep = load(sweep_file, space)
    corners = [trial.method for trial in sweep.corners]
    assert {m.name for m in corners} == {"dp_sgd", "disk", "fftkf"}
    assert {m.depth for m in corners if m.name == "fftkf"} == {0.1, 0.2}
    assert {m.cut for m in corners if m.name == "fftkf"} == {0.3}
    assert {m.kappa for m in corners if m.name == "disk"} == {0.5, 1}


def test_one_key_of_the_search_can_be_set_from_the_command_line(sweep_file):
    sweep = load(sweep_file, "search.method.kappa={choice: [0.5]}")
    assert {trial.method.kappa for trial in sweep.corners} == {0.5}
    assert {trial.optimizer.lr for trial in sweep.corners} == {0.3, 3}


def test_a_trial_is_no_sweep():
    with pytest.raises(ConfigError, match=r"is a trial, not a sweep.*dpsweep train"):
        load_sweep(ROOT / "configs/digits_cnn.yaml")


def test_resources_decide_threads_and_device(sweep_file):
    trial = load(sweep_file, "resources={cpu: 2}").reference_trial
    assert (trial.train.threads, trial.train.device) == (2, "cpu")
    assert load(sweep_file, "resources={gpu: 0.5}").reference_trial.train.device == "cuda"


MISTAKES = [
    ("search={method.kapa: {uniform: [0.1, 1]}}", r"search\.method\.kapa: unknown key.*'kappa'"),
    ("search={method.depth: {uniform: [0, 1]}}", r"search\.method\.depth: must be less than 1"),
    ("search={method.kappa: {uniform: [0, 1]}}", r"search\.method\.kappa: must be greater than 0"),
    (
        "search={method.gamma: {choice: [0.5, 0.0]}}",
        r"search\.method\.gamma: must not be 0, got 0: the two points",
    ),
    (
        "search={train.batch_size: {choice: [128, 5000]}}",
        r"search\.train\.batch_size: 5000 exceeds the 1437 private examples",
    ),
    ("search={method.kappa: {uniform: [1, 0.5]}}", r"\[1, 0\.5\] is reversed; write \[0\.5, 1\]"),
    ("search={method.kappa: {uniform: [1, 1]}}", r"\[1, 1\] is empty; set 1 in the base config"),
    ("search={optimizer.lr: {log_uniform: [0, 1]}}", r"log_uniform needs a low end above 0"),
    ("search={optimizer.lr: {uniform: [.nan, 1]}}", r"uniform needs finite numbers"),
    ("search={optimizer.lr: {uniform: [a, b]}}", r"uniform takes two numbers \[low, high\]"),
    ("search={train.batch_size: {integer: [1.5, 3]}}", r"integer needs whole numbers"),
    ("search={optimizer.lr: {choice: []}}", r"choice takes a list of values"),
    ("search={optimizer.lr: {choice: [1, 1]}}", r"choice lists 1 twice"),
    ("search={optimizer.lr: 0.1}", r"expected one way to vary it.*write it in the base config"),
    ("search={optimizer.lr: {unifrm: [0, 1]}}", r"unknown way to vary 'unifrm'.*'uniform'"),
    (
        "search={method: {kappa: {uniform: [0.1, 1]}}}",
        r"For a key inside method, write method\.kappa",
    ),
    ("search={}", r"search: is empty"),
    ("search={privacy.epsilon: {uniform: [1, 8]}}", r"cannot be searched: privacy\.epsilon is the"),
    ("search={privacy.sigma: {uniform: [1, 8]}}", r"privacy\.sigma: cannot be searched"),
    ("search={data.name: {choice: [mnist]}}", r"data\.name: cannot be searched: data is what all"),
    ("search={privacy: {one_of: [{epsilon: 1}]}}", r"privacy: cannot be searched"),
    (
        "search={method: {one_of: [{name: disk, rho: 0.1}]}}",
        r"search\.method\.depth: is a parameter of fftkf \(rho in the paper\), not of disk",
    ),
    ("search={method: {one_of: [{name: disk}, {name: disk}]}}", r"two mappings are called 'disk'"),
    (
        "search={method.rho: {uniform: [0, 0.1]}, method.depth: {uniform: [0, 0.2]}}",
        r"varies method\.depth a second time",
    ),
    ("method.kappa=0.5", r"--set method\.kappa: is varied by this sweep"),
    ("budget.trials=0", r"budget\.trials: must be greater than 0"),
    ("name=a b", r"--set name: .*got the text 'a b'"),
    ("sampler.name=grid", r"sampler\.name: must be one of 'tpe', 'random', 'qmc', 'gp' or"),
    ("objective.metric=train/loss", r"objective\.metric: must be one of 'valid/accuracy'"),
    ("base=nowhere.yaml", r"--set base: 'nowhere\.yaml': .*no such file"),
]


@pytest.mark.parametrize(("setting", "message"), MISTAKES)
def test_a_mistake_names_the_key_the_value_and_the_remedy(sweep_file, setting, message):
    with pytest.raises(ConfigError, match=message):
        load(sweep_file, setting)


def test_a_mistake_in_the_file_names_its_line(sweep_file):
    text = sweep_file.read_text().replace("uniform: [0.3, 1.0]", "uniform: [0.0, 1.0]")
    sweep_file.write_text(text)
    line = text.splitlines().index("  method.kappa: {uniform: [0.0, 1.0]}") + 1
    with pytest.raises(ConfigError, match=rf"tiny\.yaml:{line}: search\.method\.kappa: must be"):
        load(sweep_file)


def test_a_conditional_space_has_no_even_covering(sweep_file):
    with pytest.raises(ConfigError, match=r"qmc covers a space of fixed keys"):
        load(sweep_file, "sampler.name=qmc", "search={method: {one_of: [{name: disk}]}}")


def test_a_held_out_part_of_the_training_data_is_not_public(sweep_file):
    with pytest.raises(ConfigError, match=r"accounting: none says that the validation data are"):
        load(sweep_file, "accounting=none", "data.validation=holdout")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "stop: {name: median}", r"tiny.yaml:\d+: stop: is now called pruner\. Write pruner:"),
        ("", "start: printed", r"start: printed is now called published\. Write published in its"),
        (
            "method: {name: fftkf}",
            "method: {name: doppler, filter: {printed: a9_b1}}",
            r"method\.filter\.printed: is now called published\. Write published: in its place",
        ),
    ],
)
def test_a_key_with_its_old_name_is_told_the_new_one(sweep_file, old, new, message):
    text = sweep_file.read_text().replace("  method.kappa: {uniform: [0.3, 1.0]}\n", "")
    sweep_file.write_text(text.replace(old, new) if old else f"{text}{new}\n")
    with pytest.raises(ConfigError, match=message):
        load_sweep(sweep_file)
