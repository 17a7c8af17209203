"""Sizes as people write them: ``10GiB``, ``500 MB``, ``25%`` of all that there is to hold, ``unbounded``."""

from __future__ import annotations

import re
from typing import NamedTuple

from blend.errors import BudgetError

__all__ = ["Capacity", "read_capacity", "show_bytes"]

_UNITS = {"b": 1} | {f"{c}{i}b": base**n for i, base in (("", 1000), ("i", 1024)) for n, c in enumerate("kmgt", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")


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
    size, share = _SIZE.fullmatch(label.lower()), _SHARE.fullmatch(label)
    if size is not None and size[2] in _UNITS:
        nbytes = float(size[1]) * _UNITS[size[2]]
    elif share is not None:
        nbytes = float(share[1]) / 100 * whole
    else:
        nbytes = _fraction(label) * whole
    if nbytes < 1:
        raise BudgetError(f"capacity {text!r} holds nothing: give a positive one, such as 10GiB or 25%")
    return Capacity(label, int(nbytes))


def show_bytes(nbytes: float) -> str:
    """Three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def _fraction(label: str) -> float:
    try:
        fraction = float(label)
    except ValueError:
        fraction = -1.0
    if not 0 < fraction <= 1:
        raise BudgetError(
            f"capacity {label!r} cannot be read: give bytes with a unit (10GiB), a share of all distinct KV "
            "(25% or 0.25), or unbounded"
        )
    return fraction
