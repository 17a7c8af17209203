"""Who stands where in a prompt, where the KV of each row comes from, and by how much it moves.

Knows nothing of models. Example, with an exact prefix hit that ends inside chunk 0::

    rows    | 0 ......... 41 | 42 .... 99 | 100 ...... 219 | 220 .. 239 |
    piece   | prefix (exact) | chunk 0    | chunk 1        | fresh      |
              system + head    tail, moved  moved            question
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blend.chunk import ChunkKV
from blend.prompt import Prompt

__all__ = ["Layout", "Origin", "Piece", "lay_out"]

Origin = Literal["prefix", "fused", "chunk", "fresh"]


class Piece(NamedTuple):
    """A run of rows with one origin.

    Attributes:
        start: first row.
        stop: row behind the last.
        origin: ``prefix`` (exact KV), ``fused`` (an earlier fused context), ``chunk`` (moved KV), ``fresh`` (none yet).
        exact: the KV equals what full prefill computes, up to rounding.
        chunk: index of the chunk in the prompt, or None.
        skip: rows of the chunk's KV before this piece's first row.
    """

    start: int
    stop: int
    origin: Origin
    exact: bool
    chunk: int | None = None
    skip: int = 0


@dataclass(frozen=True)
class Layout:
    """The pieces of a prompt, left to right, covering rows ``0 .. rows - 1`` without gap or overlap.

    Attributes:
        spreads: of each piece, how much its rows differ from context to context; empty where nobody knows.
    """

    pieces: tuple[Piece, ...]
    rows: int
    spreads: tuple[tuple[float, ...], ...] = ()

    @cached_property
    def stale(self) -> Tensor:
        """Rows whose KV is reused but not exact: the only ones that a selector may choose; int64, sorted."""
        return _rows(p for p in self.pieces if p.origin == "chunk" and not p.exact)

    @cached_property
    def forced(self) -> Tensor:
        """Rows that have no KV yet and are always computed (the question); int64, sorted."""
        return _rows(p for p in self.pieces if p.origin == "fresh")

    @cached_property
    def settled_rows(self) -> int:
        """Rows before the first that is stale or fresh: if the rest is all fresh, nothing needs a repair."""
        return next((p.start for p in self.pieces if p.origin == "fresh" or (p.origin == "chunk" and not p.exact)), 0)

    @cached_property
    def spread(self) -> Tensor | None:
        """How much the KV of each stale row differs from context to context, fp32 ``[rows]``.

        None where it is known of no row; rows of which it is not known have the mean of the others.
        """
        spread_T = torch.full((self.rows,), torch.nan)
        for piece, spread in zip(self.pieces, self.spreads, strict=False):
            if spread:
                spread_T[piece.start : piece.stop] = torch.tensor(spread)
        known = spread_T.isfinite()
        return torch.where(known, spread_T, spread_T[known].mean()) if bool(known.any()) else None

    @cached_property
    def stale_spans(self) -> tuple[tuple[int, int], ...]:
        """``(start, stop)`` of each chunk's stale rows."""
        return tuple((p.start, p.stop) for p in self.pieces if p.origin == "chunk" and not p.exact)


def lay_out(
    prompt: Prompt,
    prefix_rows: int = 0,
    fused_rows: int = 0,
    chunks: Sequence[ChunkKV | None] = (),
    same_angles: Callable[[int, int], bool] = lambda length, other: True,
    fused_exact: bool = False,
) -> Layout:
    """Assigns an origin to every row.

    Args:
        prefix_rows: rows covered by an exact prefix hit.
        fused_rows: rows covered by an earlier fused context (used where it reaches beyond the prefix).
        chunks: the KV of every chunk of the prompt, in prompt order; None where a prefix or context covers it.
        fused_exact: whether the earlier fused context is exact.
        same_angles: whether passes of two lengths rotate alike; a chunk is exact only where they do.
    """
    total = len(prompt)
    # The last row is always computed: its logits are the answer's first token.
    prefix_rows, fused_rows = min(prefix_rows, total - 1), min(fused_rows, total - 1)
    pieces: list[Piece] = []
    if prefix_rows:
        pieces.append(Piece(0, prefix_rows, "prefix", True))
    if fused_rows > prefix_rows:
        pieces.append(Piece(prefix_rows, fused_rows, "fused", fused_exact))
    covered = max(prefix_rows, fused_rows)
    if covered < len(prompt.system):
        pieces.append(Piece(covered, len(prompt.system), "fresh", True))
        covered = len(prompt.system)
    for index, (start, chunk, kv) in enumerate(zip(prompt.starts, prompt.chunks, chunks, strict=True)):
        stop = start + len(chunk)
        if covered < stop:
            assert kv is not None, "a chunk beyond the covered rows needs its KV"
            exact = not kv.averaged and prompt.ids[:start] == kv.prelude and same_angles(kv.length, total)
            pieces.append(Piece(max(covered, start), stop, "chunk", exact, index, max(covered - start, 0)))
            covered = stop
    if covered < total:
        pieces.append(Piece(covered, total, "fresh", True))
    return Layout(tuple(pieces), total, tuple(_spread(piece, chunks) for piece in pieces))


def _spread(piece: Piece, chunks: Sequence[ChunkKV | None]) -> tuple[float, ...]:
    kv = chunks[piece.chunk] if piece.chunk is not None else None
    return kv.spread[piece.skip : piece.skip + piece.stop - piece.start] if kv else ()


def _rows(pieces: Iterable[Piece]) -> Tensor:
    runs = [torch.arange(p.start, p.stop) for p in pieces]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
