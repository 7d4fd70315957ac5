"""How verbs speak to people."""

from rich.console import Console


def warn(warnings: list[str]) -> None:
    """Prints warnings to stderr, a line each."""
    for warning in warnings:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
            f"warning: {warning}"
        )
