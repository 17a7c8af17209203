"""Every error that kvblend raises on purpose, in one small tree under :class:`KVBlendError`."""

from rope.errors import KVBlendError, UnsupportedRotation

__all__ = [
    "BudgetError",
    "ForeignKV",
    "KVBlendError",
    "ModelNotFound",
    "PromptError",
    "PromptTooLong",
    "SelfCheckFailed",
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
