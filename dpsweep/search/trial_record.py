"""One trial, as the study knows it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from dpsweep.config.trial import TrialConfig
from dpsweep.core import __version__
from dpsweep.core.errors import StateError
from dpsweep.core.types import Row

HYPERPARAMS, DISPATCHED = "hyperparams", "dispatched"
"""User attributes of a trial of Optuna's, as the database holds them."""

_STATES = {
    TrialState.RUNNING: "running",
    TrialState.WAITING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@dataclass(frozen=True)
class Record:
    """A row of the study."""

    number: int  # counted from 0 in the order of asking
    state: str  # running, complete, pruned or failed. A running trial may have lost its driver
    config: TrialConfig  # the resolved trial config
    hyperparams: dict[str, Any]  # what was searched, by dotted key of the config
    row: Row | None  # its last report; None before the first
    value: float | None  # the objective at the last report
    reason: str | None  # why it failed
    void: bool  # True if a test secret was used
    dispatched: bool  # True once its secret was drawn
    # sampling_rate, noise_multiplier and steps that it was charged for when it was dispatched; None
    # before
    charged: dict[str, float] | None = None
    confirms: int | None = None  # the trial whose config it repeats; None for a trial of the search
    # True for the final run, which has what the exploring trials left of epsilon
    final: bool = False
    # posterior mean of the objective at its config, once the search has ended and chosen by that;
    # None before, and where the choice is as observed
    expected: float | None = None
    # of the default that is ranked first, as none is ahead of it by more (search/ranking.py)
    margin: float | None = None
    # Unix time at which it was asked for; None for a private selection's own trials
    asked: float | None = None
    ended: float | None = None  # Unix time at which it ended; None while it has not

    @property
    def ranking_value(self) -> float:
        """Value that a complete trial is ranked by."""
        found = self.value if self.expected is None else self.expected
        return 0.0 if found is None else found

    @property
    def seconds(self) -> float:
        """Time spent training it, over restarts."""
        return self.row["seconds"] if self.row else 0.0

    @property
    def epsilon(self) -> float | None:
        """Epsilon that its noise was calibrated to; None where the noise was given."""
        return self.config.privacy.epsilon


def make_attributes(
    config: TrialConfig, hyperparams: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Make the attributes of a new Optuna trial, which `make_record` reads."""
    return {HYPERPARAMS: dict(hyperparams), "config": config.model_dump(mode="json"), **more}


def make_record(trial: FrozenTrial, config: TrialConfig) -> Record:
    """Return the record of a trial of Optuna's that has a config.

    Raises:
        StateError: If an older dpsweep stored it: what it was charged stands under other names.
    """
    if "knobs" in trial.user_attrs:
        raise StateError(
            f"trial {trial.number}: stored by a dpsweep older than {__version__}, which cannot "
            f"read what it was charged. Finish that sweep with the version that began it"
        )
    attrs, values = trial.user_attrs, trial.intermediate_values
    dispatched = attrs.get(DISPATCHED, {})
    return Record(
        number=trial.number,
        state=_STATES[trial.state],
        config=config,
        hyperparams=attrs[HYPERPARAMS],
        row=attrs.get("row"),
        value=values[max(values)] if values else None,
        reason=attrs.get("reason"),
        void=dispatched.get("void", False),
        dispatched=bool(dispatched),
        charged=dispatched.get("charged"),
        confirms=attrs.get("confirms"),
        final=attrs.get("final", False),
        asked=trial.datetime_start.timestamp() if trial.datetime_start else None,
        ended=trial.datetime_complete.timestamp() if trial.datetime_complete else None,
    )
