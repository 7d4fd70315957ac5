"""Errors name the place, the guess and the choices."""

import pytest

from dpsweep.core import errors
from dpsweep.core.errors import ConfigError, DpSweepError, InvalidKey, unknown_name_error


def test_unknown_method_names_the_place_the_guess_and_the_choices():
    error = unknown_name_error(
        "method", "dsik", ["dp_sgd", "doppler", "disk"], where="sweeps/x.yaml:3: method.name"
    )
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "sweeps/x.yaml:3: method.name: unknown method 'dsik'. "
        "Did you mean 'disk'? Known: disk, doppler, dp_sgd."
    )


def test_name_like_no_other_gets_no_guess():
    error = unknown_name_error(
        "model", "transformer", ["cnn5", "cnn_small"], where="x.yaml:1: model.name"
    )
    assert str(error) == (
        "x.yaml:1: model.name: unknown model 'transformer'. Known: cnn5, cnn_small."
    )


@pytest.mark.parametrize("name", ["ConfigError", "StateError", "ConnectionRefused", "Diverged"])
def test_what_a_user_can_mend_is_caught_as_one(name):
    assert issubclass(getattr(errors, name), DpSweepError)


def test_misfit_carries_the_key_to_name():
    error = InvalidKey("gamma", "must not be 0")
    assert error.key == "gamma"
    assert str(error) == "must not be 0"
    assert isinstance(error, ValueError)
