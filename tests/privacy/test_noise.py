"""Secure draws have the law that fast ones have, repeat for the same step, and tell no key."""

import copy
import logging
import math
import pickle

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from pydantic import ValidationError
from scipy import stats

from dpsweep.config.trial import TrialConfig
from dpsweep.core.seeds import Secret
from dpsweep.core.types import Clipped
from dpsweep.privacy import noise
from dpsweep.privacy.noise import SOURCES, NoiseDraw, SecureDraws, leaf_slices
from dpsweep.privacy.release import GRID_BITS, release
from dpsweep.privacy.sampling import poisson_batch
from dpsweep.training.loop import train
from dpsweep.training.trial_dir import TrialDir

SECRET = Secret.fixed("secure noise")
KEY = bytes(range(32))
LEVEL = 1e-6
"""False alarms of one test. The secrets are fixed: one comes up only when the draws change."""

MANY = 400_000
FIVE = 5
"""Deviations of a nearly normal sum that chance passes once in two million times."""


def normals(step: int, num: int = MANY) -> np.ndarray:
    return SOURCES["secure"](SECRET, step, "noise").standard_normal((num,))


def key_stream(num_words: int) -> np.ndarray:
    stream = Cipher(ChaCha20(KEY, bytes(16)), mode=None).encryptor().update(bytes(8 * num_words))
    return np.frombuffer(stream, "<u8")


# The key stream and what is made of it.


def test_key_stream_is_that_of_rfc_8439():
    """Appendix A.1, test vector 1."""
    first = bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    words = np.frombuffer(first, "<u8")
    uniform = SecureDraws(bytes(32)).random(4)
    assert uniform.tolist() == [int(word >> np.uint64(11)) / 2**53 for word in words]


def test_each_value_is_half_the_sum_of_four_draws_by_box_and_muller():
    num_pairs = 5
    words = key_stream(8 * num_pairs).reshape(4, 2, num_pairs)
    expected = [0.0] * (2 * num_pairs)
    for radii, angles in words.tolist():
        for i, (k, angle) in enumerate(zip(radii, angles, strict=True)):
            r, turn = (
                math.sqrt(-2 * math.log((k + 1) / 2**64)),
                2 * math.pi * ((angle >> 11) / 2**53),
            )
            expected[i] += r * math.cos(turn) / 2
            expected[num_pairs + i] += r * math.sin(turn) / 2
    draws = SecureDraws(KEY)
    np.testing.assert_allclose(draws.standard_normal((10,)), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("word", [0, 1, 2**64 - 1])
def test_extreme_words_give_finite_normals(word, monkeypatch):
    monkeypatch.setattr(SecureDraws, "_next", lambda self, num: np.full(num, word, dtype="<u8"))
    draws = SecureDraws(KEY)
    assert np.isfinite(draws.standard_normal((6,))).all()
    assert abs(draws.standard_normal((6,))).max() <= 2 * math.sqrt(2 * 64 * math.log(2))
    assert ((draws.random(6) >= 0) & (draws.random(6) < 1)).all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, noise._BLOCK + 1)])
def test_shapes_are_as_asked(shape):
    draws = SecureDraws(KEY).standard_normal(shape)
    assert draws.shape == shape
    assert draws.dtype == np.float64
    assert SecureDraws(KEY).random(math.prod(shape)).shape == (math.prod(shape),)


def test_later_calls_go_on_in_the_key_stream():
    draws = SecureDraws(KEY)
    parts = np.concatenate([draws.random(3), draws.random(noise._BLOCK), draws.random(2)])
    assert np.array_equal(parts, SecureDraws(KEY).random(noise._BLOCK + 5))
    assert draws.left_bytes == 2**38 - 8 * (noise._BLOCK + 5)


def test_key_stream_never_starts_over():
    draws = SecureDraws(KEY)
    draws.left_bytes = 31
    with pytest.raises(OverflowError, match=r"more than 274877906944 bytes of one key"):
        draws.standard_normal((1,))


def test_short_key_is_refused():
    with pytest.raises(ValueError, match="key"):
        SecureDraws(bytes(16))


# The law.


def test_mean_variance_and_kurtosis_are_the_normal_s():
    z = normals(0)
    assert abs(z.mean()) < FIVE / math.sqrt(MANY)
    assert z.var() == pytest.approx(1, abs=FIVE * math.sqrt(2 / MANY))  # four draws over two
    assert (z**4).mean() == pytest.approx(3, abs=FIVE * math.sqrt(96 / MANY))


