"""Assembling: the KV of every reused row, moved to its new place, in one fusion cache.

Every row is copied once and turned once, from the stored original, so nothing drifts over requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blend.chunk import ChunkKV, KVLayers
from blend.hf.fusion_cache import FusionCache
from blend.hf.view import ModelView
from blend.layout import Layout, Piece
from rope import Move, Rope
from rope.rotation import turn_, turn_name

__all__ = ["assemble"]


def assemble(
    view: ModelView,
    layout: Layout,
    chunks: Sequence[ChunkKV | None],
    prefix: KVLayers | None = None,
    fused: KVLayers | None = None,
) -> FusionCache:
    """Copies and moves the KV of all pieces; rows that are computed fresh stay zero.

    Args:
        chunks: KV of the prompt's chunks, in prompt order.
        prefix: exact KV of the first rows (for pieces of origin ``prefix``).
        fused: KV of an earlier fused context (for pieces of origin ``fused``).

    Raises:
        UnsupportedRotation: an angle table cannot serve the prompt's length.
    """
    sources = [_source(piece, chunks, prefix, fused) for piece in layout.pieces]
    templates = next(source for source in sources if source is not None)
    layers = []
    for index, (keys, values) in enumerate(templates):
        pair = (_gather(layout, sources, index, 0, keys), _gather(layout, sources, index, 1, values))
        layers.append(pair)
    _move_chunks(view.rope, layout, chunks, layers)
    return FusionCache([(keys[None], values[None]) for keys, values in layers], layout.rows)


def _source(
    piece: Piece, chunks: Sequence[ChunkKV | None], prefix: KVLayers | None, fused: KVLayers | None
) -> KVLayers | None:
    """The KV that a piece is cut from, or None for fresh rows."""
    if piece.origin == "chunk":
        return _of(piece, chunks).layers
    return {"prefix": prefix, "fused": fused, "fresh": None}[piece.origin]


def _gather(layout: Layout, sources: Sequence[KVLayers | None], layer: int, slot: int, like_HnD: Tensor) -> Tensor:
    """One layer's keys (slot 0) or values (slot 1) of all rows, ``[H, T, D]``."""
    out_HTD = like_HnD.new_empty(like_HnD.shape[0], layout.rows, like_HnD.shape[-1])
    for piece, source in zip(layout.pieces, sources, strict=True):
        rows = slice(piece.start, piece.stop)
        if source is None:
            out_HTD[:, rows] = 0
        else:
            first = piece.skip if piece.origin == "chunk" else piece.start
            out_HTD[:, rows] = source[layer][slot][:, first : first + piece.stop - piece.start]
    return out_HTD


def _move_chunks(
    rope: Rope, layout: Layout, chunks: Sequence[ChunkKV | None], layers: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Turns the chunks' rows in place, all chunks of a layer at once."""
    pieces = [piece for piece in layout.pieces if piece.origin == "chunk"]
    if not pieces:
        return
    rows = slice(pieces[0].start, pieces[-1].stop)  # chunks stand side by side
    turns = rope.turns(_chunk_moves(pieces, chunks, layout.rows, layers[0][0].device))
    for rotation, (keys, values) in zip(rope.layers, layers, strict=True):
        if rotation is not None:
            moved = keys if rotation.slot == "key" else values
            turn_(moved[:, rows], rotation, turns[turn_name(rotation.table, rotation.sign)])


def _chunk_moves(pieces: Sequence[Piece], chunks: Sequence[ChunkKV | None], total: int, device: torch.device) -> Move:
    olds, lengths = [], []
    for piece in pieces:
        kv, count = _of(piece, chunks), piece.stop - piece.start
        olds.append(torch.arange(kv.base + piece.skip, kv.base + piece.skip + count, device=device))
        lengths.append(torch.full((count,), kv.length, device=device))
    new_T = torch.arange(pieces[0].start, pieces[-1].stop, device=device)
    return Move(torch.cat(olds), new_T, torch.cat(lengths), total)


def _of(piece: Piece, chunks: Sequence[ChunkKV | None]) -> ChunkKV:
    kv = chunks[piece.chunk] if piece.chunk is not None else None
    assert kv is not None, "the layout puts a chunk's KV only where there is one"
    return kv
