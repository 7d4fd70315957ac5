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
from dpsweep.core.errors import DpSweepError
from dpsweep.core.types import Row
from dpsweep.train.loop import train
from dpsweep.train.room import Room

PAYLOAD = "dpsweep"
"""The one key of what is reported to Tune; its value is JSON, since Tune rewrites mappings."""

Assignment = dict[str, Any]
"""number; config: the trial config as JSON; room: its folder; reported: its last known epoch."""


def run_trial(assignment: Assignment) -> None:
    """Trains one trial and reports each row, then how it ended.

    A failure is a result like any other: raising would make Ray run it again, and a second
    run of a config that diverges, or of a mistake of ours, ends no better.
    """
    try:
        room = _room(assignment)
        config = TrialConfig.model_validate(assignment["config"])
        train(config, room, lambda row: _send(row=row))
        _send(end="complete")
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


def _room(assignment: Assignment) -> Room:
    path = Path(assignment["room"])
    if not path.parent.is_dir():
        raise DpSweepError(
            f"the state folder {path.parent.parent} is not there on this node. Put it where "
            f"every node sees it, with --state FOLDER"
        )
    room = Room(path)
    if assignment["reported"] and room.load() is None:
        raise DpSweepError(
            f"the resume state in {path} is gone, and epoch {assignment['reported']} was already "
            f"reported. Starting over with fresh noise would release twice what is charged once"
        )
    return room


def _send(*, row: Row | None = None, **end: Any) -> None:
    tune.report({PAYLOAD: json.dumps({"row": row} if row else end)})
