"""How far fresh K/V are from the moved cached ones, row by row. Shape suffixes as in :mod:`blend.selectors.base`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from blend.errors import BudgetError
from blend.selectors.base import FreshKV

__all__ = ["On", "check_on", "deviation", "distance", "spread"]

On = Literal["value", "key", "both"]
"""Which deviation counts: of values, of keys, or their sum, each over its mean so that neither drowns the other."""


def check_on(on: str) -> None:
    """Raises :class:`BudgetError` for anything that is not one of :data:`On`."""
    if on not in ("value", "key", "both"):
        raise BudgetError(f"on is {on!r}: choose 'value', 'key' or 'both'")


def deviation(fresh: FreshKV, on: On) -> Tensor:
    """Squared L2 distance of each row over all heads, fp32 ``[R]``."""
    key_R = _squared_distance(fresh.fresh_keys, fresh.cached_keys) if on != "value" else None
    value_R = _squared_distance(fresh.fresh_values, fresh.cached_values) if on != "key" else None
    if key_R is None or value_R is None:
        return key_R if key_R is not None else value_R  # type: ignore[return-value]  # one of them is set
    return key_R / key_R.mean().clamp_min(1e-30) + value_R / value_R.mean().clamp_min(1e-30)


def distance(fresh_HRD: Tensor, cached_HRD: Tensor, relative: bool) -> Tensor:
    """L2 distance of each row over all heads, fp32 ``[R]``; if ``relative``, over the fresh row's own length."""
    length_R = _squared_distance(fresh_HRD, cached_HRD).sqrt_()
    if not relative:
        return length_R
    return length_R / fresh_HRD.float().square().sum(dim=(0, 2)).sqrt_().clamp_min(1e-30)


def _squared_distance(a_HRD: Tensor, b_HRD: Tensor) -> Tensor:
    return (a_HRD.float() - b_HRD.float()).square_().sum(dim=(0, 2))


def spread(rows_R: Tensor, value_R: Tensor, total: int) -> Tensor:
    """``value_R`` at its rows, zero elsewhere: fp32 ``[T]`` with T = ``total``."""
    value_T = torch.zeros(total, device=value_R.device)
    value_T[rows_R.to(value_R.device)] = value_R
    return value_T
