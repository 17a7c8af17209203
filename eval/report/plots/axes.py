"""Axes that several pictures share: KL with its zero, and speed-ups, seconds and rows in plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["kl_axis", "plain_log"]

_STEPS = (1, 2, 5)
_ROUNDING = 1 / 300  # of the largest KL: what is less is drawn with the zeros, or exact systems would take all the room


def kl_axis(axes: Axes, values: Iterable[float]) -> None:
    """The y axis for KL: logarithmic, with a place for 0 below where something is 0, but for rounding."""
    known = np.array([value for value in values if np.isfinite(value)])
    above = known[known > _ROUNDING * known.max(initial=0.0)]
    if not len(above):
        axes.set_ylim(-0.05, 1)
        return
    low, high = float(above.min()) * 0.8, float(above.max()) * 1.25
    ticks = _ticks(low, high)
    if len(above) < len(known):
        axes.set_yscale("symlog", linthresh=low, linscale=0.35)
        axes.set_ylim(-low * 0.45, high)
        ticks = [0.0, *ticks]
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


def plain_log(axes: Axes, which: Literal["x", "y"], low: float, high: float, unit: str = "") -> None:
    """A logarithmic axis with ticks in plain numbers: at 1, 2 and 5 times powers of ten where the range has some."""
    ticks = _ticks(low, high)
    names = [f"{tick:,.10g}{unit}" for tick in ticks]
    if which == "x":
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, names)
        axes.set_xticks([], minor=True)
    else:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.set_yticks(ticks, names)
        axes.set_yticks([], minor=True)


def _ticks(low: float, high: float) -> list[float]:
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    all_of_them = [step * 10.0**power for power in powers for step in _STEPS if low <= step * 10.0**power <= high]
    if len(all_of_them) < 2:  # a narrow range has none of these: plain steps
        from matplotlib.ticker import MaxNLocator

        return [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    tens = [tick for tick in all_of_them if np.isclose(np.log10(tick), round(np.log10(tick)))]
    return tens if len(all_of_them) > 9 and len(tens) > 2 else all_of_them
