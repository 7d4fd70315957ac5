"""`dpsweep check` finds what cannot be trained before a trial starts, and names file, line, key."""

from functools import partial
from pathlib import Path

import pytest

from dpsweep.cli.verbs.trial import check
from dpsweep.config.sweep import load_sweep
from dpsweep.core.errors import ConfigError
from dpsweep.training.check import check_parts

HEAD = """\
data: {name: digits}
model: MODEL
privacy: {noise_multiplier: 1.0}
train: {batch_size: 100, epochs: 2}
optimizer:
  lr: 0.5
method:
"""
DENSE = "{name: cnn_small, width: 5}"
BLOCKS = "{name: cnn_small, width: 5, block: 5}"


def trial(method: str, model: str = DENSE) -> str:
    """A trial whose method stands on line 8 and after."""
    body = "".join(f"  {line}\n" for line in method.splitlines())
    return HEAD.replace("MODEL", model) + body


def checked(folder: Path, text: str) -> None:
    """As `dpsweep check trial.yaml`, and no trial has begun."""
    (folder / "trial.yaml").write_text(text)
    try:
        check(folder / "trial.yaml", [], False)
    finally:
        assert [place.name for place in folder.iterdir()] == ["trial.yaml"]


FORMS = {
    "published": "name: doppler\nfilter: {published: a9_b05_05}",
    "coefficients": "name: doppler\nfilter: {coefficients: {a: [-0.9], b: [0.15, -0.05]}}",
    "design": "name: dp_pmlf\nk: 3\nfilter: {design: {order: 2, cutoff: 0.2}}",
    "poles": "name: doppler\nfilter: {poles: [{radius: 0.8}], zeros: [{radius: 1, angle: 3.14}]}",
    "riccati": "name: disk\ngain: riccati\ngamma: one_point",
    "split": "name: fftkf\npredictor: split",
    "innerouter": "name: innerouter\nbeta_o: 0.5",
}


@pytest.mark.parametrize("method", FORMS.values(), ids=FORMS)
def test_each_form_of_a_method_is_a_valid_trial(method, tmp_path, capsys):
    checked(tmp_path, trial(method))
    assert "a valid trial" in capsys.readouterr().out


def test_budget_that_cannot_be_counted_is_named_with_its_line(tmp_path):
    text = trial("name: dp_sgd").replace("noise_multiplier: 1.0", "epsilon: 1, delta: 0.2")
    text = text.replace("batch_size: 100, epochs: 2", "batch_size: 1, epochs: 0.0027")
    with pytest.raises(ConfigError, match=r"trial\.yaml:3: privacy: 4 steps .* Write a larger"):
        checked(tmp_path, text.replace("MODEL", DENSE))


@pytest.mark.parametrize(
    ("method", "model"),
    [
        ("name: spectral_dp", BLOCKS),
        ("name: block_spectral_dp", BLOCKS),
        ("name: spectral_dp", "{name: cnn5}"),
    ],
)
def test_spectral_methods_fit_models_of_blocks(method, model, tmp_path):
    checked(tmp_path, trial(method, model))


