"""Sizes and times as people write them: 2GB, 500 MiB, 30m, 1.5h."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_SIZES = {
    "B": 1,
    **{f"{k}B": 1000**n for n, k in enumerate("KMGT", start=1)},
    **{f"{k}IB": 1024**n for n, k in enumerate("KMGT", start=1)},
}
_TIMES = {"s": 1.0, "m": 60.0, "h": 3600.0}
_WRITTEN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*$")


def parse_size(text: str) -> int:
    """Bytes of a size with its unit.

    Raises:
        ValueError: If it is no size above zero.

    >>> parse_size("2GB"), parse_size("1.5 GiB")
    (2000000000, 1610612736)
    """
    return round(_parse_amount(text, {k: float(v) for k, v in _SIZES.items()}, "2GB or 500 MiB"))


def parse_duration(text: str) -> float:
    """Seconds of a time with its unit: s, m or h.

    Raises:
        ValueError: If it is no time above zero.

    >>> parse_duration("30m"), parse_duration("1.5h")
    (1800.0, 5400.0)
    """
    return _parse_amount(text, _TIMES, "90s, 30m or 2h")


def _parse_amount(text: str, units: dict[str, float], example: str) -> float:
    found = _WRITTEN.match(text)
    unit = found[2] if found else ""
    known = {name.upper(): size for name, size in units.items()}
    if not found or unit.upper() not in known or not float(found[1]) > 0:
        raise ValueError(f"must be a number above 0 with its unit, such as {example}")
    return float(found[1]) * known[unit.upper()]


def _validate_size(text: str) -> str:
    parse_size(text)
    return text


def _validate_duration(text: str) -> str:
    parse_duration(text)
    return text


Size = Annotated[
    str,
    AfterValidator(_validate_size),
    Field(json_schema_extra={"pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt]i?)?[Bb]\s*$"}),
]
"""Text such as 2GB; `parse_size` reads it."""

Duration = Annotated[
    str,
    AfterValidator(_validate_duration),
    Field(json_schema_extra={"pattern": r"^\s*\d+(\.\d+)?\s*[smhSMH]\s*$"}),
]
"""Text such as 30m; `parse_duration` reads it."""
