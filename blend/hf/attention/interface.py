"""Our entry in transformers' attention registry: fusion masks go to our kernel, everything else to the stock one.

The registry key replaces the model's own implementation once, when a :class:`~blend.hf.view.ModelView` is attached;
ordinary calls of the model (plain masks, padding, no mask) behave exactly as before, unless :func:`attending` has put
another function in the stock one's place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from blend.errors import UnsupportedModel
from blend.hf.attention.choice import BACKENDS, choose_backend
from blend.hf.attention.eager import mix_eager, weights_eager
from blend.hf.attention.mask import FusionMask, Reach

__all__ = [
    "FUSION_OVER",
    "Attention",
    "attach",
    "attending",
    "detach",
    "fusion_attention",
    "stock_attention",
]

# The names avoid "sdpa", "flash" and "flex_attention": transformers takes those as requests for kernels.
FUSION_OVER = {"sdpa": "kv_fusion", "eager": "kv_fusion_float"}
"""Registry key that stands over each stock implementation."""

Attention: TypeAlias = "Callable[..., tuple[Tensor, Any]]"
"""An attention function as transformers calls it: module, query, key, value, mask, and keyword arguments."""

_instead: ContextVar[Attention | None] = ContextVar("kvblend_attention", default=None)

_attached: WeakKeyDictionary[PreTrainedModel, tuple[str, int]] = WeakKeyDictionary()
"""A model's own implementation, and how many views hold ours; the last one to go restores it."""


def stock_attention(model: PreTrainedModel) -> str:
    """The implementation that the model runs ordinary calls with."""
    name = str(model.config._attn_implementation)
    return next((stock for stock, ours in FUSION_OVER.items() if ours == name), name)


def attach(model: PreTrainedModel) -> bool:
    """Puts the fusion attention over the model's own; False where transformers does not let one choose.

    Implementations other than SDPA and eager are replaced by SDPA.
    """
    if not model._can_set_attn_implementation():
        return False
    for stock, name in FUSION_OVER.items():
        AttentionInterface.register(name, _over_sdpa if stock == "sdpa" else _over_eager)
        # With no mask function of its own, a key would lose the padding mask of ordinary batched calls.
        AttentionMaskInterface.register(name, sdpa_mask if stock == "sdpa" else eager_mask)
    own, views = _attached.get(model, (str(model.config._attn_implementation), 0))
    model.set_attn_implementation(FUSION_OVER.get(own, FUSION_OVER["sdpa"]))
    _attached[model] = own, views + 1
    return True


def detach(model: PreTrainedModel) -> None:
    """Undoes one :func:`attach`."""
    own, views = _attached[model]
    if views > 1:
        _attached[model] = own, views - 1
    else:
        del _attached[model]
        model.set_attn_implementation(own)


@contextmanager
def attending(attention: Attention) -> Iterator[None]:
    """While open, ordinary calls of attached models made in this thread attend by ``attention``.

    For methods that change how a model looks at its KV, in decoding too. Passes over a fusion cache are not touched.
    """
    before = _instead.set(attention)
    try:
        yield
    finally:
        _instead.reset(before)


def fusion_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: FusionMask,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    backend: str | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention of the selected rows ``query [1, Hq, S, D]`` over all rows; arguments as transformers passes them.

    Raises:
        UnsupportedModel: the model adds a position bias that this function does not know.
    """
    if extra.get("position_bias") is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a learned position bias: use full prefill for this model")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # What the model itself passes wins over what its config says.
    reach = Reach(window=int(sliding_window)) if sliding_window is not None else mask.reach
    options: dict[str, Any] = {"scaling": scale, "softcap": softcap, "sinks": s_aux}
    if mask.observer is not None:
        weights = weights_eager(query, key, mask.dense(reach), **options)
        mask.observer(module.layer_idx, weights)
        return mix_eager(weights, value), None
    attend = BACKENDS[backend or choose_backend(query, value, softcap is not None, s_aux is not None)]
    return attend(query, key, value, mask, reach=reach, **options), None


def _over_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    if isinstance(attention_mask, FusionMask):
        return fusion_attention(module, query, key, value, attention_mask, **kwargs)
    attend = _instead.get() or sdpa_attention_forward
    return attend(module, query, key, value, attention_mask, **kwargs)


def _over_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    if isinstance(attention_mask, FusionMask):
        return fusion_attention(module, query, key, value, attention_mask, **kwargs)
    # Every modeling file brings its own eager function (softcap, sinks); transformers' default is looked up there.
    attend: Attention = _instead.get() or sys.modules[type(module).__module__].eager_attention_forward
    return attend(module, query, key, value, attention_mask, **kwargs)
