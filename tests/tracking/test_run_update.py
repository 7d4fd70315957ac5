"""What is said of a run in one batch is delivered together, within the server's limits."""

import math

from dpsweep.tracking.run_update import RUNNING, group_by_run


def trial(number, **params):
    return {"kind": "trial", "number": number, "params": params, "tags": {"a": "1"}, "note": "n"}


def row(number, epoch, value=0.5):
    said = {"epoch": epoch, "step": 9, "loss": value}
    return {"kind": "row", "number": number, "row": said, "time": 7000 + epoch}


def end(number, status="FINISHED"):
    return {"kind": "end", "number": number, "status": status, "tags": {"a": "2"}}


def test_a_whole_trial_is_one_call_besides_its_tags_and_one_status():
    found = group_by_run([trial(0, lr=0.1), row(0, 1), trial(1), row(0, 2), end(0)])
    ((params, metrics),) = found[0].batches()
    assert [(p.key, p.value) for p in params] == [("lr", "0.1")]
    assert found[0].tags == {"a": "2", "mlflow.note.content": "n"}
    assert [(m.key, m.value, m.step, m.timestamp) for m in metrics] == [
        ("loss", 0.5, 9, 7_001_000),
        ("loss", 0.5, 9, 7_002_000),
    ]
    assert found[0].status == "FINISHED"
    assert found[1].status == RUNNING


def test_what_does_not_fit_a_call_is_spread_over_several_and_nothing_is_lost():
    events = [trial(0, **{f"p{i}": i for i in range(250)}), *[row(0, i) for i in range(1700)]]
    calls = list(group_by_run(events)[0].batches())
    assert [len(params) for params, _ in calls] == [100, 100, 50]
    assert [len(metrics) for _, metrics in calls] == [800, 800, 100]
    tagged = {**trial(0), "tags": {f"t{i}": "1" for i in range(150)}}
    assert [len(tags) for tags in group_by_run([tagged])[0].tag_batches()] == [100, 51]


def test_the_parent_run_comes_first_whatever_was_said_before():
    assert list(group_by_run([row(1, 1), trial(0), {**trial(None), "kind": "sweep"}])) == [
        None,
        1,
        0,
    ]


def test_a_figure_that_is_not_finite_is_left_out():
    assert group_by_run([row(0, 1, math.inf), row(0, 2, math.nan)])[0].metrics == []


def test_nothing_said_is_no_call():
    update = group_by_run([{"kind": "artifact", "number": None, "path": "x"}])[None]
    assert (list(update.batches()), list(update.tag_batches())) == ([], [])
