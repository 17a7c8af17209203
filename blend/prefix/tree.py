"""What the radix tree and the chained blocks share: nodes that own pages of one pool, locks, and leaves that leave.

::

    root of extra "" -- [system prompt, 2000 rows] -+- [question A, 50 rows]   <- leaf
                                                    +- [question B, 50 rows]   <- leaf, locked
    root of extra "tenant 2" -- ...

A sequence is the path from a root to a node; its KV stands in the pages of the nodes on that path, so a beginning that
sequences share is held once. How a path is cut into nodes, and how the next node is found, is the subclass's business.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from blend.chunk import KVLayers
from blend.errors import BudgetError, StoreError
from blend.prefix.base import PrefixCache, PrefixHit, PrefixStats
from blend.prefix.leaves import Leaves, Node
from blend.prefix.pool import WORD, PagePool
from blend.stores.eviction import Policy, policy_by_name

__all__ = ["TreePrefixCache"]


@dataclass(slots=True)
class _Lease:
    """A lock: the node that it lies on, and the rows of the path that were asked for. None once it is given back."""

    node: Node | None
    rows: int


class TreePrefixCache(PrefixCache):
    """A tree of nodes over a pool of pages.

    A policy sees every node as an entry whose ``cost`` is its rows: what a row costs to compute is not known here, and
    is about the same for all. A match, and an insert, is a use of the whole path.

    Args:
        limit: bytes of keys and values.
        page: rows of a page, and so of the smallest hit.
        policy: which leaf leaves first, by name or an object of its own.

    Raises:
        BudgetError: ``limit`` is not positive.
        StoreError: ``page`` is not positive, or no policy has that name.
    """

    def __init__(self, limit: int, page: int, policy: Policy | str) -> None:
        if limit <= 0:
            raise BudgetError(f"limit is {limit} bytes: a prefix cache needs a positive one, such as 1 << 30")
        if page <= 0:
            raise StoreError(f"a block of {page} rows holds nothing: it needs at least one, and 16 is usual")
        self.limit = limit
        self.granularity = page
        self._pool = PagePool(limit, page)
        self.policy = policy_by_name(policy) if isinstance(policy, str) else policy
        self._leaves = Leaves(self.policy)
        self._roots: dict[Hashable, Node] = {}
        self._table: dict[Hashable, Node] = {}  # every other node by its key
        self._leases = 0
        self._logical = 0
        self._counts = [0, 0, 0]  # rows matched, asked for, evicted
        self._lock = threading.Lock()

    # --- what a subclass adds ---------------------------------------------------------------------

    @abstractmethod
    def _root_key(self, extra: str) -> Hashable:
        """Key of the root of all sequences with this ``extra``."""

    @abstractmethod
    def _walk(self, root: Node, data: bytes) -> tuple[Node, int]:
        """The deepest node that shares a row with the packed tokens, and the rows that are known of them.

        The node may reach further than they do.
        """

    @abstractmethod
    def _split(self, node: Node, rows: int) -> Node:
        """Cuts a node after ``rows`` rows of its path; the upper part is a new node, and the one to hang things on."""

    @abstractmethod
    def _grow(self, node: Node, data: bytes, pages: bytes) -> int:
        """Hangs packed tokens and their pages below ``node``; pages used."""

    # --- the verbs --------------------------------------------------------------------------------

    def match(self, ids: Sequence[int], *, extra: str = "", lock: bool = False) -> PrefixHit | None:
        data = array("q", ids).tobytes()
        with self._lock:
            root = self._roots.get(self._root_key(extra))
            node, rows = (root, 0) if root is None else self._walk(root, data)
            self._counts[0] += rows
            self._counts[1] += len(data) // WORD
            if node is None or not rows:
                return None
            self._leaves.use(node)
            lease = _Lease(node, rows)
            if not lock:
                layers = self._read(lease)
                return PrefixHit(rows, lambda: layers)
            node.pins += 1
            self._leases += 1
            return PrefixHit(rows, partial(self._read_locked, lease), lease)

    def insert(self, ids: Sequence[int], layers: KVLayers, *, extra: str = "") -> int:
        """Adds the exact KV of ``ids`` (``[H, len(ids), D]`` per layer); a copy is kept.

        What does not fit is left out, from the end. Returns the rows that were new and are stored.

        Raises:
            StoreError: a layer has another number of rows.
            ForeignKV: the layers are not like those that are held.
        """
        data = array("q", ids).tobytes()
        if not data:
            return 0
        layers = tuple(layers)
        with self._lock:
            self._pool.admit(layers, len(data) // WORD)
            root = self._root(extra)
            node, rows = self._walk(root, data)
            wanted = len(data) // WORD // self.granularity - rows // self.granularity
            if wanted and rows < node.end:
                node = self._split(node, rows)
            self._leaves.use(node)
            node.pins += 1  # making room must not take what the new rows hang on
            try:
                return self._append(node, data[rows * WORD :], wanted, layers) if wanted else 0
            finally:
                node.pins -= 1
                self._settle(node)

    def unlock(self, hit: PrefixHit) -> None:
        """Gives a locked hit back; once per hit.

        Raises:
            StoreError: the hit was not locked, or was given back before.
        """
        with self._lock:
            lease = hit.handle
            if not isinstance(lease, _Lease) or lease.node is None:
                raise StoreError(
                    f"this hit of {hit.rows} rows is not locked: match(..., lock=True), then unlock it once"
                )
            node, lease.node = lease.node, None
            node.pins -= 1
            self._leases -= 1
            self._settle(node)

    def evict(self, nbytes: int) -> int:
        with self._lock:
            before = self._pool.used
            if not before or nbytes <= 0:
                return 0
            freed = before * self._pool.page_bytes
            self._free_pages(self._pool.free + min(before, -(-nbytes // self._pool.page_bytes)))
            freed -= self._pool.used * self._pool.page_bytes
            if not self._pool.used:
                self._pool.clear()
            return freed

    def stats(self) -> PrefixStats:
        with self._lock:
            rows = self._pool.used * self.granularity
            return PrefixStats(rows, self._logical, self._pool.used * self._pool.page_bytes, *self._counts)

    def check(self) -> None:
        with self._lock:
            nodes = list(self._table.values())
            self._pool.check([node.pages for node in nodes])
            self._leaves.check()
            fanout = dict.fromkeys(map(id, (*nodes, *self._roots.values())), 0)
            for key, node in self._table.items():
                assert node.key == key
                assert node.parent is not None
                fanout[id(node.parent)] += 1
                rows = len(node.pages) // WORD * self.granularity
                assert rows
                assert rows == len(node.tokens) // WORD == node.end - node.parent.end == node.cost
                assert node.nbytes * self.granularity == rows * self._pool.page_bytes
                assert node.waiting or not node.may_leave, "a leaf that may leave is not queued"
            assert all(node.fanout == fanout[id(node)] for node in (*nodes, *self._roots.values()))
            assert all(root.fanout and root.key == key for key, root in self._roots.items()), "a root without a tree"
            assert self._logical == sum(node.end for node in nodes if not node.fanout)
            assert self._leases == sum(node.pins for node in (*nodes, *self._roots.values()))

    # --- KV ---------------------------------------------------------------------------------------

    def _read(self, lease: _Lease) -> KVLayers:
        parts, node = [], lease.node
        while node is not None:
            parts.append(node.pages)
            node = node.parent
        return self._pool.read(b"".join(reversed(parts))[: lease.rows // self.granularity * WORD])

    def _read_locked(self, lease: _Lease) -> KVLayers:
        with self._lock:
            if lease.node is None:
                raise StoreError(
                    f"this hit of {lease.rows} rows was unlocked before it was read: read hit.layers first"
                )
            return self._read(lease)

    # --- growing and shrinking --------------------------------------------------------------------

    def _append(self, node: Node, data: bytes, wanted: int, layers: KVLayers) -> int:
        """Stores the rows behind a node, ``wanted`` pages of them or what fits; rows stored."""
        count = min(wanted, self._free_pages(min(wanted, self._pool.capacity)))
        if not count:
            return 0
        pages = self._pool.take(count)
        used = 0
        try:
            self._pool.write(pages, layers, node.end)
            used = self._grow(node, data[: count * self.granularity * WORD], pages)
        finally:
            if used < count:
                self._pool.give(pages[used * WORD :])
        return used * self.granularity

    def _root(self, extra: str) -> Node:
        key = self._root_key(extra)
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(key, 0)
        return root

    def _attach(self, parent: Node, key: Hashable, tokens: bytes, pages: bytes) -> Node:
        """A new leaf."""
        rows = len(tokens) // WORD
        node = Node(key, len(pages) // WORD * self._pool.page_bytes, float(rows), tokens=tokens, pages=pages)
        node.parent, node.end = parent, parent.end + rows
        self._leaves.enter(node)
        self._table[key] = node
        self._logical += node.end if parent.fanout else rows
        parent.fanout += 1
        return node

    def _settle(self, node: Node) -> None:
        """Queues a node that may leave now, and forgets a root that nothing hangs on."""
        if node.may_leave:
            self._leaves.add(node)
        elif node.parent is None and not node.fanout and not node.pins:
            del self._roots[node.key]

    def _free_pages(self, wanted: int) -> int:
        """Evicts until ``wanted`` pages are free or nothing more may leave; pages that are free then."""
        while self._pool.free < wanted:
            leaf = self._leaves.take()
            if leaf is None:
                break
            self._shorten(leaf, wanted - self._pool.free)
        return self._pool.free

    def _shorten(self, leaf: Node, wanted: int) -> None:
        """Takes up to ``wanted`` pages off the end of a leaf; one of which none is left is gone."""
        keep = max(len(leaf.pages) - wanted * WORD, 0)
        rows = (len(leaf.pages) - keep) // WORD * self.granularity
        self._pool.give(leaf.pages[keep:])
        self._counts[2] += rows
        self._logical -= rows
        if keep:
            leaf.pages, leaf.tokens = leaf.pages[:keep], leaf.tokens[: keep * self.granularity]
            leaf.end -= rows
            self._resize(leaf)
            self._leaves.add(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del self._table[leaf.key]
        parent.fanout -= 1
        if parent.fanout:
            self._logical -= parent.end
        self.policy.evicted(leaf)
        self._settle(parent)

    def _resize(self, node: Node) -> None:
        node.nbytes = len(node.pages) // WORD * self._pool.page_bytes
        node.cost = float(len(node.tokens) // WORD)
