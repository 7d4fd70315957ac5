"""FFTKF is DiSK's query, then the shelf, then the average."""

import pytest
from pydantic import ValidationError

from dpsweep.filters.lti import Ema
from dpsweep.filters.spectral import Shelf
from dpsweep.methods import disk, fftkf


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.5, -1.0), (0.4, 1.5), (1.0, 2.0)])
def test_query_is_that_of_disk(kappa, gamma):
    ours = fftkf.build(fftkf.Config(kappa=kappa, gamma=gamma))
    assert ours.query == disk.build(disk.Config(kappa=kappa, gamma=gamma)).query


def test_shelf_stands_in_front_of_the_average():
    method = fftkf.build(fftkf.Config(kappa=0.3, gamma=0.5, cut=0.2, depth=0.6))
    assert method.filters == (Shelf(cut=0.2, depth=0.6), Ema(gain=0.3))
    assert method.chain.links == method.filters


def test_letters_of_the_paper_are_the_same_tunables():
    assert fftkf.Config(**{"lambda": 0.2, "rho": 0.6}) == fftkf.Config(cut=0.2, depth=0.6)


def test_gamma_zero_is_refused():
    with pytest.raises(ValidationError, match="must not be 0, got 0"):
        fftkf.Config(gamma=0.0)


@pytest.mark.parametrize("wrong", [{"cut": 0.0}, {"cut": 1.0}, {"depth": 1.0}, {"depth": -0.1}])
def test_shelf_outside_its_range_is_refused(wrong):
    (key,) = wrong
    with pytest.raises(ValidationError, match=rf"{key}\n  Input should be (greater|less) than"):
        fftkf.Config(**wrong)
