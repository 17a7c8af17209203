"""Transform coding: a cosine transform along the rows, rounding to whole steps, an entropy code.

As in JPEG, and for KV in CacheGen (SIGCOMM 2024, arXiv 2310.07240) and KVTC (arXiv 2511.01815), no number is given a
number of bits: each is rounded to a multiple of a step, and an entropy code writes the likely ones short. One step for
all makes the mean squared error smallest for its size, within about a quarter of a bit per number of the best that any
code can do (Gish and Pierce, 1968).

- Along the rows a channel of the keys is a slow wave: its mean, turned by RoPE. The transform gathers it in a few
  coefficients. CacheGen's differences to an anchor row gather less; KVTC's principal components gather more, but have
  to be learnt from the model beforehand.
- Values have a step per row, relative to the row's size. The rows that all others look at (sinks) have small values,
  which an error of the others' size would drown.
- The coefficients are written in the order of their size, so that a Huffman code that starts anew every few thousand
  symbols meets one distribution at a time. How large they are is written down per channel and band of frequencies.

The Huffman code is zlib's, its search for repeats left out. Arithmetic coding would take 4 % less space and several
times as long.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from blend.stores.codecs.base import Side, SideCodec

__all__ = ["Dct"]

Array: TypeAlias = "np.ndarray[Any, Any]"

_ROWS = 128  # of one transform, about
_BAND = 4  # a band of frequencies ends where the next is this many times higher
_FINEST = 2**-10  # of the largest key: no finer step, or an outlier would need more than 16 bits
_ESCAPE = 255  # stands for a coefficient that takes more than a byte
_MEMORY = 6  # of zlib: its Huffman code starts anew after 4096 symbols


class Dct(SideCodec):
    """Steps relative to the keys' typical distance from their channel's mean, and to the size of each row of values.

    Arrays of a side: ``steps`` (keys fp32 ``[1]``, values bf16 ``[n]``) and ``stream``, deflated: about the log2 of the
    coefficients' size, a byte per band and channel; the coefficients, a byte each; those that take more, as int16.
    """

    name = "dct"
    key_step = 0.23
    value_step = 0.45

    def encode_side(self, side: Side, x_HnD: Tensor) -> dict[str, Tensor] | None:
        x_nC = x_HnD.float().cpu().transpose(0, 1).flatten(1)
        largest = x_nC.abs().max()
        if not 1e-15 < largest < 1e15:  # fp32 holds no squares of such numbers
            return None
        if side == "key":
            typical = _size(x_nC - x_nC.mean(0)).median()
            steps = (self.key_step * typical).maximum(_FINEST * largest)[None]
        else:
            steps = (self.value_step * _size(x_nC)).bfloat16()
        divisor = steps.float().where(steps > 0, 1.0)  # a row of zeros
        z_nC = _transform(x_nC / divisor[:, None], inverse=False).round().to(torch.int16).numpy()
        levels = _levels(z_nC)
        codes, large = _to_bytes(z_nC.reshape(-1)[_order(levels, *z_nC.shape)])
        return {"steps": steps, "stream": _deflate(levels, codes, large)}

    def decode_side(self, side: Side, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        heads, rows, width = shape
        channels = heads * width
        stream = _inflate(parts["stream"])
        levels, codes, large = np.split(stream, np.cumsum([_bands(rows)[1] * channels, rows * channels]))
        z_nC = np.empty((rows, channels), np.float32)
        order = _order(levels.reshape(-1, channels), rows, channels)
        z_nC.reshape(-1)[order] = _from_bytes(codes, large.view(np.int16))
        x_nC = _transform(torch.from_numpy(z_nC), inverse=True) * parts["steps"].float()[:, None]
        x_HnD: Tensor = x_nC.reshape(rows, heads, width).transpose(0, 1)
        return x_HnD


def _size(x_nC: Tensor) -> Tensor:
    """Root mean square of each row."""
    return x_nC.square().mean(1).sqrt()


# --- transform --------------------------------------------------------------------------------------------------------


def _transform(x_nC: Tensor, inverse: bool) -> Tensor:
    """Orthonormal cosine transform (DCT-II) of stretches of rows, or back."""
    stretches = x_nC.split(_stretches(len(x_nC)))
    return torch.cat([(_waves(len(x)).T if inverse else _waves(len(x))) @ x for x in stretches])


def _stretches(rows: int) -> list[int]:
    """Rows cut evenly into stretches of about ``_ROWS``."""
    count = max(1, round(rows / _ROWS))
    return [rows // count + (i < rows % count) for i in range(count)]


@lru_cache(maxsize=64)
def _waves(rows: int) -> Tensor:
    """The transform's matrix ``[frequency, row]``."""
    places = torch.arange(rows, dtype=torch.float64)
    waves = torch.cos(math.pi / rows * places[:, None] * (places + 0.5)) * math.sqrt(2 / rows)
    waves[0] /= math.sqrt(2)
    return waves.float()


# --- order of the coefficients ----------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _bands(rows: int) -> tuple[Array, int]:
    """Band of each row's frequency (0 for the mean, 1 for frequencies 1 to 3, 2 for 4 to 15, ...), and their number."""
    frequencies = np.concatenate([np.arange(stretch) for stretch in _stretches(rows)])
    edges = [_BAND**i for i in range(16)]
    bands = np.searchsorted(edges, frequencies, side="right")
    return bands, int(bands.max()) + 1


def _levels(z_nC: Array) -> Array:
    """Size of the coefficients, uint8 ``[band, channel]``: 0 where nearly all are zero, one more for each doubling."""
    bands, count = _bands(len(z_nC))
    squares = np.square(z_nC, dtype=np.float32)
    means = np.stack([squares[bands == band].mean(0) for band in range(count)])
    levels: Array = np.log2(np.sqrt(means) + 1).round().astype(np.uint8)
    return levels


def _order(levels: Array, rows: int, channels: int) -> Array:
    """Where in ``[n, C]`` the coefficients stand, by ascending level."""
    bands, _ = _bands(rows)
    return levels[bands].reshape(rows * channels).argsort(kind="stable")


# --- bytes ------------------------------------------------------------------------------------------------------------


def _to_bytes(z: Array) -> tuple[Array, Array]:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ...; from 255 on as 255, and the number itself in the second array."""
    folded = (z << 1 ^ z >> 15).view(np.uint16)
    return np.minimum(folded, _ESCAPE).astype(np.uint8), z[folded >= _ESCAPE]


def _from_bytes(codes: Array, large: Array) -> Array:
    z: Array = (codes >> 1).astype(np.int16) ^ -(codes & 1).astype(np.int16)
    z[codes == _ESCAPE] = large
    return z


def _deflate(*arrays: Array) -> Tensor:
    """One stream of all of them, a new Huffman code for each."""
    deflate = zlib.compressobj(wbits=-15, memLevel=_MEMORY, strategy=zlib.Z_HUFFMAN_ONLY)
    data = b"".join(deflate.compress(array.tobytes()) + deflate.flush(zlib.Z_BLOCK) for array in arrays)
    return torch.frombuffer(bytearray(data + deflate.flush()), dtype=torch.uint8)


def _inflate(data: Tensor) -> Array:
    raw: Any = data.numpy()
    return np.frombuffer(zlib.decompress(raw, wbits=-15), np.uint8)
