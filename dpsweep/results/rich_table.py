"""The look of every table that has a title."""

from rich import box
from rich.table import Table


def plain_table(title: str, **more: str) -> Table:
    """A table under a title, to be filled; `more` as rich's Table takes it."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        **more,  # type: ignore[arg-type]
    )
