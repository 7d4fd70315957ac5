"""The driver's screen and another terminal show a sweep alike, and neither writes."""

import io

from rich.console import Console

from dpsweep.results.live import LiveView, follow_sweep
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

    follow_sweep(LiveView(study, told.console, lambda: told.owner), pause)
    lines = told.lines()
    assert lines[0].startswith("tiny: 1/3 trials, 0 running, best 0.5000 (trial 0), ε 4 a trial")
    assert lines[1].startswith("[2/3] trial 1 complete: accuracy 0.7000, κ=")
    assert lines[2].startswith("tiny: 2/3 trials, 0 running, best 0.7000 (trial 1)")
    assert lines[3] == "tiny is not driven by anybody. Go on with: dpsweep resume tiny"


def test_a_finished_sweep_is_said_to_be_finished_at_once(study_of):
    told = Told()
    told.owner = None
    follow_sweep(LiveView(study_of([0.5, 0.6]), told.console, lambda: told.owner), lambda: 1 / 0)
    assert "tiny is finished. See: dpsweep best tiny" in told.lines()[-1]


def test_leaving_says_nothing_about_an_end(study_of):
    told = Told()
    follow_sweep(LiveView(study_of([0.5]), told.console, lambda: told.owner), lambda: True)
    assert len(told.lines()) == 1


def test_of_a_private_selection_only_that_it_runs(study_of):
    secret = ("accounting=private_selection", "sampler={name: random}", "pruner={name: none}")
    study, told = study_of([], *secret), Told()
    watch = LiveView(study, told.console, lambda: told.owner)
    follow_sweep(watch, lambda: True)
    told.console.print(watch)
    runs = "tiny: runs; a private selection tells nothing before its end"
    assert told.lines() == [runs, runs]


def test_the_panel_shows_what_runs_and_what_ended(study_of):
    study, told = study_of([0.5, None], "budget.trials=3"), Told()
    study.ask()
    watch = LiveView(study, told.console, lambda: told.owner)
    watch.look()
    told.console.print(watch)
    shown = told.out.getvalue()
    assert "driven by process 7 on host" in shown
    assert "failed" in shown
    assert "0/2" in shown
    (header,) = (line for line in shown.splitlines() if "epoch" in line)
    assert header.lstrip().startswith("trial"), "the bar has a line of its own"


def test_the_drivers_screen_and_another_terminal_say_the_same(study_of):
    """One is told of events, the other reads the study."""
    study, here, there = study_of([0.5], "budget.trials=3"), Told(), Told()
    mine = LiveView(study, here.console)
    theirs = LiveView(study, there.console, lambda: there.owner)
    for accuracy in (0.7, 0.6):
        asked = study.ask()
        mine.on_trial_start(asked)
        row = {"epoch": 2, "valid/accuracy": accuracy, "valid/loss": 1.0, "seconds": 1.0}
        row |= {"privacy/epsilon_spent": 3.9}
        study.report(asked.number, row)
        mine.on_trial_report(study.record(asked.number), row)
        assert theirs.look()
        assert mine.summary() == theirs.summary()
        mine.on_trial_end(study.tell(asked.number, "complete"))
        theirs.look()
        theirs.print_lines()
    assert here.lines() == there.lines()
    assert [line.split(":")[0] for line in here.lines()] == [
        "[2/3] trial 1 complete",
        "[3/3] trial 2 complete",
    ]


def test_a_private_selections_own_driver_shows_no_more_than_that_it_runs(study_of):
    secret = ("accounting=private_selection", "sampler={name: random}", "pruner={name: none}")
    told = Told()
    view = LiveView(study_of([], *secret), told.console)
    told.console.print(view)
    assert told.lines() == ["tiny: runs; a private selection tells nothing before its end"]


def test_one_estimate_of_the_time_left_and_a_bar_for_both_who_look(study_of):
    """Of 5 trials of 60 s each, one has ended and one is half through: 210 s of work are left."""
    study, told = study_of([6.0], "budget.trials=5"), Told()
    told.console = Console(file=told.out, width=80, highlight=False)
    asked = study.ask()
    row = {"epoch": 1, "valid/accuracy": 0.5, "valid/loss": 1.0, "seconds": 30.0}
    study.report(asked.number, row | {"privacy/epsilon_spent": 3.9})
    mine = LiveView(study, told.console)
    theirs = LiveView(study, told.console, lambda: told.owner)
    assert mine.summary() == theirs.summary()
    assert mine.summary().endswith("a trial, about 4 min left")
    bars = [
        next(one for one in view.__rich__().renderables if hasattr(one, "completed"))
        for view in (mine, theirs)
    ]
    assert [(bar.completed, bar.total) for bar in bars] == [(1.5, 5)] * 2
    told.console.print(mine)
    assert all(len(line) <= 80 for line in told.lines())
    told.owner = None
    theirs.look()
    assert "left" not in theirs.summary(), "nobody works on it"
