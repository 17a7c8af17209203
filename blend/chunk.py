"""A chunk: the tokens of one retrieved passage, and its KV once computed. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from torch import Tensor

from blend.errors import PromptError

__all__ = ["DEFAULT_PRIORITY", "DEFAULT_RETENTION", "Chunk", "ChunkKV", "KVLayers", "Retention", "kv_bytes"]

KVLayers: TypeAlias = "Sequence[tuple[Tensor, Tensor]]"
"""Per cache layer the pair (keys ``[H, n, Dk]``, values ``[H, n, Dv]``), in the model's dtype.

A tuple, or a sequence that reads a layer from its store when that layer is asked for.
"""

DEFAULT_PRIORITY = 35
"""Priority of an entry for which none was given (TensorRT-LLM's retention default)."""


class Retention(NamedTuple):
    """What an eviction policy may weigh when it decides how long to keep an entry.

    Attributes:
        cost: seconds that computing the entry took; 0.0 where unknown.
        priority: 0 (first to go) to 100.
        duration: seconds for which ``priority`` holds, then it falls to the default; None for ever.
    """

    cost: float = 0.0
    priority: int = DEFAULT_PRIORITY
    duration: float | None = None


DEFAULT_RETENTION = Retention()
"""Nothing known, nothing asked for."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that are cached and reused as one unit.

    Attributes:
        ids: token ids, without BOS or chat-template tokens.
        name: shown in reports; no part of the chunk's identity.

    Raises:
        PromptError: no tokens, or a negative id.
    """

    ids: tuple[int, ...]
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(int(i) for i in self.ids))
        if not self.ids:
            raise PromptError(f"chunk {self.name!r} has no tokens: drop it, or give it some text")
        if min(self.ids) < 0:
            raise PromptError(f"chunk {self.name!r} holds the negative token id {min(self.ids)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chunk) and self.ids == other.ids

    def __hash__(self) -> int:
        return hash(self.ids)


@dataclass(frozen=True, eq=False)
class ChunkKV:
    """A chunk's cached keys and values, as they stood when it was encoded.

    Attributes:
        key: content key (see :func:`blend.keys.chunk_key`).
        fingerprint: the model, dtype, tokenizer and rotation that produced it.
        ids: the chunk's token ids.
        prelude: the token ids it was encoded behind; its first row stood at position ``len(prelude)``.
        length: rows of the pass that cached it (some RoPE types depend on it).
        layers: keys and values per cache layer.
        retention: how much the entry is worth keeping; no part of its identity.
        averaged: contexts that the KV is the mean over, as it would stand behind the prelude; 0 for KV that was
            computed right behind the prelude. A mean is exact nowhere.
        spread: how much each row's KV differs from context to context (:meth:`blend.averaging.Mean.spread`); empty
            where nobody knows.
    """

    key: str
    fingerprint: str
    ids: tuple[int, ...]
    prelude: tuple[int, ...]
    length: int
    layers: KVLayers
    retention: Retention = DEFAULT_RETENTION
    averaged: int = 0
    spread: tuple[float, ...] = ()

    @property
    def base(self) -> int:
        """Position of the first row at caching time."""
        return len(self.prelude)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return kv_bytes(self.layers)

    def with_layers(self, layers: KVLayers) -> ChunkKV:
        """The same chunk with other layers."""
        return replace(self, layers=layers)


def kv_bytes(layers: KVLayers) -> int:
    """Bytes of keys and values together."""
    return sum(keys.numel() * keys.element_size() + values.numel() * values.element_size() for keys, values in layers)
