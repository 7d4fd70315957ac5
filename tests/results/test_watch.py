"""Another terminal sees a sweep as its driver goes on, and never writes."""

import io

from rich.console import Console

from dpsweep.results.watch import Watch, followed
from dpsweep.store.lease import LeaseHolder

DRIVER = LeaseHolder("host", 7, 0.0)


class Told:
    """A console in a pipe, and who drives the sweep."""

    def __init__(self):
        self.out, self.owner = io.StringIO(), DRIVER
        self.console = Console(file=self.out, width=120, highlight=False)

    def lines(self):
        return self.out.getvalue().splitlines()


def test_a_pipe_gets_a_line_for_each_trial_that_ends_and_an_end(study_of):
    study, told = study_of([0.5], "budget.trials=3"), Told()
    paused = []

    def pause():
        paused.append(1)
        if len(paused) == 1:
            asked = study.ask()
            row = {"epoch": 2, "valid/accuracy": 0.7, "valid/loss": 1.0, "seconds": 1.0}
            study.report(asked.number, row | {"privacy/epsilon_spent": 3.9})
            study.tell(asked.number, "complete")
        else:
            told.owner = None
        return False

    followed(Watch(study, lambda: told.owner, told.console), pause)
    lines = told.lines()
    assert lines[0].startswith("tiny: 1/3 trials, 0 running, best 0.5000 (trial 0), ε 4 a trial")
    assert lines[1].startswith("trial 1 complete: valid/accuracy 0.7000, κ=")
    assert lines[2].startswith("tiny: 2/3 trials, 0 running, best 0.7000 (trial 1)")
    assert lines[3] == "tiny is not driven by anybody. Go on with: dpsweep resume tiny"


def test_a_finished_sweep_is_said_to_be_finished_at_once(study_of):
    told = Told()
    told.owner = None
    followed(Watch(study_of([0.5, 0.6]), lambda: told.owner, told.console), lambda: 1 / 0)
    assert "tiny is finished. See: dpsweep best tiny" in told.lines()[-1]


def test_leaving_says_nothing_about_an_end(study_of):
    told = Told()
    followed(Watch(study_of([0.5]), lambda: told.owner, told.console), lambda: True)
    assert len(told.lines()) == 1


def test_of_a_private_selection_only_that_it_runs(study_of):
    secret = ("accounting=private_selection", "sampler={name: random}", "pruner={name: none}")
    study, told = study_of([], *secret), Told()
    watch = Watch(study, lambda: told.owner, told.console)
    followed(watch, lambda: True)
    told.console.print(watch)
    runs = "tiny: runs; a private selection tells nothing before its end"
    assert told.lines() == [runs, runs]


def test_the_panel_shows_what_runs_and_what_ended(study_of):
    study, told = study_of([0.5, None], "budget.trials=3"), Told()
    study.ask()
    watch = Watch(study, lambda: told.owner, told.console)
    watch.look()
    told.console.print(watch)
    shown = told.out.getvalue()
    assert "driven by process 7 on host" in shown
    assert "failed" in shown
    assert "0/2" in shown
