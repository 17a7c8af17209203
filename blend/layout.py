"""Who stands where in a prompt, where the KV of each row comes from, and by how much it moves.

Knows nothing of models. Example, with an exact prefix hit that ends inside chunk 0::

    rows    | 0 ......... 41 | 42 .... 99 | 100 ...... 219 | 220 .. 239 |
    piece   | prefix (exact) | chunk 0    | chunk 1        | fresh      |
              system + head    tail, moved  moved            question

A chunk is several pieces where an earlier one has said some of its text already: these rows come from another reading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blend.chunk import ChunkKV
from blend.prompt import Prompt
from blend.readings import Run

__all__ = ["Again", "Layout", "Origin", "Piece", "lay_out"]

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
        kv: what the rows are taken from; None where that is no chunk.
        again: an earlier chunk has said this text already, and ``kv`` is the chunk's reading behind itself.
    """

    start: int
    stop: int
    origin: Origin
    exact: bool
    chunk: int | None = None
    skip: int = 0
    kv: ChunkKV | None = None
    again: bool = False


class Again(NamedTuple):
    """A chunk's KV behind itself, and the rows of the prompt that are taken from it."""

    kv: ChunkKV
    runs: tuple[Run, ...]


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
        """``(start, stop)`` of each chunk's stale rows; they stand side by side."""
        stale = (p for p in self.pieces if p.origin == "chunk" and not p.exact)
        chunks = (list(pieces) for _, pieces in groupby(stale, key=lambda p: p.chunk))
        return tuple((pieces[0].start, pieces[-1].stop) for pieces in chunks)


def lay_out(
    prompt: Prompt,
    prefix_rows: int = 0,
    fused_rows: int = 0,
    chunks: Sequence[ChunkKV | None] = (),
    same_angles: Callable[[int, int], bool] = lambda length, other: True,
    fused_exact: bool = False,
    again: Mapping[int, Again] | None = None,
) -> Layout:
    """Assigns an origin to every row.

    Args:
        prefix_rows: rows covered by an exact prefix hit.
        fused_rows: rows covered by an earlier fused context (used where it reaches beyond the prefix).
        chunks: the KV of every chunk of the prompt, in prompt order; None where a prefix or context covers it.
        fused_exact: whether the earlier fused context is exact.
        same_angles: whether passes of two lengths rotate alike; a chunk is exact only where they do.
        again: by the chunk's index, rows that an earlier chunk has said already, and what they are taken from.
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
            piece = Piece(max(covered, start), stop, "chunk", exact, index, max(covered - start, 0), kv)
            pieces += _cut(piece, again[index]) if again and index in again and not exact else [piece]
            covered = stop
    if covered < total:
        pieces.append(Piece(covered, total, "fresh", True))
    return Layout(tuple(pieces), total, tuple(map(_spread, pieces)))


def _cut(piece: Piece, again: Again) -> list[Piece]:
    """The piece in parts, of which those that lie in a run are taken from the chunk's other reading."""
    borders = {row for run in again.runs for row in run if piece.start < row < piece.stop}
    parts = []
    for start, stop in pairwise(sorted({piece.start, *borders, piece.stop})):
        repeated = any(a <= start < b for a, b in again.runs)
        kv = again.kv if repeated else piece.kv
        skip = piece.skip + start - piece.start
        parts.append(piece._replace(start=start, stop=stop, skip=skip, kv=kv, again=repeated))
    return parts


def _spread(piece: Piece) -> tuple[float, ...]:
    return piece.kv.spread[piece.skip : piece.skip + piece.stop - piece.start] if piece.kv else ()


def _rows(pieces: Iterable[Piece]) -> Tensor:
    runs = [torch.arange(p.start, p.stop) for p in pieces]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)
