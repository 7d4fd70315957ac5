"""A trial config is checked once, and each mistake names key, value and remedy."""

import pytest

from dpsweep.config.plan import plan_privacy
from dpsweep.config.privacy import PrivacyConfig
from dpsweep.config.source import parse_yaml
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError

GOOD = """\
data: {name: digits}
model: {name: cnn_small}
privacy: {epsilon: 4, clip_norm: 1.0}
train: {batch_size: 64, epochs: 3}
optimizer: {lr: 0.5}
method: {name: fftkf}
"""


def load(*settings, text=GOOD):
    return load_trial(resolve_trial_source(parse_yaml(text, "trial.yaml"), list(settings)))


def test_defaults_are_those_in_print():
    config = load()
    method = config.method
    assert (method.kappa, method.gamma, method.cut, method.depth) == (0.7, 0.5, 0.5, 0.5)
    assert config.optimizer.name == "sgd"
    assert config.privacy.delta == "auto"


@pytest.mark.parametrize(
    ("settings", "clip_norm"),
    [
        (["optimizer={}"], 0.3),
        (["optimizer={total_step: 100}"], 0.3),
        (["optimizer={total_step: 100}", "privacy.clip_norm=2"], 2),
        (["optimizer={lr: 0.5}"], 1),
    ],
)
def test_the_clip_norm_is_the_measured_one_without_a_learning_rate(settings, clip_norm):
    config = load("privacy={epsilon: 4}", *settings)
    assert config.privacy.clip_norm == clip_norm
    assert config.total_step == load("privacy={epsilon: 4, clip_norm: 1}", *settings).total_step


@pytest.mark.parametrize(
    ("data", "model", "total_step"),
    [
        ("{name: digits}", "linear", 4),  # 64 inputs
        ("{name: mnist, root: data}", "linear", 1.7),  # 784
        ("{name: mnist, root: data, features: {groups: 27}}", "linear", 1.0),  # 3,969
        ("{name: digits}", "cnn_small", 2.5),
        ("{name: mnist, root: data}", "lenet5", 1.1),
        ("{name: mnist, root: data}", "mlp4", 0.43),
        ("{name: mnist, root: data}", "cnn5", 0.4),
        ("{name: cifar10, root: data}", "cnn5", 0.28),  # 3,072
    ],
)
def test_adams_default_step_is_what_the_models_width_bears(data, model, total_step):
    settings = [f"data={data}", f"model={{name: {model}}}", "optimizer={}"]
    assert load("method={name: dp_adam}", *settings).total_step == total_step


@pytest.mark.parametrize(
    ("method", "momentum", "factor"),
    [
        ("{name: dp_sgd}", 0.5, 1.5),
        ("{name: innerouter}", 0, 1.9),
        ("{name: innerouter, outer_decay: 0}", 0, 1),
        ("{name: doppler}", 0, 1),  # corrected for its start, so its first step is a whole one
    ],
)
def test_a_heavy_ball_bears_a_larger_default_step(method, momentum, factor):
    def of(data, model, epochs, *settings):
        run = [f"data={data}", f"model={{name: {model}}}", "privacy={epsilon: 4}"]
        train = f"train={{batch_size: 512, epochs: {epochs}}}"
        return load(*run, train, *settings).total_step

    heavy = (f"method={method}", f"optimizer={{momentum: {momentum}}}")
    plain = ("method={name: dp_sgd}", "optimizer={}")
    short = ("{name: mnist, root: data}", "cnn5", 1)
    assert of(*short, *heavy) == pytest.approx(factor * of(*short, *plain), rel=0.01)
    noisy = ("{name: digits}", "linear", 60)
    assert of(*noisy, *heavy) == of(*noisy, *plain)


@pytest.mark.parametrize("epsilon", [1, 4])
@pytest.mark.parametrize(("batch_size", "epochs", "error"), [(256, 30, 0.1), (128, 1, 0.4)])
def test_the_floor_of_adambc_is_twice_the_noises_variance_without_a_learning_rate(
    epsilon, batch_size, epochs, error
):
    """In one epoch too, where the noise of a step is far above that of many steps' limit."""
    method, train = "method={name: dp_adambc}", f"{{batch_size: {batch_size}, epochs: {epochs}}}"
    private = f"privacy={{epsilon: {epsilon}, clip_norm: 0.1}}"
    config = load(method, private, "optimizer={}", f"train={train}")
    noise = plan_privacy(config).run.noise_multiplier
    assert config.optimizer.floor == pytest.approx(2 * (noise * 0.1 / batch_size) ** 2, rel=error)
    known = f"privacy={{noise_multiplier: {noise}, clip_norm: 0.1}}"
    exact = load(method, known, "optimizer={}", f"train={train}").optimizer.floor
    assert exact == pytest.approx(2 * (noise * 0.1 / batch_size) ** 2, rel=0.05)
    assert load(method, private, "optimizer={floor: 1.0e-5}").optimizer.floor == 1e-5
    assert load(method, private, "optimizer={lr: 0.5}").optimizer.floor == 1e-7


@pytest.mark.parametrize(
    ("letter", "name"),
    [
        ("method.rho=0.25", "method.depth=0.25"),
        ("method.lambda=0.25", "method.cut=0.25"),
        ("privacy.C=2.0", "privacy.clip_norm=2.0"),
        ("train.B=32", "train.batch_size=32"),
        ("train.E=7", "train.epochs=7"),
        ("optimizer.eta=0.1", "optimizer.lr=0.1"),
    ],
)
def test_the_papers_letters_are_the_same_keys(letter, name):
    assert load(letter) == load(name) != load()


