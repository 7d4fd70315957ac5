"""The connected cluster's nodes while a sweep runs: nodes join, drain and leave.

Trials run at once as far as the nodes that are there allow, counted again every two seconds. An
autoscaler is asked for as many as the trials that are left can use. A node that joins is asked what
the others were asked before the first trial, and gets trials when it has answered.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

from dpsweep.compat import draining_nodes, has_autoscaler
from dpsweep.config.resources import ResourcesConfig
from dpsweep.execution.resources import count_trials_per_node, make_bundle

_LOOK_SECONDS, _ASK_SECONDS = 2.0, 15.0
_MOST = 10_000
"""Trials that an autoscaler is asked to make room for, at most: its own limit comes long before."""

FindFaults = Callable[[str], list[str]]
"""Asks the node of an id what trials need, and returns what is wrong there."""

log = logging.getLogger(__name__)


class ClusterNodes:
    """The nodes where trials of one sweep may run.

    Args:
        resources: Of a trial; `gpu` is decided.
        find_faults: Called in a thread for each node that joins; None to take every node.
    """

    def __init__(self, resources: ResourcesConfig, find_faults: FindFaults | None = None) -> None:
        self._resources, self._find_faults = resources, find_faults
        self._looked = self._asked = float("-inf")
        self._alive: list[dict[str, Any]] = []
        self._draining: frozenset[str] = frozenset()
        self._refused: set[str] = set()  # those that have not answered yet, and those at fault
        self._elastic = has_autoscaler()
        self._look()
        self._seen = {node["NodeID"] for node in self._alive}

    def usable(self) -> dict[str, str]:
        """The nodes on which a trial fits and may begin: Ray's id -> host."""
        return {n["NodeID"]: n["NodeManagerHostname"] for n in self._list_fit() if self._takes(n)}

    def list_refused(self) -> frozenset[str]:
        """Nodes that are there and must not be given a trial."""
        return self._draining | frozenset(self._refused)

    @property
    def draining(self) -> frozenset[str]:
        """Ids of draining nodes: Ray places nothing new on them before they end."""
        return self._draining

    def count_trials(self, avoided: Collection[str] = ()) -> int:
        """Count the trials that run at once on nodes that are not avoided."""
        self.update()
        usable = [n for n in self._list_fit() if self._takes(n) and n["NodeID"] not in avoided]
        most = sum(count_trials_per_node(self._resources, n["Resources"]) for n in usable)
        return min(most, self._resources.max_concurrent or most)

    def request(self, count_wanted: Callable[[], int]) -> None:
        """Ask the autoscaler, if there is one, for room for as many trials as can run now."""
        now = time.monotonic()
        if not self._elastic or now - self._asked < _ASK_SECONDS:
            return
        self._asked = now
        num = min(count_wanted(), self._resources.max_concurrent or _MOST, _MOST)
        request_resources(bundles=[make_bundle(self._resources)] * num)

    def release(self) -> None:
        """Take the request back, so that idle nodes may go."""
        if self._elastic:
            with contextlib.suppress(RayError):  # the cluster may be gone
                request_resources(bundles=[])

    def update(self) -> None:
        """Look for nodes that joined or left, unless that was just done."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._look()
        joined = [n for n in self._list_fit() if n["NodeID"] not in self._seen]
        for node in joined:
            self._seen.add(node["NodeID"])
            if self._find_faults is None:
                continue
            self._refused.add(node["NodeID"])
            threading.Thread(target=self._question, args=(node,), daemon=True).start()

    def _look(self) -> None:
        with contextlib.suppress(RayError):  # the head may be away for a moment
            self._alive = [node for node in ray.nodes() if node["Alive"]]
            self._draining = frozenset(draining_nodes())
        self._looked = time.monotonic()

    def _question(self, node: dict[str, Any]) -> None:
        assert self._find_faults is not None
        node_id, host = node["NodeID"], node["NodeManagerHostname"]
        try:
            faults = self._find_faults(node_id)
        except Exception as e:  # in a thread it would be lost
            faults = [f"{type(e).__name__}: {e}"]
        if faults:
            log.warning("%s (node %s) joined and gets no trials: %s", host, node_id[:8], faults[0])
        else:
            self._refused.discard(node_id)
            log.warning("%s (node %s) joined and gets trials", host, node_id[:8])

    def _list_fit(self) -> list[dict[str, Any]]:
        return [n for n in self._alive if count_trials_per_node(self._resources, n["Resources"])]

    def _takes(self, node: dict[str, Any]) -> bool:
        return node["NodeID"] not in self.list_refused()
