"""What a search's best config is told with: the edge of a range that it lies at."""

from dataclasses import replace

from dpsweep.config.space.domains import Range
from dpsweep.config.space.leaves import list_leaves
from dpsweep.config.sweep import load_sweep
from dpsweep.search.choose import describe_edges


def test_a_winner_at_an_edge_is_told_what_to_search_next(sweep_file, search):
    sweep = load_sweep(sweep_file, ["budget.trials=1"])
    record = search(sweep, 1, lambda record: 0.5).records()[0]
    low, high = 0.3, 6.0
    for leaf in list_leaves(sweep.space):
        if leaf.slot.key == "optimizer.lr":
            assert isinstance(leaf.domain, Range)
            low, high = leaf.domain.low, leaf.domain.high
    middle = {"optimizer.lr": (low * high) ** 0.5}
    assert describe_edges(sweep.space, replace(record, hyperparams=middle)) == ""
    words = describe_edges(sweep.space, replace(record, hyperparams={"optimizer.lr": high}))
    width = (high / low) ** 0.5
    assert "optimizer.lr" in words
    assert "upper edge of its range: search it next with" in words
    assert f"[{high / width:.3g}, {high * width:.3g}]" in words
