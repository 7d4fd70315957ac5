"""Rows of the user's own files: named columns of csv, tsv, jsonl, parquet, npz, and datasets.

Each value keeps its place, so that an error names the line. Nothing is guessed from the values:
types, ranges and classes are declared (data/tables.py).
"""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from dpsweep.core.errors import (
    ConfigError,
    InvalidKey,
    PrivateRowError,
    suggest_names,
    summarize_error,
)

Format = Literal["csv", "tsv", "jsonl", "parquet", "npz", "huggingface"]

FORMATS = [kind for kind in get_args(Format) if kind != "huggingface"]
"""Formats of files, which are the endings of their names."""


@dataclass(frozen=True)
class Column:
    """One column of a file."""

    key: str  # dotted key of the config that names it, such as data.columns.age
    path: Path
    name: str  # of the column
    values: Sequence[Any]  # text in csv and tsv; numbers, text or None in the others
    lines: Sequence[int]  # line or row of each, from 1
    unit: str  # word for `lines`: "line" or "row"

    def error(self, index: int, what: str) -> PrivateRowError:
        """Make the error of one value, with its place."""
        return PrivateRowError(
            f"{self.key}: {self.path}, {self.unit} {self.lines[index]}: column {self.name!r}: "
            f"{what}"
        )

    def convert(self, one: Callable[[Any], Any]) -> list[Any]:
        """Convert each value; `one` raises ValueError saying what is wrong with it."""
        found = []
        for index, value in enumerate(self.values):
            try:
                found.append(one(value))
            except ValueError as e:
                raise self.error(index, str(e)) from None
        return found


def file_format(path: Path, declared: Format | None = None) -> Format:
    """Tell the format by the file's suffix, unless it is declared.

    Raises:
        ConfigError: If the suffix is of none.
    """
    suffix = path.suffix.removeprefix(".").lower()
    if declared is not None:
        return declared
    if suffix in FORMATS:
        return suffix  # type: ignore[return-value]
    raise ConfigError(
        f"{path}: its name ends in none of .{', .'.join(FORMATS)}. Convert it, or give data.format"
    )


def read_columns(
    path: Path,
    names: Mapping[str, str],
    num_rows: tuple[str, int],
    file: str,
    declared: Format | None = None,
    split: tuple[str, str | None] = ("", None),
) -> dict[str, Column]:
    """Read some columns of a file.

    Args:
        names: Of the columns -> the keys that name them, such as data.columns.age.
        num_rows: Key that declares the number of rows, such as data.num_train, and that number.
        file: Key that names the file, such as data.file.
        declared: Format, if the suffix does not say.
        split: Key and name of the part of a data set of the package datasets, such as train.

    Raises:
        ConfigError: If the file is empty, broken, or has not these columns and so many rows.
    """
    try:
        kind = file_format(path, declared)
        if kind == "huggingface":
            read: _Reader = partial(_read_huggingface, split=split)
        else:
            read = _READERS[kind]
        header, columns, lines, unit = _read_file(path, kind, [*names], read)
    except InvalidKey as e:
        raise ConfigError(f"{e.key}: {path}: {e}") from e
    except ConfigError as e:
        raise type(e)(f"{file}: {e}") from e  # one about a private row stays one
    if not header:
        raise ConfigError(f"{file}: {path}: is empty. Give a file with named columns and rows")
    for name, key in names.items():
        if name not in header:
            raise ConfigError(
                f"{key}: {path}: has no column {name!r}.{suggest_names(name, header)}"
            )
    if not lines:
        raise ConfigError(f"{file}: {path}: has a header and no row. Give a file with rows")
    key, num = num_rows
    if len(lines) != num:
        raise ConfigError(
            f"{key}: declares {num:,}, and {path} holds {len(lines):,} rows. Correct one of the two"
        )
    return {k: Column(names[k], path, k, columns[k], lines, unit) for k in names}


