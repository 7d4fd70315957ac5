"""Every key that a space varies, in one list: those of branches with the branch they belong to."""

from collections.abc import Iterator
from dataclasses import dataclass

from dpsweep.config.keys import format_path
from dpsweep.config.source import KeyPath
from dpsweep.config.space.derived import Derived
from dpsweep.config.space.domains import Choice, OneOf, Range, Slot, Space


@dataclass(frozen=True)
class Leaf:
    """One searched key."""

    slot: Slot  # its name in the study, and its dotted key in the trial config
    # label of the innermost mapping of a one_of or each_of it stands in; None at the top
    branch: str | None
    domain: Range | Choice | Derived  # how it varies. The choice of a branch is a choice of labels


def list_leaves(space: Space) -> list[Leaf]:
    """All of them, in the order of the file; a branching key comes before what is inside it."""
    return [
        leaf
        for path, domain in space.domains.items()
        for leaf in _iter_leaves(format_path(path), path, domain, None)
    ]


def _iter_leaves(
    name: str, path: KeyPath, domain: Range | Choice | Derived | OneOf, branch: str | None
) -> Iterator[Leaf]:
    """Those of one domain, named as `Space.draw` names them."""
    place = format_path(path)
    if not isinstance(domain, OneOf):
        yield Leaf(Slot(name, place), branch, domain)
        return
    labels = Choice(tuple(b.label for b in domain.branches), domain.in_turn)
    yield Leaf(Slot(name or "one_of", f"{place or 'method'}.name"), branch, labels)
    for inside in domain.branches:
        for inner, way in inside.inner.items():
            inner_name = f"{name or 'one_of'}.{inside.label}.{format_path(inner)}"
            yield from _iter_leaves(inner_name, (*path, *inner), way, inside.label)
