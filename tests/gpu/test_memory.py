"""A step takes no more of a GPU than the trial's share, whatever method, model and card."""

import pytest
from steps import World, one_step
from virtual import GIB

SMALL = [
    World("dp_sgd", "cnn5", 128),
    World("disk", "cnn5", 128, augment=2),
    World("fftkf-split", "cnn5", 128),
    World("block_spectral_dp", "circulant", 64),
]
LARGE = [
    World("dp_sgd", "wrn_40_4", 512),
    World("disk", "wrn_16_4", 512),
    World("disk", "wrn_16_4", 256, augment=8),
    World("disk", "vit_small", 64),
    World("innerouter", "vit_small", 64),
    World("innerouter", "wrn_16_4", 512),
    World("dp_pmlf", "wrn_16_4", 512),
    World("dp_adambc", "vit_small", 64),
    World("fftkf", "vit_small", 64),
    World("spectral_dp", "model2", 256),
]


def named(world):
    return f"{world.method}-{world.model}-{world.batch_size}-{world.augment}"


@pytest.mark.parametrize(
    ("world", "gpu_share"),
    [(SMALL[0], 1.0), *((world, 0.25) for world in SMALL)],
    ids=lambda value: named(value) if isinstance(value, World) else str(value),
)
def test_a_small_model_stays_within_its_share_of_three_gib(world, gpu_share):
    gpu = one_step(world, total=3 * GIB, gpu_share=gpu_share)
    assert gpu.peak <= gpu_share * 3 * GIB
    assert gpu.mixed == []


@pytest.mark.slow
@pytest.mark.parametrize("total", [3, 80])
@pytest.mark.parametrize("world", LARGE, ids=named)
def test_a_large_model_stays_within_the_card(world, total):
    if total == 80:  # a batch that fills the card, in few pieces
        world = world._replace(batch_size=16 * world.batch_size)
    gpu = one_step(world, total=total * GIB)
    assert gpu.peak <= total * GIB
    assert gpu.mixed == []


def test_a_batch_that_fits_is_computed_in_one_piece():
    world = World("dp_sgd", "cnn5", 256)
    assert one_step(world).physical == 256 + 2 * 16
