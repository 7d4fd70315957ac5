"""Nothing that was spooled is lost, whatever the server does."""

import json
import os
import threading
import time

import pytest
from waiting import CEILING_SECONDS, wait_for

from dpsweep.core.errors import DiskFull
from dpsweep.tracking.spool import Backlog, DeliveryThread, Spool, Undeliverable, read_backlog
from dpsweep.tracking.tracker import Tracker


class Server:
    """A tracking server that can be away, and that refuses some events for good."""

    def __init__(self, away=0, refuses=()):
        self.away, self.refuses = away, refuses
        self.took, self.calls = [], 0
        self.lock = threading.Lock()

    def __call__(self, events):
        with self.lock:
            self.calls += 1
            if self.away:
                self.away -= 1
                raise ConnectionError("away")
            bad = [e for e in events if e["n"] in self.refuses]
            if bad:
                raise Undeliverable(f"event {bad[0]['n']} is wrong")
            self.took += [e["n"] for e in events]


def deliver(folder, server, count=0, start=0, timeout=CEILING_SECONDS):
    spool = Spool(folder)
    for n in range(start, start + count):
        spool.append({"n": n})
    delivery = DeliveryThread(spool, server)
    delivery.start()
    return delivery.close(timeout), spool


def test_events_arrive_in_order_and_in_few_calls(tmp_path):
    server = Server()
    done, _ = deliver(tmp_path, server, 500)
    assert done
    assert server.took == list(range(500))
    assert server.calls <= 2


def test_a_server_that_is_away_for_a_while_misses_nothing(tmp_path):
    server = Server(away=2)
    done, _ = deliver(tmp_path, server, 10)
    assert done
    assert server.took == list(range(10))


def test_what_a_dead_driver_left_is_delivered_by_the_next(tmp_path):
    done, spool = deliver(tmp_path, Server(away=10**6), 10, timeout=0.1)
    assert not done
    assert not spool.is_empty()
    with (tmp_path / "spool.jsonl").open("a") as file:
        file.write('{"n": 10')  # killed in the middle of a line
    server = Server()
    done, _ = deliver(tmp_path, server, 2, start=11)
    assert done
    assert server.took == [*range(10), 11, 12]


def test_an_event_that_is_refused_for_good_is_put_aside_and_the_rest_arrives(tmp_path):
    server = Server(refuses=[3])
    done, spool = deliver(tmp_path, server, 6)
    assert done
    assert server.took == [0, 1, 2, 4, 5]
    assert spool.count_refused() == 1
    line = json.loads((tmp_path / "spool.refused.jsonl").read_text())
    assert line == {"reason": "event 3 is wrong", "event": {"n": 3}}


def test_appending_never_waits_for_the_server(tmp_path):
    stuck = threading.Event()
    delivery = DeliveryThread(
        spool := Spool(tmp_path), lambda _: stuck.wait(CEILING_SECONDS) and None
    )
    delivery.start()
    for n in range(100):
        spool.append({"n": n})
    assert len((tmp_path / "spool.jsonl").read_text().splitlines()) == 100
    stuck.set()
    assert delivery.close(CEILING_SECONDS)


def test_what_is_appended_while_the_thread_looks_is_delivered_before_it_ends(tmp_path):
    looked, appended = threading.Event(), threading.Event()

    class SlowSpool(Spool):
        def is_empty(self):
            answer = super().is_empty()
            if not looked.is_set():  # the thread's first look, at an empty file
                looked.set()
                assert appended.wait(CEILING_SECONDS)
            return answer

    server = Server()
    delivery = DeliveryThread(spool := SlowSpool(tmp_path), server)
    delivery.start()
    assert looked.wait(CEILING_SECONDS)
    spool.append({"n": 0})
    closing = threading.Thread(target=delivery.close, args=[CEILING_SECONDS])
    closing.start()
    assert delivery._closing.wait(CEILING_SECONDS)
    appended.set()
    closing.join(CEILING_SECONDS)
    assert server.took == [0]
    assert spool.is_empty()


def test_closing_wakes_a_thread_that_leaves_a_server_in_trouble_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("dpsweep.tracking.spool._COALESCE_SECONDS", CEILING_SECONDS)
    monkeypatch.setattr("dpsweep.tracking.spool._LONGEST_PAUSE_SECONDS", CEILING_SECONDS)
    server = Server(away=1)
    spool = Spool(tmp_path)
    spool.append({"n": 0})
    delivery = DeliveryThread(spool, server)
    delivery.start()
    wait_for(lambda: delivery.trouble, "trouble")
    start = time.monotonic()
    assert delivery.close(CEILING_SECONDS)
    assert time.monotonic() - start < CEILING_SECONDS / 2
    assert server.took == [0]


