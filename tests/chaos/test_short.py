"""A killed worker and a locked database; every run has end_to_end/test_kills.py instead."""

import os
import signal
import sqlite3
import time

import pytest
from waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_killed_worker_and_a_locked_tracking_database_lose_nothing(sweep):
    it = sweep(trials=2, epochs=30, every=2)
    it.launch()
    number = it.wait_for_trial()
    tracking = sqlite3.connect(it.state.root / "mlflow.db", isolation_level=None)
    wait_for(lambda: locked(tracking), "a lock on MLflow's database")
    (worker,) = it.trainers(number)
    os.kill(worker, signal.SIGKILL)
    it.wait_for_more(number, time.monotonic())
    tracking.close()
    it.finish()
    it.check()


def locked(database):
    try:
        database.execute("begin exclusive")
    except sqlite3.OperationalError:
        return False
    return True
