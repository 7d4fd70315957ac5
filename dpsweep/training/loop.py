"""Training of one trial, from its first step or its last checkpoint to its end.

Only figures computed from released iterates and public data are reported. No training loss,
no true batch size, no gradient norm.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dpsweep.config.plan import PrivacyPlan
from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import Diverged, StateError
from dpsweep.core.types import Row, Tensors
from dpsweep.data.read import list_class_names
from dpsweep.models.parts import saved_tensors
from dpsweep.privacy.engine.repeatability import Probe
from dpsweep.training.allowance import WHOLE, Allowance
from dpsweep.training.assemble import assemble_step, initial_params
from dpsweep.training.device import open_device
from dpsweep.training.evaluate import AT_ONCE, sum_validation
from dpsweep.training.malloc import keep_freed_memory
from dpsweep.training.schedule import Report, TrialSchedule, resolve_trial_schedule
from dpsweep.training.step import Progress, Step
from dpsweep.training.trial_dir import ConfusionMatrix, TrialDir

CHECKPOINT_SECONDS = 60.0
"""Longest time between two checkpoints, if reports are rarer."""

_LOOK_SECONDS = 0.5
"""Seconds between two checks for a request to pause and for weights that are not finite."""

_PLAN_TOLERANCE = 1e-6
"""Relative difference of a noise multiplier that another machine calibrated, at most."""

_DEFAULT_THREADS = torch.get_num_threads()


class Paused(Exception):
    """The trial has paused as requested; its checkpoint is that of its last step."""


@dataclass(frozen=True)
class Result:
    """A trial that reached its last step."""

    rows: list[Row]  # its reports, oldest first
    plan: PrivacyPlan  # what it spent
    void: bool  # True if a fixed test secret was used: there is no privacy


def train(
    config: TrialConfig,
    trial_dir: TrialDir,
    report: Callable[[Row], None],
    should_pause: Callable[[], bool] = lambda: False,
    schedule: TrialSchedule | None = None,
    allowance: Allowance = WHOLE,
    data_mark: str = "",
    reported: float = 0,
) -> Result:
    """Train, evaluate, checkpoint and report, and leave the weights in `trial_dir`.

    Every row is in the trial directory's checkpoint before it is reported. After a crash the rows
    that the checkpoint holds are reported again, so the listener must identify rows by epoch.

    Args:
        trial_dir: Its directory, with its secret and, after a crash, its checkpoint. Locked by the
            caller.
        report: Called with each row, in order.
        should_pause: Called between steps, about twice a second.
        schedule: The trial's schedule, if it is known already.
        allowance: Share of the machine that it may use; changes the result by rounding alone.
        data_mark: Identifies the data where the config does not. The secret is bound to it: the
            same noise on other data would cancel in the difference of two releases.
        reported: Last epoch that is known elsewhere to have been reported; 0 for none.

    Raises:
        Paused: If `should_pause` returned True; the next call resumes there.
        Diverged: If an iterate or the validation loss is not finite.
        ConfigError: If data or device are missing, or the model keeps state between calls.
        StateError: If the trial directory's secret or checkpoint is gone or another config's.
    """
    torch.set_num_threads(config.train.threads or _DEFAULT_THREADS)
    keep_freed_memory()
    identity, secret = config.model_dump_json() + data_mark, trial_dir.secret()
    # a fixed test secret protects nothing; bound to the config alone, it gives the same run again
    secret = secret.bind_to_config(config.model_dump_json() if secret.void else identity)
    device = open_device(
        config.train.device, allowance.gpu_share, num_devices=allowance.num_devices
    )
    schedule = schedule or resolve_trial_schedule(config)
    plan = schedule.plan
    step = assemble_step(config, secret, device, plan, allowance)
    task = step.data.task
    probes = [
        Probe.of(one.model, step.data.spec, task.loss, task.draw_targets)
        for one in step.engine.replicas
    ]

    rows: list[Row] = []
    saved = _load_checkpoint(trial_dir, identity, plan, reported)
    if saved is None:
        progress = step.start(initial_params(step))
        trial_dir.note_first_step()  # before it: a trial without the note has released nothing
    else:
        rows = saved["rows"]
        # the steps since the checkpoint are replayed with the same batches and the same noise, so
        # they release nothing new
        progress = step.resume(_move_progress(saved["progress"], device))
        trial_dir.save_rows(rows)
        for row in rows:
            report(row)

    clock = _Clock(rows)
    for due in schedule.reports:
        if due.step <= (rows[-1]["step"] if rows else 0):
            continue
        while progress.step < due.step:
            step(progress)
            looks = clock.look_is_due()
            if looks:  # not at each step: on a GPU it waits for the device
                _check_finite(due, progress, step)
            paused = looks and should_pause()
            if paused or clock.checkpoint_is_due():
                trial_dir.save(_make_checkpoint(identity, plan, progress, rows))
            if paused:
                raise Paused
        for probe in probes:
            probe.check()  # before anything is reported
        at_once = allowance.portion(AT_ONCE, AT_ONCE)
        sums = sum_validation(step.engine.model, progress.result, step.data, step.dtype, at_once)
        rows.append(_make_row(due, progress, step, clock, sums))
        if progress.step == plan.steps:  # before the last checkpoint, after which nothing runs
            trial_dir.save_weights(
                collect_weights(step, progress), _describe_weights(step, progress)
            )
            _save_confusion(config, trial_dir, sums)
        # the checkpoint first: a row that is reported must never be newer than what can be resumed
        trial_dir.save(_make_checkpoint(identity, plan, progress, rows))
        trial_dir.save_rows(rows)
        clock.note_checkpoint()
        report(rows[-1])
    return Result(rows, plan, secret.void)


def collect_weights(step: Step, progress: Progress) -> Tensors:
    """Collect all of the model's tensors: the trial's result, and what was frozen or never learned.

    Parameters and persistent buffers by the names that a state_dict has, and nothing else:
    `state_dict` itself runs the model's own code (get_extra_state, hooks, an override), which may
    hand on what is neither noised nor known to be constant.
    """
    model = step.engine.model
    names = {id(p): name for name, p in model.named_parameters()}
    whole = saved_tensors(model if step.uncut_model is None else step.uncut_model)
    return {k: progress.result[names[id(x)]] if id(x) in names else x for k, x in whole.items()}


def _describe_weights(step: Step, progress: Progress) -> str:
    ema = step.config.train.ema
    if ema is None:
        return ""
    return (
        f"An average over the iterates of {progress.step} steps, with train.ema {ema}; not the "
        f"last iterate."
    )


def _make_checkpoint(
    identity: str, plan: PrivacyPlan, progress: Progress, rows: list[Row]
) -> dict[str, Any]:
    state = {"config": identity, "progress": progress.state_dict(), "rows": rows}
    return {**state, "plan": _list_numbers(plan)}


def _list_numbers(plan: PrivacyPlan) -> list[float]:
    """List what a run is counted by: sampling rate, noise, rounds, steps and cycle."""
    run, cycle = plan.run, plan.correlation.cycle if plan.correlation else 1
    return [run.sampling_rate, run.noise_multiplier, run.steps, plan.steps, cycle]


def _load_checkpoint(
    trial_dir: TrialDir, identity: str, plan: PrivacyPlan, reported: float
) -> dict[str, Any] | None:
    """Load the checkpoint to resume from, if it is this config's and no older than the reports.

    Another version of this package or of the accountant may calibrate other noise, or choose other
    bands, for the same config: half of a run of each is counted by neither.
    """
    saved, rows = trial_dir.load(), trial_dir.rows()
    then = saved.get("plan") if saved else None
    if then and not all(
        math.isclose(*pair, rel_tol=_PLAN_TOLERANCE)
        for pair in zip(then, _list_numbers(plan), strict=True)
    ):
        raise StateError(
            f"{trial_dir.path}: was begun with sampling rate, noise, rounds, steps and bands "
            f"{then}, and they are {_list_numbers(plan)} now. What such a run spends is not known. "
            f"Go on with the versions of dpsweep, dp-accounting and SciPy that began it, or train "
            f"in another folder"
        )
    if saved is not None and saved["config"] != identity:
        raise StateError(
            f"{trial_dir.path}: holds a checkpoint of another config or other data. Train this one "
            f"in another folder"
        )
    seen = max([reported, *(row["epoch"] for row in rows)])
    if seen and (saved is None or not saved["rows"] or saved["rows"][-1]["epoch"] < seen):
        raise StateError(
            f"{trial_dir.path}: epoch {seen:g} was reported, and the checkpoint of it is gone. "
            f"Training on from an older one could release more than is charged; train in another "
            f"folder"
        )
    return saved


def _save_confusion(config: TrialConfig, trial_dir: TrialDir, sums: Tensors) -> None:
    """Store the confusion matrix, if validation data are declared public: it counts their labels.

    How many held-out examples have each label is private, and no metric tells it exactly.
    """
    if config.data.validation == "test_split" and "confusion" in sums:
        counts = tuple(tuple(map(int, row)) for row in sums["confusion"].tolist())
        trial_dir.save_confusion(ConfusionMatrix(list_class_names(config.data), counts))


def _make_row(due: Report, progress: Progress, step: Step, clock: "_Clock", sums: Tensors) -> Row:
    score = step.data.task.compute_metrics(sums, len(step.data.valid_targets))
    _check_finite(due, progress, step, loss=score["loss"])
    return {
        "epoch": due.epoch,
        "step": progress.step,
        **{f"valid/{name}": value for name, value in score.items()},
        "privacy/epsilon_spent": due.epsilon,
        "noise_multiplier": step.plan.run.noise_multiplier,
        "learning_rate": progress.optimizer.param_groups[0]["lr"],  # of the last step
        "seconds": clock.seconds(),
    }


def _check_finite(due: Report, progress: Progress, step: Step, loss: float = 0.0) -> None:
    """Raise Diverged; weights are released, and the loss is that of the validation data."""
    finite = all(bool(torch.isfinite(x).all()) for x in progress.params.values())
    if not finite or not math.isfinite(loss):
        raise Diverged(
            f"the weights stopped being finite by epoch {due.epoch} (step {progress.step}); "
            f"optimizer.{step.config.step_size} may be too large"
        )


class _Clock:
    """Seconds of work on this trial over restarts, and the times of checkpoints."""

    def __init__(self, rows: list[Row]) -> None:
        self._before = rows[-1]["seconds"] if rows else 0.0
        self._start = self._saved = self._looked = time.monotonic()

    def seconds(self) -> float:
        return round(self._before + time.monotonic() - self._start, 3)

    def checkpoint_is_due(self) -> bool:
        due = time.monotonic() - self._saved > CHECKPOINT_SECONDS
        if due:
            self.note_checkpoint()
        return due

    def look_is_due(self) -> bool:
        due = time.monotonic() - self._looked > _LOOK_SECONDS
        if due:
            self._looked = time.monotonic()
        return due

    def note_checkpoint(self) -> None:
        self._saved = time.monotonic()


def _move_progress(saved: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move a checkpoint's progress to `device`, except the optimizer's state.

    Torch's `load_state_dict` moves those that belong there. Adam's step counts stay on the CPU:
    on a GPU each step of each parameter would wait to read one.
    """

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.to(device)

    rest = {k: v for k, v in saved.items() if k != "optimizer"}
    moved: dict[str, Any] = torch.utils._pytree.tree_map_only(torch.Tensor, move, rest)
    return {**moved, "optimizer": saved["optimizer"]}
