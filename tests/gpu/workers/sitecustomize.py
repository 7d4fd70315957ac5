"""Gives Ray's workers the virtual cards that their CUDA_VISIBLE_DEVICES names.

On the path of a `ray start`, whose workers inherit it. Each trial leaves a note of what it had in
DPSWEEP_TEST_NOTES, and waits for the others there: trials that share a card are to run at once.
"""

import contextlib
import functools
import importlib.machinery
import json
import os
import sys
import time
from pathlib import Path

_WAIT_SECONDS = 120.0
_cards, _ledger = contextlib.ExitStack(), []


def _give_cards(_):
    if _ledger:
        return
    import torch
    from virtual import virtual_gpu

    def count():
        return len(list(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))))

    _ledger.append(_cards.enter_context(virtual_gpu()))
    torch.cuda.device_count = count
    torch.cuda.is_available = lambda: count() > 0


def _note_trials(worker):
    _give_cards(worker)
    train, notes = worker.train, Path(os.environ["DPSWEEP_TEST_NOTES"])

    @functools.wraps(train)
    def noted(config, *args):
        mine = notes / f"{os.getpid()}.json"
        mine.write_text("")
        until = time.monotonic() + _WAIT_SECONDS
        while len(list(notes.iterdir())) < int(os.environ["DPSWEEP_TEST_TRIALS"]):
            assert time.monotonic() < until, "the other trials have not begun"
            time.sleep(0.1)
        with _ledger[0].enter_thread():  # a thread of Ray Tune's
            found = train(config, *args)
        ledger = _ledger[0]
        what = {
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "fractions": list(ledger.fractions.values()),
            "launches": ledger.launches.total(),
            "mixed": ledger.mixed,
        }
        mine.write_text(json.dumps(what))
        return found

    worker.train = noted


_AFTER = {
    "dpsweep.cluster.nodes": _give_cards,
    "dpsweep.training.release_check": _give_cards,
    "dpsweep.execution.worker": _note_trials,
}


class _AfterImport(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name in _AFTER else None
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _AFTER[name](module)

        spec.loader.exec_module = exec_module
        return spec


if "DPSWEEP_TEST_NOTES" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))
    sys.meta_path.insert(0, _AfterImport)
