"""The cache of this node: nothing is taken from it that was not put there for the same question."""

import json

import pytest

from dpsweep.core import cache
from dpsweep.core.errors import StateError
from dpsweep.privacy.accounting import Run, _calibrate, calibrate_noise


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    place = tmp_path / "cache"
    monkeypatch.setenv("DPSWEEP_CACHE", str(place))
    return place


@pytest.fixture
def squares():
    """A cached function, and the arguments that it was really called with."""
    calls = []

    @cache.cached_numbers("numpy")
    def square(x):
        calls.append(x)
        return [x * x, float("inf")]

    return square, calls


def test_a_result_is_computed_once_and_kept_bit_for_bit(squares):
    square, calls = squares
    assert square(0.1) == square(0.1) == [0.1 * 0.1, float("inf")]
    assert calls == [0.1]
    assert square(0.2)[0] == 0.2 * 0.2
    assert calls[-1] == 0.2


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: "",
        lambda entry: json.dumps(entry)[:-9],
        lambda entry: json.dumps(entry | {"numbers": [4.0, 1.0]}),
        lambda entry: json.dumps(entry | {"key": [*entry["key"][:-2], "(4.0,)", "[]"]}),
        lambda entry: json.dumps([entry]),
        lambda entry: json.dumps({"numbers": entry["numbers"]}),
    ],
)
def test_an_entry_that_was_changed_is_computed_anew(squares, folder, damage):
    square, calls = squares
    square(3.0)
    (place,) = (folder / "numbers").iterdir()
    place.write_text(damage(json.loads(place.read_text())))
    assert square(3.0)[0] == 9.0
    assert calls == [3.0, 3.0]
    assert square(3.0)[0] == 9.0
    assert calls == [3.0, 3.0], "the entry was mended"


def test_a_folder_that_others_reach_is_not_read(squares, folder):
    square, calls = squares
    square(3.0)
    folder.chmod(0o777)
    assert square(3.0)[0] == 9.0
    assert calls == [3.0, 3.0]
    with pytest.raises(StateError, match="others can reach it"):
        cache.check_once("key", folder, lambda: None)


def test_another_version_of_a_package_is_another_question(squares, monkeypatch):
    square, calls = squares
    square(3.0)
    monkeypatch.setattr(cache.metadata, "version", lambda name: "99")
    anew = cache.cached_numbers("numpy")(square.__wrapped__)
    anew(3.0)
    assert calls == [3.0, 3.0]


def test_a_calibration_is_the_same_from_the_cache(folder):
    _calibrate.cache_clear()
    fresh = calibrate_noise(2.0, 1e-5, 0.1, 50)
    assert list((folder / "numbers").iterdir())
    _calibrate.cache_clear()
    assert calibrate_noise(2.0, 1e-5, 0.1, 50) == fresh
    assert isinstance(fresh[0], Run)


def test_a_check_that_failed_is_run_again_and_one_that_passed_is_not(tmp_path):
    source, runs = tmp_path / "data.txt", []
    source.write_text("a")

    def failing():
        runs.append("failing")
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011 - it is the check's own
            cache.check_once("key", source, failing)
    for _ in range(2):
        cache.check_once("key", source, lambda: runs.append("passing"))
    assert runs == ["failing", "failing", "passing"]
    cache.check_once("another", source, lambda: runs.append("another"))
    source.write_text("ab")
    cache.check_once("key", source, lambda: runs.append("changed"))
    assert runs[3:] == ["another", "changed"]
