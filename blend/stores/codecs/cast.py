"""Keys and values in a dtype of 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blend.stores.codecs.base import Side, SideCodec

__all__ = ["BFloat16", "Float16"]


class _Cast(SideCodec):
    """Rounds to ``dtype``. A side with a number beyond that dtype's range, or with none inside, is stored as it is."""

    dtype: torch.dtype

    def encode_side(self, side: Side, x_HnD: Tensor) -> dict[str, Tensor] | None:
        largest = float(x_HnD.abs().max())
        inside = largest == 0 or torch.finfo(self.dtype).tiny <= largest <= torch.finfo(self.dtype).max
        return {"cast": x_HnD.to(self.dtype)} if inside else None

    def decode_side(self, side: Side, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return parts["cast"]


class BFloat16(_Cast):
    """bfloat16: the range of fp32 with 8 significant bits; of a bf16 model's KV not a bit is lost."""

    name = "bf16"
    dtype = torch.bfloat16


class Float16(_Cast):
    """float16: 11 significant bits, up to 65504; below 6e-5 they become fewer."""

    name = "fp16"
    dtype = torch.float16
