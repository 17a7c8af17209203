"""What can go wrong while passages are read, found and put together. Shares kvblend's one root of errors."""

from rope.errors import KVBlendError

__all__ = [
    "DamagedIndex",
    "DocumentExists",
    "EmbedderMissing",
    "ExtraMissing",
    "IndexMismatch",
    "SettingError",
    "UnknownDocument",
    "UnreadableDocument",
]


class ExtraMissing(KVBlendError):
    """A package that this needs is not installed; the message names the extra that brings it."""


class EmbedderMissing(ExtraMissing):
    """No embedding model is there; the message says how to get one."""


class UnreadableDocument(KVBlendError):
    """A file or row that gives no text; the message names it and says why."""


class DocumentExists(KVBlendError):
    """A document of that id is there already, with another text."""


class UnknownDocument(KVBlendError, KeyError):
    """No document of that id is there."""

    __str__ = Exception.__str__  # KeyError would put the message into quotes


class IndexMismatch(KVBlendError):
    """A folder was made with another model, embedder or setting than it is opened with; the message says which."""


class DamagedIndex(KVBlendError):
    """A file of an index is missing or unreadable, and cannot be made again from the others."""


class SettingError(KVBlendError, ValueError):
    """A setting, or an argument, outside its range; the message names it and what it may be."""
