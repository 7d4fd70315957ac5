"""Studies on SQLite, and searches of made-up results through them."""

import pytest

from dpsweep.tune.study import Study


@pytest.fixture
def uri(tmp_path):
    return f"sqlite:///{tmp_path}/study.db"


@pytest.fixture
def search(tmp_path):
    """Runs `trials` trials of a sweep one at a time; a trial's accuracy is `judge(record)`.

    With `reopen`, each is asked for by a study that was just opened.
    """

    def run(sweep, trials, judge, *, name="study", reopen=False):
        uri = f"sqlite:///{tmp_path}/{name}.db"
        study = Study.create(uri, sweep)
        for _ in range(trials):
            study = Study.open(uri, sweep) if reopen else study
            finish(study, study.ask(), judge)
        return study

    return run


def finish(study, record, judge):
    """Reports a made-up result of a running trial, and ends it."""
    row = {
        "epoch": 1,
        "step": 11,
        "valid/accuracy": judge(record),
        "valid/loss": 1.0,
        "noise_multiplier": 1.2,
        "privacy/epsilon_spent": 1.0,
        "seconds": 0.5,
    }
    study.report(record.number, row)
    if study.sweep.config.stop.name != "none":
        study.should_prune(record.number)  # notes the rung that the trial has reached
    return study.tell(record.number, "complete")
