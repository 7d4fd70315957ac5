"""Weights of the best trials stay on disk, those of the others go as soon as they are beaten."""

from collections import defaultdict

from dpsweep.core.types import Row
from dpsweep.search.confirmation import get_group
from dpsweep.search.trial_record import Record
from dpsweep.store.state_dir import SweepFolder
from dpsweep.store.study import Study
from dpsweep.training.trial_dir import TrialDir, delete_weights_except


class BestWeights:
    """A watcher that keeps the weights of the `count` best trials, of each epsilon.

    And of each method, where the best of each method are confirmed. Where the config is chosen by
    posterior mean once the search has ended, the better half of the trials keep theirs until then,
    and the default: the chosen one may not be among the first few as observed.

    Repeats of a chosen config leave none: their figures are what they are run for. The weights of a
    final run are what the whole sweep is for, and stay.
    """

    def __init__(self, study: Study, folder: SweepFolder, count: int) -> None:
        self._folder, self._study, self._last = folder, study, count
        chosen = any(r.expected is not None or r.margin is not None for r in study.records())
        wide = study.sweep.chooses_by_posterior and not chosen
        self._count = max(count, study.sweep.config.budget.trials // 2) if wide else count
        self._keeps_default = wide and study.sweep.starts_at_default
        self._sign = study.sweep.config.objective.sign
        self._confirm = study.sweep.config.confirm
        self._kept: dict[object, list[tuple[float, int]]] = defaultdict(list)
        for record in study.best():
            self._add(record)
        self._keep([n for kept in self._kept.values() for _, n in kept])

    def finish(self) -> None:
        """Keep those of the best trials alone, as they were chosen; the search has ended."""
        kept: dict[object, list[int]] = defaultdict(list)
        for record in self._study.best():
            kept[get_group(record, self._confirm)].append(record.number)
        self._keep([n for numbers in kept.values() for n in numbers[: self._last]])

    def _keep(self, numbers: list[int]) -> None:
        delete_weights_except(self._folder.path / "trials", numbers)

    def on_trial_start(self, record: Record) -> None:
        """Nothing yet."""

    def on_trial_report(self, record: Record, row: Row) -> None:
        """Nothing yet."""

    def on_trial_end(self, record: Record) -> None:
        """Keep its weights, if it is among the best, instead of the least of those."""
        for number in self._add(record):
            TrialDir(self._folder.trial_dir(number)).weights.unlink(missing_ok=True)

    def _add(self, record: Record) -> list[int]:
        """Take a trial in, and say whose weights are to go."""
        if record.final and record.state == "complete":
            self._kept["final"] = [(0.0, record.number)]
            return []
        if record.confirms is not None or record.state != "complete" or record.value is None:
            return [record.number]
        if self._keeps_default and record.number == 0:  # whatever its result, it may be chosen
            self._kept["default"] = [(0.0, 0)]
            return []
        kept = self._kept[get_group(record, self._confirm)]
        entry = (self._sign * record.ranking_value, record.number)
        if entry not in kept:  # after a crash it may end twice
            kept.append(entry)
        kept.sort()
        gone = [number for _, number in kept[self._count :]]
        del kept[self._count :]
        return gone
