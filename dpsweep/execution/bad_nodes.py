"""Nodes on which trials fail before their first step, and where such a trial may run instead.

A trial whose directory shows that no step began (`TrialDir.has_stepped`) has released nothing: the
note of it is on disk before the first step. The trial is charged once, keeps its secret, and runs
again on another node, with the batches and the noise that it would have had. So which node it runs
on costs no privacy, even if the directory were read too early.

A failure counts against its node until a trial reports from there, or until the same trial fails
on a second node: then trial or sweep are at fault. With two failures the node is avoided, as long
as there is another one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_FAILURES = 2
"""Trials that fail before their first step on a node, one after the other, until it is avoided."""

ListNodes = Callable[[], Mapping[str, str]]
"""Nodes on which a trial of the sweep fits: Ray's id -> host."""


@dataclass
class NodeFailures:
    """Failures before a first step, by node."""

    list_nodes: ListNodes  # lists the nodes where a trial fits
    _failed: dict[str, set[int]] = field(default_factory=dict)
    _tried: dict[int, set[str]] = field(default_factory=dict)

    def note_failure(self, number: int, node: str) -> bool:
        """Note that a trial failed on a node before its first step.

        Returns:
            True if it is to run on another node; False if that would end no better, or if there is
            no other node.
        """
        tried = self._tried.setdefault(number, set())
        tried.add(node)
        if not node or len(tried) > 1:
            for failed in self._failed.values():
                failed.discard(number)
            return False
        self._failed.setdefault(node, set()).add(number)
        return not tried >= set(self.list_nodes()) - self._list_bad()

    def note_report(self, node: str) -> None:
        """Note that a trial reported from a node: what failed there before is no fault of it."""
        self._failed.pop(node, None)

    def list_avoided(self, number: int | None = None) -> frozenset[str]:
        """Nodes that trials avoid, and those on which trial `number` failed.

        None if no other node is there: the sweep would wait for one for ever.
        """
        avoided = self._list_bad()
        if number is not None:
            avoided |= self._tried.get(number, set())
        # most often none has failed: Tune asks at each of its steps
        if avoided and set(self.list_nodes()) - avoided:
            return frozenset(avoided)
        return frozenset()

    def _list_bad(self) -> set[str]:
        return {node for node, failed in self._failed.items() if len(failed) >= MAX_FAILURES}

    def describe(self, node: str) -> str:
        """The node's host and the first letters of its id."""
        return f"{self.list_nodes().get(node, 'a node that is gone')} (node {node[:8]})"
