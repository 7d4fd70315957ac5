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
"""number; config: the trial config as JSON; room: its folder, with the secret in it."""

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
        with room.lock(_PREDECESSOR_SECONDS):
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


def _send(*, row: Row | None = None, **end: Any) -> None:
    tune.report({PAYLOAD: json.dumps({"row": row} if row else end)})
