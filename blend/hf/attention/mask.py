"""Which keys a selected row may see: everything up to its own position, within its layer's window or chunk.

Shape suffixes: ``S`` selected rows (queries), ``T`` all rows (keys).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Block", "FusionMask", "Observer", "Reach"]

Observer = Callable[[int, Tensor], None]
"""Called with the layer and its attention weights, fp32 ``[1, Hq, S, T]``."""

BLOCK_ROWS = 64


class Reach(NamedTuple):
    """How far back a layer sees: everything, the last ``window`` rows, or its own chunk of ``chunk`` rows."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """First row that a query at ``position`` sees."""
        if self.chunk is not None:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window is not None else 0


@dataclass(frozen=True, eq=False)
class Block:
    """Queries ``[q0, q1)`` against keys ``[k0, k1)``: from the first key that one of them sees to the last.

    ::

        keys    k0 ......... c0 ............... c1 ......... k1
                | some rows  | every row sees   | some rows  |
                  (windows)                       (diagonal)

    What is kept is the mask of the edges alone. Masks of whole blocks, all of them, would be as large as that of the
    prompt.

    Attributes:
        rows_n: positions of the queries.
        reach: window or chunk.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    rows_n: Tensor
    reach: Reach
    _common: tuple[int, int]
    _edges: dict[torch.dtype, list[tuple[slice, Tensor]]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Pairs of a query and a key."""
        return (self.q1 - self.q0) * (self.k1 - self.k0)

    @property
    def common(self) -> slice:
        """Columns, from ``k0``, of the keys that every row sees; an empty slice at 0 where there are none."""
        first, last = self._common
        return slice(first - self.k0, last - self.k0) if first < last else slice(0, 0)

    @property
    def seen(self) -> Tensor:
        """bool ``[q1 - q0, k1 - k0]``, True where seen."""
        return self._seen(slice(0, self.k1 - self.k0))

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask as an additive one, 0 or -inf."""
        whole = torch.zeros(self.q1 - self.q0, self.k1 - self.k0, dtype=dtype, device=self.rows_n.device)
        for columns, bias in self.edges(dtype):
            whole[:, columns] = bias
        return whole

    def edges(self, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
        """The columns outside the common ones, with their additive mask; made once for all layers."""
        if dtype not in self._edges:
            common = self.common
            parts = slice(0, common.start), slice(common.stop, self.k1 - self.k0)
            self._edges[dtype] = [(part, self._bias(part, dtype)) for part in parts if part.stop > part.start]
        return self._edges[dtype]

    def _bias(self, columns: slice, dtype: torch.dtype) -> Tensor:
        hidden = ~self._seen(columns)
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))

    def _seen(self, columns: slice) -> Tensor:
        keys = torch.arange(self.k0 + columns.start, self.k0 + columns.stop, device=self.rows_n.device)
        return _seen(self.rows_n, keys, self.reach)


class FusionMask:
    """Stands in for an attention mask when only selected rows run; passed through the model's layers untouched.

    Args:
        rows_S: positions of the queries, int64, sorted.
        total: rows of the prompt (keys).
        reach: the layer's window or chunk.
        observer: sees the attention weights (the question probe).

    Attributes:
        memo: what a backend makes of the mask once and keeps for all layers that share it, by its own keys.
    """

    def __init__(self, rows_S: Tensor, total: int, reach: Reach, observer: Observer | None = None) -> None:
        self.rows_S = rows_S
        self.total = total
        self.reach = reach
        self.observer = observer
        self.memo: dict[Any, Any] = {}
        self._blocks: dict[tuple[Reach, int], list[Block]] = {}

    def dense(self, reach: Reach | None = None) -> Tensor:
        """The whole mask, bool ``[S, T]``, True where the query may see the key."""
        return _seen(self.rows_S, torch.arange(self.total, device=self.rows_S.device), reach or self.reach)

    def blocks(self, reach: Reach | None = None, size: int = BLOCK_ROWS) -> list[Block]:
        """Blocks of ``size`` queries, each with just the keys between its first and its last visible one."""
        key = reach or self.reach, size
        if key not in self._blocks:
            self._blocks[key] = _cut(self.rows_S, *key)
        return self._blocks[key]


def _cut(rows_S: Tensor, reach: Reach, size: int) -> list[Block]:
    positions = rows_S.tolist()
    blocks = []
    for q0 in range(0, len(positions), size):
        q1 = min(q0 + size, len(positions))
        k0, k1 = reach.first(positions[q0]), positions[q1 - 1] + 1
        common = reach.first(positions[q1 - 1]), positions[q0] + 1
        blocks.append(Block(q0, q1, k0, k1, rows_S[q0:q1], reach, common))
    return blocks


def _seen(rows_S: Tensor, keys_K: Tensor, reach: Reach) -> Tensor:
    row, key = rows_S[:, None], keys_K[None, :]
    seen = key <= row
    if reach.window is not None:
        seen &= key > row - reach.window
    if reach.chunk is not None:
        seen &= torch.div(key, reach.chunk, rounding_mode="floor") == torch.div(row, reach.chunk, rounding_mode="floor")
    return seen
