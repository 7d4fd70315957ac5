"""The look of every table that has a title, and how it fits a narrow terminal."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

_WORDS_WIDTH = 20
"""Columns of words may be wrapped to so many characters; numbers are never cut."""


class FittingTable(Table):
    """A table that leaves out columns where there is no room, and says which.

    rich cuts numbers short instead ("4.…"), and a figure that is cut is a wrong one.
    """

    spare: Sequence[str] = ()  # headings of columns that may be left out, the first to go first

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, gone, left = copy.copy(self), list[str](), list(self.columns)
        for heading in self.spare:
            if _count_needed(left) <= options.max_width:
                break
            if any(column.header == heading for column in left):
                gone.append(heading)
                left = [column for column in left if column.header != heading]
        shown.columns = [
            replace(column, _index=i, no_wrap=_is_whole(column)) for i, column in enumerate(left)
        ]
        if gone:
            words = f"no room for {', '.join(gone)}"
            shown.caption = f"{self.caption}; {words}" if self.caption else words
        yield from Table.__rich_console__(shown, console, options)


def _is_whole(column: Column) -> bool:
    """True if its cells stay on one line: numbers, which stand to the right."""
    return column.no_wrap or column.justify == "right"


def _count_needed(columns: Sequence[Column]) -> int:
    """Characters that columns take with every number whole."""
    widths = []
    for column in columns:
        widest = max(cell_len(str(cell)) for cell in (column.header, *column.cells))
        widths.append(widest if _is_whole(column) else min(widest, _WORDS_WIDTH))
    return sum(widths) + 2 * len(widths)  # a space of padding, and one between columns


def plain_table(
    title: str,
    columns: Sequence[str] = (),
    *,
    words: Sequence[str] = (),
    spare: Sequence[str] = (),
    **more: str,
) -> FittingTable:
    """A table under a title, to be filled; `more` as rich's Table takes it.

    Args:
        columns: Headings; those that are in `words` stand left, and figures right.
        spare: Headings of columns that a narrow terminal goes without, the first to go first.
    """
    table = FittingTable(
        title=title,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        **more,  # type: ignore[arg-type]
    )
    table.spare = spare
    for name in columns:
        table.add_column(name, justify="left" if name in words else "right")
    return table


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table in Markdown."""
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return head + [f"| {' | '.join(row)} |" for row in rows]
