"""Chained block hashes: a prefix is found block by block (automatic prefix caching of vLLM).

The name of a block is SHA-256 over the name of the block before it and its own tokens, and the first chain link is the
hash of ``extra``. Equal names then mean equal beginnings, and one table serves all sequences.
"""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import sha256

from blend.prefix.leaves import Node
from blend.prefix.pool import WORD
from blend.prefix.tree import TreePrefixCache
from blend.stores.eviction import Policy

__all__ = ["BlockPrefixCache"]


class BlockPrefixCache(TreePrefixCache):
    """Finds the longest known prefix in whole blocks, and holds every shared one once.

    Only full blocks are kept: the rows behind the last full one are computed again every time. The blocks of a
    released sequence leave from its tail on, as none leaves while another stands behind it.

    Args:
        limit: bytes of keys and values.
        block: rows of a block.
        policy: which end of a sequence leaves first: a name of :data:`blend.stores.eviction.POLICIES`, or an object of
            its own.

    Raises:
        BudgetError: ``limit`` is not positive.
        StoreError: ``block`` is not positive, or no policy has that name.
    """

    def __init__(self, limit: int = 1 << 30, *, block: int = 16, policy: Policy | str = "lru") -> None:
        super().__init__(limit, block, policy)
        self.block = block

    def check(self) -> None:
        super().check()
        with self._lock:
            for node in self._table.values():
                assert node.parent is not None
                assert node.key == self._name(node.parent, node.tokens)

    def _root_key(self, extra: str) -> Hashable:
        return sha256(extra.encode()).digest()

    def _name(self, parent: Node, tokens: bytes) -> bytes:
        assert isinstance(parent.key, bytes)
        return sha256(parent.key + tokens).digest()

    def _walk(self, root: Node, data: bytes) -> tuple[Node, int]:
        node, size = root, self.block * WORD
        for at in range(0, len(data) - size + 1, size):
            tokens = data[at : at + size]
            child = self._table.get(self._name(node, tokens))
            # The tokens are compared too: two blocks of one name are then a miss, never wrong KV.
            if child is None or child.parent is not node or child.tokens != tokens:
                break
            node = child
        return node, node.end

    def _split(self, node: Node, rows: int) -> Node:
        raise AssertionError("a block is found whole or not at all")

    def _grow(self, node: Node, data: bytes, pages: bytes) -> int:
        size = self.block * WORD
        for used in range(len(pages) // WORD):
            tokens = data[used * size : (used + 1) * size]
            name = self._name(node, tokens)
            if name in self._table:
                break  # another block's name: there is no place for this one, nor for those behind it
            node = self._attach(node, name, tokens, pages[used * WORD : (used + 1) * WORD])
        else:
            used = len(pages) // WORD
        self._settle(node)
        return used
