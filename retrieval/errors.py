"""What can go wrong while passages are found. Shares kvblend's one root of errors."""

from rope.errors import KVBlendError

__all__ = ["EmbedderMissing"]


class EmbedderMissing(KVBlendError):
    """No embedding model is there; the message says how to get one."""
