"""Root of the error hierarchy, and what can go wrong when a rotation is read or applied."""

__all__ = ["KVBlendError", "UnsupportedRotation"]


class KVBlendError(Exception):
    """Base of every error that kvblend raises on purpose.

    A message names the offending value and the way out.
    """


class UnsupportedRotation(KVBlendError):
    """The model's position encoding cannot be undone and redone on a cached key."""
