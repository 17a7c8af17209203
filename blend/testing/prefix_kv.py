"""KV that a prefix cache is tested with, which tells whose it is, and tokens that often start alike."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import torch

from blend.chunk import KVLayers, kv_bytes
from blend.testing.kv import same_bits

__all__ = ["ROW", "exact_kv", "longest", "odd_kv", "other_kv", "related", "run", "same_layers"]


def exact_kv(ids: Sequence[int]) -> KVLayers:
    """What a model would compute for ``ids``: a row depends on its token and on all before it."""
    state, rows = 0, list[int]()
    for token in ids:
        state = (state * 31 + token + 1) % 1_000_003
        rows.append(state)
    column = torch.tensor(rows, dtype=torch.float32).reshape(1, -1, 1)
    # Two kv heads of dim 3 and values of dim 2, in two layers.
    return tuple((column.expand(2, -1, 3) + layer, column.expand(2, -1, 2) - layer) for layer in range(2))


ROW = kv_bytes(exact_kv((0,)))
"""Bytes of a row of :func:`exact_kv`."""


def other_kv(ids: Sequence[int]) -> KVLayers:
    """KV of the same form that is not :func:`exact_kv`: another tenant's, or image's."""
    return tuple((keys + 0.5, values - 0.5) for keys, values in exact_kv(ids))


def odd_kv(ids: Sequence[int]) -> KVLayers:
    """Layers that differ in heads, dims and dtype, with numbers that only a copy of the bits preserves."""
    keys, values = exact_kv(ids)[0]
    keys[0, ::3, 0], values[1, ::2, 1] = float("nan"), -0.0
    return (
        (keys[:1], values),
        (keys.bfloat16(), values.repeat(2, 1, 4).half()),
        (keys.to(torch.uint8), values[..., :1].to(torch.float8_e4m3fn)),
    )


def same_layers(a: KVLayers, b: KVLayers) -> bool:
    """Whether both are the same to the last bit."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return all(same_bits(x, y) for x, y in pairs)


def run(number: int, rows: int) -> tuple[int, ...]:
    """Tokens that no other number's run has."""
    return tuple(range(number * 10_000, number * 10_000 + rows))


def related(draw: random.Random, known: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """A sequence that often starts like an earlier one."""
    start = draw.choice(known) if known and draw.random() < 0.8 else ()
    head = start[: draw.randint(0, len(start))]
    return (*head, *(draw.randrange(3) for _ in range(draw.randint(1, 6))))[:30]


def longest(ids: Sequence[int], known: Iterable[Sequence[int]]) -> int:
    """Rows of the longest prefix that ``ids`` share with any of ``known``, by brute force."""
    return max((_common(ids, other) for other in known), default=0)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
