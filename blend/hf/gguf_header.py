"""The header of a GGUF file: enough of it to refuse a damaged file by name, before anything is loaded."""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ModelNotFound

__all__ = ["GGUFHeader", "GGUFTensor", "read_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# The value types of the format: fixed-size numbers by struct code, then strings and arrays.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclass(frozen=True)
class GGUFTensor:
    """One row of the tensor table; ``start`` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def size(self) -> int | None:
        """Bytes in the file, or None for a kind that the gguf package does not know."""
        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        except (KeyError, ValueError):
            return None
        return prod(self.shape) // block * size


@dataclass(frozen=True)
class GGUFHeader:
    """Metadata (arrays left out) and tensor table of one file."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def floats(self, name: str) -> list[float] | None:
        """The values of a float32 tensor, or None when the file has no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.kind != GGMLQuantizationType.F32:
            return None
        count = prod(tensor.shape)
        with self.path.open("rb") as file:
            file.seek(tensor.start)
            return list(struct.unpack(f"<{count}f", file.read(4 * count)))


def read_header(path: Path) -> GGUFHeader:
    """Read the header and check that the file is long enough for every tensor it lists.

    Raises :class:`ModelNotFound` for a file that is missing, not GGUF, of another version, or cut short.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
            if start != MAGIC:
                what = "is empty" if not start else f"starts with {start!r}, not {MAGIC!r}"
                raise ModelNotFound(f"{path} is not a GGUF file: it {what}. Download it again.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
                return _parse(path, blob)
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    except _Short as short:
        raise ModelNotFound(f"{path} is cut short: {short}. Download it again.") from None
    except (UnicodeDecodeError, _Garbled) as error:
        raise ModelNotFound(f"{path} is damaged: {error}. Download it again.") from None


class _Short(Exception):
    """The file ends before the data that it announces."""


class _Garbled(Exception):
    """The bytes cannot be a GGUF header."""


class _Cursor:
    def __init__(self, blob: mmap.mmap) -> None:
        self.blob, self.at, self.end = blob, len(MAGIC), len(blob)

    def skip(self, size: int) -> int:
        at = self.at
        if size > self.end - at:
            raise _Short(f"its header goes on past the end of the file, at byte {self.end:,}")
        self.at = at + size
        return at

    def number(self, code: str) -> int | float | bool:
        at = self.skip(struct.calcsize("<" + code))
        value: int | float | bool = struct.unpack_from("<" + code, self.blob, at)[0]
        return value

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def text(self) -> str:
        size = self.count()
        at = self.skip(size)
        return self.blob[at : at + size].decode("utf-8")

    def value(self, kind: int) -> object:
        """One metadata value; an array is stepped over and given as None."""
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise _Garbled(f"it has a metadata value of unknown type {kind}")
        kind, count = self.count("I"), self.count()
        if kind in NUMBERS:
            self.skip(count * struct.calcsize("<" + NUMBERS[kind]))
        elif kind == STRING:
            for _ in range(count):
                self.skip(self.count())
        else:
            raise _Garbled(f"it has a metadata array of type {kind}")
        return None


def _parse(path: Path, blob: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(blob)
    version = cursor.count("I")
    if version not in VERSIONS:
        raise _Garbled(f"it says GGUF version {version}, and only versions 2 and 3 (little-endian) are known")
    tensor_count, metadata_count = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(metadata_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.count("I"))
    table = []
    for _ in range(tensor_count):
        name = cursor.text()
        shape = tuple(cursor.count() for _ in range(cursor.count("I")))
        table.append((name, shape, cursor.count("I"), cursor.count()))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise _Garbled(f"its alignment is {alignment!r}")
    data = -(-cursor.at // alignment) * alignment
    tensors = {name: GGUFTensor(name, shape, kind, data + offset) for name, shape, kind, offset in table}
    end = max((tensor.start + (tensor.size or 0) for tensor in tensors.values()), default=data)
    if end > len(blob):
        raise _Short(f"it has {len(blob):,} bytes and its tensors need {end:,}")
    return GGUFHeader(path, metadata, tensors)
