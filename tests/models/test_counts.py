"""The stored numbers of weights are those of the models as they are built."""

import json

from dpsweep.models import counts


def test_the_stored_counts_are_those_of_the_models():
    stored = json.loads(counts._STORED.read_text())
    assert stored == counts.count_weights(), "write them again: python -m dpsweep.models.counts"
