"""What is said of a run in one batch is delivered together, within the server's limits."""

import math

from dpsweep.tracking.parcel import RUNNING, parcels


def trial(number, **params):
    return {"kind": "trial", "number": number, "params": params, "tags": {"a": "1"}, "note": "n"}


def row(number, epoch, value=0.5):
    return {"kind": "row", "number": number, "row": {"epoch": epoch, "step": 9, "loss": value}}


def end(number, status="FINISHED"):
    return {"kind": "end", "number": number, "status": status, "tags": {"a": "2"}}


def test_a_whole_trial_is_one_call_and_one_status():
    found = parcels([trial(0, lr=0.1), row(0, 1), trial(1), row(0, 2), end(0)])
    (call,) = found[0].batches()
    assert [(p.key, p.value) for p in call["params"]] == [("lr", "0.1")]
    assert {t.key: t.value for t in call["tags"]} == {"a": "2", "mlflow.note.content": "n"}
    assert [(m.key, m.value, m.step, m.timestamp) for m in call["metrics"]] == [
        ("loss", 0.5, 1, 1),
        ("loss", 0.5, 2, 2),
    ]
    assert found[0].status == "FINISHED"
    assert found[1].status == RUNNING


def test_what_does_not_fit_a_call_is_spread_over_several_and_nothing_is_lost():
    events = [trial(0, **{f"p{i}": i for i in range(250)}), *[row(0, i) for i in range(1700)]]
    calls = list(parcels(events)[0].batches())
    assert [len(call["params"]) for call in calls] == [100, 100, 50]
    assert [len(call["metrics"]) for call in calls] == [800, 800, 100]
    assert all(sum(map(len, call.values())) <= 1000 for call in calls)


def test_a_figure_that_is_not_finite_is_left_out():
    assert parcels([row(0, 1, math.inf), row(0, 2, math.nan)])[0].metrics == []


def test_nothing_said_is_no_call():
    assert list(parcels([{"kind": "artifact", "number": None, "path": "x"}])[None].batches()) == []
