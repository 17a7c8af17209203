"""The pictures of a report, one file each: ``NAME``, ``TITLE``, ``CAPTION`` and ``draw(run) -> Figure``.

``draw`` raises :class:`NothingToDraw` where the run has not measured what the picture shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eval.report.plots import deviation, kl_ratio, length, quality_ratio, stages, tradeoff
from eval.report.plots.missing import NothingToDraw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from eval.report.run import Run

__all__ = ["PLOTS", "NothingToDraw", "Plot"]


@dataclass(frozen=True)
class Plot:
    """One picture: its file's stem, what stands over and under it, and what draws it."""

    name: str
    title: str
    caption: str
    draw: Callable[[Run], Figure]


PLOTS: tuple[Plot, ...] = tuple(
    Plot(module.__name__.rpartition(".")[2], module.TITLE, module.CAPTION, module.draw)
    for module in (tradeoff, quality_ratio, kl_ratio, length, stages, deviation)
)
