"""Several devices share a batch: the sum has the bits of one device, and each model is watched.

On CPUs, each replica in its own thread. tests/gpu has the same on several virtual cards.
"""

import threading
import time
from dataclasses import dataclass

import pytest
import torch
from oracle import CLIPS, QUERIES, draw, points_of
from pairs import pairs
from torch import nn

from dpsweep.core.errors import ConfigError
from dpsweep.privacy.engine import BookkeepingEngine, VmapEngine, make_engine, replicate_engine
from dpsweep.privacy.engine.opacus import OpacusEngine
from dpsweep.privacy.engine.parallel import DataParallelEngine
from dpsweep.privacy.geometry import IDENTITY

CPU = torch.device("cpu")
ENGINES = {"bookkeeping": BookkeepingEngine, "vmap": VmapEngine, "opacus": OpacusEngine}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
loss = nn.functional.cross_entropy
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")


def network(dtype=torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layers = nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(18, 4)
        return nn.Sequential(*layers).to(dtype)


def batch(num, dtype=torch.float32):
    return draw(num, 1, 5, 5, seed=4).to(dtype), torch.arange(num) % 4


def side_by_side(kind, model, at_once, num_devices, copies=1):
    def make(own):
        return kind(own, loss, at_once, copies=copies)

    return replicate_engine(make, model, [CPU] * num_devices)


@pairs(
    kind=ENGINES, clip=CLIPS, query=QUERIES, dtype=DTYPES, num_devices=[2, 3, 8], num=[0, 1, 7, 40]
)
def test_several_devices_give_the_bits_of_one(kind, clip, query, dtype, num_devices, num):
    model, inputs = network(dtype), batch(num, dtype)
    asked = points_of(model, len(query)), query, *inputs, clip
    alone = kind(model, loss, 3).clipped_sum(*asked)
    together = side_by_side(kind, model, 3, num_devices)
    assert isinstance(together, DataParallelEngine)
    found = together.clipped_sum(*asked)
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[k], alone[k]) for k in alone)


def test_copies_of_an_example_stay_on_one_device():
    model, (inputs, targets) = network(), batch(12)
    asked = points_of(model, 1), [1.0], inputs.view(6, 2, 1, 5, 5), targets[:6], CLIPS["flat"]
    alone = BookkeepingEngine(model, loss, 2, copies=2).clipped_sum(*asked)
    found = side_by_side(BookkeepingEngine, model, 2, 3, copies=2).clipped_sum(*asked)
    assert all(torch.equal(found[k], alone[k]) for k in alone)


@dataclass(frozen=True)
class Late(VmapEngine):
    """Its parts are ready in the opposite order."""

    def _portion(self, points, weights, portion, clip):
        time.sleep(0.05 * (portion.inputs_B.mean().item() < 1))
        return super()._portion(points, weights, portion, clip)


def test_sums_are_added_in_the_order_of_the_portions_whichever_is_ready_first():
    model, (inputs, targets) = network(), batch(8)
    inputs[4:] += 2  # the first two portions are late
    asked = points_of(model, 1), [1.0], inputs, targets, CLIPS["flat"]
    alone = VmapEngine(model, loss, 2).clipped_sum(*asked)
    engines = [Late(network(), loss, 2) for _ in range(4)]
    found = DataParallelEngine(tuple(engines)).clipped_sum(*asked)
    assert all(torch.equal(found[k], alone[k]) for k in alone)


class Remembering(nn.Module):
    """Keeps what it sees in an attribute, on the devices where `keeps` is True."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.keeps, self.last = network(), False, 0.0

    def forward(self, x):
        if self.keeps:
            self.last = float(x.mean())
        return self.inside(x)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_device_s_model_is_watched(which):
    together = side_by_side(BookkeepingEngine, Remembering(), 2, 3)
    together.replicas[which].model.keeps = True
    asked = points_of(together.model, 1), [1.0], *batch(6), CLIPS["flat"]
    with pytest.raises(ConfigError, match=r"attribute 'last' of the model .* changes"):
        together.clipped_sum(*asked)


class Writing(nn.Module):
    """Writes to its weights on the devices where `writes` is True."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.writes = nn.Linear(25, 4), False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.inside.weight[0, 0] += 1
        return self.inside(x.flatten(1))


def test_a_replica_that_writes_to_its_point_is_refused():
    together = side_by_side(BookkeepingEngine, Writing(), 2, 2)
    together.replicas[1].model.writes = True
    points = [{k: p.detach().clone() for k, p in together.model.named_parameters()}]
    with pytest.raises(ConfigError, match=r"parameter 'inside\.weight' changes"):
        together.clipped_sum(points, [1.0], *batch(4), CLIPS["flat"])


class Failing(VmapEngine):
    """Its device has no memory left."""

    def _portion(self, points, weights, portion, clip):
        raise RuntimeError("CUDA out of memory on the second card")


def test_a_failure_on_one_device_fails_the_step_and_leaves_no_thread():
    engines = VmapEngine(network(), loss, 2), Failing(network(), loss, 2)
    before = threading.active_count()
    asked = points_of(engines[0].model, 1), [1.0], *batch(8), CLIPS["flat"]
    with pytest.raises(RuntimeError, match="out of memory on the second card"):
        DataParallelEngine(engines).clipped_sum(*asked)
    assert threading.active_count() == before


def test_each_device_s_engine_is_checked_and_one_device_needs_no_threads(forgotten):
    made = []

    def make(own):
        made.append(own)
        return make_engine(own, loss, IDENTITY, 4, (1, 5, 5))

    model = network()
    together = replicate_engine(make, model, [CPU, CPU])
    assert [type(one) for one in together.replicas] == [BookkeepingEngine] * 2
    assert together.model is made[0] is model
    assert made[1] is not model
    alone = replicate_engine(make, model, [CPU])
    assert isinstance(alone, BookkeepingEngine)
    assert alone.replicas == (alone,)
