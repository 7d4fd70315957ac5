"""What a change does that a database broke off; tests/chaos restarts a real one."""

import pytest
from ray.tune import TuneError

from dpsweep.core.errors import StateError
from dpsweep.execution.launch import _unwrap_tune_errors
from dpsweep.store import retry as patience
from dpsweep.store.retry import InterruptedChange, retry_if_interrupted


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch):
    monkeypatch.setattr(patience, "_PAUSE_SECONDS", 0.0)


def breaks(times, error=InterruptedChange):
    """A change that goes wrong so often, and then is made; and how often it was tried."""
    tried = []

    @retry_if_interrupted
    def change(word):
        tried.append(word)
        if len(tried) <= times:
            raise error("the database went away")
        return word

    return change, tried


def test_a_change_that_was_broken_off_is_made_again():
    change, tried = breaks(2)
    assert change("it") == "it"
    assert tried == ["it"] * 3


def test_a_database_that_always_breaks_off_is_told():
    change, tried = breaks(99)
    with pytest.raises(InterruptedChange, match="went away"):
        change("it")
    assert len(tried) == 5


def test_another_error_is_told_at_once():
    change, tried = breaks(1, StateError)
    with pytest.raises(StateError):
        change("it")
    assert tried == ["it"]


def test_an_error_of_ours_comes_out_of_tune_as_itself():
    with pytest.raises(InterruptedChange, match="went away"), _unwrap_tune_errors("tiny"):
        _wrapped(InterruptedChange("the database went away"))
    with pytest.raises(TuneError, match="a traceback"), _unwrap_tune_errors("tiny"):
        _wrapped(ValueError("a mistake of ours"))


def _wrapped(error):
    """Raises as Tune does what its callbacks raised."""
    try:
        raise error
    except Exception:
        raise TuneError("a traceback")  # noqa: B904
