"""Our own cross-entropy needs no vmap; every other loss is computed with one example at a time."""

from dataclasses import replace

import pytest
import torch
from oracle import draw

from dpsweep.data.read import Dataset
from dpsweep.data.tasks import Classification, Regression
from dpsweep.privacy.engine.base import CrossEntropy, per_example_loss

TARGETS = torch.tensor([0, 2, 1, 2, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_has_the_bits_that_it_has_under_vmap(dtype):
    outputs = (30 * draw(5, 3)).to(dtype)
    outputs[0], outputs[1, 0] = 1e4 * outputs[0], float("nan")

    def losses_and_gradients(loss):
        leaf = outputs.clone().requires_grad_()
        losses = per_example_loss(loss, leaf, TARGETS)
        return losses, *torch.autograd.grad(losses.sum(), leaf)

    own = losses_and_gradients(CrossEntropy())
    for other in (
        lambda o, y: torch.nn.functional.cross_entropy(o, y),
        lambda o, y: CrossEntropy()(o, y),  # its form for vmap, as no engine knows it
        lambda o, y: Classification().loss(o, y),
    ):
        for mine, theirs in zip(own, losses_and_gradients(other), strict=True):
            assert mine.dtype == dtype
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
    assert own[1][0].isfinite().all()


def test_only_plain_classification_is_computed_without_vmap():
    inputs = draw(5, 4)
    data = Dataset(inputs, TARGETS, inputs, TARGETS, brightest=1)
    assert data.engine_loss == CrossEntropy()
    others = (
        replace(data, task=Classification(class_weights=(1.0, 2.0, 1.0))),
        replace(data, task=Regression(range=(0.0, 1.0))),
        replace(data, targets={"targets": TARGETS[:, None], "weights": draw(5, 1)}, copies=1),
    )
    for other in others:
        assert not isinstance(other.engine_loss, CrossEntropy)
        assert other.engine_loss == other.loss


def test_a_loss_that_mixes_examples_cannot_when_it_is_someone_else_s():
    def mixing(outputs, targets):
        return (outputs - outputs.mean(0)).square().mean()

    assert torch.equal(per_example_loss(mixing, draw(5, 3), TARGETS), torch.zeros(5).double())
