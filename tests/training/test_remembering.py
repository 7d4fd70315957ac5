"""A trial of a model that remembers its examples stops, whatever the engine, and says what does.

Through `train()` and `model: own`, as a user comes to it. tests/privacy/engine/test_state_guard.py
has the engines alone.
"""

from pathlib import Path

import pytest
import torch

from dpsweep.config.source import parse_yaml
from dpsweep.config.trial import TrialConfig, load_trial
from dpsweep.core.errors import ConfigError
from dpsweep.training import loop
from dpsweep.training.check import check_parts
from dpsweep.training.trial_dir import TrialDir

NETS = str(Path(__file__).parent.parent / "models")
ENGINES = ("auto", "bookkeeping", "vmap", "opacus")
every_engine = pytest.mark.parametrize("engine", ENGINES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule"),
]


@pytest.fixture(autouse=True)
def _fixed_secret(monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "remembering")


def trial(function: str, engine: str = "auto", epochs: float = 0.5, **arguments) -> TrialConfig:
    own = {"name": "own", "function": f"remembering:{function}", "folder": NETS}
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {**own, "arguments": arguments},
            "privacy": {"noise_multiplier": 1.0},
            "train": {
                "batch_size": 64,
                "epochs": epochs,
                "device": "cpu",
                "engine": engine,
                "max_physical_batch": 16,
            },
            "optimizer": {"lr": 0.1},
            "method": {"name": "dp_sgd"},
        }
    )


def trained(config: TrialConfig, folder: Path, reports: list | None = None) -> dict:
    """The weights of a trial, from its directory as an upload would take them."""
    trial_dir = TrialDir(folder / "trial")
    trial_dir.make_secret()
    loop.train(config, trial_dir, (reports if reports is not None else []).append)
    return torch.load(trial_dir.weights, weights_only=True)


@every_engine
@pytest.mark.parametrize("only_learning", [False, True])
def test_initialisation_from_data_is_refused_before_the_first_step(engine, only_learning, tmp_path):
    text = r"attribute 'mean' of module '0' \(ActNorm\) depends on the images that the model is"
    with pytest.raises(ConfigError, match=text):
        trained(trial("act_norm", engine, only_learning=only_learning), tmp_path)


