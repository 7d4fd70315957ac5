"""Tasks: losses of one example each, and metrics as scikit-learn computes them."""

import sys
from pathlib import Path

import pytest
import torch
from sklearn import metrics as expected_metrics
from torch import nn
from torch.nn import functional as F

from dpsweep.core.errors import InvalidKey
from dpsweep.data.tasks import Classification, MultiLabel, OwnTask, Regression
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine
from dpsweep.privacy.engine.gradient_check import find_wrong_gradients

NUM = 50

OWN_LOSS = """
def cubed(output, target):
    return (output[0] - target).abs() ** 3
"""


@pytest.fixture
def own_task(tmp_path):
    (tmp_path / "own_loss_for_test.py").write_text(OWN_LOSS)
    yield OwnTask(function="own_loss_for_test:cubed", folder=str(tmp_path), num_outputs=1)
    sys.modules.pop("own_loss_for_test", None)


def measured(task, outputs_B, targets_B, at_once=7):
    sums: dict[str, torch.Tensor] = {}
    for start in range(0, len(outputs_B), at_once):
        rows = slice(start, start + at_once)
        for name, x in task.sums(outputs_B[rows], targets_B[rows]).items():
            sums[name] = sums.get(name, 0) + x.double()
    return task.compute_metrics(sums, len(outputs_B))


