"""What a kernel that is not installed, or that cannot serve a call, is refused with."""

from blend.errors import KVBlendError

__all__ = ["BackendMissing"]


class BackendMissing(KVBlendError, ImportError):
    """An attention backend that was asked for by name and cannot run here; the message says why and the way out."""