def test_draws_follow_the_normal_law_and_the_test_would_see_less():
    z, law = normals(1), stats.norm.cdf
    assert stats.kstest(z, law).pvalue > LEVEL
    assert stats.kstest(z[: MANY // 2], z[MANY // 2 :]).pvalue > LEVEL
    for wrong in (0.98, 1.02):  # a draw forgotten would be 0.87, a divisor of 4 would be 0.5
        assert stats.kstest(z * wrong, law).pvalue < LEVEL


def test_tails_are_as_long_as_they_should_be():
    z = np.concatenate([normals(t) for t in range(2, 7)])
    for far in (3.0, 4.0):
        seen, share = int((abs(z) > far).sum()), 2 * stats.norm.sf(far)
        low, high = stats.binom(len(z), share).ppf([LEVEL / 2, 1 - LEVEL / 2])
        assert low <= seen <= high


def test_low_bits_are_coins():
    """Those over the release's grid: were they not, rounding to it would hide nothing."""
    bits = np.floor(np.ldexp(normals(7), GRID_BITS)).astype(np.int64)
    for bit in range(20):
        ones = int((bits >> bit & 1).sum())
        assert abs(ones - MANY / 2) < FIVE * math.sqrt(MANY) / 2


def test_steps_streams_secrets_and_coordinates_are_independent():
    z, n = normals(10), MANY
    half = n // 2
    pairs = {
        "next step": (z, normals(11)),
        "another secret": (
            z,
            SOURCES["secure"](Secret.fixed("x"), 10, "noise").standard_normal((n,)),
        ),
        "the batch's stream": (z, SOURCES["secure"](SECRET, 10, "sample").standard_normal((n,))),
        "the fast source": (z, SOURCES["fast"](SECRET, 10, "noise").standard_normal((n,))),
        "next coordinate": (z[:-1], z[1:]),
        "cos and sin": (z[: noise._BLOCK // 2], z[noise._BLOCK // 2 : noise._BLOCK]),
        "far coordinate": (z[:half], z[half:]),
    }
    for name, (a, b) in pairs.items():
        deviation = 1 / math.sqrt(len(a))
        assert abs((a * b).mean()) < FIVE * deviation, name
        # Products of squares, less one, have deviation 2: radii that are shared would show in them.
        assert abs(((a**2 - 1) * (b**2 - 1)).mean()) < FIVE * 2 * deviation, name


def test_neighbours_with_shared_radii_are_independent_all_the_same():
    """(r cos a, r sin a) are independent normals; a sum of four such pairs is too."""
    size = noise._BLOCK // 2
    blocks = [normals(t, noise._BLOCK).reshape(2, size) for t in range(20, 32)]
    x, y = np.concatenate(blocks, axis=1)
    for f, g in ((np.square, np.square), (np.abs, np.abs), (np.sign, np.abs)):
        assert abs(np.corrcoef(f(x), g(y))[0, 1]) < FIVE / math.sqrt(len(x))
    turn = np.arctan2(y, x) / (2 * math.pi) + 0.5
    assert stats.kstest(turn, "uniform").pvalue > LEVEL
    assert stats.kstest((x * x + y * y) / 2, "expon").pvalue > LEVEL


def test_uniforms_are_uniform_and_batches_binomial():
    draws = SOURCES["secure"](SECRET, 0, "sample")
    assert stats.kstest(draws.random(MANY), "uniform").pvalue > LEVEL
    rate = 0.02
    sizes = [
        len(poisson_batch(2000, rate, SOURCES["secure"](SECRET, t, "sample"))) for t in range(1500)
    ]
    law = stats.binom(2000, rate)
    assert np.mean(sizes) == pytest.approx(law.mean(), abs=FIVE * law.std() / math.sqrt(1500))
    assert np.var(sizes) == pytest.approx(law.var(), rel=FIVE * math.sqrt(2 / 1499))


# Through the release.


def released(source: str, step: int, sigma: float = 1.5) -> torch.Tensor:
    total = Clipped({"w": torch.full((300, 70), 0.25, dtype=torch.float64)})
    rng = SOURCES[source](SECRET, step, "noise")
    return release(total, clip_norm=0.5, noise_multiplier=sigma, batch_size=10, rng=rng)["w"]


@pytest.mark.parametrize("sigma", [0.3, 1.5, 8.0])
def test_release_has_standard_deviation_sigma_c_over_b(sigma):
    z = (10 * released("secure", 3, sigma) - 0.25) / (0.5 * sigma)
    assert stats.kstest(z.flatten(), "norm").pvalue > LEVEL


def test_replayed_step_releases_the_same_bits_and_the_next_one_others():
    assert torch.equal(released("secure", 4), released("secure", 4))
    assert (released("secure", 4) != released("secure", 5)).all()
    assert (released("secure", 4) != released("fast", 4)).all()


# Drawn by a thread.

ODD = {"w": (3, 41), "scale": (), "none": (0,), "b": (noise._BLOCK + 1,)}


@pytest.mark.parametrize("source", SOURCES)
def test_a_thread_draws_what_would_be_drawn_leaf_by_leaf(source):
    sizes = [math.prod(shape) for shape in ODD.values()]
    drawn = NoiseDraw(SOURCES[source](SECRET, 3, "noise"), sizes, pinned=False).wait(sizes)
    rng = SOURCES[source](SECRET, 3, "noise")
    for part, shape in zip(leaf_slices(sizes), ODD.values(), strict=True):
        assert part.start % 16 == 0
        expected = np.asarray(rng.standard_normal(shape))
        np.testing.assert_array_equal(drawn[part].view(shape).numpy(), expected)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_release_of_what_a_thread_drew_is_the_same_to_the_bit(source, dtype):
    total = Clipped({k: torch.randn(shape, dtype=torch.float64) for k, shape in ODD.items()})
    how = {"clip_norm": 0.7, "noise_multiplier": 1.3, "batch_size": 50, "dtype": dtype}
    inline = release(total, rng=SOURCES[source](SECRET, 3, "noise"), **how)
    sizes = [x.numel() for x in total.values()]
    draw = NoiseDraw(SOURCES[source](SECRET, 3, "noise"), sizes, pinned=False)
    for k, x in release(total, rng=draw, **how).items():
        assert torch.equal(x, inline[k]), k
        assert x.dtype == (dtype or torch.float64)


def test_noise_for_other_leaves_is_not_used():
    draw = NoiseDraw(SOURCES["fast"](SECRET, 3, "noise"), [4, 2], pinned=False)
    with pytest.raises(AssertionError, match="noise was drawn for another release"):
        draw.wait([6])


# In a trial.


def trial(source: str | None) -> TrialConfig:
    chosen = {"noise": {"source": source}} if source else {}
    return TrialConfig.model_validate(
        {
            "data": {"name": "digits"},
            "model": {"name": "cnn_small", "width": 2},
            "privacy": {"noise_multiplier": 1.0, **chosen},
            "train": {"batch_size": 479, "epochs": 2, "device": "cpu", "threads": 1},
            "optimizer": {"lr": 0.1},
            "method": {"name": "disk"},
        }
    )


def weights(trial_dir: TrialDir) -> list[torch.Tensor]:
    return list(torch.load(trial_dir.weights, weights_only=True).values())


class Killed(BaseException):
    """What a test does to a trial."""


def test_trial_killed_after_a_report_goes_on_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "resume")
    whole, killed = TrialDir(tmp_path / "whole"), TrialDir(tmp_path / "killed")
    for trial_dir in (whole, killed):
        trial_dir.make_secret()

    def kill(row: dict[str, float]) -> None:
        raise Killed

    train(trial("secure"), whole, lambda row: None)
    with pytest.raises(Killed):
        train(trial("secure"), killed, kill)
    train(trial("secure"), killed, lambda row: None)
    assert all(map(torch.equal, weights(whole), weights(killed)))
    other = TrialDir(tmp_path / "fast")
    other.make_secret()
    train(trial("fast"), other, lambda row: None)
    assert not any(map(torch.equal, weights(whole), weights(other)))


def test_bytes_of_no_key_are_said_written_or_sent(tmp_path, monkeypatch, capfd, caplog):
    monkeypatch.setenv("DPSWEEP_TEST_SECRET", "tell nobody")
    caplog.set_level(logging.DEBUG)
    trial_dir, keys = TrialDir(tmp_path / "trial"), [Secret.fixed("tell nobody").key]
    derive = Secret.stream_key

    def noting(self: Secret, step: int, name: str) -> bytes:
        keys.extend([self.key, derive(self, step, name)])
        return keys[-1]

    monkeypatch.setattr(Secret, "stream_key", noting)
    trial_dir.make_secret()
    result = train(trial("secure"), trial_dir, lambda row: None)
    assert len(set(keys)) == 2 + 2 * 6  # drawn, bound to the config, and two streams of six steps
    said = " ".join(
        [*capfd.readouterr(), caplog.text, repr(result), trial("secure").model_dump_json()]
    )
    for key in keys:
        for telling in (repr(key), key.hex(), str(int.from_bytes(key)), repr(list(key))):
            assert telling not in said
        for place in trial_dir.path.iterdir():
            assert (key in place.read_bytes()) == (place.name == "secret" and key == keys[0])
            assert key.hex().encode() not in place.read_bytes()


@pytest.mark.parametrize("carry", [pickle.dumps, copy.copy, copy.deepcopy])
def test_secure_draws_cannot_be_sent_or_copied_and_show_no_key(carry):
    draws = SecureDraws(KEY)
    with pytest.raises(TypeError, match="not sent"):
        carry(draws)
    assert not any(KEY.hex() in str(x) or repr(KEY) in str(x) for x in (draws, vars(draws)))


# In a file.


def test_fast_is_the_default_and_adds_nothing_to_a_trial_s_identity():
    """A trial that began before the key was there is the same trial."""
    assert trial(None) == trial("fast")
    assert "noise" not in trial("fast").model_dump()["privacy"]
    assert trial("secure").model_dump()["privacy"]["noise"] == {"source": "secure"}
    assert TrialConfig.model_validate_json(trial("secure").model_dump_json()) == trial("secure")


def test_unknown_source_is_refused():
    with pytest.raises(ValidationError, match=r"'fast' or 'secure'"):
        trial("opacus")
