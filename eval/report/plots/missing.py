"""Why there is no picture."""

from blend.errors import KVBlendError

__all__ = ["NothingToDraw"]


class NothingToDraw(KVBlendError):
    """The run has not measured what a picture shows; the message says what is missing."""
