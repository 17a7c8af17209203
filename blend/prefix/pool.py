"""Where a prefix cache keeps its KV: pages of rows, numbered, taken and given back in any order. Knows no tokens.

::

    keys of one layer  slab 0                     slab 1
    [H, rows, D]       | page 0 | page 1 | ... |  | page n | page n+1 | ... |

A page is a place in every layer's keys and values at once. Pages and not sequences are what is handed out, so that two
sequences can share the pages of their common beginning (PagedAttention, Kwon et al. 2023). Slabs are made when the
first of their pages is needed, up to the limit, and kept as room for what comes next until no page is in use.

Page numbers travel packed, eight bytes each, as tokens do: a run is then cut, joined and compared as bytes are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from blend.chunk import KVLayers
from blend.errors import ForeignKV, StoreError

__all__ = ["WORD", "PagePool"]

WORD = 8
"""Bytes of a packed page number or token id."""

_SLAB = 64 << 20  # bytes; a CPU commits them only as they are written to
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Form(NamedTuple):
    """What one layer's keys, or values, look like."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row_bytes(self) -> int:
        return self.heads * self.dim * self.dtype.itemsize


class PagePool:
    """Pages of ``page_rows`` rows, ``limit`` bytes of them at most. Not locked: its prefix cache is.

    The KV that comes into an empty pool decides what a row looks like; layers may differ in heads, dims, dtype, device.

    Attributes:
        used: pages that are taken.
        capacity: pages that may be taken in all; 0 until the form of a row is known.
        page_bytes: bytes of a page.
    """

    def __init__(self, limit: int, page_rows: int) -> None:
        self.page_rows = page_rows
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Lets go of the slabs, and of the form. No page may be in use."""
        self.used = self.capacity = self.page_bytes = 0
        self._forms: tuple[_Form, ...] = ()
        self._slabs: list[list[Tensor]] = []  # per slab, each layer's keys and values: [H, pages * rows, D]
        self._slab_pages = 1
        self._fresh = 0  # pages from here on were never taken
        self._free: list[int] = []  # pages given back

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return self.capacity - self.used

    def admit(self, layers: KVLayers, rows: int) -> None:
        """Looks KV over before it is stored.

        Raises:
            StoreError: a layer has not ``rows`` rows.
            ForeignKV: its layers are not like those that are held: it comes from another model, dtype or device.
        """
        tensors = [x for pair in layers for x in pair]
        for x in tensors:
            if x.ndim != 3 or x.shape[1] != rows:
                raise StoreError(f"KV of shape {tuple(x.shape)} for {rows} tokens: [H, {rows}, D] per layer is needed")
        forms = tuple(_Form(x.shape[0], x.shape[2], x.dtype, x.device) for x in tensors)
        if forms == self._forms:
            return
        if self.used:
            raise ForeignKV(
                f"this prefix cache holds KV of {_words(self._forms)}, and was given {_words(forms)}: "
                "use one prefix cache per model, dtype and device"
            )
        self.clear()
        self._open(forms)

    def take(self, count: int) -> bytes:
        """Page numbers, as many as asked for and in one rising run where there is one; at most :attr:`free`."""
        assert count <= self.free
        reused = min(count, len(self._free))
        pages = self._free[len(self._free) - reused :][::-1]
        stop = self._fresh + count - reused
        while stop > len(self._slabs) * self._slab_pages:
            self._slabs.append(self._slab())  # may run out of memory, so nothing is booked before
        del self._free[len(self._free) - reused :]
        pages.extend(range(self._fresh, stop))
        self._fresh = stop
        self.used += count
        return array("q", pages).tobytes()

    def give(self, pages: bytes) -> None:
        """Pages that are free from now on."""
        numbers = memoryview(pages).cast("q").tolist()
        self._free.extend(reversed(numbers))  # the next to be taken come in rising order again
        self.used -= len(numbers)

    def write(self, pages: bytes, layers: KVLayers, first: int) -> None:
        """Copies rows ``first`` and following of every layer, as many as the pages hold."""
        wanted = np.frombuffer(pages, dtype=np.int64)
        rows = wanted.size * self.page_rows
        tensors = [x.detach().narrow(1, first, rows) for pair in layers for x in pair]
        for slab, local, places in self._pieces(wanted):
            for held, new in zip(slab, tensors, strict=True):
                if isinstance(local, slice):
                    held.narrow(1, local.start, rows).copy_(new)  # all of it
                else:
                    chosen = self._paged(new).index_select(1, _index(places, new))
                    self._paged(held).index_copy_(1, _index(local, held), chosen)

    @torch.inference_mode(False)  # what is handed out outlives whatever mode it is asked for in
    def read(self, pages: bytes) -> KVLayers:
        """The rows of these pages in their order: per layer ``[H, rows, D]``, contiguous, a copy."""
        pieces = list(self._pieces(np.frombuffer(pages, dtype=np.int64)))
        parts = [[self._pick(held, local) for held in slab] for slab, local, _ in pieces]
        whole = parts[0] if len(parts) == 1 else self._joined(parts, [places for _, _, places in pieces])
        return tuple(zip(whole[::2], whole[1::2], strict=True))

    def check(self, held: Sequence[bytes]) -> None:
        """Raises AssertionError unless ``held`` names every page in use, once, and the rest are free."""
        pages = np.frombuffer(b"".join(held), dtype=np.int64)
        every = np.sort(np.concatenate([pages, np.array(self._free, dtype=np.int64)]))
        assert np.array_equal(every, np.arange(self._fresh)), "a page is lost, or has two owners"
        assert pages.size == self.used <= self.capacity
        assert self.used * self.page_bytes <= self._limit
        assert len(self._slabs) * self._slab_pages >= self._fresh

    # --- slabs ------------------------------------------------------------------------------------

    def _open(self, forms: tuple[_Form, ...]) -> None:
        self._forms = forms
        self.page_bytes = self.page_rows * sum(form.row_bytes for form in forms)
        self.capacity = self._limit // max(self.page_bytes, 1)
        self._slab_pages = max(min(self.capacity, _SLAB // max(self.page_bytes, 1)), 1)

    @torch.inference_mode(False)
    def _slab(self) -> list[Tensor]:
        """Room for the next pages; the last slab is cut short by the limit."""
        pages = min(self._slab_pages, self.capacity - len(self._slabs) * self._slab_pages)
        rows = pages * self.page_rows
        return [torch.empty(f.heads, rows, f.dim, dtype=f.dtype, device=f.device) for f in self._forms]

    def _pieces(self, pages: np.ndarray) -> Iterator[_Piece]:
        first, last = divmod(int(pages[0]), self._slab_pages), divmod(int(pages[-1]), self._slab_pages)
        if first[0] == last[0] and _side_by_side(pages):
            rows = slice(first[1] * self.page_rows, (last[1] + 1) * self.page_rows)
            yield _Piece(self._slabs[first[0]], rows, np.arange(pages.size))
            return
        slabs = pages // self._slab_pages
        for number in np.unique(slabs):
            places = np.flatnonzero(slabs == number)
            yield _Piece(self._slabs[number], pages[places] - number * self._slab_pages, places)

    # --- rows in and out --------------------------------------------------------------------------

    def _paged(self, x: Tensor) -> Tensor:
        """The same memory page by page, ``[H, pages, rows, D]``, as integers: no kernel knows every dtype."""
        return x.view(_BITS[x.dtype.itemsize]).reshape(x.shape[0], -1, self.page_rows, x.shape[2])

    def _pick(self, held: Tensor, local: np.ndarray | slice) -> Tensor:
        if isinstance(local, slice):
            rows = held.narrow(1, local.start, local.stop - local.start)
            return rows.clone(memory_format=torch.contiguous_format)
        chosen: Tensor = self._paged(held).index_select(1, _index(local, held)).flatten(1, 2).view(held.dtype)
        return chosen

    def _joined(self, parts: list[list[Tensor]], order: list[np.ndarray]) -> list[Tensor]:
        """Per tensor the pieces of all slabs, put where they belong."""
        back = np.argsort(np.concatenate(order))
        whole = [torch.cat(pieces, 1) for pieces in zip(*parts, strict=True)]
        return whole if _side_by_side(back) else [self._pick(x, back) for x in whole]


class _Piece(NamedTuple):
    """What one slab holds of the pages asked for: as a slice of rows where they are all of them, and side by side."""

    slab: list[Tensor]
    local: np.ndarray | slice
    places: np.ndarray  # where they stand among those asked for


def _side_by_side(pages: np.ndarray) -> bool:
    """Whether the pages are one rising run, which is copied fastest."""
    if int(pages[-1]) - int(pages[0]) != pages.size - 1:
        return False
    return pages.size < 3 or bool((pages[1:] - pages[:-1] == 1).all())


def _index(places: np.ndarray, beside: Tensor) -> Tensor:
    return torch.tensor(places, device=beside.device)


def _words(forms: Sequence[_Form]) -> str:
    first = (
        f", the first [{forms[0].heads}, rows, {forms[0].dim}] {forms[0].dtype} on {forms[0].device}" if forms else ""
    )
    return f"{len(forms) // 2} layers{first}"
