"""Which keys a selected row may see: everything up to its own position, within its layer's window or chunk.

Shape suffixes: ``S`` selected rows (queries), ``T`` all rows (keys).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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

    Attributes:
        common: ``(c0, c1)``, the keys that every row of the block sees; empty when ``c0 >= c1``.
        seen: bool ``[q1 - q0, k1 - k0]``, True where seen.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    common: tuple[int, int]
    seen: Tensor
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype) -> Tensor:
        """The mask as an additive one, 0 or -inf; made once for all layers that share the block."""
        if dtype not in self._biases:
            zeros = torch.zeros(self.seen.shape, dtype=dtype, device=self.seen.device)
            self._biases[dtype] = zeros.masked_fill_(~self.seen, float("-inf"))
        return self._biases[dtype]

    @cached_property
    def hidden(self) -> list[tuple[slice, Tensor]]:
        """Column ranges (relative to ``k0``) outside the common keys, with True where a key is not seen."""
        c0, c1 = self.common if self.common[0] < self.common[1] else (self.k0, self.k0)
        parts = slice(0, c0 - self.k0), slice(c1 - self.k0, self.k1 - self.k0)
        return [(part, ~self.seen[:, part]) for part in parts if part.stop > part.start]


class FusionMask:
    """Stands in for an attention mask when only selected rows run; passed through the model's layers untouched.

    Args:
        rows_S: positions of the queries, int64, sorted.
        total: rows of the prompt (keys).
        reach: the layer's window or chunk.
        observer: sees the attention weights (the question probe).
    """

    def __init__(self, rows_S: Tensor, total: int, reach: Reach, observer: Observer | None = None) -> None:
        self.rows_S = rows_S
        self.total = total
        self.reach = reach
        self.observer = observer
        self._blocks: dict[Reach, list[Block]] = {}

    def dense(self, reach: Reach | None = None) -> Tensor:
        """The whole mask, bool ``[S, T]``, True where the query may see the key."""
        return _seen(self.rows_S, torch.arange(self.total, device=self.rows_S.device), reach or self.reach)

    def blocks(self, reach: Reach | None = None, size: int = BLOCK_ROWS) -> list[Block]:
        """Blocks of ``size`` queries, each with just the keys between its first and its last visible one."""
        reach = reach or self.reach
        if reach not in self._blocks:
            self._blocks[reach] = list(_cut(self.rows_S, reach, size))
        return self._blocks[reach]


def _cut(rows_S: Tensor, reach: Reach, size: int) -> list[Block]:
    positions = rows_S.tolist()
    blocks = []
    for q0 in range(0, len(positions), size):
        q1 = min(q0 + size, len(positions))
        k0, k1 = reach.first(positions[q0]), positions[q1 - 1] + 1
        common = reach.first(positions[q1 - 1]), positions[q0] + 1
        keys = torch.arange(k0, k1, device=rows_S.device)
        blocks.append(Block(q0, q1, k0, k1, common, _seen(rows_S[q0:q1], keys, reach)))
    return blocks


def _seen(rows_S: Tensor, keys_K: Tensor, reach: Reach) -> Tensor:
    row, key = rows_S[:, None], keys_K[None, :]
    seen = key <= row
    if reach.window is not None:
        seen &= key > row - reach.window
    if reach.chunk is not None:
        seen &= torch.div(key, reach.chunk, rounding_mode="floor") == torch.div(row, reach.chunk, rounding_mode="floor")
    return seen
