"""A style of clipping is named in one word or spelled out, and says what the noise leaves of it."""

import math

import pytest
from pydantic import ValidationError

from dpsweep.config.clipping import AdaptiveClipping, AutomaticClipping, PerLayerClipping
from dpsweep.config.privacy import PrivacyConfig
from dpsweep.config.source import Source, parse_yaml
from dpsweep.config.trial import TrialConfig, load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError, InvalidKey
from dpsweep.privacy.clip import Automatic, Flat, PerLayer, Quantile
from dpsweep.training.check import check_parts

TRIAL = """\
data: {name: digits}
model: {name: cnn_small, width: 5, block: 5}
privacy:
  noise_multiplier: 2.0
  clip_norm: 0.5
  clipping: CLIPPING
train: {batch_size: 100, epochs: 3}
optimizer: {lr: 0.5}
method: {name: METHOD}
"""


def source(clipping: str, method: str = "dp_sgd", *settings: str) -> Source:
    text = TRIAL.replace("CLIPPING", clipping).replace("METHOD", method)
    return resolve_trial_source(parse_yaml(text, "trial.yaml"), list(settings))


def load(clipping: str, method: str = "dp_sgd", *settings: str) -> TrialConfig:
    return load_trial(source(clipping, method, *settings))


def check(clipping: str, method: str = "dp_sgd", *settings: str) -> None:
    """As `dpsweep check` does, but for the data."""
    given = source(clipping, method, *settings)
    check_parts(load_trial(given), given)


BOUNDS = "{name: per_layer, bounds: {'0': 0.6, '3': 0.64, '7': 0.48}}"
BUILT = [
    ("flat", Flat(0.5)),
    ("{name: flat}", Flat(0.5)),
    ("automatic", Automatic(0.5)),
    ("{name: automatic, stability: 0.1}", Automatic(0.5, 0.1)),
    ("per_layer", PerLayer(0.5)),
    (BOUNDS, PerLayer(0.5, {"0": 0.6, "3": 0.64, "7": 0.48})),
    ("adaptive", Quantile(0.5, share=(2 / (2 * 100 / 20)) ** 2, quantile=0.5, rate=0.2)),
    (
        "{name: adaptive, quantile: 0.7, rate: 0.1, count_noise: 4}",
        Quantile(0.5, share=(2 / 8) ** 2, quantile=0.7, rate=0.1),
    ),
]
every_style = pytest.mark.parametrize(("clipping", "built"), BUILT, ids=[name for name, _ in BUILT])


@every_style
def test_each_style_is_built_for_the_trials_norm_and_noise(clipping, built):
    config = load(clipping)
    clip = config.privacy.clipping.build(config.privacy.clip_norm, 2.0, config.train.batch_size)
    assert clip == built
    check(clipping)


@every_style
def test_each_style_is_the_same_after_a_journey_through_json(clipping, built):
    config = load(clipping)
    assert TrialConfig.model_validate_json(config.model_dump_json()) == config
    assert TrialConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("name", ["flat", "automatic", "per_layer", "adaptive"])
def test_name_alone_is_the_mapping_with_that_name(name):
    assert load(name) == load(f"{{name: {name}}}")
    assert load("flat", "dp_sgd", f"privacy.clipping={name}") == load(name)


def test_one_number_of_a_style_can_be_set_from_the_command_line():
    changed = load("{name: adaptive}", "dp_sgd", "privacy.clipping.rate=0.5")
    assert changed.privacy.clipping == AdaptiveClipping(rate=0.5)


@pytest.mark.parametrize(
    ("method", "own"),
    [("dp_sgd", "flat"), ("fftkf", "flat"), ("spectral_dp", "per_layer")],
)
def test_method_brings_its_own_style_where_the_file_says_nothing(method, own):
    text = TRIAL.replace("  clipping: CLIPPING\n", "").replace("METHOD", method)
    config = load_trial(resolve_trial_source(parse_yaml(text, "trial.yaml"), []))
    assert config.privacy.clipping.name == own
    assert load("automatic", method).privacy.clipping == AutomaticClipping()


def test_style_is_flat_where_nothing_says_otherwise():
    assert PrivacyConfig(noise_multiplier=1.0).clipping.name == "flat"


