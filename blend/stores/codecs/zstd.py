"""zstd behind another codec, or alone: nothing more is lost.

Numbers of several bytes are cut into planes, all their first bytes, then all their second ones, and so on: the plane
that holds sign and exponent shrinks well, and the mantissas no longer stand in its way (ZipNN, arXiv 2411.05239).
Of Gaussian-like bf16 about a third goes away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

from blend.stores.codecs.base import Codec, LayerSpec
from blend.stores.codecs.plain import Plain

__all__ = ["Zstd"]

_LEVEL = 1  # higher ones look for repeats, which KV does not have: slower, and larger too
_LENGTH = 4  # bytes of a length


class Zstd(Codec):
    """Squeezes what ``inner`` writes into a single array of bytes, ``zstd``.

    ::

        4 bytes    length N of the JSON
        N bytes    JSON: per array its name, dtype, shape, and the length of each of its frames
        ...        one zstd frame per plane

    Args:
        inner: the codec whose arrays are squeezed.
    """

    def __init__(self, inner: Codec | None = None) -> None:
        self.inner = inner or Plain()
        self.name = "zstd" if inner is None else f"{inner.name}+zstd"
        self.lossless = self.inner.lossless

    @property
    def loss(self) -> str:
        return self.inner.loss

    def encode(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        squeeze = zstandard.ZstdCompressor(level=_LEVEL).compress
        table, frames = [], []
        for name, array in self.inner.encode(keys, values).items():
            own = [squeeze(plane) for plane in _planes(array)]
            table.append([name, str(array.dtype).removeprefix("torch."), list(array.shape), [len(f) for f in own]])
            frames += own
        text = json.dumps(table, separators=(",", ":")).encode()
        blob = b"".join([len(text).to_bytes(_LENGTH, "little"), text, *frames])
        return {"zstd": torch.frombuffer(bytearray(blob), dtype=torch.uint8)}

    def decode(self, parts: Mapping[str, Tensor], spec: LayerSpec) -> tuple[Tensor, Tensor]:
        raw: Any = parts["zstd"].numpy()
        blob = memoryview(raw)
        begin = _LENGTH + int.from_bytes(blob[:_LENGTH], "little")
        restore = zstandard.ZstdDecompressor().decompress
        arrays = {}
        for name, dtype, shape, lengths in json.loads(bytes(blob[_LENGTH:begin])):
            planes = []
            for length in lengths:
                planes.append(np.frombuffer(restore(blob[begin : begin + length]), np.uint8))
                begin += length
            whole = torch.from_numpy(np.stack(planes, axis=1).reshape(-1))
            arrays[name] = whole.view(getattr(torch, dtype)).reshape(shape)
        return self.inner.decode(arrays, spec)


def _planes(array: Tensor) -> list[bytes]:
    size = array.element_size()
    raw: np.ndarray[Any, Any] = array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return [raw[byte::size].tobytes() for byte in range(size)]
