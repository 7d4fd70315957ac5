"""Copies are drawn from the example itself, whoever else is in the batch, and shifted as said."""

import pytest
import torch
from pydantic import ValidationError

from dpsweep.core.errors import InvalidKey
from dpsweep.data.augment import Augment, hash_images

BOTH = Augment(flips=True, crops=2, multiplicity=5)
NUM = 4000


def images(num: int = 12) -> torch.Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, 2, 6, 5), generator=rng, dtype=torch.uint8)


def test_copies_are_the_image_mirrored_at_its_edge_shifted_and_turned():
    x = images()
    copies, (flipped, down, right) = (
        BOTH.copies(x, hash_images(x), 3, 7),
        BOTH.draws(hash_images(x), 3, 7),
    )
    assert copies.shape == (12, 5, 2, 6, 5)
    assert copies.dtype == torch.uint8
    wide = torch.nn.functional.pad(x.double(), (2, 2, 2, 2), mode="reflect").to(torch.uint8)
    for i in range(12):
        for k in range(5):
            top, left = 2 + int(down[i, k]), 2 + int(right[i, k])
            cut = wide[i, :, top : top + 6, left : left + 5]
            assert torch.equal(copies[i, k], cut.flip(2) if flipped[i, k] else cut)


def test_an_example_s_copies_do_not_depend_on_its_place_or_its_companions():
    x = images()
    whole = BOTH.copies(x, hash_images(x), 3, 7)
    some = torch.tensor([9, 2, 2, 5])
    assert torch.equal(BOTH.copies(x[some], hash_images(x[some]), 3, 7), whole[some])
    assert torch.equal(hash_images(x)[some], hash_images(x[some]))


def test_steps_seeds_copies_and_examples_have_draws_of_their_own_and_replays_the_same():
    x = images()
    drawn = torch.stack(BOTH.draws(hash_images(x), 3, 7))
    assert torch.equal(drawn, torch.stack(BOTH.draws(hash_images(x), 3, 7)))
    assert not torch.equal(drawn, torch.stack(BOTH.draws(hash_images(x), 4, 7)))
    assert not torch.equal(drawn, torch.stack(BOTH.draws(hash_images(x), 3, 8)))
    assert (drawn != drawn[:, :1]).any()
    assert (drawn != drawn[:, :, :1]).any()


def test_one_changed_pixel_gives_another_mark():
    x = images(1)
    seen = {int(hash_images(x))}
    for at in range(x.numel()):
        other = x.clone()
        other.view(-1)[at] += 1
        seen.add(int(hash_images(other)))
    assert len(seen) == 1 + x.numel()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_marks_are_of_bytes_of_any_kind(dtype):
    x = images().to(dtype)
    assert hash_images(x).dtype == torch.int64
    assert len(hash_images(x).unique()) == len(x)


def test_draws_are_even_and_independent():
    x = torch.arange(NUM)  # marks of neighbouring numbers are the hardest
    flipped, down, right = Augment(flips=True, crops=2).draws(x, 0, 0)
    # 4,000 coins have a deviation of 31.6, places of probability 1/5 one of 25.3; five of them.
    assert abs(int(flipped.sum()) - NUM / 2) < 5 * 31.6
    for places in (down, right):
        counts = torch.bincount((places + 2).flatten(), minlength=5)
        assert counts.shape == (5,)
        assert (counts - NUM / 5).abs().max() < 5 * 25.3
    pairs = torch.bincount(((down + 2) * 5 + right + 2).flatten(), minlength=25)
    assert (pairs - NUM / 25).abs().max() < 5 * 12.4
    turned = torch.bincount(((down + 2) + 5 * flipped).flatten(), minlength=10)
    assert (turned - NUM / 10).abs().max() < 5 * 19


def test_one_copy_has_no_axis_of_its_own_and_what_is_not_asked_for_does_not_happen():
    x = images()
    turned = Augment(flips=True).copies(x, hash_images(x), 0, 0)
    assert turned.shape == x.shape
    same, mirrored = (turned == x).flatten(1).all(1), (turned == x.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert same.any()
    assert mirrored.any()
    assert not Augment(crops=1).draws(hash_images(x), 0, 0)[0].any()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"multiplicity": 4}, "4 copies would all be the same image. Set flips: true or crops"),
        ({}, "1 copies would all be the same image"),
        ({"flips": True, "multiplicity": 0}, "greater than 0"),
        ({"crops": -1}, "greater than or equal to 0"),
    ],
)
def test_augmentation_that_does_nothing_is_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        Augment(**keys)


def test_shift_beyond_the_image_is_refused_with_both_numbers():
    Augment(crops=7).refuse_larger((1, 8, 8))
    with pytest.raises(InvalidKey, match=r"^8 pixels, of images of 9 x 8\. Give fewer$") as caught:
        Augment(crops=8).refuse_larger((1, 9, 8))
    assert caught.value.key == "crops"
