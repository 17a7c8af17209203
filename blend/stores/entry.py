"""An entry as bytes: a safetensors file whose layers stand one after another, each with a checksum of its own.

::

    8 bytes    length N of the JSON
    N bytes    JSON: where each array is; under __metadata__ what the entry is
    16 (1+L)   array "check": xxh3-128 of the head, then of each layer
    ...        layer 0: its codec's arrays, padded to 8 bytes
    ...        layer 1 ...

Any safetensors reader opens it. The library's own writer sorts arrays by dtype, which would tear a layer apart; hence
this one. A head is enough to know what an entry is, and any single layer can be read and checked alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import xxhash
from torch import Tensor

from blend.chunk import ChunkKV, Retention
from blend.errors import CorruptEntry
from blend.keys import FORMAT_VERSION
from blend.stores.codecs import Codec, LayerSpec, codec_by_name
from blend.stores.lazy import LayerSequence, Pair

__all__ = ["HEAD_GUESS", "Bytes", "ForeignEntry", "Head", "LazyLayers", "Packed", "head_size", "pack", "read_head"]

Bytes: TypeAlias = "bytes | bytearray | memoryview"

HEAD_GUESS = 32 << 10
"""Bytes worth asking for when a head of unknown size is read."""

_DIGEST = 16
_ALIGN = 8
_COMPACT = (",", ":")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class ForeignEntry(CorruptEntry):
    """An intact entry that is not the one asked for, or of another format version."""


class Packed(NamedTuple):
    """An entry ready to be written: ``head`` and ``layers`` one after another are the file."""

    head: bytes
    layers: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + sum(map(len, self.layers))


class Part(NamedTuple):
    """One array: name, dtype, shape, first and last byte within its layer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Head(NamedTuple):
    """What an entry is and where its layers are.

    Attributes:
        kv: everything but the layers.
        codec: what decodes them.
        size: bytes of the whole file.
        spans: first and last byte of each layer in the file.
        specs: shapes and dtypes per layer, decoded.
        parts: arrays per layer.
        digests: xxh3-128 per layer.
    """

    kv: ChunkKV
    codec: Codec
    size: int
    spans: tuple[tuple[int, int], ...]
    specs: tuple[LayerSpec, ...]
    parts: tuple[tuple[Part, ...], ...]
    digests: tuple[bytes, ...]

    def layer(self, index: int, data: Bytes) -> tuple[Tensor, Tensor]:
        """Checks and decodes one layer's bytes. The tensors share ``data`` where the codec allows it.

        Raises:
            CorruptEntry: they are not the bytes that were written.
        """
        if xxhash.xxh3_128_digest(data) != self.digests[index]:
            raise CorruptEntry(f"layer {index} of entry {self.kv.key[:12]} is not what was written: it is dropped")
        whole = torch.frombuffer(data if _writable(data) else bytearray(data), dtype=torch.uint8)
        arrays = {p.name: whole[p.start : p.stop].view(p.dtype).reshape(p.shape) for p in self.parts[index]}
        return self.codec.decode(arrays, self.specs[index])

    def lazy(self, read: Callable[[int], Bytes]) -> ChunkKV:
        """The entry, its layers read by ``read(index)`` when they are asked for."""
        return self.kv.with_layers(LazyLayers(self, read))

    def whole(self, read: Callable[[int], Bytes]) -> ChunkKV:
        """The entry with all layers read and checked."""
        return self.kv.with_layers(tuple(self.layer(i, read(i)) for i in range(len(self.spans))))


class LazyLayers(LayerSequence):
    """Layers that are read, checked and decoded at each access; nothing is kept."""

    def __init__(self, head: Head, read: Callable[[int], Bytes]) -> None:
        self.head = head
        self.stored_bytes = head.size
        self._read = read

    def __len__(self) -> int:
        return len(self.head.spans)

    def layer(self, index: int) -> Pair:
        return self.head.layer(index, self._read(index))


def pack(kv: ChunkKV, codec: Codec) -> Packed:
    """An entry's bytes."""
    specs, layers = [], []
    table: dict[str, Any] = {}
    offset = _DIGEST * (1 + len(kv.layers))
    for index, (keys, values) in enumerate(kv.layers):
        specs.append(LayerSpec.of(keys, values))
        # Wide dtypes first, so that each array begins where its dtype may.
        arrays = dict(sorted(codec.encode(keys, values).items(), key=lambda item: -item[1].element_size()))
        size = sum(x.numel() * x.element_size() for x in arrays.values())
        pieces = []
        for name, array in _padded(arrays, size).items():
            pieces.append(_raw(array))
            stop = offset + len(pieces[-1])
            table[f"{index:03}.{name}"] = _described(array.dtype, array.shape, (offset, stop))
            offset = stop
        layers.append(b"".join(pieces))
    rows = 1 + len(layers)
    checks = {"check": _described(torch.uint8, (rows, _DIGEST), (0, _DIGEST * rows))}
    text = json.dumps(
        {"__metadata__": {"kvblend": _metadata(kv, codec, specs)}, **checks, **table}, separators=_COMPACT
    ).encode()
    text += b" " * (-len(text) % _ALIGN)
    digests = b"".join(xxhash.xxh3_128_digest(layer) for layer in layers)
    front = len(text).to_bytes(8, "little") + text
    return Packed(front + xxhash.xxh3_128_digest(front + digests) + digests, tuple(layers))


