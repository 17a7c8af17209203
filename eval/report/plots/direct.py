"""Names in the picture instead of a legend: beside points, or in a column right of the axes, with thin leaders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.report.plots.labels import place, spread
from eval.report.style import PAPER, SMALL_PT, look, marks, text_inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation
    from matplotlib.transforms import Transform
    from numpy.typing import NDArray

__all__ = ["End", "column_inches", "label_column", "label_points"]

_LINE_PT = SMALL_PT * 1.5  # from one label of a column to the next
_KEY_PT, _NAME_PT = 26, 33  # from the axes to the markers and names of a column


@dataclass(frozen=True)
class End:
    """The right end of a system's curve, which its label belongs to."""

    name: str
    title: str
    x: float
    y: float


def column_inches(titles: Iterable[str]) -> float:
    """The margin that a column of labels needs."""
    return text_inches(titles) + (_NAME_PT + 6) / 72


def label_column(axes: Axes, ends: Sequence[End]) -> None:
    """Writes each curve's name right of the axes, with its marker, as near to the curve's end as the others allow."""
    _, bottom, right, top = _box(axes)
    at = _points(axes, np.array([(end.x, end.y) for end in ends]))
    places = spread([float(y) for _, y in at], _LINE_PT, bottom, top)
    key = right + _KEY_PT
    for end, (x, y), place_y in zip(ends, at, places, strict=True):
        _line(axes, [x, right + 4, key - 6], [y, y, place_y], look(end.name).colour)
        plain = {**marks(end.name, 5.5), "linestyle": "none"}
        axes.plot([key], [place_y], transform=_in_points(axes), clip_on=False, zorder=5, **plain)
        _write(axes, end.title, (right + _NAME_PT, float(place_y)), ha="left")


def label_points(axes: Axes, titles: Mapping[str, str], curves: Mapping[str, NDArray[np.float64]]) -> None:
    """Writes each system's name beside one of its points, where it covers no other name and hardly a point or line.

    Args:
        titles: by system's name.
        curves: each system's points ``[k, 2]``, in data coordinates.
    """
    ground = {"boxstyle": "square,pad=0.05", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.75}
    texts = [_write(axes, titles[name], (0, 0), ha="center", bbox=ground, color=look(name).letters) for name in curves]
    extents = [text.get_window_extent() for text in texts]
    sizes = np.array([(extent.width, extent.height) for extent in extents]).reshape(-1, 2) / _pixels(axes)
    at = [_points(axes, points) for points in curves.values()]
    lines = [_along(points) for points in at if len(points) > 1] or [np.empty((0, 2))]
    left, bottom, right, top = _box(axes)
    bounds = (left + 2, bottom + 2, right - 2, top - 2)
    middles, anchors = place(sizes, at, np.concatenate(at), np.concatenate(lines), bounds)
    for name, text, size, middle, anchor in zip(curves, texts, sizes, middles, anchors, strict=True):
        text.xy = (float(middle[0]), float(middle[1]))
        text.set_position(text.xy)
        nearest = np.clip(anchor, middle - size / 2, middle + size / 2)
        if np.hypot(*(nearest - anchor)) > 7:
            _line(axes, [anchor[0], nearest[0]], [anchor[1], nearest[1]], look(name).colour)


def _along(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Points along a curve, near enough to each other that no label slips between them."""
    share = np.linspace(0, 1, 24)[:, None]
    return np.concatenate([a + share * (b - a) for a, b in pairwise(points)])


# All places are in points (1/72 inch) from the figure's corner: pixels would be others in a PNG of another resolution.


def _pixels(axes: Axes) -> float:
    """Pixels to a point, while drawing."""
    return float(axes.figure.dpi) / 72


def _points(axes: Axes, data: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(axes.transData.transform(data) / _pixels(axes))


def _box(axes: Axes) -> tuple[float, float, float, float]:
    """Left, bottom, right and top."""
    box, pixels = axes.get_window_extent(), _pixels(axes)
    return box.x0 / pixels, box.y0 / pixels, box.x1 / pixels, box.y1 / pixels


def _in_points(axes: Axes) -> Transform:
    from matplotlib.transforms import Affine2D

    return Affine2D().scale(1 / 72) + axes.figure.dpi_scale_trans


def _write(axes: Axes, text: str, at: tuple[float, float], **how: Any) -> Annotation:
    return axes.annotate(
        text, at, xycoords="figure points", fontsize=SMALL_PT, va="center", zorder=6, annotation_clip=False, **how
    )


def _line(axes: Axes, xs: Any, ys: Any, colour: str) -> None:
    its: dict[str, Any] = {"color": colour, "linewidth": 0.7, "alpha": 0.75, "zorder": 1.5}
    axes.plot(xs, ys, transform=_in_points(axes), clip_on=False, **its)
