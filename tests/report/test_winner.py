"""The winner among methods is named with how even the comparison was."""

from types import SimpleNamespace

from dpsweep.report.winner import Standing, standings, verdict


def record(method, value, state="complete"):
    return SimpleNamespace(knobs={"method.name": method}, value=value, state=state, confirms=None)


def test_methods_are_ranked_by_their_best_complete_trial():
    records = [
        record("disk", 0.90),
        record("disk", 0.75),
        record("fftkf", 0.95),
        record("fftkf", 0.99, "pruned"),
        record("doppler", None, "failed"),
        record("doppler", None, "failed"),
    ]
    table = standings(records, "maximize")
    assert table[:2] == [Standing("fftkf", 2, 0.95, 0.95), Standing("disk", 2, 0.90, 0.825)]
    assert table[2] == Standing("doppler", 2, None, None)
    assert verdict(table) == "fftkf won under equal trials (2 each): 0.9500, next disk 0.9000."


def test_least_loss_wins_where_less_is_better():
    table = standings([record("a", 0.2), record("b", 0.0), record("b", 0.4)], "minimize")
    assert [s.method for s in table] == ["b", "a"]
    assert verdict(table) == (
        "b leads, but trials were not equal (1 to 2 a method); each_of gives every method the same "
        "number, if budget.trials is a multiple: 0.0000, next a 0.2000."
    )


def test_a_search_over_one_method_has_no_winner():
    assert standings([record("disk", 0.9), record("disk", 0.8)], "maximize") == []
    assert (
        standings(
            [SimpleNamespace(knobs={}, value=1.0, state="complete", confirms=None)], "maximize"
        )
        == []
    )
    assert verdict([]) == ""
    nobody = standings([record("a", None, "failed"), record("b", None, "failed")], "maximize")
    assert verdict(nobody) == ""
