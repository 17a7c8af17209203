"""Every error that kvblend raises on purpose, in one small tree under :class:`KVBlendError`."""

from rope.errors import KVBlendError, UnsupportedRotation

__all__ = [
    "BudgetError",
    "CorruptEntry",
    "ForeignKV",
    "KVBlendError",
    "ModelNotFound",
    "PromptError",
    "PromptTooLong",
    "SelfCheckFailed",
    "StoreError",
    "StoreUnavailable",
    "UnsupportedModel",
    "UnsupportedRotation",
]


class ModelNotFound(KVBlendError):
    """A model name leads to no weights; the message lists every place that was tried."""


class UnsupportedModel(KVBlendError):
    """The model's cached KV cannot be fused; the message gives the reason and what to use instead."""


class SelfCheckFailed(UnsupportedModel):
    """The load-time proof against full prefill failed on this model."""


class PromptError(KVBlendError, ValueError):
    """A prompt, chunk or question that cannot be used as given."""


class PromptTooLong(PromptError):
    """The prompt has more rows than the model's context."""


class BudgetError(KVBlendError, ValueError):
    """A recompute budget outside its range."""


class ForeignKV(KVBlendError):
    """Cached KV that another model, dtype, tokenizer or rotation produced."""


class StoreError(KVBlendError):
    """A store that cannot be opened or used as asked; the message gives the way out."""


class StoreUnavailable(StoreError):
    """The server or folder behind a store does not answer. Requests go on: every look-up there is a miss."""


class CorruptEntry(StoreError):
    """A stored entry whose bytes are not what was written: flipped, cut off, or another entry's. It is never used."""
