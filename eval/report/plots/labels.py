"""Puts labels where they overlap nothing. Plain geometry: boxes and points, in any one unit; draws nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["place", "spread"]

Array = NDArray[np.float64]

_ANGLES = np.arange(0, 360, 22.5) * np.pi / 180
_RINGS = 14
_OVERLAP, _POINT, _LINE, _CROSSED = 1e6, 120.0, 6.0, 400.0  # costs; a ring further out costs 2
_STRANGER, _HIDDEN = 80.0, 8.0  # another's point is nearer to the label than its own, or on the way to it


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> Array:
    """Places on a line, as near to ``wanted`` as can be (least squares), in order, ``gap`` apart, between the ends.

    Where there is no room for all, they stand closer.
    """
    targets = np.asarray(wanted, dtype=float)
    if not len(targets):
        return targets
    gap = min(gap, (high - low) / max(1, len(targets) - 1))
    order = np.argsort(targets, kind="stable")
    steps = gap * np.arange(len(targets))
    pools: list[tuple[float, int]] = []  # mean and size: neighbours that got in each other's way move as one
    for value in targets[order] - steps:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (mean * size + before * count) / (size + count), size + count
        pools.append((mean, size))
    free = np.concatenate([np.full(size, mean) for mean, size in pools])
    places = np.empty(len(targets))
    places[order] = np.clip(free, low, high - steps[-1]) + steps
    return places


def place(
    sizes: Array, anchors: Sequence[Array], points: Array, lines: Array, bounds: tuple[float, float, float, float]
) -> tuple[Array, Array]:
    """Places labels near their anchors.

    Args:
        sizes: width and height of each label, ``[n, 2]``.
        anchors: per label, the points that it may stand at, ``[k, 2]``.
        points: middles of marks that no label should cover, ``[m, 2]``.
        lines: points along lines that labels should rather not cover, ``[l, 2]``.
        bounds: left, bottom, right and top that labels stay inside of.

    Returns:
        Middle of each label and the anchor it belongs to, both ``[n, 2]``. No two labels overlap as long as there is
        room within reach of their anchors.
    """
    count = len(sizes)
    if not count:
        return np.empty((0, 2)), np.empty((0, 2))
    options = [_options(size, at, points, lines, bounds) for size, at in zip(sizes, anchors, strict=True)]
    chosen: list[int | None] = [None] * count
    order = sorted(range(count), key=lambda i: -float(np.median(options[i][2])))  # the most cramped one first
    for _ in range(12):
        before = list(chosen)
        for i in order:
            others = [j for j in range(count) if j != i and chosen[j] is not None]
            chosen[i] = int(np.argmin(options[i][2] + _clashes(i, others, sizes, options, chosen)))
        if chosen == before:
            break
    picked = [(options[i][0][c], options[i][1][c]) for i, c in enumerate(chosen) if c is not None]
    return np.array([middle for middle, _ in picked]), np.array([anchor for _, anchor in picked])


Options = tuple[Array, Array, Array]  # middles [c, 2], anchors [c, 2], costs [c]


def _options(size: Array, anchors: Array, points: Array, lines: Array, bounds: tuple[float, ...]) -> Options:
    """Every place that a label may take, and what it costs by itself."""
    way = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
    half = size / 2
    unit = size[1] * 0.5
    # From the anchor outwards until the box no longer touches it, then a ring at a time.
    touch = np.min(np.divide(half, np.abs(way), out=np.full_like(way, np.inf), where=np.abs(way) > 1e-9), axis=1)
    reach = touch[None, :] + unit * (1.3 + np.arange(_RINGS)[:, None])
    offsets = (reach[..., None] * way[None]).reshape(-1, 2)
    middles = (anchors[:, None] + offsets[None]).reshape(-1, 2)
    at = np.repeat(anchors, len(offsets), axis=0)
    cost = np.tile(np.repeat(np.arange(_RINGS, dtype=float) * 2.0, len(_ANGLES)), len(anchors))
    cost += _POINT * _covered(middles, half + unit * 0.55, points) + _LINE * _covered(middles, half, lines)
    strangers = points[~(points[:, None] == anchors[None]).all(axis=-1).any(axis=1)] if len(points) else points
    if len(strangers):
        own = _distance(middles, half, at[:, None])[:, 0]
        for share in (0.0, 0.25, 0.5, 0.75):
            cost += _HIDDEN * _covered(at + share * (middles - at), np.full(2, 1.2 * unit), strangers)
        cost += _STRANGER * (_distance(middles, half, strangers[None]).min(axis=1) < own + unit)
    left, bottom, right, top = bounds
    outside = (middles - half < [left, bottom]).any(axis=1) | (middles + half > [right, top]).any(axis=1)
    return middles, at, cost + 1e9 * outside


def _clashes(
    i: int, others: Sequence[int], sizes: Array, options: Sequence[Options], chosen: Sequence[int | None]
) -> Array:
    """What each place of label ``i`` costs beside the labels that are placed: overlaps, and leaders under labels."""
    middles, anchors, _ = options[i]
    if not others:
        return np.zeros(len(middles))
    theirs = np.array([options[j][0][chosen[j] or 0] for j in others])
    their_anchors = np.array([options[j][1][chosen[j] or 0] for j in others])
    halves = (sizes[i] / 2 + sizes[list(others)] / 2)[None]
    apart = np.abs(middles[:, None] - theirs[None])
    margin = sizes[i, 1] * np.array([0.5, 0.12])
    cost = _OVERLAP * (apart < halves + margin).all(axis=-1).sum(axis=1)
    for share in np.linspace(0.0, 0.9, 8):
        mine = anchors + share * (middles - anchors)
        inside = (np.abs(mine[:, None] - theirs[None]) < sizes[list(others)][None] / 2).all(axis=-1)
        leaders = their_anchors + share * (theirs - their_anchors)
        under = (np.abs(middles[:, None] - leaders[None]) < sizes[i] / 2).all(axis=-1)
        cost = cost + _CROSSED / 8 * (inside.sum(axis=1) + under.sum(axis=1))
    crossing = _cross(anchors[:, None], middles[:, None], their_anchors[None], theirs[None])
    return np.asarray(cost + _CROSSED / 4 * crossing.sum(axis=1), dtype=float)


def _distance(middles: Array, half: Array, points: Array) -> Array:
    """From each box ``[c]`` to each point, ``[c, p]``; 0 inside."""
    beyond = np.maximum(np.abs(middles[:, None] - points) - half, 0.0)
    return np.asarray(np.hypot(beyond[..., 0], beyond[..., 1]))


def _covered(middles: Array, half: Array, points: Array) -> Array:
    """How many points each box covers."""
    if not len(points):
        return np.zeros(len(middles))
    return np.asarray((np.abs(middles[:, None] - points[None]) < half).all(axis=-1).sum(axis=1), dtype=float)


def _cross(a: Array, b: Array, c: Array, d: Array) -> NDArray[np.bool_]:
    """Whether segment a-b crosses segment c-d."""

    def side(p: Array, q: Array, r: Array) -> Array:
        ab, ac = q - p, r - p
        return np.asarray(ab[..., 0] * ac[..., 1] - ab[..., 1] * ac[..., 0])

    return np.asarray((side(a, b, c) * side(a, b, d) < 0) & (side(c, d, a) * side(c, d, b) < 0))
