"""Content keys: everything that a chunk's KV depends on, hashed. Knows nothing of models."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

__all__ = ["FORMAT_VERSION", "chunk_key"]

FORMAT_VERSION = 1
"""Raised whenever the meaning of stored KV changes; old entries then simply miss."""


def chunk_key(fingerprint: str, prelude: Sequence[int], ids: Sequence[int], salt: str = "") -> str:
    """sha256 (hex) over format version, model fingerprint, tenant salt, prelude tokens and chunk tokens.

    Args:
        fingerprint: of model, dtype, tokenizer and rotation.
        prelude: token ids that the chunk is encoded behind.
        ids: the chunk's token ids.
        salt: separates tenants; set by the server side, never by a prompt.
    """
    state = hashlib.sha256()
    for part in (str(FORMAT_VERSION).encode(), fingerprint.encode(), salt.encode(), _pack(prelude), _pack(ids)):
        # Length first, so that no two lists of parts give the same bytes.
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


def _pack(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
