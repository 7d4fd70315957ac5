"""Proposal of the next trial: drawn until every condition of the sweep holds, and only then stored.

A proposal follows from the sweep's seed, the trial's place among the trials of the search, and
the trials before it; nothing is stored until it is made. So a driver that dies on the way leaves
no trace, and the next one makes the same proposal. That holds to the letter where one trial runs
at a time. Where several do, what is proposed also depends on which of them have ended.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from dpsweep.compat import contains, restrict_study, sobol_point
from dpsweep.config.search import SamplerConfig
from dpsweep.config.space.domains import Draw, Labels, Range, Slot
from dpsweep.config.space.suggest import InTurn, PartialFixedDraw, Point, RoundRobin
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import ConfigError
from dpsweep.core.seeds import derive_public_seed
from dpsweep.search.distributions import make_distribution, make_distributions, make_sampler
from dpsweep.search.quasi_random import QuasiRandomDraw
from dpsweep.search.study_view import AttributeBuffer, list_comparable_trials, list_search_trials
from dpsweep.search.trial_record import make_attributes

_ATTEMPTS = {"gp": 4}
_MOST_ATTEMPTS = 200
"""Proposals a sampler may make; gp, which is slow and insists, fewer. Then random points.

As many quasi-random draws may be passed over."""

_RANDOM_ATTEMPTS = 1000

_QUASI_RANDOM_ROUNDS = 4
"""First trials of every method and budget that goes in turn, which are drawn evenly: what a sampler
has learned from other methods says nothing about a method's own keys."""

_INDEX = "dpsweep:sobol"
_KEPT_ATTRIBUTES = (_INDEX, "cma:")
"""Notes of samplers that later trials need, by how they begin."""


@dataclass(frozen=True)
class Proposal:
    """Hyperparameters of a trial that is to run."""

    config: TrialConfig
    hyperparams: Mapping[str, Any]  # what was searched, by dotted key of the config
    params: Mapping[str, Any]  # the same without what follows from it, by name in the study
    ways: Mapping[str, BaseDistribution]  # how each of `params` varies
    notes: Mapping[str, Any]  # system attributes that the sampler reads again later

    def trial(self) -> FrozenTrial:
        """A running trial with all of it, for the storage to take in at once."""
        return optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=dict(self.params),
            distributions=dict(self.ways),
            user_attrs=make_attributes(self.config, self.hyperparams),
            system_attrs=dict(self.notes),
        )


def propose(
    sweep: ResolvedSweep, study: optuna.Study, history: Sequence[FrozenTrial] = ()
) -> Proposal:
    """The next trial of a study.

    Args:
        history: Finished trials of an earlier sweep.

    Raises:
        ConfigError: If no point is found that meets the conditions, or it is no valid trial.
    """
    trials = study.get_trials(deepcopy=False)
    place = len(list_search_trials(trials))
    turning = InTurn(place)
    _, own = sweep.space.draw(sweep.base.tree, turning)
    # Another epsilon means other noise, so the sampler sees only trials with this one's.
    earlier = list_comparable_trials(history, own)
    known = [*earlier, *list_comparable_trials(trials, own)]
    trial = optuna.trial.create_trial(state=TrialState.RUNNING)
    # create_trial leaves -1, and samplers read the number.
    trial.number = len(trials)
    point = get_start_point(sweep, place)

    def draws() -> Iterator[tuple[Draw, AttributeBuffer]]:
        turns = place % turning.turns.ways, turning.turns.left
        if _is_startup(sweep.config.sampler, known, None if earlier else turning.turns.left):
            for quasi_random in _iter_quasi_random_draws(sweep, place, *turns):
                yield quasi_random, AttributeBuffer()
        for proposer, notes in _iter_samplers(sweep, place, known, earlier):
            yield (
                _SamplerDraw(
                    proposer, restrict_study(study, known, notes), trial, RoundRobin(place)
                ),
                notes,
            )

    for drawn, notes in draws():
        draw = RecordingDraw(point, drawn)
        tree, hyperparams = sweep.space.draw(sweep.base.tree, draw)
        config = sweep.trial(tree)
        if sweep.admits(config):
            kept = {k: v for k, v in notes.attrs.items() if k.startswith(_KEPT_ATTRIBUTES)}
            return Proposal(sweep.exploring(config), hyperparams, draw.params, draw.ways, kept)
    raise ConfigError(
        f"{sweep.conditions[0].place}: none of {_RANDOM_ATTEMPTS} and more proposals meets "
        f"{' and '.join(c.formula.text for c in sweep.conditions)}; of random points "
        f"{sweep.share():.1%} do. Loosen it, or move the ranges"
    )


def _is_startup(config: SamplerConfig, known: Sequence[FrozenTrial], before: int | None) -> bool:
    """True while a sampler that learns would still draw at random, or in the first rounds.

    Args:
        known: All trials that it sees.
        before: Rounds before this one; None where an earlier sweep has had them.
    """
    ended = {TrialState.COMPLETE} | ({TrialState.PRUNED} if config.name == "tpe" else set())
    few = sum(t.state in ended for t in known) < config.startup_trials
    first = before is not None and before < min(_QUASI_RANDOM_ROUNDS, config.startup_trials)
    return config.learns and (few or first)


