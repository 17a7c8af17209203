"""Nodes of a prefix tree, and the order in which its leaves leave. Knows neither tokens nor KV."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from blend.stores.eviction import Entry, Policy

__all__ = ["Leaves", "Node"]


@dataclass(slots=True, eq=False)
class Node(Entry):
    """A run of tokens behind those of its parent, and the pages that hold their KV. A root has none.

    Attributes:
        tokens: packed token ids.
        pages: packed page numbers.
        parent: the node that it hangs on; None for a root.
        end: rows from the start of the sequence to the node's last.
        fanout: nodes that hang on it; 0 makes it a leaf.
        waiting: whether it stands in the queue of leaves.
    """

    tokens: bytes = b""
    pages: bytes = b""
    parent: Node | None = None
    end: int = 0
    fanout: int = 0
    waiting: bool = False

    @property
    def may_leave(self) -> bool:
        """Whether it is a leaf that nobody has locked.

        Only leaves leave, so a lock on a node keeps all that stands above it too.
        """
        return not self.fanout and not self.pins and self.parent is not None


class Leaves:
    """The leaves of a prefix tree in order of their score: O(log n) to add and to take, O(1) to use.

    A queue of its own and not :class:`~blend.stores.eviction.EvictionQueue`: a node has a history while it is no leaf,
    and keeps it when it becomes one.

    Args:
        policy: who leaves first.
        clock: seconds; only differences and order matter.
    """

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self._clock = clock
        self._serial = itertools.count()
        # At most one item per node. It is put right when it surfaces: scores only rise, and whoever is no leaf by then,
        # or is locked, is dropped, to be added again when that ends.
        self._heap: list[tuple[tuple[int, float], int, Node]] = []

    def enter(self, node: Node) -> None:
        """Books the first use of a new node."""
        node.used = self._clock()
        node.score = self.policy.score(node)

    def use(self, node: Node) -> None:
        """Books a use of a node and of all above it, but for the root."""
        now, score = self._clock(), self.policy.score
        while node.parent is not None:
            node.uses += 1
            node.used = now
            node.score = score(node)
            node = node.parent

    def add(self, node: Node) -> None:
        """Queues a node that may leave; twice is once."""
        if not node.waiting:
            node.waiting = True
            heapq.heappush(self._heap, (node.score, next(self._serial), node))

    def take(self) -> Node | None:
        """The leaf that leaves first, no longer queued; None when none may leave."""
        while self._heap:
            score, _, node = heapq.heappop(self._heap)
            if node.may_leave and node.score != score:
                heapq.heappush(self._heap, (node.score, next(self._serial), node))
                continue
            node.waiting = False
            if node.may_leave:
                return node
        return None

    def check(self) -> None:
        """Raises AssertionError when a node's ``waiting`` is not true of it, or an item is too high."""
        assert len({id(node) for _, _, node in self._heap}) == len(self._heap), "a node is queued twice"
        assert all(node.waiting and score <= node.score for score, _, node in self._heap)

    def __len__(self) -> int:
        return len(self._heap)
