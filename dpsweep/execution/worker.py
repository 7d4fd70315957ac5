"""One trial on one Ray worker: hand the config to training/loop, and its rows to the driver.

An actor is used for many trials. What a trial leaves behind in the process is torch's number
of threads, which the next one sets, and the data set in memory, which is the same for all.
"""

import contextlib
import json
import traceback
from pathlib import Path
from typing import Any

import ray
from ray import tune

from dpsweep.config.trial import TrialConfig
from dpsweep.core.device import describe_device_failure
from dpsweep.core.errors import DiskFull, DpSweepError, PrivateRowError, StateError
from dpsweep.core.memory import find_exhausted_memory
from dpsweep.core.types import Row
from dpsweep.data.read import fingerprint_images
from dpsweep.execution.failures import (
    Limits,
    decide_retry,
    exit_out_of_memory,
    exit_without_device,
    note_begin,
    watch_trial,
)
from dpsweep.store.state_dir import SweepFolder
from dpsweep.training.allowance import Allowance
from dpsweep.training.loop import Paused, train
from dpsweep.training.schedule import TrialSchedule
from dpsweep.training.trial_dir import TrialDir

PAYLOAD = "dpsweep"
"""The one key of what is reported to Tune; its value is JSON, since Tune rewrites mappings."""

Assignment = dict[str, Any]
"""number; config: the trial config as JSON; schedule: what it spends and when it reports, as JSON;
trial_dir: its folder, with the secret in it; pause: files of which each, where present, asks the
trial to save its state and end; limits: what it is held to (execution/failures.py), as JSON;
reported: the last epoch that the study knows, 0 for none."""

_PREDECESSOR_SECONDS = 600.0
"""Longest wait for a process that was given the trial before and is not dead yet.

On a node that the network has cut off it lives on until that node gives up, minutes later.
"""


def run_trial(assignment: Assignment) -> None:
    """Train one trial and report each row, then how it ended.

    A failure is a result like any other: raising would make Ray run it again, and a second
    run of a config that diverges, or of a mistake of ours, ends no better. A process whose memory
    is full, or that has lost its GPU, ends, and leaves word to the next: Ray would give it, or what
    is left of it, the trials after this one.
    """
    place = Path(assignment["trial_dir"])
    try:
        trial_dir = TrialDir(place)
        with contextlib.ExitStack() as ours:
            if _lock_trial(trial_dir, ours):
                _train(assignment, trial_dir)
    except Paused:
        _send(end="paused")
    except Exception as e:
        if what := describe_device_failure(e):
            with contextlib.suppress(DiskFull):
                TrialDir(place).note_failure(traceback.format_exc())
            exit_without_device(place, what, e)
        if where := find_exhausted_memory(e):
            exit_out_of_memory(place, where)
        _send_failure(place, e)


def _send_failure(place: Path, error: Exception) -> None:
    """Send a trial's failure to the driver; the message of errors that are not ours is left out.

    It may quote private data, as that of a PrivateRowError does; the type and place do not. What is
    sent is kept in the study and in MLflow.
    """
    if isinstance(error, DiskFull):
        _send(end="halted", reason=str(error))
        return
    if isinstance(error, DpSweepError) and not isinstance(error, PrivateRowError):
        _send(end="failed", reason=str(error))
        return
    note = TrialDir(place).note_failure(traceback.format_exc())
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _send(
        end="failed",
        reason=f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}; the full "
        f"traceback is private and stays in {note}",
    )


def _lock_trial(trial_dir: TrialDir, ours: contextlib.ExitStack) -> bool:
    """Lock the trial until `ours` ends; one that another process still trains has not failed."""
    try:
        ours.enter_context(trial_dir.lock(_PREDECESSOR_SECONDS))
    except StateError:
        _send(
            end="halted",
            reason=f"trial {int(trial_dir.path.name)} is still being trained by another process, "
            f"perhaps on a node that the network has cut off. End that process (or node), and "
            f"resume: nothing is lost",
        )
        return False
    return True


def _train(assignment: Assignment, trial_dir: TrialDir) -> None:
    """Train in a trial directory that is locked, unless an earlier process left a verdict there."""
    limits = Limits(**assignment["limits"])
    note_begin(trial_dir.path, ray.get_runtime_context().get_node_id())
    before = decide_retry(trial_dir.path, limits)
    if before.end:
        _send(end=before.end, reason=before.reason)
        return
    config = TrialConfig.model_validate(assignment["config"])
    trial_schedule = TrialSchedule.from_json(assignment["schedule"])
    last = trial_schedule.reports[-1].step
    with watch_trial(trial_dir.path, limits) as watch:
        with watch.excused():
            check_same_data(config, trial_dir)

        def report(row: Row) -> None:
            with watch.excused():
                _send(row=row, **({"end": "complete"} if row["step"] == last else {}))

        train(
            config,
            trial_dir,
            report,
            lambda: any(Path(request).exists() for request in assignment["pause"]),
            trial_schedule,
            Allowance(before.halvings, limits.gpu_share, limits.num_devices, watch.excused),
            reported=assignment["reported"],
        )


def check_same_data(config: TrialConfig, trial_dir: TrialDir) -> None:
    """Compare the data that this process has read with those that the sweep was launched with.

    A file may be changed or sorted anew while a sweep runs, and the user's own code may return what
    it likes. Other examples would then be held out, which no epsilon covers, and a trial that goes
    on would have others in the groups of its correlated noise.

    Raises:
        StateError: If they differ.
    """
    folder, data = SweepFolder(trial_dir.path.parent.parent), config.data
    try:
        folder.check_data(fingerprint_images(data, config.seed, folder.data_key()))
    except StateError as e:
        why = (
            "data: the files hold other examples, or another order, than when the sweep was "
            "launched or resumed"
        )
        remedy = "Put the former files back"
        if not data.is_kept:
            why = (
                "data.function: returned other examples, or another order, than in the process "
                "that launched the sweep"
            )
            remedy = "Sort what you list, and seed what you draw"
        raise StateError(
            f"{why}. Who is held out and who is in which batch would change from one process to "
            f"the next. {remedy}"
        ) from e


def _send(**message: Any) -> None:
    """row: figures; end: complete, failed, paused, halted or memory; reason: why."""
    tune.report({PAYLOAD: json.dumps(message)})
