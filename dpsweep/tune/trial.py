"""One trial on one Ray worker: hand the config to train/loop, and its rows to the driver.

An actor is used for many trials. What a trial leaves behind in the process is torch's number
of threads, which the next one sets, and the data set in memory, which is the same for all.
"""

import json
import traceback
from pathlib import Path
from typing import Any

from ray import tune

from dpsweep.config.trial import TrialConfig
from dpsweep.core.errors import DiskFull, DpSweepError
from dpsweep.train.course import Course
from dpsweep.train.loop import Paused, train
from dpsweep.train.room import Room

PAYLOAD = "dpsweep"
"""The one key of what is reported to Tune; its value is JSON, since Tune rewrites mappings."""

Assignment = dict[str, Any]
"""number; config: the trial config as JSON; course: what it spends and when it reports, as JSON;
room: its folder, with the secret in it; pause: the file whose presence asks the trial to save its
state and end."""

_PREDECESSOR_SECONDS = 60.0
"""How long to wait for a process that was given the trial before and is not dead yet."""


def run_trial(assignment: Assignment) -> None:
    """Trains one trial and reports each row, then how it ended.

    A failure is a result like any other: raising would make Ray run it again, and a second
    run of a config that diverges, or of a mistake of ours, ends no better.
    """
    try:
        room = Room(Path(assignment["room"]))
        config = TrialConfig.model_validate(assignment["config"])
        course = Course.from_json(assignment["course"])
        last = course.reports[-1].step
        with room.lock(_PREDECESSOR_SECONDS):
            train(
                config,
                room,
                lambda row: _send(row=row, **({"end": "complete"} if row["step"] == last else {})),
                Path(assignment["pause"]).exists,
                course,
            )
    except Paused:
        _send(end="paused")
    except DiskFull as e:
        _send(end="halted", reason=str(e))
    except DpSweepError as e:
        _send(end="failed", reason=str(e))
    except Exception as e:  # the message may quote private data; the type and place do not
        place = Room(Path(assignment["room"])).note_failure(traceback.format_exc())
        frame = traceback.extract_tb(e.__traceback__)[-1]
        _send(
            end="failed",
            reason=f"{type(e).__name__} at {Path(frame.filename).name}:{frame.lineno}; the full "
            f"traceback is private and stays in {place}",
        )


def _send(**message: Any) -> None:
    """row: figures; end: complete, failed, paused or halted; reason: why it failed or halted."""
    tune.report({PAYLOAD: json.dumps(message)})
