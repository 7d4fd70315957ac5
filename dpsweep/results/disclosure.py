"""Limits on what is told of a search: every trial, or, of a private selection, the winner alone."""

from dpsweep.config.sweep import ResolvedSweep
from dpsweep.execution.changes import describe_second_sweep, may_add_trials
from dpsweep.results.tables import num_trials_and_repeats, run_words
from dpsweep.search.trial_record import Record
from dpsweep.store.study import Study


class Disclosure:
    """Texts on a search for screen, page and commands, where every trial is charged and told."""

    tells_trials = True  # each trial may be shown while the search runs
    no_figures = "There are too few results to draw anything."

    def num_trials(self, count: int) -> int | None:
        """Return the number of trials that is told; None if it is a secret."""
        return count

    def describe_chance(self, record: Record, metric: str, num_trials: int) -> str:
        """Say what the winner's figure is worth, of which there are no repeats."""
        if num_trials == 1:
            return f"{metric} is that of one run; another would come out otherwise."
        if record.margin is not None:
            return (
                f"{metric} is that of one run of the default, of which none of {num_trials} trials "
                f"is clearly ahead; another would come out otherwise."
            )
        if record.expected is not None:
            return (
                f"{metric} is that of one run, and part of it is chance: by all trials together "
                f"its config comes to {record.expected:.4f}. To measure that with fresh noise, "
                f"write confirm: {{seeds: 5}} in the sweep file."
            )
        return (
            f"{metric} is that of the best of {num_trials} trials, run once: part of it is chance. "
            f"To repeat the best config with fresh noise, write confirm: {{seeds: 5}} in the "
            f"sweep file."
        )

    def describe_nothing(self, study: Study, name: str) -> str:
        """Say why there is no result yet; the user calls the sweep `name`."""
        return f"sweep {name!r} has no complete trial yet. See: dpsweep status {name}"

    def describe_failures(self, study: Study) -> str:
        """Say how trials of a sweep without a result failed; begins with a colon, or is empty."""
        failed = [record for record in study.records() if record.state == "failed"]
        if not failed:
            return ""
        return f": {len(failed)} failed, the last one with: {failed[-1].reason}"

    def describe_rest(self, study: Study) -> str:
        """Say what a sweep that is resumed has done and has still to do."""
        name, ended = study.sweep.name, (r for r in study.records() if r.state != "running")
        explores = study.sweep.explores
        ran = run_words(*num_trials_and_repeats(ended), explores=explores)
        if not study.is_finished():
            return (
                f"{name}: {ran} finished, {len(study.running())} to continue, "
                f"{run_words(study.num_to_ask(), study.num_to_confirm(), explores=explores)} to run"
            )
        more = f"launch its file as {describe_second_sweep(study.sweep)}"
        if may_add_trials(study.sweep):
            trials = study.sweep.config.budget.trials
            more = f"type: dpsweep resume {name} --trials {2 * trials}"
        return (
            f"{name}: is finished, with {ran}; results are delivered again. For more trials {more}"
        )

    def remarks(self, study: Study, *, driven: bool) -> list[str]:
        """List what a reader must know of an unfinished search before its figures are believed."""
        if study.is_finished():
            return []
        state = "still runs" if driven else "was stopped before its end"
        left = run_words(study.num_to_ask(), study.num_to_confirm(), explores=study.sweep.explores)
        return [f"{state}: {left} are left"]


class TellsWinner(Disclosure):
    """Of a private selection: how many trials there were, and how they did, is a secret."""

    tells_trials = False
    no_figures = (
        "This was a private selection: only the winner is told of. Figures would show the trials "
        "that lost, and with them what the guarantee keeps secret, so there are none."
    )

    def num_trials(self, count: int) -> int | None:
        return None

    def describe_chance(self, record: Record, metric: str, num_trials: int) -> str:
        return f"{metric} is that of the winner of a private selection: part of it is chance."

    def describe_nothing(self, study: Study, name: str) -> str:
        if study.is_finished():
            return super().describe_nothing(study, name)
        return (
            f"sweep {name!r} is a private selection, of which nothing is told before its end. "
            f"Go on with: dpsweep resume {name}"
        )

    def describe_failures(self, study: Study) -> str:
        return ""

    def describe_rest(self, study: Study) -> str:
        if study.is_finished():
            return super().describe_rest(study)
        return f"{study.sweep.name}: goes on; nothing is told before its end"

    def remarks(self, study: Study, *, driven: bool) -> list[str]:
        return ["a private selection: only its winner is told, and nothing was repeated"]


def disclosure_of(sweep: ResolvedSweep) -> Disclosure:
    """Return what may be told of a sweep."""
    return TellsWinner() if sweep.is_private_selection else Disclosure()