def _iter_quasi_random_draws(
    sweep: ResolvedSweep, place: int, whose: int, rounds: int
) -> Iterator[QuasiRandomDraw]:
    """The quasi-random draw of this round, if any: those that no condition admits are no rounds.

    So the rounds cover what the conditions leave of the space. Passed-over draws are counted anew
    each time, without what a point of `start` gives, and so alike for every round.
    """

    def draw_point(index: int) -> QuasiRandomDraw:
        return QuasiRandomDraw(sweep.config.seed, place, (whose, index))

    def is_admitted(index: int) -> bool:
        tree, _ = sweep.space.draw(sweep.base.tree, draw_point(index))
        try:
            return sweep.admits(sweep.trial(tree))
        except ConfigError:  # it would be no trial at all
            return False

    indices: Iterable[int] = range(rounds + _MOST_ATTEMPTS)
    if sweep.conditions:
        indices = filter(is_admitted, indices)
    yield from map(draw_point, islice(indices, rounds, rounds + 1))


def get_start_point(sweep: ResolvedSweep, place: int) -> Point:
    """Get the start point of the trial at a place; empty once the points are used up."""
    turning = InTurn(place)
    sweep.space.draw(sweep.base.tree, turning)
    about = []
    for point in sweep.start:
        draw = PartialFixedDraw(point, InTurn(place))
        sweep.space.draw(sweep.base.tree, draw)
        if not draw.elsewhere and draw.used == set(point):
            about.append(point)
    rounds = turning.turns.left
    return about[rounds] if rounds < len(about) else {}


def _iter_samplers(
    sweep: ResolvedSweep, place: int, known: Sequence[FrozenTrial], history: Sequence[FrozenTrial]
) -> Iterator[tuple[BaseSampler, AttributeBuffer]]:
    """Samplers for one proposal each: the sweep's own, then random ones."""
    config, seed = sweep.config.sampler, sweep.config.seed
    ways = make_distributions(sweep.space) if config.name == "qmc" else {}
    # Go on after the last stored point: trials that are proposed while others run must differ.
    first = 1 + max((t.system_attrs.get(_INDEX, -1) for t in known), default=-1)
    for attempt in range(_ATTEMPTS.get(config.name, _MOST_ATTEMPTS)):
        notes = AttributeBuffer()
        if config.name == "qmc":
            notes.attrs[_INDEX] = first + attempt
            yield sobol_point(ways, derive_public_seed(seed, "search"), first + attempt), notes
        else:
            # Attempt 0 draws as a search without conditions does.
            path = (place, attempt) if attempt else (place,)
            yield make_sampler(config, seed, path, history), notes
    for attempt in range(_RANDOM_ATTEMPTS):
        yield (
            RandomSampler(seed=derive_public_seed(seed, "search", place, "random", attempt)),
            AttributeBuffer(),
        )


class RecordingDraw(PartialFixedDraw):
    """Remembers what a point and another draw come to, in Optuna's terms."""

    def __init__(self, point: Point, other: Draw) -> None:
        super().__init__(point, other)
        self.params: dict[str, Any] = {}  # by name in the study; not what goes in turn
        self.ways: dict[str, BaseDistribution] = {}  # how each of them varies

    def number(self, slot: Slot, domain: Range) -> float | int:
        """As the point or the other has it."""
        value = super().number(slot, domain)
        self.params[slot.name], self.ways[slot.name] = value, make_distribution(domain)
        return value

    def option(self, slot: Slot, labels: Labels) -> int:
        """As the point or the other has it."""
        index = super().option(slot, labels)
        self.params[slot.name] = labels[index]
        self.ways[slot.name] = CategoricalDistribution(labels)
        return index


class _SamplerDraw:
    """Draws from a sampler as Optuna's own trials do, and stores nothing."""

    def __init__(
        self, proposer: BaseSampler, view: optuna.Study, trial: FrozenTrial, turns: RoundRobin
    ) -> None:
        self._proposer, self._view, self._trial, self._turns = proposer, view, trial, turns
        space = proposer.infer_relative_search_space(view, trial)
        self._together = proposer.sample_relative(view, trial, space)

    def number(self, slot: Slot, domain: Range) -> float | int:
        found: float | int = self._value(slot.name, make_distribution(domain))
        return found

    def option(self, slot: Slot, labels: Labels) -> int:
        return labels.index(self._value(slot.name, CategoricalDistribution(labels)))

    def choose_label(self, slot: Slot, labels: Labels) -> int:
        return self._turns.take(len(labels))

    def _value(self, name: str, ways: BaseDistribution) -> Any:
        # As in Optuna: a joint value outside this trial's range is drawn again by itself, and a
        # range with a single value never reaches the sampler.
        if name in self._together and contains(ways, self._together[name]):
            return self._together[name]
        proposer = RandomSampler(seed=0) if ways.single() else self._proposer
        return proposer.sample_independent(self._view, self._trial, name, ways)
