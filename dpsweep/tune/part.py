"""Some trials of a study, as if they were all of it."""

from collections.abc import Collection

from dpsweep.tune.study import Study
from dpsweep.tune.view import View


def among(study: Study, numbers: Collection[int]) -> Study:
    """The study with the numbered trials alone, to read: one method's, say, at one epsilon."""
    trials = study._study.get_trials(deepcopy=False)
    return Study(View(study._study, [t for t in trials if t.number in numbers]), study.sweep)