MISTAKES = [
    (
        "name: doppler\nfilter:\n  coefficients:\n    a: [-1.1]\n    b: [-0.1]",
        r"trial\.yaml:11: method\.filter\.coefficients\.a: Iir\.a = \[-1\.1\] is unstable: it has",
    ),
    (
        "name: doppler\nfilter:\n  coefficients:\n    a: [0.9]\n    b: [0.1]",
        r"trial\.yaml:12: method\.filter\.coefficients\.b: .* has sum 0\.1, but 1 \+ sum a = 1\.9",
    ),
    (
        "name: dp_pmlf\nfilter:\n  coefficients:\n    a: [-0.9]\n    b: [0.2]",
        r"trial\.yaml:12: method\.filter\.coefficients\.b: .* would come out times 2\. Use b = \[0",
    ),
    (
        "name: doppler\nfilter:\n  coefficients: {b: []}",
        r"trial\.yaml:10: method\.filter\.coefficients\.b: Iir\.b is empty",
    ),
    (
        "name: doppler\nfilter:\n  poles: [{radius: 1}]",
        r"trial\.yaml:10: method\.filter\.poles: poles\[0\] must have a radius in \[0, 1\), got 1",
    ),
    (
        "name: doppler\nfilter:\n  design:\n    order: 2\n    cutoff: 1.0",
        r"trial\.yaml:12: method\.filter\.design\.cutoff: must be less than 1.*got 1\.0",
    ),
    (
        "name: doppler\nfilter:\n  design:\n    order: 8\n    cutoff: 0.001",
        r"trial\.yaml:12: method\.filter\.design\.cutoff: cutoff 0\.001 is too low for order 8",
    ),
    (
        "name: doppler\nfilter:\n  published: a9_b1\n  design: {order: 2, cutoff: 0.1}",
        r"trial\.yaml:11: method\.filter\.design: is a second form of the filter, beside published",
    ),
    (
        "name: doppler\nfilter:\n  published: a9_b2",
        r"trial\.yaml:10: method\.filter\.published: must be one of 'none', 'a9_b1'",
    ),
    (
        "name: doppler\nfilter: {}",
        r"trial\.yaml:9: method\.filter: needs a filter in one of four forms",
    ),
    (
        "name: disk\nkappa: 0",
        r"trial\.yaml:9: method\.kappa: must be greater than 0.*got 0\..*\(0, 1\]",
    ),
    ("name: fftkf\nkappa: 1.01", r"trial\.yaml:9: method\.kappa: must be at most 1.*got 1\.01"),
    ("name: disk\ngamma: 0", r"trial\.yaml:9: method\.gamma: must not be 0, got 0: the two"),
    (
        "name: disk\ngamma: one_pont",
        r"trial\.yaml:9: method\.gamma: must be a number, got the text 'one_pont'.* one_point is",
    ),
    ("name: disk\ngamma: .nan", r"trial\.yaml:9: method\.gamma: must be a finite number, got nan"),
    (
        "name: disk\ngain: riccati\nprocess: 0\nhessian: 0",
        r"trial\.yaml:10: method\.process: Riccati\.process and hessian must not both be 0",
    ),
    (
        "name: fftkf\nkappa: 1\npredictor: split",
        r"trial\.yaml:10: method\.predictor: split needs a constant gain below 1, got kappa: 1",
    ),
    (
        "name: fftkf\ngain: riccati\npredictor: split",
        r"trial\.yaml:10: method\.predictor: split needs a constant gain .*got gain: riccati",
    ),
    ("name: fftkf\nrho: 1", r"trial\.yaml:9: method\.depth: must be less than 1.*got 1"),
    ("name: dp_pmlf\npoints: 0", r"trial\.yaml:9: method\.points: must be at least 1, got 0"),
    ("name: innerouter\nk: 17", r"trial\.yaml:9: method\.points: must be at most 16, got 17"),
    ("name: innerouter\nbeta: 0", r"trial\.yaml:9: method\.decay: must be greater than 0"),
    (
        "name: innerouter\nbeta_o: 1",
        r"trial\.yaml:9: method\.outer_decay: must be less than 1.*got 1",
    ),
    ("name: spectral_dp\nkeep: 0", r"trial\.yaml:9: method\.keep: must be greater than 0"),
    (
        "name: spectral_dp",
        r"trial\.yaml:2: model: cnn_small does not fit method spectral_dp: layer '7' is a plain "
        r"Linear\(40, 10\), .* CirculantLinear, .* with a block .*, such as 10\.$",
    ),
]


