"""Sizes as people write them: ``10GiB``, ``500 MB``, ``25%`` of all that there is to hold, ``unbounded``."""

from __future__ import annotations

import re
from typing import NamedTuple

from blend.errors import BudgetError, StoreError
from blend.stores.url import parse_size

__all__ = ["Capacity", "read_capacity", "show_bytes"]

_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)")


class Capacity(NamedTuple):
    """A limit.

    Attributes:
        label: as it was written.
        nbytes: None for no limit.
    """

    label: str
    nbytes: int | None


def read_capacity(text: str, whole: int) -> Capacity:
    """Reads a size.

    Args:
        text: bytes with a unit, a percentage or a fraction of ``whole``, or ``unbounded``.
        whole: bytes of all that there is to hold.

    Raises:
        BudgetError: it is none of these, or nothing would fit.
    """
    label = text.strip()
    if label == "unbounded":
        return Capacity(label, None)
    share = _SHARE.fullmatch(label)
    try:
        nbytes = int(float(share[1]) / (100 if share[2] else 1) * whole) if share else parse_size(label)
    except StoreError:
        nbytes = 0
    if nbytes < 1 or (share and nbytes > whole):
        raise BudgetError(
            f"capacity {text!r} cannot be used: give bytes with a unit (10GiB), a share of all distinct KV "
            "(25% or 0.25, at most 1), or unbounded"
        )
    return Capacity(label, nbytes)


def show_bytes(nbytes: float) -> str:
    """Three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"
