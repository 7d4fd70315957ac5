"""Owner of a sweep: a login name, or DPSWEEP_OWNER where several people share one account.

It keeps people out of each other's way and is no protection: whoever may use the account may set
the variable. What protects is who may read and write the files (docs/concepts/privacy.md).
"""

import os
import pwd
import re
from urllib.parse import quote

from dpsweep.core.errors import ConfigError, StateError

VARIABLE = "DPSWEEP_OWNER"
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+%-]{0,79}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}")


def whoami() -> str:
    """Get the name of the current user; ConfigError if DPSWEEP_OWNER is no name for a folder."""
    named = os.environ.get(VARIABLE)
    if named is None:
        return get_login_name(os.geteuid())
    if not is_owner(named):
        raise ConfigError(
            f"{VARIABLE}={named!r}: an owner is up to 80 letters, digits and _ . @ + % -, such as "
            f"alice"
        )
    return named


def is_owner(text: str) -> bool:
    """True if `text` can name an owner."""
    return _OWNER.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """True if `text` can name a sweep."""
    return _NAME.fullmatch(text) is not None


def get_login_name(uid: int) -> str:
    """The login name of a user id, as it can name a folder; uid-N if it has none."""
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid-{uid}"
    return name if is_owner(name) else f"_{quote(name, safe='@+')}"[:80]


def split_sweep_name(named: str) -> tuple[str | None, str]:
    """Owner and name of a sweep as people type it; no owner for their own.

    >>> split_sweep_name("tiny"), split_sweep_name("alice/tiny")
    ((None, 'tiny'), ('alice', 'tiny'))

    Raises:
        StateError: If it is neither, so that nothing that was typed or stored leaves its folder.
    """
    owner, slash, name = named.rpartition("/")
    if not is_name(name) or (slash and not is_owner(owner)):
        shown = named if len(named) <= 80 else f"{named[:77]}..."
        raise StateError(
            f"{shown!r} is no sweep's name. One is NAME, or OWNER/NAME for somebody else's: up to "
            f"80 letters, digits, dots, dashes and underscores"
        )
    return owner if slash else None, name
