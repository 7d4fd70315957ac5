"""What a step asks of the card: a change that adds launches, waits, copies or memory fails here.

The table is ledger.json beside this file. Where a change needs less, or needs more for a reason,
write it anew and look at the difference: `python tests/gpu/test_ledger.py`.
"""

import json
import sys
from pathlib import Path

import pytest
from steps import World, one_step

PLACE = Path(__file__).with_name("ledger.json")
WORLDS = [
    World("dp_sgd", "cnn5", 256),
    World("dp_sgd", "features", 1024),
    World("disk", "cnn5", 256, augment=2),
    World("fftkf-split", "cnn5", 256),
    World("block_spectral_dp", "circulant", 256),
    World("dp_sgd", "wrn_16_4", 256),
    World("dp_sgd", "vit_small", 256),
    World("disk", "wrn_16_4", 256),
    World("spectral_dp", "model2", 256),
    World("dp_sgd", "wrn_40_4", 1024),
]
FAST = 3
"""The first of them are part of every run of the tests."""


def named(world):
    return f"{world.method}-{world.model}-{world.batch_size}-{world.augment}"


def entry(gpu):
    return {
        "launches": gpu.launches.total(),
        "waits": gpu.waits.total(),
        "copies": sum(map(len, gpu.copies.values())),
        "double": gpu.double,
        "peak_mib": round(gpu.peak / 2**20),
    }


@pytest.mark.parametrize(
    "world",
    [pytest.param(w, marks=[pytest.mark.slow] * (i >= FAST)) for i, w in enumerate(WORLDS)],
    ids=named,
)
def test_a_step_asks_no_more_of_the_card_than_it_did(world):
    gpu = one_step(world)
    known, now = json.loads(PLACE.read_text())[named(world)], entry(gpu)
    more = {k: (known[k], n) for k, n in now.items() if n > known[k]}
    assert more == {}, f"was, is; by line: {dict(gpu.waits)}"
    assert gpu.unordered == gpu.mixed == []


def test_the_goals_of_the_table_are_met():
    """Launches and waits of a step of DP-SGD, with eight microseconds a launch."""
    table = json.loads(PLACE.read_text())
    goals = {"cnn5-256": 400, "features-1024": 80}
    goals |= {"wrn_16_4-256": 1200, "vit_small-256": 2500, "wrn_40_4-1024": 4000}
    for name, launches in goals.items():
        assert table[f"dp_sgd-{name}-1"]["launches"] <= launches
        assert table[f"dp_sgd-{name}-1"]["waits"] <= 3


if __name__ == "__main__":
    chosen = [w for w in WORLDS if not sys.argv[1:] or named(w) in sys.argv[1:]]
    table = json.loads(PLACE.read_text()) if PLACE.exists() else {}
    for world in chosen:
        table[named(world)] = entry(one_step(world))
        print(named(world), table[named(world)], flush=True)
    PLACE.write_text(json.dumps(table, indent=1) + "\n")
