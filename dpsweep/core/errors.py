"""Errors a user can act on: where, what was expected, what came, what to do next."""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches


class DpSweepError(Exception):
    """A mistake that the user can correct.

    The command line prints it without a traceback and exits with `exit_code`.
    """

    exit_code = 2


class ConfigError(DpSweepError):
    """Something in a YAML file or an override is wrong."""


class PrivateRowError(ConfigError):
    """A row or image of private data is not as declared; the message quotes it.

    It is for whoever reads the file, on the machine that has it, and never recorded elsewhere.
    """

    public = (
        "a row or image of the data is not as declared, and its values are not written here. See "
        "it where the data are, with: dpsweep check FILE"
    )
    """Message in the place of its own, where it is recorded."""


class StateError(DpSweepError):
    """The sweep's stored state does not allow what was asked."""


class Interrupted(StateError):
    """The sweep cannot go on now, and can later, by the same command and without a change."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: by it a job's queue tells a fault from a mistake


class ConnectionRefused(DpSweepError):
    """A service the sweep needs (Ray, tracking server, storage) cannot be used."""


class DiskFull(DpSweepError):
    """Something could not be written for want of space; nothing written before is lost."""


class Diverged(DpSweepError):
    """A trial's released weights stopped being finite numbers."""


class InvalidKey(ValueError):
    """Raised inside a config's validator when two of its keys do not go together.

    Attributes:
        key: Dotted key to name, relative to the config that raises.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[type[ValueError], tuple[str, str]]:
        return InvalidKey, (self.key, str(self))  # it may come from another process


def unknown_name_error(kind: str, name: str, known: Iterable[str], *, where: str) -> ConfigError:
    """Make the error for a name missing from a table; `where` is file, line and dotted key."""
    return ConfigError(f"{where}: unknown {kind} {name!r}.{suggest_names(name, known)}")


def suggest_names(name: str, known: Iterable[str], meant: str | None = None) -> str:
    """Return the end of such a message: `meant`, or the closest known name, then all of them.

    >>> suggest_names("dsik", ["disk", "dp_sgd"])
    " Did you mean 'disk'? Known: disk, dp_sgd."
    >>> suggest_names("DP-SGD", ["disk", "dp_sgd"])
    " Did you mean 'dp_sgd'? Known: disk, dp_sgd."
    """
    known = sorted(known)
    forms = {normalize_name(k): k for k in known}
    close = (
        [meant]
        if meant
        else [forms[form] for form in get_close_matches(normalize_name(name), forms, n=1)]
    )
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(known)}."


def normalize_name(name: str) -> str:
    """Return a name without differences of spelling: case, dashes, blanks, outer underscores.

    >>> normalize_name("DP-SGD"), normalize_name("learningRate"), normalize_name("Batch Size")
    ('dp_sgd', 'learning_rate', 'batch_size')
    """
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return re.sub(r"[\W_]+", "_", apart).strip("_").lower()


def summarize_error(error: BaseException) -> str:
    r"""Return the first line of another library's error, or its type's name if it has no text.

    >>> summarize_error(OSError("no route\n  to host")), summarize_error(ValueError())
    ('no route', 'ValueError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one it was raised from or while handling, and so on."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def list_some(words: Sequence[str], most: int = 3) -> str:
    """List the first few words of a message.

    >>> list_some(["a", "b", "c", "d"])
    'a, b, c, ...'
    """
    return ", ".join(words[:most]) + ", ..." * (len(words) > most)


def format_shape(shape: Sequence[int]) -> str:
    """Format a shape, such as 3 x 32 x 32."""
    return " x ".join(map(str, shape))