@pytest.mark.parametrize("delivered", [0, 3])
def test_the_position_survives(tmp_path, delivered):
    spool = Spool(tmp_path)
    for n in range(delivered):
        spool.append({"n": n})
    spool.mark_delivered(spool.waiting()[1])
    assert Spool(tmp_path).is_empty()


def test_a_spool_that_was_delivered_is_emptied_when_its_delivery_closes(tmp_path):
    server = Server()
    done, _ = deliver(tmp_path, server, 10)
    assert done
    assert (tmp_path / "spool.jsonl").stat().st_size == 0
    done, spool = deliver(tmp_path, server, 3, start=10)
    assert done
    assert spool.is_empty()
    assert server.took == list(range(13))


def test_a_spool_with_something_left_is_not_cut(tmp_path):
    done, spool = deliver(tmp_path, Server(away=10**6), 3, timeout=0.1)
    assert not done
    spool.truncate_delivered()
    assert read_backlog(tmp_path).waiting == 3


def test_a_crash_between_mark_and_cut_delivers_twice_rather_than_never(tmp_path, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    deliver(tmp_path, Server(away=10**6), 3, timeout=0.1)
    spool = Spool(tmp_path)
    spool.mark_delivered(spool.waiting()[1])
    monkeypatch.setattr("os.truncate", crash)
    with pytest.raises(KeyboardInterrupt):
        spool.truncate_delivered()
    monkeypatch.undo()
    server = Server()
    deliver(tmp_path, server, 1, start=3)
    assert server.took == [0, 1, 2, 3]


@pytest.mark.parametrize("mark", ["", "99999"])
def test_a_mark_that_cannot_be_right_delivers_everything_again(tmp_path, mark):
    deliver(tmp_path, Server(away=10**6), 3, timeout=0.1)
    (tmp_path / "spool.delivered").write_text(mark)
    server = Server()
    deliver(tmp_path, server)
    assert server.took == [0, 1, 2]


def test_whoever_flushes_waits_for_delivery_but_not_for_a_server_that_is_away_or_silent(tmp_path):
    server = Server()
    delivery = DeliveryThread(spool := Spool(tmp_path / "up"), server)
    spool.append({"n": 0})
    delivery.start()
    assert delivery.flush(CEILING_SECONDS)
    assert server.took == [0]
    delivery = DeliveryThread(spool := Spool(tmp_path / "away"), Server(away=10**6))
    spool.append({"n": 0})
    delivery.start()
    assert not delivery.flush(10**6)
    assert delivery.trouble == "ConnectionError: away"
    stuck = threading.Event()
    spool = Spool(tmp_path / "silent")
    delivery = DeliveryThread(spool, lambda _: stuck.wait(CEILING_SECONDS) and None)
    spool.append({"n": 0})
    delivery.start()
    assert not delivery.flush(0.1)
    stuck.set()


def test_what_is_refused_again_is_put_aside_once(tmp_path):
    for _ in range(2):
        _, spool = deliver(tmp_path, Server(refuses=[0]), 1)
    assert spool.count_refused() == 1
    assert read_backlog(tmp_path).reason == "event 0 is wrong"


def test_looking_at_a_spool_changes_nothing(tmp_path):
    assert read_backlog(tmp_path / "none") == Backlog(0, 0, 0, None)
    deliver(tmp_path, Server(away=10**6), 3, timeout=0.1)
    with (tmp_path / "spool.jsonl").open("a") as file:
        file.write('{"n": 3')  # the driver is writing this
    before = (tmp_path / "spool.jsonl").read_bytes()
    assert read_backlog(tmp_path) == Backlog(3, 0, 0, None)
    assert (tmp_path / "spool.jsonl").read_bytes() == before


def test_an_event_that_found_no_room_leaves_no_trace(tmp_path, monkeypatch):
    spool = Spool(tmp_path)
    spool.append({"n": 0})
    write = os.write
    monkeypatch.setattr("os.write", lambda file, line: write(file, line[:5]))  # the disk is full
    with pytest.raises(DiskFull, match=r"the disk is full: .* are free"):
        spool.append({"n": 1})
    monkeypatch.undo()
    spool.append({"n": 2})
    assert [event["n"] for event in spool.waiting()[0]] == [0, 2]


def test_people_are_told_what_was_refused(tmp_path):
    tracker = Tracker(tmp_path, Server())
    assert tracker.refused is None
    tracker.spool.refuse({"n": 1}, "wrong")
    tracker.close(CEILING_SECONDS)
    assert tracker.refused.startswith("the tracking server refused 1 entries for good; they are in")
    assert tracker.refused.endswith("spool.refused.jsonl, each with its reason")
