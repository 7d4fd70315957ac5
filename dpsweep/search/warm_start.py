"""Warm start: results of an earlier sweep for the sampler of a new one over the same space.

The earlier trials are no trials of the new sweep: they fill none of its budget, and are not
ranked, tracked, charged or exported here. The sampler sees them as a history before trial 0. They
are written into the new study when it is launched, so that a resumed search knows the same ones
whatever has become of the earlier sweep.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from dpsweep.config.keys import DELTA, EPSILON, NOISE_MULTIPLIER, SCOPE
from dpsweep.config.space.derived import Derived
from dpsweep.config.space.domains import Space
from dpsweep.config.space.suggest import Corner, OutsideSpaceError
from dpsweep.config.sweep import ResolvedSweep
from dpsweep.core.errors import ConfigError
from dpsweep.search.objectives import get_goal_values
from dpsweep.search.propose import RecordingDraw
from dpsweep.search.trial_record import HYPERPARAMS, Record

EarlierTrial = dict[str, Any]
"""hyperparams and values of one earlier trial, as JSON."""


def collect_earlier_trials(
    sweep: ResolvedSweep, earlier: ResolvedSweep, records: Iterable[Record]
) -> list[EarlierTrial]:
    """Collect the complete trials of an earlier sweep that a new one can learn from.

    Raises:
        ConfigError: If the sweeps differ in what the results depend on, naming it.
    """
    place = sweep.file.at(("learn_from",))
    for (what, ours), theirs in zip(
        _get_shared_settings(sweep).items(), _get_shared_settings(earlier).values(), strict=True
    ):
        if ours != theirs:
            raise ConfigError(
                f"{place}: sweep {earlier.name!r} has another {what}: {theirs}, and here it is "
                f"{ours}. Results can be learned from where both are the same"
            )
    told = list[EarlierTrial]()
    for record in records:
        values = get_goal_values(sweep.config.objective, record.row, record.config)
        if record.state != "complete" or record.confirms is not None or values is None:
            continue
        hyperparams = {k: v for k, v in record.hyperparams.items() if k != EPSILON}
        if len(sweep.epsilons) > 1:
            hyperparams[EPSILON] = record.config.privacy.epsilon
        try:
            _redraw(sweep, hyperparams)
        except OutsideSpaceError as e:
            raise ConfigError(
                f"{place}: trial {record.number} of sweep {earlier.name!r} is outside this space: "
                f"{e}. Widen the range, or leave out --from"
            ) from e
        told.append({HYPERPARAMS: hyperparams, "values": list(values)})
    return told


def make_history(sweep: ResolvedSweep, told: Sequence[EarlierTrial]) -> list[FrozenTrial]:
    """Earlier trials as a sampler knows them, numbered below 0."""
    trials = []
    for i, earlier in enumerate(told):
        draw, hyperparams = _redraw(sweep, earlier[HYPERPARAMS])
        trial = optuna.trial.create_trial(
            state=TrialState.COMPLETE,
            params=draw.params,
            distributions=draw.ways,
            values=earlier["values"],
            user_attrs={HYPERPARAMS: hyperparams},
        )
        trial.number = i - len(told)
        trials.append(trial)
    return trials


def _get_shared_settings(sweep: ResolvedSweep) -> dict[str, Any]:
    """Get the settings that must be the same in both sweeps, by name."""
    trial = sweep.written
    return {
        "objective": " and ".join(sweep.config.objective.goals),
        "set of searched keys": ", ".join(_list_drawn_keys(sweep.space)),
        "data": trial.data,
        SCOPE: trial.privacy.scope,
        DELTA: trial.delta,
        EPSILON: ", ".join(f"{e:g}" for e in sorted(e or 0 for e in sweep.epsilons)),
        NOISE_MULTIPLIER: trial.privacy.noise_multiplier,
        # with another seed, examples that choose here without noise were trained on there
        "seed, which says who is held out": trial.seed if trial.data.num_held_out else None,
    }


def _list_drawn_keys(space: Space) -> list[str]:
    """List the drawn keys; those that go in turn over budgets or are derived are left out."""
    paths = (p for p, d in space.domains.items() if not isinstance(d, Derived))
    return sorted({".".join(map(str, p)) or "one_of" for p in paths} - {EPSILON})


def _redraw(
    sweep: ResolvedSweep, hyperparams: dict[str, Any]
) -> tuple[RecordingDraw, dict[str, Any]]:
    """Earlier hyperparams in terms of this space; OutsideSpaceError if they are not in it."""
    draw = RecordingDraw(hyperparams, Corner())
    _, ours = sweep.space.draw(sweep.base.tree, draw)
    lost = [key for key in hyperparams if key not in ours]
    missing = [key for key in draw.asked if key not in hyperparams]
    if lost or missing:
        raise OutsideSpaceError(f"{(lost or missing)[0]} is searched in one of the two alone")
    return draw, ours
