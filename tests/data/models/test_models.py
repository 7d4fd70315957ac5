"""Models start from the public seed alone, and each example answers for itself."""

import pytest
import torch

from dpsweep.data.datasets import SPECS
from dpsweep.data.models import ModelConfig, build
from dpsweep.data.models.cnn import Cnn5, CnnSmall

MODELS: list[ModelConfig] = [CnnSmall(), CnnSmall(width=3), CnnSmall(width=5, block=5), Cnn5()]
every_model = pytest.mark.parametrize("config", MODELS, ids=repr)
every_data_set = pytest.mark.parametrize("data", SPECS)


def images(data: str, num: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(num, *SPECS[data].shape, generator=rng) * 2 - 1


@every_data_set
@every_model
def test_images_give_a_logit_for_each_class(config, data):
    model = build(config, SPECS[data], 0)
    assert model(images(data, 2)).shape == (2, SPECS[data].num_classes)


@every_model
def test_logits_of_an_example_do_not_depend_on_its_companions(config):
    model, batch = build(config, SPECS["digits"], 0), images("digits", 6)
    alone = torch.cat([model(image.unsqueeze(0)) for image in batch])
    torch.testing.assert_close(model(batch), alone, rtol=1e-5, atol=1e-6)


@every_model
def test_model_has_no_buffers_that_examples_could_fill(config):
    assert not list(build(config, SPECS["digits"], 0).buffers())


@every_model
def test_weights_come_from_the_public_seed(config):
    one, again, other = (build(config, SPECS["digits"], seed) for seed in (0, 0, 1))
    for a, b in zip(one.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert any((a != b).any() for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_kind_of_the_head_changes_no_other_weights():
    dense, blocks = (
        build(CnnSmall(width=5, block=block), SPECS["digits"], 3).state_dict()
        for block in (None, 5)
    )
    assert blocks["7.weight"].shape == (2, 8, 5)
    assert dense["7.weight"].shape == (10, 40)
    for name in ("0.weight", "0.bias", "3.weight", "3.bias"):
        assert torch.equal(dense[name], blocks[name])


@every_model
def test_building_leaves_torchs_own_generator_alone(config):
    before = torch.get_rng_state()
    build(config, SPECS["digits"], 0)
    assert torch.equal(torch.get_rng_state(), before)


@every_model
def test_every_parameter_answers_to_the_loss(config):
    model = build(config, SPECS["mnist"], 0)
    torch.nn.functional.cross_entropy(model(images("mnist", 4)), torch.arange(4)).backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in model.parameters())


def test_cnn5_has_about_the_papers_number_of_weights():
    num = sum(p.numel() for p in build(Cnn5(), SPECS["cifar10"], 0).parameters())
    assert num == pytest.approx(412_000, rel=0.01)
