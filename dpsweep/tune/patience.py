"""A database server that goes away while a sweep runs, as for a restart, and comes back.

Between two changes the driver waits for it: whoever connects tries again. A change that is broken
off in its middle may have been made or not, so it is not tried again; the driver ends, and the
next one asks the study how far it came.
"""

import logging
import time
from typing import Any

from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import Dialect, ExceptionContext

from dpsweep.core.errors import StateError

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 600.0
_PAUSE_SECONDS = 1.0


def be_patient(engine: Engine, shown: str, seconds: float = PATIENCE_SECONDS) -> None:
    """From now on a server that does not answer is waited for.

    Args:
        engine: Its pool must look at each connection before use (`pool_pre_ping`).
        shown: Its URL for people, without a password.
        seconds: How long it is waited for.
    """

    def connect(dialect: Dialect, record: object, args: list[Any], words: dict[str, Any]) -> Any:
        refused = dialect.loaded_dbapi.OperationalError
        end, said = time.monotonic() + seconds, False
        while True:
            try:
                return dialect.connect(*args, **words)
            except refused as e:
                if time.monotonic() > end:
                    raise
                if not said:
                    log.warning("%s", _waiting(shown, seconds, e))
                said = True
                time.sleep(_PAUSE_SECONDS)

    def broken(context: ExceptionContext) -> None:
        if context.is_disconnect and not context.is_pre_ping:
            raise StateError(
                f"--storage {shown}: the database went away in the middle of a change: "
                f"{_reason(context.original_exception)}. Nothing is lost: when it is back, go on "
                f"with dpsweep resume"
            ) from context.original_exception

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "handle_error", broken)


def _waiting(shown: str, seconds: float, e: BaseException) -> str:
    return (
        f"--storage {shown}: the database does not answer: {_reason(e)}. The sweep waits for it, "
        f"for up to {seconds / 60:.0f} min"
    )


def _reason(e: BaseException) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0]