def inspect_columns(path: Path) -> tuple[dict[str, bool], int]:
    """Tell the columns of a file, and whether each holds numbers alone; and count its rows.

    No value is told: neither the smallest nor the largest, and no category.

    Raises:
        ConfigError: If it cannot be read, or has no row.
    """
    kind = file_format(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    header = _read_file(path, kind, [], _READERS[kind])[0]
    _, columns, lines, _ = _read_file(path, kind, header, _READERS[kind])
    if not lines:
        raise ConfigError(f"{path}: is empty. Give a file with named columns and rows")
    return {name: all(map(_is_number, columns[name])) for name in header}, len(lines)


def _is_number(value: Any) -> bool:
    try:
        parse_number(value)
    except ValueError:
        return is_missing(value)
    return True


_Read = tuple[list[str], dict[str, Sequence[Any]], Sequence[int], str]
"""Names of all columns, values of those that were asked for, their lines, and the word for them."""

_Reader = Callable[[Path, list[str]], _Read]


def _read_file(path: Path, kind: str, names: list[str], read: _Reader) -> _Read:
    try:
        return read(path, names)
    except UnicodeDecodeError as e:
        if kind not in ("csv", "tsv", "jsonl"):  # whose files have no lines
            raise PrivateRowError(
                f"{path}: holds text that is not UTF-8. Write the file afresh, with UTF-8"
            ) from e
        raise PrivateRowError(
            f"{path}, line {_find_undecodable(path)}: is not UTF-8. Save the file as UTF-8, such "
            f"as with: iconv -f ENCODING -t UTF-8 FILE"
        ) from e
    except OSError as e:
        raise PrivateRowError(
            f"{path}: cannot be read as {kind}: {e.strerror or e}. Check that you may read it, or "
            f"copy it afresh"
        ) from e


def _find_undecodable(path: Path) -> int:
    """Return the number of the first line that is not UTF-8: the decoder names a byte alone."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line.decode()
        except UnicodeDecodeError:
            return number
    return 1  # the file was mended meanwhile


def _read_text(path: Path, names: list[str], dialect: dict[str, Any]) -> _Read:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True, **dialect)
        header = _next_row(reader, path) or []
        places = {name: header.index(name) for name in names if name in header}
        columns: dict[str, list[Any]] = {name: [] for name in places}
        lines = []
        while True:
            first = reader.line_num + 1  # a row with line breaks in quotes ends further down
            if (row := _next_row(reader, path)) is None:
                break
            if not row:
                continue  # a line without anything, as at a file's end
            if len(row) != len(header):
                raise PrivateRowError(
                    f"{path}, line {first}: has {len(row)} cells, and the header has "
                    f"{len(header)}. Correct the line"
                )
            lines.append(first)
            for name, place in places.items():
                columns[name].append(row[place])
    return header, dict(columns), lines, "line"


def _next_row(reader: Any, path: Path) -> list[str] | None:
    first = reader.line_num + 1
    try:
        row: list[str] | None = next(reader, None)
    except csv.Error as e:
        raise PrivateRowError(
            f"{path}, line {first}: the row that begins here is broken: {e}. Close its quotes, "
            f"and write a quote inside of a quoted cell twice"
        ) from e
    return row


_JSON_LINE = 'each line is one object, such as {"COLUMN": VALUE, ...}'


def _read_jsonl(path: Path, names: list[str]) -> _Read:
    header: dict[str, None] = {}
    columns: dict[str, list[Any]] = {name: [] for name in names}
    lines = []
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as e:
                raise PrivateRowError(
                    f"{path}, line {number}: is no JSON: {e.msg}. Correct it: {_JSON_LINE}"
                ) from e
            if not isinstance(row, dict):
                raise PrivateRowError(
                    f"{path}, line {number}: is no JSON object. Correct it: {_JSON_LINE}"
                )
            header |= dict.fromkeys(row)
            lines.append(number)
            for name in names:
                columns[name].append(row.get(name))
    return [*header], dict(columns), lines, "line"


def _read_parquet(path: Path, names: list[str]) -> _Read:
    parquet = import_module("pyarrow.parquet")
    try:
        header = list(parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=[name for name in names if name in header])
    except import_module("pyarrow").ArrowException as e:
        raise PrivateRowError(
            f"{path}: cannot be read as parquet: {summarize_error(e).rstrip('.')}. Copy or write "
            f"it afresh"
        ) from e
    columns = {name: table[name].to_pylist() for name in table.column_names}
    return header, columns, range(1, table.num_rows + 1), "row"


def _read_npz(path: Path, names: list[str]) -> _Read:
    from dpsweep.data.npz import read_arrays, read_headers  # torch; instant verbs load this module

    header = list(read_headers(path))
    known = [name for name in names if name in header]
    columns = dict(zip(known, read_arrays(path, known), strict=True))
    for name, column in columns.items():
        if column.ndim != 1:
            raise ConfigError(
                f"{path}: array {name!r} has the shape {column.shape}. Give one number a row"
            )
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1:
        raise ConfigError(f"{path}: arrays of {sorted(sizes)} rows. Give as many in each")
    rows = range(1, 1 + next(iter(sizes), 0))
    return header, {name: column.tolist() for name, column in columns.items()}, rows, "row"


def _read_huggingface(path: Path, names: list[str], split: tuple[str, str | None]) -> _Read:
    """Read a folder that `save_to_disk` of the package datasets wrote; nothing is downloaded."""
    datasets = import_module("datasets")
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as e:  # no such folder, or of another kind
        raise ConfigError(
            f"{path}: is no data set of the package datasets: {e}. Write it with save_to_disk; a "
            f".parquet or .csv file is read by its name"
        ) from e
    if isinstance(found, datasets.DatasetDict):
        key, part = split
        if part not in found:
            raise InvalidKey(key, f"has no split {part!r}.{suggest_names(str(part), found)}")
        found = found[part]
    header = list(found.column_names)
    columns: dict[str, Sequence[Any]] = {k: list(found[k]) for k in names if k in header}
    return header, columns, range(1, len(found) + 1), "row"


_READERS: dict[str, _Reader] = {
    "csv": lambda path, names: _read_text(path, names, {}),
    "tsv": lambda path, names: _read_text(
        path, names, {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    ),
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "npz": _read_npz,
}


def parse_number(value: Any) -> float:
    """Parse a finite number.

    Raises:
        ValueError: Saying what it is instead.
    """
    if is_missing(value):
        raise ValueError("is empty or NaN. Correct it, or delete the row")
    try:
        number = float(value)
    except (TypeError, ValueError):
        plain = str(value).replace(",", "").replace(" ", "")
        meant = f": {plain} has no separators of thousands" if plain.isdecimal() else ""
        raise ValueError(f"{value!r} is no number. Correct it{meant}") from None
    if math.isinf(number):
        raise ValueError(f"{value!r} is no finite number. Correct it")
    return number


def is_missing(value: Any) -> bool:
    """True for an empty cell, None and NaN, in csv also written as nan."""
    if isinstance(value, str):
        return value.strip() in ("", "nan", "NaN", "NA")
    return value is None or (isinstance(value, float) and math.isnan(value))
