"""Content keys: everything that a chunk's KV depends on, hashed. Knows nothing of models."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["FORMAT_VERSION", "chunk_key"]

FORMAT_VERSION = 2
"""Raised whenever the meaning of stored KV changes; old entries then simply miss."""


def chunk_key(
    fingerprint: str,
    prelude: Sequence[int],
    ids: Sequence[int],
    salt: str = "",
    *,
    codec: str = "none",
    adapter: str = "",
    background: str = "",
) -> str:
    """sha256 (hex) over everything that stored chunk KV depends on, and the format version.

    Args:
        fingerprint: of model, dtype, tokenizer and rotation.
        prelude: token ids that the chunk is encoded behind.
        ids: the chunk's token ids.
        salt: separates tenants; set by the server side, never by a prompt.
        codec: what the KV loses on its way in and out, by its codec's name; KV that lost digits is not the KV that lost
            none.
        adapter: id of the adapter (LoRA) that the model runs with; "" for none.
        background: digest of the contexts that the KV is averaged over; "" for none.
    """
    texts = (str(FORMAT_VERSION), fingerprint, salt, codec, adapter)
    state = hashlib.sha256()
    parts = [*(text.encode() for text in texts), _pack(prelude), _pack(ids)]
    if background:  # left out where there is none: such keys are older than backgrounds
        parts.append(background.encode())
    for part in parts:
        # Length first, so that no two lists of parts give the same bytes.
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _pack(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
