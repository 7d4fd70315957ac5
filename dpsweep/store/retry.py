"""A database server that goes away while a sweep runs, as for a restart, and comes back.

Between two changes the driver waits for it: whoever connects tries again. A change that is broken
off in its middle may have been made or not. Where that makes no difference it is made again
(`repeated`); a new trial is not, so as not to be charged for two. The driver ends then, and the
next one finds in the study how far it came.
"""

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Engine, event
from sqlalchemy.engine.interfaces import Dialect, ExceptionContext

from dpsweep.core.errors import StateError, summarize_error

log = logging.getLogger(__name__)

_RETRY_SECONDS = 600.0
_PAUSE_SECONDS = 1.0
_TIMES = 5

P = ParamSpec("P")
T = TypeVar("T")


class InterruptedChange(StateError):
    """The database went away in the middle of a change."""


def retry_if_interrupted(method: Callable[P, T]) -> Callable[P, T]:
    """Call `method`, which leaves the same state if called twice, again if it was broken off."""

    @functools.wraps(method)
    def attempt(*args: P.args, **words: P.kwargs) -> T:
        for _ in range(_TIMES - 1):
            try:
                return method(*args, **words)
            except InterruptedChange as e:
                log.debug("made again: %s", e)
                time.sleep(_PAUSE_SECONDS)  # a server that is ending still takes connections
        return method(*args, **words)

    return attempt


def retry_connections(engine: Engine, shown: str) -> None:
    """From now on a server that does not answer is waited for.

    Args:
        engine: Its pool must look at each connection before use (`pool_pre_ping`).
        shown: Its URL for people, without a password.
    """

    def connect(dialect: Dialect, record: object, args: list[Any], words: dict[str, Any]) -> Any:
        refused = dialect.loaded_dbapi.OperationalError
        end, said = time.monotonic() + _RETRY_SECONDS, False
        while True:
            try:
                return dialect.connect(*args, **words)
            except refused as e:
                if time.monotonic() > end:
                    raise
                if not said:
                    log.warning("%s", _describe_wait(shown, e))
                said = True
                time.sleep(_PAUSE_SECONDS)

    def note_broken(context: ExceptionContext) -> None:
        if context.is_disconnect and not context.is_pre_ping:
            raise InterruptedChange(
                f"--storage {shown}: the database went away in the middle of a change: "
                f"{summarize_error(context.original_exception)}. Nothing is lost: when it is back, "
                f"go on with dpsweep resume"
            ) from context.original_exception

    event.listen(engine, "do_connect", connect)
    event.listen(engine, "handle_error", note_broken)


def _describe_wait(shown: str, e: BaseException) -> str:
    return (
        f"--storage {shown}: the database does not answer: {summarize_error(e)}. The sweep waits "
        f"for it, for up to {_RETRY_SECONDS / 60:.0f} min"
    )