def test_a_letter_beside_its_name_is_refused():
    doubled = GOOD.replace("name: fftkf", "name: fftkf, rho: 0.2, depth: 0.3")
    with pytest.raises(ConfigError, match=r"gives depth twice: as depth: 0\.3 and as rho: 0\.2"):
        load(text=doubled)


@pytest.mark.parametrize(("method", "base"), [("dp_sgd", "sgd"), ("dp_adam", "adam")])
def test_a_method_brings_its_own_base_optimizer(method, base):
    assert load(f"method={{name: {method}}}").optimizer.name == base


MISTAKES = [
    ("train.batch=3", r"--set train\.batch: unknown key\. Did you mean 'batch_size'\?"),
    ("optimizer.lr=fast", r"optimizer\.lr: must be a number, got the text 'fast'"),
    ("train.batch_size=2.5", r"train\.batch_size: must be a whole number, got 2\.5"),
    ("train.batch_size=true", r"train\.batch_size: must be a whole number, got true"),
    ("optimizer.lr=.nan", r"optimizer\.lr: must be a finite number, got nan"),
    ("train.epochs=.inf", r"train\.epochs: must be a finite number, got inf"),
    ("privacy.epsilon=0", r"privacy\.epsilon: must be greater than 0.*got 0"),
    ("privacy.epsilon=-1", r"privacy\.epsilon: must be greater than 0.*got -1"),
    ("privacy.delta=1.0", r"privacy\.delta: must lie in \(0, 1\), got 1\.0.*delta: auto"),
    ("privacy.delta=0.0", r"privacy\.delta: must lie in \(0, 1\), got 0\.0"),
    ("privacy.delta=soon", r"--set privacy\.delta: must be one of 'auto', got the text 'soon'\."),
    ("method.gamma=fast", r"--set method\.gamma: must be a number, got the text 'fast'\. Look"),
    ("privacy.noise_multiplier=1.0", r"privacy\.epsilon: give exactly one of"),
    ("train.batch_size=1438", r"train\.batch_size: 1438 exceeds the 1437 private examples"),
    ("method.kappa=0", r"method\.kappa: must be greater than 0.*got 0.*\(0, 1\]"),
    ("method.kappa=1.1", r"method\.kappa: must be at most 1.*got 1\.1"),
    ("method.gamma=0", r"method\.gamma: must not be 0, got 0.*papers search 0\.2 to 3"),
    ("method.cut=1.0", r"method\.cut: must be less than 1.*got 1\.0"),
    ("method.name=dsik", r"method\.name: unknown method 'dsik'\. Did you mean 'disk'\?"),
    (
        "method={name: disk, rho: 0.1}",
        r"method\.depth: is a parameter of fftkf \(rho in the paper\), not of disk.*name: fftkf",
    ),
    ("optimizer={lr: 1.0, name: lion}", r"optimizer\.name: unknown optimizer 'lion'"),
    ("data.name=imagenet", r"data\.name: unknown data 'imagenet'. Did you mean 'tiny_imagenet'"),
    (
        "data.name=huggingface",
        r"data\.name: unknown .*name: text, .* format: huggingface, file: FO",
    ),
    ("model=cnn", r"model: .*got the text 'cnn'"),
    ("privacy.clipping=soft", r"privacy\.clipping\.name: unknown clipping 'soft'\. Known: .*flat"),
]


@pytest.mark.parametrize(("setting", "message"), MISTAKES)
def test_a_mistake_names_key_value_and_remedy(setting, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(setting)
    assert "\n" not in str(caught.value), "one mistake, one line"


def test_a_base_optimizer_the_method_does_not_step_with_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.name: dp_sgd steps with sgd, got adam"):
        load("method={name: dp_sgd}", "optimizer={name: adam, lr: 0.1}")


def test_a_missing_section_names_what_it_is_for():
    with pytest.raises(ConfigError, match=r"trial\.yaml:1: privacy: is missing"):
        load(text=GOOD.replace("privacy: {epsilon: 4, clip_norm: 1.0}\n", ""))


def test_several_mistakes_are_all_told_with_their_lines():
    text = GOOD.replace("epochs: 3", "epochs: -3").replace("lr: 0.5", "lr: 0")
    with pytest.raises(ConfigError) as caught:
        load(text=text)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["trial.yaml:4", "trial.yaml:5"]


def test_a_relative_data_root_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("data.root=here").data.root == str(tmp_path / "here")


@pytest.mark.parametrize("epsilon", [1e-6, 9e-3])
def test_epsilon_that_no_accountant_reaches_in_time_is_refused(epsilon):
    with pytest.raises(ValueError, match=r"must be at least 0\.01, got"):
        PrivacyConfig(epsilon=epsilon)
    assert PrivacyConfig(epsilon=0.01).epsilon == 0.01


def test_noise_too_small_to_count_is_refused():
    with pytest.raises(ValueError, match=r"0 or at least 0\.1, got 0\.05"):
        PrivacyConfig(noise_multiplier=0.05)
    assert PrivacyConfig(noise_multiplier=0.1).noise_multiplier == 0.1


def test_delta_that_a_long_run_gives_up_is_refused():
    with pytest.raises(ConfigError, match=r"privacy\.delta.*Write delta: 1e-08 or more"):
        load("train.epochs=690", "train.batch_size=1", "privacy.delta=1e-12")
