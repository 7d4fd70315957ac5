"""One copy of a data set a node: read once, private to its user, and never of other files."""

import gzip
import os
import stat
import struct
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from dpsweep.core.cache import cache_folder
from dpsweep.core.errors import StateError
from dpsweep.data.datasets import SPECS, ImageData
from dpsweep.data.read import fingerprint_images, load_dataset
from dpsweep.data.shared import load_shared

KEY = b"k" * 32


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where copies are to lie; modes left to the system would be open to all."""
    place = tmp_path / "cache"
    monkeypatch.setenv("DPSWEEP_CACHE", str(place))
    before = os.umask(0)
    yield place
    os.umask(before)


@pytest.fixture
def source(tmp_path):
    """A folder as some data set has it."""
    place = tmp_path / "data" / "raw"
    place.mkdir(parents=True)
    (place / "images").write_bytes(b"12345678")
    return place


class Reader:
    """Reads the source, and counts how often."""

    def __init__(self, source):
        self.source, self.times = source, 0

    def __call__(self):
        self.times += 1
        raw = list((self.source / "images").read_bytes())
        return (torch.tensor(raw, dtype=torch.uint8), torch.arange(3)), (torch.ones(2, 2),)


def mode(place):
    return stat.S_IMODE(place.stat().st_mode)


def test_what_is_mapped_is_what_was_read_and_is_read_once(cache, source):
    read = Reader(source)
    first, again = load_shared(source, read), load_shared(source, read)
    assert read.times == 1
    for found in (first, again):
        (inputs, targets), (others,) = found
        assert bytes(inputs.tolist()) == b"12345678"
        assert inputs.dtype == torch.uint8
        assert torch.equal(targets, torch.arange(3))
        assert torch.equal(others, torch.ones(2, 2))


def test_who_writes_to_what_he_mapped_changes_nobody_elses(cache, source):
    mine, theirs = load_shared(source, Reader(source)), load_shared(source, Reader(source))
    mine[0][0].zero_()
    for found in (theirs, load_shared(source, Reader(source))):
        assert bytes(found[0][0].tolist()) == b"12345678"


def test_the_copy_is_its_users_alone(cache, source):
    load_shared(source, Reader(source))
    assert mode(cache) == 0o700
    assert {oct(mode(p)) for p in cache.iterdir()} == {"0o600"}
    assert len(list(cache.glob("*.pt"))) == 1


@pytest.mark.parametrize("open_to", [0o710, 0o701, 0o750, 0o777, 0o704])
def test_a_folder_that_others_can_reach_is_refused_and_nothing_is_written(cache, source, open_to):
    cache.mkdir()
    cache.chmod(open_to)
    read = Reader(source)
    words = rf"{cache}: is meant for copies of private data, .* mode {open_to:o}\).*DPSWEEP_CACHE"
    with pytest.raises(StateError, match=words):
        load_shared(source, read)
    assert read.times == 0
    assert list(cache.iterdir()) == []


def test_a_folder_that_was_opened_later_is_refused_too(cache, source):
    load_shared(source, Reader(source))
    cache.chmod(0o755)
    with pytest.raises(StateError, match="others can reach it"):
        load_shared(source, Reader(source))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_somebody_elses_is_refused(cache):
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, -1)
    with pytest.raises(StateError, match=r"owner 12345, mode 700"):
        cache_folder()


def test_without_a_name_it_lies_among_the_systems_files_by_user(tmp_path, monkeypatch):
    monkeypatch.delenv("DPSWEEP_CACHE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"dpsweep-data-{os.getuid()}"
    assert mode(cache_folder()) == 0o700


CHANGES = {
    "another size": lambda p: (p / "images").write_bytes(b"123456789"),
    "another age": lambda p: os.utime(p / "images", (1, 1)),
    "one more file": lambda p: (p / "labels").write_bytes(b""),
    "another name": lambda p: (p / "labels").write_bytes((p / "images").read_bytes()),
    "a file in a folder": lambda p: ((p / "x").mkdir(), (p / "x" / "y").touch()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_files_are_read_anew(cache, source, change):
    read = Reader(source)
    load_shared(source, read)
    change(source)
    found = load_shared(source, read)
    assert read.times == 2
    assert bytes(found[0][0].tolist()) == (source / "images").read_bytes()


def test_the_same_files_in_another_folder_have_their_own_copy(cache, source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "images").write_bytes(b"87654321")
    times = (source / "images").stat()
    os.utime(other / "images", ns=(times.st_atime_ns, times.st_mtime_ns))
    load_shared(source, Reader(source))
    assert bytes(load_shared(other, Reader(other))[0][0].tolist()) == b"87654321"


def test_a_reading_that_fails_leaves_nothing_and_the_next_one_reads(cache, source):
    def fails():
        raise OSError("the disk is away")

    with pytest.raises(OSError, match="the disk is away"):
        load_shared(source, fails)
    with pytest.raises(Exception, match=r"(?i)pickle|lambda"):
        load_shared(source, lambda: ((torch.ones(2), lambda: None),))
    assert list(cache.glob("*.pt")) == []
    assert [p.suffix for p in cache.iterdir()] == [".lock"]
    read = Reader(source)
    load_shared(source, read)
    assert read.times == 1


USER = """
import sys
from pathlib import Path
import torch
from dpsweep.data.shared import load_shared

