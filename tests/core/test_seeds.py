"""Secret streams repeat for the same step and purpose alone, and the key shows nowhere."""

import math
import pickle

import pytest

from dpsweep.core.seeds import SECRET_BYTES, TEST_SECRET_VARIABLE, Secret, derive_public_seed


@pytest.fixture(autouse=True)
def _no_test_secret(monkeypatch):
    monkeypatch.delenv(TEST_SECRET_VARIABLE, raising=False)


def draws(secret: Secret, step: int, name: str) -> list[float]:
    return secret.stream(step, name).random(8).tolist()


def test_drawn_secrets_differ_and_hold_256_bits():
    keys = {Secret.draw().key for _ in range(50)}
    assert len(keys) == 50
    assert {len(key) for key in keys} == {SECRET_BYTES} == {32}
    assert not Secret.draw().void


@pytest.mark.parametrize("secret", [Secret.draw(), Secret.fixed("text")], ids=["drawn", "fixed"])
def test_key_is_not_in_any_text_made_of_the_secret(secret):
    for text in (repr(secret), str(secret), f"{secret}", repr([secret])):
        assert text.strip("[]") == f"Secret(void={secret.void})"


def test_fixed_secret_is_void_and_the_same_for_the_same_text():
    assert Secret.fixed("a").void
    assert Secret.fixed("a") == Secret.fixed("a")
    assert Secret.fixed("a").key != Secret.fixed("b").key


def test_new_trial_draws_unless_the_test_variable_is_set(monkeypatch):
    one, two = Secret.for_new_trial(), Secret.for_new_trial()
    assert one.key != two.key
    assert not one.void
    monkeypatch.setenv(TEST_SECRET_VARIABLE, "a test")
    assert TEST_SECRET_VARIABLE == "DPSWEEP_TEST_SECRET"
    assert Secret.for_new_trial() == Secret.fixed("a test")
    assert Secret.for_new_trial().void


def test_empty_test_variable_fixes_nothing(monkeypatch):
    monkeypatch.setenv(TEST_SECRET_VARIABLE, "")
    assert not Secret.for_new_trial().void
    assert Secret.for_new_trial().key != Secret.for_new_trial().key


def test_stream_repeats_for_the_same_secret_step_and_name():
    secret = Secret.draw()
    copy = pickle.loads(pickle.dumps(secret))
    assert draws(secret, 3, "noise") == draws(secret, 3, "noise") == draws(copy, 3, "noise")


def test_streams_differ_in_step_name_and_secret():
    one, other = Secret.fixed("a"), Secret.fixed("b")
    streams = {
        tuple(draws(secret, step, name))
        for secret in (one, other)
        for step in (0, 1, 2, 255, 256, 2**32)
        for name in ("sample", "noise")
    }
    assert len(streams) == 2 * 6 * 2


def test_streams_of_one_step_are_uncorrelated():
    n = 100_000
    sample = Secret.fixed("a").stream(5, "sample").standard_normal(n)
    noise = Secret.fixed("a").stream(5, "noise").standard_normal(n)
    # The mean product of independent standard normals has deviation 1/sqrt(n); five of them are
    # passed by chance once in two million times.
    assert abs((sample * noise).mean()) < 5 / math.sqrt(n)


def test_public_seed_is_the_same_for_everyone():
    assert derive_public_seed(0, "weights") == derive_public_seed(0, "weights")
    assert 0 <= derive_public_seed(123, "weights") < 2**32


def test_public_seeds_of_different_purposes_differ():
    paths = [(seed, *path) for seed in range(20) for path in [("weights",), ("search", 1), ("a",)]]
    assert len({derive_public_seed(*path) for path in paths}) == len(paths)
