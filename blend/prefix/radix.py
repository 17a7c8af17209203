"""A radix tree over tokens: a prefix is found to the token (RadixAttention of SGLang, Zheng et al. 2024, section 3)."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from blend.prefix.leaves import Node
from blend.prefix.pool import WORD
from blend.prefix.tree import TreePrefixCache
from blend.stores.eviction import Policy

__all__ = ["RadixPrefixCache"]


class RadixPrefixCache(TreePrefixCache):
    """Finds the longest known prefix to the token, and holds every shared beginning once.

    A node holds the longest run of tokens that no sequence leaves, so that runs are compared whole and a sequence
    costs as many steps as it has branches. A run is split where a sequence first leaves it. The least valuable leaf
    leaves first, its end before its beginning.

    Args:
        limit: bytes of keys and values.
        policy: which leaf leaves first: a name of :data:`blend.stores.eviction.POLICIES`, or an object of its own.

    Raises:
        BudgetError: ``limit`` is not positive.
        StoreError: no policy has that name.
    """

    def __init__(self, limit: int = 1 << 30, *, policy: Policy | str = "lru") -> None:
        super().__init__(limit, 1, policy)

    def check(self) -> None:
        super().check()
        with self._lock:
            for node in self._table.values():
                assert node.key == _key(node.parent, node.tokens)

    def _root_key(self, extra: str) -> Hashable:
        return extra

    def _walk(self, root: Node, data: bytes) -> tuple[Node, int]:
        node, at = root, 0
        while at < len(data):
            child = self._table.get((id(node), data[at : at + WORD]))
            if child is None:
                break
            node = child
            if not data.startswith(child.tokens, at):
                at += _common(data, at, child.tokens)
                break
            at += len(child.tokens)
        return node, at // WORD

    def _grow(self, node: Node, data: bytes, pages: bytes) -> int:
        self._settle(self._attach(node, _key(node, data), data, pages))
        return len(pages) // WORD

    def _split(self, node: Node, rows: int) -> Node:
        """The lower part stays the node that it was, so that locks, children and its place in the queue stay right."""
        assert node.parent is not None
        cut = (rows - node.parent.end) * WORD
        upper = Node(node.key, 0, uses=node.uses, used=node.used, score=node.score)
        upper.tokens, upper.pages = node.tokens[:cut], node.pages[:cut]
        upper.parent, upper.end, upper.fanout = node.parent, rows, 1
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[cut:]
        node.key = _key(upper, node.tokens)
        self._table[upper.key], self._table[node.key] = upper, node
        self._resize(upper)
        self._resize(node)
        return upper


def _key(parent: Node | None, tokens: bytes) -> Hashable:
    """A node is found by its parent, which outlives it, and its first token."""
    return id(parent), tokens[:WORD]


def _common(data: bytes, at: int, tokens: bytes) -> int:
    """Bytes of whole tokens on which ``data`` from ``at`` on, and ``tokens``, which differ, agree."""
    size = min(len(data) - at, len(tokens)) // WORD
    ours = np.frombuffer(data, dtype=np.int64, offset=at, count=size)
    differs = ours != np.frombuffer(tokens, dtype=np.int64, count=size)
    first = int(differs.argmax())
    return (first if differs[first] else size) * WORD
