"""The figures that papers print, as cells that can be run: published.yaml, read and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from dpsweep.config.source import Tree, read_yaml, validate_source
from dpsweep.config.space.domains import merge_trees
from dpsweep.core.errors import unknown_name_error
from dpsweep.core.strict import Strict

_FILE = Path(__file__).with_name("published.yaml")


class Part(Strict):
    """Settings that a row, a column or a method of a table gives its trials."""

    set: dict[str, Any] = Field(default_factory=dict)
    """Sections of the trial config."""

    search: dict[str, Any] = Field(default_factory=dict)
    """Dotted key -> how it varies, as in a sweep file."""

    published: dict[str, Any] = Field(default_factory=dict)
    """Dotted key -> the setting that print names."""

    objective: str = ""
    """Metric that print reports, such as valid/bleu; valid/accuracy if empty."""


class Row(Part):
    """Settings that a row gives its trials."""

    methods: dict[str, Part] = Field(default_factory=dict)
    """List its results of one method, by the name that print gives it."""


class Table(Strict):
    """One table of a paper."""

    source: str
    """Paper and table."""

    needs: str = ""
    """Contents of the user's own folders, where weights or data are not ours to fetch."""

    notes: list[str] = Field(default_factory=list)
    """Differences of its experiments from ours, whatever the cell."""

    base: dict[str, Any]
    """The trial config, as far as all cells share it."""

    search: dict[str, Any]
    """Dotted key -> how it varies in all cells."""

    rows: dict[str, Row]
    """By name."""

    columns: dict[str, Part]
    """By name."""

    methods: dict[str, Part]
    """By the name that print gives them."""

    cells: dict[str, dict[str, dict[str, float]]]
    """Row -> column -> method -> accuracy in the paper, in %."""

    beside: dict[str, dict[str, dict[str, float]]] = Field(default_factory=dict)
    """The same for figures that are not ours to run."""

    missing: dict[str, str] = Field(default_factory=dict)
    """Row -> why it cannot be run."""


@dataclass(frozen=True)
class Cell:
    """One published accuracy, and the settings of its trials."""

    table: str  # name of its table
    row: str  # name of its row
    column: str  # name of its column
    method: str  # name of its method
    published: float  # accuracy in the paper, in %
    beside: dict[str, float]  # other figures that the paper has there, by what they are
    tree: Tree  # the trial config around which is searched
    search: Tree  # what varies
    settings: dict[str, Any]  # dotted key -> the setting that print names
    missing: str  # why it cannot be run; empty if it can
    needs: str = ""  # what the user's own folders must hold; empty if nothing
    objective: str = "valid/accuracy"  # metric of the figure, such as valid/bleu

    @property
    def percent(self) -> float:
        """Factor from a trial's metric to the unit that the paper reports, such as %."""
        return 1.0 if self.objective == "valid/bleu" else 100.0

    @property
    def name(self) -> str:
        """Name of the cell's sweep."""
        return f"{self.table}.{self.row}.{self.column}.{self.method}"

    @property
    def epsilon(self) -> float | None:
        """Published epsilon; None if our text of the paper lost it."""
        found: float | None = self.tree.get("privacy", {}).get("epsilon")
        return found


@cache
def tables() -> dict[str, Table]:
    """Every table, by name."""
    source = read_yaml(_FILE)
    found: dict[str, Table] = validate_source(dict[str, Table], source)
    return found


def table(name: str) -> Table:
    """One table; ConfigError if there is none of this name."""
    if name not in tables():
        raise unknown_name_error("table", name, tables(), where="TABLE")
    return tables()[name]


def cells(
    name: str, rows: Sequence[str] = (), columns: Sequence[str] = (), methods: Sequence[str] = ()
) -> list[Cell]:
    """Cells of a table, in the order of print; all rows, columns or methods where none is named.

    Raises:
        ConfigError: If a row, column or method is not in the table.
    """
    whole = table(name)
    asked = (("rows", rows, whole.rows), ("columns", columns, whole.columns))
    for option, given, known in (*asked, ("methods", methods, whole.methods)):
        for one in given:
            if one not in known:
                raise unknown_name_error(
                    option.removesuffix("s"), one, known, where=f"{name}: --{option}"
                )
    return [
        _cell(name, whole, row, column, method)
        for row, by_column in whole.cells.items()
        for column, by_method in by_column.items()
        for method in by_method
        if (row in rows or not rows)
        and (column in columns or not columns)
        and (method in methods or not methods)
    ]


def _cell(name: str, whole: Table, row: str, column: str, method: str) -> Cell:
    by_row = whole.rows[row]
    exception = by_row.methods.get(method, Part())
    parts = (whole.methods[method], by_row, whole.columns[column], exception)
    tree, search, settings = whole.base, whole.search, dict[str, Any]()
    for part in parts:
        tree, search = merge_trees(tree, part.set), search | part.search
        settings = settings | part.published
    return Cell(
        table=name,
        row=row,
        column=column,
        method=method,
        published=whole.cells[row][column][method],
        beside=whole.beside.get(row, {}).get(column, {}),
        tree=tree,
        search=search,
        settings=settings,
        missing=whole.missing.get(row, ""),
        needs=whole.needs,
        objective=next(filter(None, (part.objective for part in parts)), "valid/accuracy"),
    )
