"""The oracle of partial recomputation: the model's stock forward over all rows, with cached K/V put back.

It narrows nothing and masks nothing of its own: each layer's cache replaces the fresh K/V of unselected rows by the
cached ones, so selected rows see exactly what a narrowed pass must show them. Slow, and obviously right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from blend.chunk import KVLayers
from blend.hf.fusion_cache import cached_kv
from rope.hf import cache_argument

__all__ = ["oracle"]


class _PutBackLayer(DynamicLayer):
    def __init__(self, cached: tuple[Tensor, Tensor], rows_S: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self.cached, self.rows_S = cached, rows_S

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        mixed = []
        for cached, fresh in zip(self.cached, (key_states, value_states), strict=True):
            out = cached[None].clone()
            out[:, :, self.rows_S] = fresh[:, :, self.rows_S]
            mixed.append(out)
        return super().update(*mixed)


@torch.inference_mode()
def oracle(model: PreTrainedModel, ids_1T: Tensor, cached: KVLayers, rows_S: Tensor) -> tuple[Tensor, KVLayers]:
    """Logits of the last row (fp32 ``[V]``) and mixed KV when ``rows_S`` are computed over ``cached`` KV ``[H, T, D]``.

    ``rows_S`` must contain the last row.
    """
    cache = Cache(layers=[_PutBackLayer(pair, rows_S) for pair in cached])
    out = model(input_ids=ids_1T, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
    return out.logits[0, -1].float(), tuple((keys[0], values[0]) for keys, values in cached_kv(cache))