def outputs(*shape):
    return torch.randn(NUM, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_classes", [2, 10])
def test_losses_of_classes_have_the_bits_of_torchs_cross_entropy(num_classes):
    """By itself, and as engines call it: through vmap, with gradients."""
    logits_B = 20 * outputs(num_classes)
    targets_B = torch.arange(NUM) % num_classes
    task = Classification()
    expected_B = F.cross_entropy(logits_B, targets_B, reduction="none")
    assert torch.equal(task.losses(logits_B, targets_B), expected_B)
    found = []
    for loss in (task.loss, F.cross_entropy):
        leaf = logits_B.clone().requires_grad_(True)
        losses_B = torch.func.vmap(lambda o, y, loss=loss: loss(o[None], y[None]))(leaf, targets_B)
        losses_B.sum().backward()
        found.append((losses_B.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(("num_classes", "average"), [(2, "binary"), (5, "macro")])
def test_metrics_of_classes_are_scikit_learns(num_classes, average):
    outputs_B = outputs(num_classes)
    targets_B = (outputs_B.argmax(1) + torch.arange(NUM) % 2) % num_classes
    task = Classification(metrics=("f1", "accuracy", "matthews"))
    found = measured(task, outputs_B, targets_B)
    guesses, truths = outputs_B.argmax(1).numpy(), targets_B.numpy()
    assert list(found) == [*task.metric_names] == ["f1", "accuracy", "matthews", "loss"]
    f1 = expected_metrics.f1_score(truths, guesses, average=average)
    assert found["f1"] == pytest.approx(f1, rel=1e-12)
    matthews = expected_metrics.matthews_corrcoef(truths, guesses)
    assert found["matthews"] == pytest.approx(matthews, rel=1e-12)
    assert found["accuracy"] == pytest.approx((guesses == truths).mean(), rel=1e-12)
    assert found["loss"] == pytest.approx(F.cross_entropy(outputs_B, targets_B).item(), rel=1e-6)


def test_a_guess_that_never_varies_has_no_correlation():
    outputs_B = torch.tensor([[1.0, 0.0]]).expand(NUM, 2)
    found = measured(Classification(metrics=("f1", "matthews")), outputs_B, torch.arange(NUM) % 2)
    assert (found["f1"], found["matthews"]) == (0.0, 0.0)


def test_class_weights_scale_an_examples_own_loss_and_divide_by_no_batch():
    task = Classification(class_weights=(0.5, 4.0, 0.0))
    outputs_B, targets_B = outputs(3), torch.arange(NUM) % 3
    plain_B = F.cross_entropy(outputs_B, targets_B, reduction="none")
    factors_B = torch.tensor([0.5, 4.0, 0.0])[targets_B]
    assert torch.equal(task.losses(outputs_B, targets_B), plain_B * factors_B)
    one = task.loss(outputs_B[1:2], targets_B[1:2])
    assert one == 4 * plain_B[1], "torch's own weight would divide it out"
    assert measured(task, outputs_B, targets_B)["loss"] == pytest.approx(
        (plain_B * factors_B).mean().item(), rel=1e-6
    )
    with pytest.raises(InvalidKey, match="for each of 2 classes"):
        task.check_outputs(2)
    with pytest.raises(InvalidKey, match="from 0 up"):
        Classification(class_weights=(1.0, -1.0)).check_outputs(2)


@pytest.mark.parametrize("num", [1, 3])
def test_metrics_of_regression_are_scikit_learns_in_the_targets_unit(num):
    low, high = 1000.0, 5000.0
    task, outputs_B = Regression(range=(low, high)), outputs(num)
    noise = torch.rand(NUM, num, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets_B = low + (high - low) * noise
    predicted = ((low + high) / 2 + (high - low) / 2 * outputs_B.double()).numpy()
    found = measured(task, outputs_B, targets_B)
    mae = expected_metrics.mean_absolute_error(targets_B.numpy(), predicted)
    assert found["mae"] == pytest.approx(mae, rel=1e-9)
    r2 = expected_metrics.r2_score(targets_B.numpy(), predicted)
    assert found["r2"] == pytest.approx(r2, rel=1e-9)


def test_huber_is_squared_near_zero_and_linear_far_away():
    squared, huber = (
        Regression(range=(-1, 1), kind=kind, huber_delta=0.5) for kind in ("squared", "huber")
    )
    near, far, zero = torch.tensor([[0.4]]), torch.tensor([[3.0]]), torch.zeros(1, 1)
    torch.testing.assert_close(huber.losses(near, zero), squared.losses(near, zero))
    assert huber.losses(far, zero).item() == pytest.approx(0.5 * (3 - 0.25))
    assert squared.losses(far, zero).item() == pytest.approx(4.5)


def test_metrics_of_labels_are_scikit_learns():
    outputs_B = outputs(4)
    targets_B = ((torch.arange(NUM)[:, None] + torch.arange(4)) % 3 == 0).double()
    found = measured(MultiLabel(), outputs_B, targets_B)
    guesses, truths = (outputs_B > 0).numpy(), (targets_B > 0).numpy()
    f1 = expected_metrics.f1_score(truths, guesses, average="micro")
    assert found["f1"] == pytest.approx(f1, rel=1e-12)
    assert found["accuracy"] == pytest.approx((guesses == truths).mean(), rel=1e-9)


def test_loss_of_ones_own_is_called_with_one_example(own_task):
    outputs_B, targets_B = outputs(1), torch.arange(NUM).double()
    expected = (outputs_B[:, 0] - targets_B).abs() ** 3
    torch.testing.assert_close(own_task.losses(outputs_B, targets_B), expected)
    assert measured(own_task, outputs_B, targets_B).keys() == {"loss"}
    missing = own_task.model_copy(update={"function": "own_loss_for_test:absent"})
    with pytest.raises(InvalidKey, match="own_loss_for_test:absent: AttributeError"):
        missing.losses(outputs_B, targets_B)


@pytest.mark.parametrize("engine", [BookkeepingEngine, VmapEngine])
@pytest.mark.parametrize(
    ("task", "num"),
    [
        (Classification(class_weights=(0.5, 4.0, 1.0)), 3),
        (Regression(range=(0, 10)), 2),
        (Regression(range=(0, 10), kind="huber", huber_delta=0.1), 1),
        (MultiLabel(), 4),
    ],
    ids=["weighted classes", "squared", "huber", "labels"],
)
def test_engines_answer_for_every_task(engine, task, num):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, num))
    assert find_wrong_gradients(net, task.loss, (5,), engine, task.draw_targets) is None


def test_engines_answer_for_a_loss_of_ones_own(own_task):
    net = nn.Sequential(nn.Linear(5, 1))
    for engine in (BookkeepingEngine, VmapEngine):
        assert find_wrong_gradients(net, own_task.loss, (5,), engine, own_task.draw_targets) is None


def test_range_is_two_numbers_in_order():
    with pytest.raises(ValueError, match="LOW below HIGH"):
        Regression(range=(3, 3))


def test_this_files_folder_is_not_left_on_the_path(own_task):
    own_task.losses(outputs(1), torch.zeros(NUM))
    assert str(Path(own_task.folder)) not in sys.path