@pytest.mark.parametrize(("method", "message"), MISTAKES, ids=[m for m, _ in MISTAKES])
def test_a_mistake_is_found_before_the_trial_starts(method, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        checked(tmp_path, trial(method))
    assert "\n" not in str(caught.value), "one mistake, one line"


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        (
            "name: spectral_dp",
            "{name: cnn_small, width: 5, block: 3}",
            r"trial\.yaml:2: model\.block: .* both in_features = 40 and out_features = 10, "
            r"got 3\. Blocks that fit: 1, 2, 5, 10\.$",
        ),
        (
            "name: dp_sgd",
            "{name: cnn_small, width: 4, block: 5}",
            r"trial\.yaml:2: model\.block: .* must divide .* = 32 and .* got 5\. .* 1, 2\.$",
        ),
        ("name: dp_sgd", "{name: cnn_small, block: 0}", r"trial\.yaml:2: model\.block: must be"),
        (
            "name: block_spectral_dp",
            "{name: cnn_small, width: 5, block: 2}",
            r"trial\.yaml:7: method\.keep_circulant: layer '7': keep_circulant = 0\.25 passes 0",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_found_before_the_trial_starts(
    method, model, message, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path, trial(method, model))


@pytest.mark.parametrize("floor", ["0", "-1e-8"])
def test_floor_of_adambc_must_be_above_zero(floor, tmp_path):
    text = trial("name: dp_adambc").replace("lr: 0.5", f"lr: 0.5\n  floor: {floor}")
    with pytest.raises(ConfigError, match=r"trial\.yaml:7: optimizer\.floor: must be greater than"):
        checked(tmp_path, text)


SWEEP = """\
name: corners
base:
  data: {name: digits}
  model: {name: cnn_small, width: 5, block: 5}
  privacy: {noise_multiplier: 1.0}
  train: {batch_size: 100, epochs: 2}
  optimizer: {lr: 0.5}
  method: {name: spectral_dp}
search:
  optimizer.lr: {log_uniform: [0.1, 10]}
  KEY
budget: {trials: 2}
"""


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (
            "model.block: {choice: [5, 3]}",
            r"corners\.yaml:11: search\.model\.block: cnn_small cannot be built: .* got 3",
        ),
        (
            "method.keep: {uniform: [0.15, 1]}",
            r"corners\.yaml:11: search\.method\.keep: .* = 0\.15 passes 0\.75 of .*Raise keep to 0",
        ),
        ("method.keep: {uniform: [0, 1]}", r"corners\.yaml:11: search\.method\.keep: must be gre"),
        (
            "privacy.clipping: {choice: [{name: per_layer, bounds: {a: 1}}]}",
            r"corners\.yaml:11: search\.privacy\.clipping\.bounds: bounds are given for 'a', and",
        ),
        (
            "privacy.clipping: {choice: [flat, {name: adaptive, count_noise: 0.1}]}",
            r"corners\.yaml:11: search\.privacy\.clipping\.count_noise: must exceed half the noise",
        ),
    ],
)
def test_every_corner_of_a_sweep_is_fitted(key, message, tmp_path):
    (tmp_path / "corners.yaml").write_text(SWEEP.replace("KEY", key))
    with pytest.raises(ConfigError, match=message):
        check(tmp_path / "corners.yaml", [], False)


def test_sweep_whose_corners_fit_is_said_to_be_valid(tmp_path, capsys):
    place = tmp_path / "corners.yaml"
    place.write_text(SWEEP.replace("KEY", "method.keep: {uniform: [0.3, 1]}"))
    check(place, [], False)
    assert "are valid trials" in capsys.readouterr().out


SWEEPS = Path(__file__).parents[2] / "sweeps"


@pytest.mark.parametrize("file", sorted(SWEEPS.rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_sweep_that_we_ship_fits(file):
    sweep = load_sweep(file)
    sweep.check_trials(partial(check_parts, source=sweep.origin))
    assert len(sweep.corners) >= len(sweep.config.search)


MODELS = Path(__file__).parent.parent / "models"


def test_a_model_of_ones_own_that_no_engine_can_train_is_found_before_the_trial_starts(tmp_path):
    own = f"{{name: own, function: 'own_net:mixing', folder: {MODELS}}}"
    message = (
        r"trial\.yaml:2: model\.function: own_net:mixing cannot be trained privately: examples mix "
        r"in batches of \d+: one example's output depends on others in its batch\. Make each"
    )
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path, trial("name: dp_sgd", own))


def test_each_model_that_is_searched_is_tried_and_the_searched_value_named(tmp_path):
    own = f"{{name: own, function: 'own_net:sometimes', folder: {MODELS}, arguments: {{mix: 0}}}}"
    (tmp_path / "base.yaml").write_text(trial("name: dp_sgd", own))
    (tmp_path / "sweep.yaml").write_text(
        "name: x\nbase: base.yaml\nbudget: {trials: 2}\nsearch:\n"
        "  model.arguments.mix: {choice: [0, 1]}\n"
    )
    with pytest.raises(ConfigError, match=r"examples mix .* model\.arguments\.mix = 1"):
        check(tmp_path / "sweep.yaml", [], False)
