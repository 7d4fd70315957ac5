"""Studies of made-up results, for figures and pages to show."""

import pytest

from dpsweep.config.sweep import load_sweep
from dpsweep.train.loop import train
from dpsweep.train.room import Room
from dpsweep.tune.study import Study


@pytest.fixture(scope="session")
def really_trained():
    """Given a sweep and its state: launches it, and trains its first trial; study and folder."""

    def made(sweep, state, *, void=False):
        folder = state.sweep(sweep.name)
        folder.create(sweep.file, sweep.base, None)
        study = Study.create(folder.storage_uri, sweep, folder.id)
        record = study.hand_out(study.ask(), void=void)
        room = Room(folder.room(record.number))
        room.make_secret()
        train(record.config, room, lambda row: study.report(record.number, row))
        room.forget()
        study.tell(record.number, "complete")
        return study, folder

    return made


@pytest.fixture
def study_of(tmp_path, sweep_file):
    """A study whose trials came to the given results, at two epochs each.

    A result is an accuracy, None for a failed trial, or ("pruned", accuracy). `repeats` are the
    accuracies of the repeats that confirm trials, in the order in which they are asked for.
    """

    def make(results, *settings, repeats=(), reason="it broke", name="study"):
        sweep = load_sweep(sweep_file, [f"budget.trials={max(1, len(results))}", *settings])
        study = Study.create(f"sqlite:///{tmp_path}/{name}.db", sweep)
        for result in results:
            end(study, study.ask(), result, reason)
        for result in repeats:
            end(study, study.ask_to_confirm(), result, reason)
        return study

    return make


def end(study, asked, result, reason):
    how, value = result if isinstance(result, tuple) else ("complete", result)
    if value is None:
        study.tell(asked.number, "failed", reason=reason)
        return
    for epoch in (1, 2):
        row = {
            "epoch": epoch,
            "step": 11 * epoch,
            "valid/accuracy": value - 0.1 * (2 - epoch),
            "valid/loss": 1 - value,
            "privacy/epsilon_spent": 3.99,
            "noise_multiplier": 1.07,
            "seconds": 10 * value,
        }
        study.report(asked.number, row)
    study.tell(asked.number, how)
