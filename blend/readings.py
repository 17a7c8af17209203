"""What may be kept of one chunk: its KV in the situations that prompts put it into. Knows nothing of models or stores.

::

    alone    | prelude | chunk |                      exact for the chunk that comes first
    mean     | prelude | context | chunk |, ...       the best guess for text that is new where it stands
    again    | prelude | chunk | chunk |              for text that an earlier chunk of the prompt has said already

Text that a model has just read is read differently: it is recognised after a few tokens, and from there on its KV tell
what comes next rather than what stands there. No mean over other texts comes near that, and neither does a reading
alone; the second copy of a chunk that stands behind itself does. Passages that overlap (a window slid over a document,
sentences with their neighbours, the same boilerplate everywhere) are full of such rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from blend.chunk import Chunk
from blend.prompt import Prompt

__all__ = ["AGAIN", "SHARE", "Reading", "Run", "Wanted", "means", "overlapping", "repeated_runs"]

Reading = Literal["alone", "mean", "again"]

AGAIN = "itself"
"""What stands where the digest of a background would in the key of a chunk that is read behind itself."""

SHARE = 0.5
"""Of a chunk's rows, repeated at least. Where fewer were, taking them from another reading gained nothing for sure."""

Run: TypeAlias = tuple[int, int]
"""First row, and the one behind the last."""

_GRAM = 8  # tokens in a row that make a repetition; fewer are names and turns of phrase (4 to 16: no difference seen)
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd: spreads ids over all bits

_Hashes: TypeAlias = "npt.NDArray[np.uint64]"
_Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Wanted(NamedTuple):
    """One chunk in one reading."""

    chunk: Chunk
    reading: Reading


def means(chunks: Iterable[Chunk]) -> list[Wanted]:
    """Each distinct chunk as a text that is new where it stands."""
    return [Wanted(chunk, "mean") for chunk in dict.fromkeys(chunks)]


def repeated_runs(prompt: Prompt) -> dict[int, tuple[Run, ...]]:
    """Rows of the prompt whose text has stood in an earlier chunk, by the index of the chunk they lie in.

    A run is at least eight tokens long; what parts two runs by less belongs to them. Chunks of which less than
    half is repeated are left out.
    """
    chunks = prompt.chunks
    owners, grams = _grams(chunks)
    if not len(grams):
        return {}
    _, first, which = np.unique(grams, return_index=True, return_inverse=True)
    earlier = owners[first[which]] < owners
    runs = {}
    for index, (start, rows) in enumerate(zip(prompt.starts, _rows_of_each(earlier, chunks), strict=True)):
        if _worthwhile(rows):
            runs[index] = tuple((start + a, start + b) for a, b in _runs(rows))
    return runs


def overlapping(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Those chunks of which half or more is in another of them too."""
    owners, grams = _grams(chunks)
    if not len(grams):
        return []
    order = np.argsort(grams, kind="stable")  # so that owners ascend among equal grams
    heads = np.flatnonzero(np.diff(grams[order], prepend=grams[order[:1]] + np.uint64(1)))
    last = np.append(heads[1:], len(order)) - 1
    in_two = owners[order[heads]] != owners[order[last]]
    shared = np.empty(len(grams), dtype=np.bool_)
    shared[order] = np.repeat(in_two, last - heads + 1)
    return [c for c, rows in zip(chunks, _rows_of_each(shared, chunks), strict=True) if _worthwhile(rows)]


def _grams(chunks: Sequence[Chunk]) -> tuple[npt.NDArray[np.int64], _Hashes]:
    """The chunk that each run of eight tokens lies in, and its hash, in order."""
    hashes = [_hashes(np.array(chunk.ids, dtype=np.uint64)) for chunk in chunks]
    owners = np.repeat(np.arange(len(chunks)), [len(h) for h in hashes])
    return owners, np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64)


def _hashes(ids: _Hashes) -> _Hashes:
    """Of each run of eight tokens: a polynomial modulo 2^64. Two texts that collide cost quality, not safety."""
    count = max(len(ids) - _GRAM + 1, 0)
    value = np.zeros(count, dtype=np.uint64)
    for step in range(_GRAM):
        value = value * _FACTOR + ids[step : step + count] + np.uint64(1)
    return value


def _rows_of_each(begins: _Flags, chunks: Sequence[Chunk]) -> Iterator[_Flags]:
    """Of each chunk the rows that lie in marked runs, from the marks of all chunks' runs in order."""
    stop = 0
    for chunk in chunks:
        start, stop = stop, stop + max(len(chunk) - _GRAM + 1, 0)
        yield _rows(begins[start:stop], len(chunk))


def _rows(begins: _Flags, rows: int) -> _Flags:
    """Rows that lie in a run that begins where it says so, or in a gap between two that is shorter than a run."""
    edges = np.zeros(rows + 1, dtype=np.int64)
    edges[:-1][: len(begins)] += begins
    edges[_GRAM : _GRAM + len(begins)] -= begins
    inside: _Flags = np.cumsum(edges[:-1]) > 0
    for start, stop in list(_runs(~inside)):
        if stop - start < _GRAM and start > 0 and stop < rows:
            inside[start:stop] = True
    return inside


def _runs(rows: _Flags) -> Iterator[Run]:
    edges = np.flatnonzero(np.diff(rows.astype(np.int8), prepend=0, append=0)).tolist()
    return zip(edges[::2], edges[1::2], strict=True)


def _worthwhile(rows: _Flags) -> bool:
    return bool(rows.sum() >= SHARE * len(rows))
