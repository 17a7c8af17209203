"""Assembling: the KV of every reused row, moved to its new place, in one fusion cache.

Every row is copied once and turned once, from the stored original, so nothing drifts over requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blend.chunk import ChunkKV, KVLayers
from blend.errors import CorruptEntry
from blend.filling import LayerFilling
from blend.hf.fusion_cache import FusionCache
from blend.hf.transfer import Transfer
from blend.hf.view import ModelView
from blend.layout import Layout, Piece
from rope import Move, Rope
from rope.rotation import turn_, turn_name

__all__ = ["LostChunk", "assemble"]

_Pair = tuple[Tensor, Tensor]


class LostChunk(Exception):
    """A chunk's stored KV turned out to be damaged, or gone, while its layers were read.

    Attributes:
        index: the chunk's place in the prompt.
        again: it is the chunk's KV behind itself.
    """

    def __init__(self, index: int, again: bool, why: str) -> None:
        super().__init__(why)
        self.index, self.again = index, again


def assemble(
    view: ModelView,
    layout: Layout,
    prefix: KVLayers | None = None,
    fused: KVLayers | None = None,
    *,
    beside: bool = False,
) -> tuple[FusionCache, LayerFilling]:
    """Copies and moves the KV of all pieces; rows that are computed fresh stay zero.

    Args:
        prefix: exact KV of the first rows (for pieces of origin ``prefix``).
        fused: KV of an earlier fused context (for pieces of origin ``fused``).
        beside: fill on a thread, while the pass runs; close the filling when the pass is over.

    Raises:
        UnsupportedRotation: an angle table cannot serve the prompt's length.
        LostChunk: a chunk's layers cannot be read; with ``beside``, the pass raises it.
    """
    sources = [_source(piece, prefix, fused) for piece in layout.pieces]
    layers = [
        (keys_HnD.new_empty(keys_HnD.shape[0], layout.rows, keys_HnD.shape[2]),
         values_HnD.new_empty(values_HnD.shape[0], layout.rows, values_HnD.shape[2]))
        for keys_HnD, values_HnD in view.kv_like
    ]  # fmt: skip
    move_ = _mover(view.rope, layout, view.device)
    transfer = Transfer(view.device)

    def fill(index: int) -> None:
        pairs = [_read(piece, source, index) for piece, source in zip(layout.pieces, sources, strict=True)]
        with transfer.filling(index):
            _gather(layout, pairs, layers[index], transfer)
            move_(index, layers[index])

    filling = LayerFilling(fill, len(layers), transfer)
    cache = FusionCache([(keys[None], values[None]) for keys, values in layers], layout.rows, filling)
    if beside:
        filling.start()
    else:
        filling.run()
    return cache, filling


def _source(piece: Piece, prefix: KVLayers | None, fused: KVLayers | None) -> KVLayers | None:
    """The KV that a piece is cut from, or None for fresh rows."""
    if piece.origin == "chunk":
        return _of(piece).layers
    return {"prefix": prefix, "fused": fused, "fresh": None}[piece.origin]


def _read(piece: Piece, source: KVLayers | None, layer: int) -> _Pair | None:
    """One layer of a piece's source; this is where a slow store is read."""
    if source is None:
        return None
    try:
        return source[layer]
    except CorruptEntry as error:
        if piece.chunk is None:
            raise
        raise LostChunk(piece.chunk, piece.again, str(error)) from error


def _gather(layout: Layout, pairs: Sequence[_Pair | None], out: _Pair, transfer: Transfer) -> None:
    """Copies the rows of all pieces into one layer's keys and values, ``[H, T, D]``."""
    for piece, pair in zip(layout.pieces, pairs, strict=True):
        rows = slice(piece.start, piece.stop)
        first = piece.skip if piece.origin == "chunk" else piece.start
        for slot in (0, 1):
            if pair is None:
                out[slot][:, rows] = 0
            else:
                transfer.copy_(out[slot][:, rows], pair[slot][:, first : first + piece.stop - piece.start])


def _mover(rope: Rope, layout: Layout, device: torch.device) -> Callable[[int, _Pair], None]:
    """Turns one layer's chunk rows in place, all chunks at once."""
    pieces = [piece for piece in layout.pieces if piece.origin == "chunk"]
    if not pieces:
        return lambda index, pair: None
    rows = slice(pieces[0].start, pieces[-1].stop)  # chunks stand side by side
    turns = rope.turns(_chunk_moves(pieces, layout.rows, device))

    def move_(index: int, pair: _Pair) -> None:
        rotation = rope.layers[index]
        if rotation is not None:
            moved = pair[0] if rotation.slot == "key" else pair[1]
            turn_(moved[:, rows], rotation, turns[turn_name(rotation.table, rotation.sign)])

    return move_


def _chunk_moves(pieces: Sequence[Piece], total: int, device: torch.device) -> Move:
    olds, lengths = [], []
    for piece in pieces:
        kv, count = _of(piece), piece.stop - piece.start
        olds.append(torch.arange(kv.base + piece.skip, kv.base + piece.skip + count, device=device))
        lengths.append(torch.full((count,), kv.length, device=device))
    new_T = torch.arange(pieces[0].start, pieces[-1].stop, device=device)
    return Move(torch.cat(olds), new_T, torch.cat(lengths), total)


def _of(piece: Piece) -> ChunkKV:
    assert piece.kv is not None, "a piece of a chunk has the KV that it is cut from"
    return piece.kv