MISTAKES = [
    ("soft", r"trial\.yaml:6: privacy\.clipping\.name: unknown clipping 'soft'\. Known: adaptive"),
    ("automatc", r"privacy\.clipping\.name: .* Did you mean 'automatic'\?"),
    ("3", r"trial\.yaml:6: privacy\.clipping: must be a mapping of keys to values, got 3"),
    ("{stability: 0.1}", r"trial\.yaml:6: privacy\.clipping: needs a name, got"),
    (
        "{name: flat, stability: 0.1}",
        r"trial\.yaml:6: privacy\.clipping\.stability: unknown key",
    ),
    (
        "{name: automatic, stability: 0}",
        r"privacy\.clipping\.stability: must be at least 1e-06.*got 0",
    ),
    (
        "{name: adaptive, quantile: 1.1}",
        r"privacy\.clipping\.quantile: must be at most 1.*got 1\.1",
    ),
    ("{name: adaptive, rate: 0}", r"privacy\.clipping\.rate: must be greater than 0.*got 0"),
    ("{name: adaptive, rate: .nan}", r"privacy\.clipping\.rate: must be a finite number, got nan"),
    (
        "{name: per_layer, bounds: {'0': 0.6, '3': 0, '7': 0.8}}",
        r"trial\.yaml:6: privacy\.clipping\.bounds\.3: must be greater than 0.*got 0",
    ),
    (
        "{name: per_layer, bounds: {'0': 0.6, '3': 0.8}}",
        r"trial\.yaml:6: privacy\.clipping\.bounds: bounds are given for '0', '3', and the layers "
        r"of this model are '0', '3', '7'\. Give one bound for each\.$",
    ),
    (
        "{name: per_layer, bounds: {'0': 0.6, '3': 0.8, '7': 1}}",
        r"trial\.yaml:6: privacy\.clipping\.bounds: the squares of the bounds sum to 2, and must "
        r"sum to 1: .* \{0: 0\.4243, 3: 0\.5657, 7: 0\.7071\}\.$",
    ),
    (
        "{name: adaptive, count_noise: 1}",
        r"trial\.yaml:6: privacy\.clipping\.count_noise: must exceed half the noise multiplier, 1, "
        r"got 1: the count alone would spend more than the budget\. Give count_noise: 4, which",
    ),
]


@pytest.mark.parametrize(("clipping", "message"), MISTAKES)
def test_a_mistake_is_found_before_a_trial_starts_with_its_line(clipping, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check(clipping)
    assert "\n" not in str(caught.value), "one mistake, one line"


def test_count_noise_left_to_us_is_told_with_where_it_comes_from():
    with pytest.raises(ConfigError, match=r"count_noise: must .*got 0\.45, batch_size 9 / 20: the"):
        check("adaptive", "dp_sgd", "train.batch_size=9")


def test_count_noise_of_the_message_is_accepted():
    check("{name: adaptive, count_noise: 4}")


def test_answers_of_two_parts_have_no_norm_to_follow():
    with pytest.raises(
        ConfigError, match=r"privacy\.clipping: adaptive follows .* predictor: split clips two"
    ):
        check("adaptive", "fftkf", "method.predictor=split")


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.999])
def test_share_of_the_count_is_that_of_its_noise(noise):
    clipping = AdaptiveClipping(count_noise=1.0)
    assert clipping.share(noise, 100) == pytest.approx((noise / 2) ** 2)
    clip = clipping.build(0.5, noise, 100)
    sigma_r = noise / math.sqrt(1 - clip.share)
    assert noise * clip.clip_norm == pytest.approx(sigma_r * 0.5)


@pytest.mark.parametrize("noise", [2.0, 2.1, 100.0, math.inf, math.nan])
def test_count_that_would_take_the_whole_budget_is_refused(noise):
    with pytest.raises(InvalidKey, match="must exceed half the noise multiplier"):
        AdaptiveClipping(count_noise=1.0).build(0.5, noise, 100)


def test_bound_above_one_is_refused():
    with pytest.raises(
        ValidationError, match=r"bounds\.conv\n  Input should be less than or equal"
    ):
        PerLayerClipping(bounds={"conv": 1.5})