found = load_shared(Path(sys.argv[1]), lambda: (torch.ones(3),), "old", "made")
print("mine", flush=True)
sys.stdin.readline()
print(int(found[0].sum()), flush=True)
"""


def names(cache):
    return {p.name for p in cache.glob("*.pt")}


def test_copies_of_a_series_go_when_two_newer_ones_are_there_unless_a_process_uses_them(
    cache, source
):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    user = subprocess.Popen([sys.executable, "-c", USER, str(source)], **pipes)
    assert user.stdout.readline() == "mine\n"
    (old,) = names(cache)
    read = Reader(source)
    load_shared(source, read, "not of the series")
    for kind in "abcd":
        load_shared(source, read, kind, "made")
    assert len(names(cache)) == 4  # the two last, the one in use, and the other
    assert old in names(cache)
    assert user.communicate("\n")[0] == "3\n"
    load_shared(source, read, "d", "made")
    assert len(names(cache)) == 3
    assert old not in names(cache)
    assert read.times == 5
    assert {oct(mode(p)) for p in cache.iterdir()} == {"0o600"}


def test_each_source_has_a_series_of_its_own_and_what_is_mapped_outlives_its_file(
    cache, source, tmp_path
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "images").write_bytes(b"87654321")
    first = load_shared(other, Reader(other), "a", "made")
    for kind in "abc":
        load_shared(source, Reader(source), kind, "made")
    assert len(names(cache)) == 3
    for kind in "bcd":
        load_shared(other, Reader(other), kind, "made")
    assert len(names(cache)) == 4
    assert bytes(first[0][0].tolist()) == b"87654321"


READER = """
import sys, time
from pathlib import Path
import torch
from dpsweep.data.shared import load_shared

def read():
    with open(sys.argv[2], "a") as log:
        log.write("read\\n")
    time.sleep(0.5)
    return (torch.arange(1000),), (torch.ones(3),)

print("ready", flush=True)
sys.stdin.readline()
found = load_shared(Path(sys.argv[1]), read)
print(int(found[0][0].sum()), flush=True)
"""


@pytest.mark.slow
def test_of_many_processes_that_need_it_at_once_one_reads(cache, source, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", READER, str(source), str(log)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    readers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
    assert [reader.communicate()[0] for reader in readers] == ["499500\n"] * 2
    assert log.read_text() == "read\n"
    assert len(list(cache.glob("*.pt"))) == 1


@pytest.fixture
def mnist(tmp_path, cache, monkeypatch):
    """MNIST's files with thirty and ten images in them."""
    monkeypatch.setitem(SPECS, "mnist", replace(SPECS["mnist"], num_train=30, num_test=10))
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for name, number in (("train", 30), ("t10k", 10)):
        pixels = bytes((7 * i) % 256 for i in range(number * 784))
        labels = bytes(i % 10 for i in range(number))
        for what, header, body in [
            ("images-idx3", struct.pack(">4I", 2051, number, 28, 28), pixels),
            ("labels-idx1", struct.pack(">2I", 2049, number), labels),
        ]:
            (raw / f"{name}-{what}-ubyte").write_bytes(header + body)
            with gzip.open(raw / f"{name}-{what}-ubyte.gz", "wb", 0) as packed:
                packed.write(header + body)
    load_dataset.cache_clear()
    yield ImageData(name="mnist", root=str(tmp_path)), raw
    load_dataset.cache_clear()


PLACES = [
    ("train-images-idx3-ubyte", 16 + 29 * 784 + 783),
    ("train-labels-idx1-ubyte", 8),
    ("t10k-images-idx3-ubyte", 16),
    ("t10k-labels-idx1-ubyte", 8 + 9),
]


@pytest.mark.parametrize(("name", "at"), PLACES)
def test_one_pixel_or_label_is_another_fingerprint(mnist, name, at):
    config, raw = mnist
    before = fingerprint_images(config, 0, KEY)
    assert fingerprint_images(config, 0, KEY) == before
    load_dataset.cache_clear()
    assert fingerprint_images(config, 0, KEY) == before, "from the copy"
    content = bytearray((raw / name).read_bytes())
    content[at] ^= 1
    time.sleep(0.01)  # an age of its own
    (raw / name).write_bytes(content)
    load_dataset.cache_clear()
    assert fingerprint_images(config, 0, KEY) != before
    content[at] ^= 1
    time.sleep(0.01)
    (raw / name).write_bytes(content)
    load_dataset.cache_clear()
    assert fingerprint_images(config, 0, KEY) == before, "it is of the examples, not of their files"


def test_examples_from_the_copy_are_those_of_the_files(mnist):
    config, raw = mnist
    for _ in range(2):  # read, then mapped
        data = load_dataset.__wrapped__(config, 0)
        pixels = (raw / "train-images-idx3-ubyte").read_bytes()[16:]
        assert bytes(data.inputs.flatten().tolist()) == pixels
        assert data.targets.tolist() == [i % 10 for i in range(30)]
        assert data.valid_inputs.shape == (10, 1, 28, 28)


def test_who_is_held_out_is_part_of_the_fingerprint():
    held = ImageData(name="digits", validation="holdout")
    prints = {
        fingerprint_images(held, 0, KEY),
        fingerprint_images(held, 1, KEY),
        fingerprint_images(ImageData(name="digits"), 0, KEY),
    }
    assert len(prints) == 3
    assert fingerprint_images(held, 1, KEY) in prints


def test_fingerprint_needs_its_key():
    config = ImageData(name="digits")
    assert fingerprint_images(config, 0, KEY) != fingerprint_images(config, 0, b"another key" * 2)
