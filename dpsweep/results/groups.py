"""Groups that `compare` compares: the trials of one sweep with one method at one epsilon."""

from dataclasses import dataclass
from statistics import mean

from dpsweep.config.keys import METHOD_NAME
from dpsweep.config.source import Tree
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.core.errors import StateError
from dpsweep.privacy.statement import SearchSpending
from dpsweep.results.disclosure import disclosure_of
from dpsweep.results.importance import LEAST_TRIALS, importances
from dpsweep.results.significance import half_width
from dpsweep.search.confirmation import list_repeats, summarize_repeats
from dpsweep.search.ranking import rank_best, surrogates
from dpsweep.search.surrogate import SelectionBias
from dpsweep.search.trial_record import Record
from dpsweep.store.statement import compute_spending
from dpsweep.store.study import Study

PrivacyTarget = tuple[float | None, str, float | None]
"""Epsilon (None where noise is given), its scope, and the noise multiplier that was given."""

_PLACES = ("root",)
"""Keys of the data that may differ between machines."""


@dataclass(frozen=True)
class TrialGroup:
    """The trials of one sweep with one method at one epsilon."""

    label: str  # what it is called beside the others
    sweep: str
    folder: str  # the state folder of that
    method: str  # the method, or what the search calls it
    target: PrivacyTarget  # what each of its trials keeps
    delta: float  # failure probability of a trial
    metric: str  # what trials are judged by
    sign: int  # -1 if large values of it are good, 1 if small ones are
    data: Tree  # the data section, without what differs between machines
    model: Tree  # the model section, without what was searched in it
    epochs: tuple[float, float]  # lengths of its trials, fewest and most
    searched: tuple[str, ...]  # dotted keys that varied
    accounting: str  # how its sweep is charged
    trials: int | None  # trials of the search that were started; None if that is secret
    # its best complete trial, by the repeats if there are any; None without one
    best: Record | None
    # public seed and objective of each complete repeat of that
    repeats: tuple[tuple[int, float], ...]
    num_failed: int  # repeats of it that failed
    num_confirmed: int  # configs that were repeated, of which that is the best
    shares: dict[str, float]  # which keys decided the result: dotted key -> share
    remarks: tuple[str, ...]  # what a reader has to know of it
    spending: SearchSpending  # of its whole sweep
    # what chance does in such a search; None with few complete trials
    selection_bias: SelectionBias | None = None

    @property
    def values(self) -> list[float]:
        """Objectives of its repeats."""
        return [value for _, value in self.repeats]

    @property
    def mean(self) -> float | None:
        """Of its repeats; None without any."""
        return mean(self.values) if self.repeats else None

    @property
    def half(self) -> float | None:
        """Half the 95 % confidence interval of the mean; None for fewer than two repeats."""
        return half_width(self.values)


def groups_of(study: Study, folder: str, *, driven: bool = False) -> list[TrialGroup]:
    """The groups of one sweep.

    Args:
        folder: The state folder it is in.
        driven: True while a process runs it.

    Raises:
        StateError: If it has no trial yet.
    """
    records = study.records()
    if not records:
        raise StateError(
            f"sweep {study.sweep.name!r} in {folder} has no trial yet. See: dpsweep status"
        )
    remarks = _remarks(study, driven=driven)
    explored = [record for record in records if not record.final]
    if study.sweep.explores and len({_method(record) for record in explored}) > 1:
        # The final run has one method and far less noise: beside the others' it says nothing.
        remarks += ("compares exploring trials, as only one method has a final run",)
        records = explored
    split: dict[tuple[PrivacyTarget, str], list[Record]] = {}
    for record in records:
        split.setdefault((_get_target(study, record), _method(record)), []).append(record)
    spending = compute_spending(study)
    return [
        _make_group(study, folder, *key, found, remarks, spending) for key, found in split.items()
    ]


def _get_target(study: Study, record: Record) -> PrivacyTarget:
    whole, privacy = study.sweep.search_budget, record.config.privacy
    if whole:
        return whole.epsilon, "sweep", None
    return privacy.epsilon, "trial", privacy.noise_multiplier


def _method(record: Record) -> str:
    return str(record.hyperparams.get(METHOD_NAME, record.config.method.name))


def _make_group(
    study: Study,
    folder: str,
    target: PrivacyTarget,
    method: str,
    records: list[Record],
    remarks: tuple[str, ...],
    spending: SearchSpending,
) -> TrialGroup:
    objective = study.sweep.config.objective
    trials = [r for r in records if r.confirms is None]
    confirmed = summarize_repeats(records)
    best = next(iter(rank_best(records, objective.sign)), None)
    epochs = [r.config.train.epochs for r in records]
    data = records[0].config.data.model_dump(mode="json", exclude_none=True)
    named = records[0].config.data.name not in ("folder", "npz")
    return TrialGroup(
        label=method,
        sweep=study.sweep.name,
        folder=folder,
        method=method,
        target=target,
        delta=records[0].config.delta,
        metric=objective.metric,
        sign=objective.sign,
        data={k: v for k, v in data.items() if not (named and k in _PLACES)},
        model=_get_common_settings(
            [r.config.model.model_dump(mode="json", exclude_none=True) for r in records]
        ),
        epochs=(min(epochs), max(epochs)),
        searched=tuple(dict.fromkeys(key for r in trials for key in r.hyperparams)),
        accounting=study.sweep.config.accounting,
        trials=disclosure_of(study.sweep).num_trials(len(trials)),
        best=best,
        repeats=list_repeats(best, records) if best else (),
        num_failed=confirmed[best.number].num_failed if best and best.number in confirmed else 0,
        num_confirmed=len(confirmed),
        shares={i.key: i.share for i in importances(study.restrict_to({r.number for r in trials}))},
        remarks=remarks,
        spending=spending,
        selection_bias=_estimate_selection_bias(study.sweep, trials, best),
    )


def _estimate_selection_bias(
    sweep: ResolvedSweep, trials: list[Record], best: Record | None
) -> SelectionBias | None:
    """Estimate the selection bias of a search like that of trials of one method and epsilon."""
    processes = surrogates(sweep, trials, LEAST_TRIALS)
    by_posterior = best is not None and best.expected is not None
    return next(
        (one.estimate_selection_bias(by_posterior=by_posterior) for one in processes.values()), None
    )


def _get_common_settings(trees: list[Tree]) -> Tree:
    """Get the settings that all of them share."""
    first, *others = trees
    return {k: v for k, v in first.items() if all(tree.get(k) == v for tree in others)}


def _remarks(study: Study, *, driven: bool) -> tuple[str, ...]:
    """List the caveats of a sweep's results."""
    sweep, found = study.sweep, list[str]()
    if study.is_void:
        found.append("void: a trial used a test seed, so no privacy statement holds")
    found += disclosure_of(sweep).remarks(study, driven=driven)
    if dropped := study.num_dropped():
        found.append(f"its time was up with {dropped} trials left, which are not run")
    if study.warm_start:
        found.append(f"began from what {', '.join(study.warm_start['sweeps'])} had found")
    return tuple(found)
