"""Small chunk KV to put into stores, and what it means that two are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blend.chunk import ChunkKV

__all__ = ["close_kv", "same_bits", "same_kv", "tiny_kv"]


def tiny_kv(key: str, seed: int = 0, rows: int = 4, dtype: torch.dtype = torch.float32) -> ChunkKV:
    """Random KV of two small layers."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(2, rows, 4, generator=generator).to(dtype)

    return ChunkKV(key, "model", tuple(range(rows)), (1, seed), rows + 2, ((draw(), draw()), (draw(), draw())))


def same_kv(a: ChunkKV | None, b: ChunkKV) -> bool:
    """Whether both are the same to the last bit, dtype, shape and ids included."""
    return a is not None and _same_head(a, b) and all(same_bits(x, y) for x, y in _pairs(a, b))


def close_kv(a: ChunkKV | None, b: ChunkKV, tolerance: float) -> bool:
    """Whether both are the same but for an error of ``tolerance``, relative to the largest number of each array."""
    return a is not None and _same_head(a, b) and all(_near(x, y, tolerance) for x, y in _pairs(a, b))


def _same_head(a: ChunkKV, b: ChunkKV) -> bool:
    return (a.key, a.fingerprint, a.ids, a.prelude, a.length, len(a.layers)) == (
        b.key, b.fingerprint, b.ids, b.prelude, b.length, len(b.layers)
    )  # fmt: skip


def _pairs(a: ChunkKV, b: ChunkKV) -> Sequence[tuple[Tensor, Tensor]]:
    return [(x, y) for one, other in zip(a.layers, b.layers, strict=True) for x, y in zip(one, other, strict=True)]


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether dtype, shape and every bit are the same."""
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(_bits(x), _bits(y))


def _near(x: Tensor, y: Tensor, tolerance: float) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return bool((x.float() - y.float()).abs().max() <= tolerance * y.float().abs().max())


def _bits(x: Tensor) -> Tensor:
    return x.cpu().contiguous().view(torch.uint8)
