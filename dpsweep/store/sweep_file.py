"""Content of a sweep.json, and the check that it is as we write it."""

import json
from pathlib import Path
from typing import Any

from dpsweep.config.source import Source, Tree
from dpsweep.core.errors import StateError


def dump_sources(*files: Source) -> list[Tree]:
    """Files as they are written down: without the lines, which only errors before a launch name."""
    return [{"name": source.name, "tree": source.tree} for source in files]


def read_stored(place: Path, name: str) -> Tree:
    """A sweep.json, as far as anything is built on it.

    Raises:
        StateError: If it is not one of ours.
        OSError: If it cannot be read.
    """
    try:
        stored = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise _make_damaged_error(place, "is no JSON") from e
    if wrong := _find_fault(stored, name):
        raise _make_damaged_error(place, wrong)
    return dict(stored)


def _find_fault(stored: Any, name: str) -> str:
    """Describe what is wrong with the content of a sweep.json; empty if nothing is."""
    if not isinstance(stored, dict):
        return "holds no mapping"
    texts = ("id", "owner", "study", "tracking_uri", "storage_uri")
    if wrong := [key for key in texts if not isinstance(stored.get(key), str | None)]:
        return f"{wrong[0]} must be text"
    if not stored.get("id") or "tracking_uri" not in stored:
        return "id or tracking_uri is missing"
    sources = stored.get("sources")
    if not isinstance(sources, list) or len(sources) != 2 or not all(map(_is_source, sources)):
        return "sources must be a sweep and its base"
    if sources[0]["tree"].get("name") != name:
        return f"is of another sweep than {name!r}, whose folder it is in"
    return ""


def _is_source(stored: Any) -> bool:
    return (
        isinstance(stored, dict)
        and isinstance(stored.get("name"), str)
        and isinstance(stored.get("tree"), dict)
    )


def _make_damaged_error(place: Path, wrong: str) -> StateError:
    return StateError(
        f"{place}: {wrong}; it was not written by dpsweep, or is damaged. Put it back from a "
        f"backup; sweep.yaml beside it may still be whole, and can be launched anew"
    )
