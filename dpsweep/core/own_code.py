"""The user's own functions, named by MODULE:FUNCTION and imported where they are needed."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from dpsweep.core.errors import InvalidKey


@contextmanager
def import_folder(folder: str | None) -> Iterator[None]:
    """Let Python find modules in `folder` first, within this context."""
    if folder is None:
        yield
        return
    place = str(Path(folder).expanduser().absolute())
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(place)


@cache
def import_function(name: str, folder: str | None) -> Callable[..., Any]:
    """Import a function of the user's.

    Args:
        name: MODULE:FUNCTION.
        folder: Folder of the module, if it is not installed.

    Raises:
        InvalidKey: If there is none.
    """
    module, _, function = name.partition(":")
    with import_folder(folder):
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        except Exception as e:  # whatever the user's own module raises
            raise InvalidKey("function", f"{name}: {type(e).__name__}: {e}") from e
    return found
