"""A model written out as code is the model."""

import pytest

from dpsweep.config.source import read_yaml
from dpsweep.config.trial import load_trial, resolve_trial_source
from dpsweep.core.errors import ConfigError
from dpsweep.models import MODELS, build_model
from dpsweep.results.formats.layers import model_code

SMALL = {
    "cnn_small": "{name: cnn_small}",
    "circulant head": "{name: cnn_small, width: 20, block: 10}",
    "cnn5": "{name: cnn5}",
    "linear": "{name: linear}",
    "wrn_16_4": "{name: wrn_16_4}",
    "standardised": "{name: wrn_16_4, standardise: true, activation: tanh}",
    "resnet18": "{name: resnet18, width: 16}",
    "vit_small": "{name: vit_small, width: 24, depth: 2, heads: 3}",
}


def trial(*settings):
    return load_trial(resolve_trial_source(read_yaml("configs/digits_cnn.yaml"), list(settings)))


@pytest.mark.parametrize("model", SMALL.values(), ids=SMALL)
def test_the_code_alone_builds_a_model_that_takes_the_same_weights(model):
    config = trial(f"model={model}")
    code, space = model_code(config), {}
    head = "\n".join(("import torch", "from torch import nn", *code.imports))
    exec(f"{head}\n{code.definitions}\nmodel = {code.expression}", space)
    original = config.model.build((1, 8, 8), 10)
    written = {k: tuple(x.shape) for k, x in space["model"].state_dict().items()}
    assert written == {k: tuple(x.shape) for k, x in original.state_dict().items()}
    assert "dpsweep" not in code.definitions + code.expression


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted(MODELS.keys() - {"huggingface", "own", "timm", "torchvision"})
)
def test_every_model_of_ours_can_be_written_out(name):
    data = "data={name: mnist, root: data}" if name != "model3" else "seed=0"
    assert model_code(trial(data, f"model={{name: {name}}}")).expression


def test_a_model_of_ones_own_is_imported(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "def make(shape, num_classes, width):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))\n"
    )
    own = f"{{name: own, function: 'nets:make', folder: {tmp_path}, arguments: {{width: 5}}}}"
    code = model_code(trial(f"model={own}"))
    assert code.expression == "make(shape=(1, 8, 8), num_classes=10, width=5)"
    assert "put it beside this file\nfrom nets import make" in code.definitions
    assert str(tmp_path) not in code.definitions  # nobody's business who is given the script


def test_a_function_that_makes_another_model_each_time_is_refused(tmp_path):
    (tmp_path / "fickle.py").write_text(
        "from torch import nn\n"
        "made = []\n"
        "def make(shape, num_classes):\n"
        "    made.append(0)\n"
        "    middle = nn.Tanh() if len(made) % 2 else nn.ReLU()\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), middle, nn.Linear(8, 10))\n"
    )
    own = trial(f"model={{name: own, function: 'fickle:make', folder: {tmp_path}}}")
    build_model(own.model, own.data.spec, 0)  # odd
    with pytest.raises(ConfigError, match="do not write it out as it is"):
        model_code(own)


def test_another_packages_model_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"torchvision is another package's model .*--register"):
        model_code(
            trial("data={name: cifar10, root: d}", "model={name: torchvision, model: resnet18}")
        )


def test_what_would_be_written_wrongly_is_refused(monkeypatch):
    from dpsweep.results.formats import layers

    plain = layers._Writer.expression

    def without_the_first_tanh(self, module):
        return plain(self, module).replace("nn.Tanh()", "nn.Identity()", 1)

    monkeypatch.setattr(layers._Writer, "expression", without_the_first_tanh)
    with pytest.raises(ConfigError, match="do not write it out as it is"):
        model_code(trial())
