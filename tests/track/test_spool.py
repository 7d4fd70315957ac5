"""Nothing that was spooled is lost, whatever the server does."""

import json
import threading

import pytest

from dpsweep.track.spool import Courier, Spool, Undeliverable


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


def deliver(folder, server, count=0, start=0, timeout=30):
    spool = Spool(folder)
    for n in range(start, start + count):
        spool.append({"n": n})
    courier = Courier(spool, server)
    courier.start()
    return courier.close(timeout), spool


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
    done, spool = deliver(tmp_path, Server(away=10**6), 10, timeout=1)
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
    assert spool.refused() == 1
    line = json.loads((tmp_path / "spool.refused.jsonl").read_text())
    assert line == {"reason": "event 3 is wrong", "event": {"n": 3}}


def test_appending_never_waits_for_the_server(tmp_path):
    stuck = threading.Event()
    courier = Courier(spool := Spool(tmp_path), lambda _: stuck.wait(20) and None)
    courier.start()
    for n in range(100):
        spool.append({"n": n})
    assert len((tmp_path / "spool.jsonl").read_text().splitlines()) == 100
    stuck.set()
    assert courier.close(10)


@pytest.mark.parametrize("delivered", [0, 3])
def test_the_position_survives(tmp_path, delivered):
    spool = Spool(tmp_path)
    for n in range(delivered):
        spool.append({"n": n})
    spool.delivered_to(spool.waiting()[1])
    assert Spool(tmp_path).is_empty()