def test_initialisation_from_data_is_told_by_a_check_of_the_file_with_its_line():
    text = f"""\
data: {{name: digits}}
model: {{name: own, function: "remembering:act_norm", folder: {NETS}}}
privacy: {{epsilon: 4}}
train: {{batch_size: 100, epochs: 1}}
optimizer: {{lr: 1.0}}
method: {{name: dp_sgd}}
"""
    source = parse_yaml(text, "x.yaml")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: model: attribute 'mean' of module '0' \(A"):
        check_parts(load_trial(source), source)


@every_engine
@pytest.mark.parametrize("recorded", [True, False])
def test_temperature_that_falls_with_the_calls_is_refused_and_not_left_to_vmap(
    engine, recorded, tmp_path
):
    text = r"attribute 'calls' of module '(0|cooling)' \(Cooling\) changes when the model is called"
    with pytest.raises(ConfigError, match=text):
        trained(trial("cooling", engine, recorded=recorded), tmp_path)


@pytest.mark.parametrize(  # both engines look by the same guard
    ("way", "engine"),
    [*((way, "bookkeeping") for way in ("float", "tensor", "list", "class")), ("list", "opacus")],
)
def test_mean_that_is_tracked_from_some_call_on_stops_the_trial_in_that_batch(
    engine, way, tmp_path
):
    """The counter is in a closure, so nothing shows before; the mean is in an attribute."""
    owner = r"class remembering\.Tracking" if way == "class" else r"module '0' \(Tracking\)"
    name = "shared" if way == "class" else "mean"
    told: list = []
    with pytest.raises(ConfigError, match=f"attribute '{name}' of {owner} changes when the model"):
        trained(trial("tracking", engine, 20, way=way, after=1000), tmp_path, told)
    assert told, "it was trained, and reported, until then"


@every_engine
def test_counter_of_a_tracked_mean_is_refused_before_the_first_step(engine, tmp_path):
    told: list = []
    with pytest.raises(ConfigError, match=r"attribute 'count' of module '0' \(Tracking\) changes"):
        trained(trial("tracking", engine, counted=True), tmp_path, told)
    assert not told


def test_mean_that_no_attribute_shows_is_told_before_the_next_report(tmp_path):
    config, told = trial("elsewhere", "bookkeeping", 6, after=500), []
    with pytest.raises(ConfigError, match="gives another answer when it is asked the same again"):
        trained(config, tmp_path, told)
    assert told


@every_engine
def test_memory_that_no_attribute_shows_is_refused_at_once_where_it_works_at_once(engine, tmp_path):
    with pytest.raises(ConfigError, match="gives another answer when it is asked the same again"):
        trained(trial("elsewhere", engine, after=0), tmp_path)


@every_engine
def test_layer_with_an_extra_state_is_refused(engine, tmp_path):
    text = r"layer '0' \(Maxima\) has get_extra_state\. Weights are saved as parameters and buffers"
    with pytest.raises(ValueError, match=text):
        trained(trial("extra_state", engine), tmp_path)


@pytest.mark.parametrize("engine", ["bookkeeping", "opacus"])
def test_weights_are_parameters_and_buffers_and_no_state_dict(engine, tmp_path):
    weights = trained(trial("exporting", engine, 0.2), tmp_path)
    assert list(weights) == ["2.weight", "2.bias"]


@every_engine
def test_cache_of_an_image_s_shape_is_no_memory(engine, tmp_path):
    weights = trained(trial("cached", engine, 0.2), tmp_path)
    assert all(x.isfinite().all() for x in weights.values())


@every_engine
def test_cache_of_the_number_of_rows_is_refused(engine, tmp_path):
    with pytest.raises(ConfigError, match=r"attribute 'zeros' of module '0' \(ByRows\) changes"):
        trained(trial("by_rows", engine), tmp_path)


def test_evaluation_is_watched_too(tmp_path):
    """Examples that are held out are measured without noise: none of them may be remembered."""
    config, told = trial("seen_in_evaluation", "bookkeeping"), []
    with pytest.raises(ConfigError, match=r"buffer 'peak' of module '0' \(Peak\) changes"):
        trained(config, tmp_path, told)
    assert not told


ANNEALED = """
from torch.nn.functional import cross_entropy

calls = [0]


def loss(outputs, target):
    calls[0] += 1
    cooled = max(0, calls[0] - 100)
    return cross_entropy(outputs[None] * (1 + 0.02 * cooled), target.long()[None])
"""


def test_loss_that_anneals_with_its_calls_stops_the_trial_before_its_next_report(tmp_path):
    """Calls are counted by microbatch, so the secret size of each batch moves all later gradients.

    Until 2026-11-22 it was trained to the end: only the model was asked twice.
    """
    (tmp_path / "annealed_for_test.py").write_text(ANNEALED)
    rows = "".join(f"{i % 7},{i % 2}\n" for i in range(200))
    (tmp_path / "rows.csv").write_text("a,y\n" + rows)
    own = {"name": "own", "function": "annealed_for_test:loss", "num_outputs": 2}
    config = TrialConfig.model_validate(
        {
            "data": {
                "name": "table",
                "file": str(tmp_path / "rows.csv"),
                "target": "y",
                "columns": {"a": {"range": [0, 6]}},
                "task": {**own, "folder": str(tmp_path)},
                "num_train": 200,
                "validation": "holdout",
            },
            "model": {"name": "linear"},
            "privacy": {"noise_multiplier": 1.0},
            "train": {"batch_size": 20, "epochs": 30, "device": "cpu", "max_physical_batch": 8},
            "optimizer": {"lr": 0.1},
            "method": {"name": "dp_sgd"},
        }
    )
    told: list = []
    with pytest.raises(ConfigError, match=r"data\.task: it gives another answer when it is asked"):
        trained(config, tmp_path, told)
    assert len(told) < 10