def head_size(data: Bytes) -> int | None:
    """Bytes of the head that ``data`` begins with; None where it takes more of them to tell.

    Raises:
        CorruptEntry: this is no entry.
    """
    if len(data) < 8:
        return None
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= 100_000_000:  # the limit of the safetensors library
        raise CorruptEntry(f"an entry whose head would have {size} bytes: it is dropped")
    if len(data) < 8 + size:
        return None
    try:
        rows = json.loads(bytes(data[8 : 8 + size]))["check"]["shape"][0]
        return 8 + size + _DIGEST * int(rows)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError) as error:
        raise CorruptEntry("an entry whose head cannot be read: it is dropped") from error


def read_head(data: Bytes, key: str) -> Head:
    """Parses and checks a head.

    Args:
        data: at least the head.
        key: the key that was asked for.

    Raises:
        CorruptEntry: the head is not what was written, or not all there.
        ForeignEntry: it is another entry's, or of another format version.
    """
    size = head_size(data)
    if size is None or len(data) < size:
        raise CorruptEntry(f"entry {key[:12]} is cut off within its head: it is dropped")
    count = int.from_bytes(data[:8], "little")
    front, check = bytes(data[: 8 + count]), bytes(data[8 + count : size])
    if xxhash.xxh3_128_digest(front + check[_DIGEST:]) != check[:_DIGEST]:
        raise CorruptEntry(f"the head of entry {key[:12]} is not what was written: it is dropped")
    # From here on the bytes are those that some kvblend wrote.
    table = json.loads(front[8:])
    meta = json.loads(table.pop("__metadata__")["kvblend"])
    if meta["format"] != FORMAT_VERSION or meta["key"] != key:
        raise ForeignEntry(
            f"under {key[:12]} lies entry {meta['key'][:12]} of format {meta['format']} (this is {FORMAT_VERSION})"
        )
    table.pop("check")
    digests = tuple(check[i : i + _DIGEST] for i in range(_DIGEST, len(check), _DIGEST))
    specs = tuple(LayerSpec(tuple(k), tuple(v), _BY_NAME[kd], _BY_NAME[vd]) for k, v, kd, vd in meta["layers"])
    spans, parts = _places(table, len(digests))
    first = 8 + count
    retention = Retention(*meta["retention"])
    ids, prelude = tuple(meta["ids"]), tuple(meta["prelude"])
    mean = meta.get("averaged", 0), tuple(meta.get("spread", ()))
    kv = ChunkKV(key, meta["fingerprint"], ids, prelude, meta["length"], (), retention, *mean)
    placed = tuple((first + start, first + stop) for start, stop in spans)
    return Head(kv, codec_by_name(meta["codec"]), placed[-1][1] if placed else size, placed, specs, parts, digests)


def _places(table: dict[str, Any], count: int) -> tuple[list[tuple[int, int]], tuple[tuple[Part, ...], ...]]:
    """Byte span (within the data area) and arrays of each layer."""
    arrays: list[list[tuple[str, Any]]] = [[] for _ in range(count)]
    for name, entry in table.items():
        arrays[int(name[:3])].append((name[4:], entry))
    spans, parts = [], []
    for items in arrays:
        begin = items[0][1]["data_offsets"][0]
        spans.append((begin, items[-1][1]["data_offsets"][1]))
        parts.append(
            tuple(
                Part(
                    name,
                    _BY_NAME[e["dtype"]],
                    tuple(e["shape"]),
                    e["data_offsets"][0] - begin,
                    e["data_offsets"][1] - begin,
                )
                for name, e in items
            )
        )
    return spans, tuple(parts)


def _metadata(kv: ChunkKV, codec: Codec, specs: Sequence[LayerSpec]) -> str:
    # Entries that are no mean look as they did before there were any.
    mean = {"averaged": kv.averaged, "spread": kv.spread} if kv.averaged else {}
    return json.dumps(
        {
            "format": FORMAT_VERSION,
            "key": kv.key,
            "fingerprint": kv.fingerprint,
            "codec": codec.name,
            "ids": kv.ids,
            "prelude": kv.prelude,
            "length": kv.length,
            "retention": kv.retention,
            **mean,
            "layers": [(s.key_shape, s.value_shape, _DTYPES[s.key_dtype], _DTYPES[s.value_dtype]) for s in specs],
        },
        separators=_COMPACT,
    )


def _described(dtype: torch.dtype, shape: Sequence[int], place: tuple[int, int]) -> dict[str, Any]:
    return {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": list(place)}


def _padded(arrays: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    """The format allows no holes, and the next layer should begin where any dtype may."""
    missing = -size % _ALIGN
    return {**arrays, "pad": torch.zeros(missing, dtype=torch.uint8)} if missing else arrays


def _raw(array: Tensor) -> memoryview:
    if not array.numel():
        return memoryview(b"")  # an empty array may have strides that no view can have
    flat: Any = array.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _writable(data: Bytes) -> bool:
    return not memoryview(data).readonly
