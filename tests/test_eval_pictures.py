"""The pictures of a report: no two texts overlap, whatever was run."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from eval.report import read_run
from eval.report.plots import PLOTS, NothingToDraw
from eval.report.plots.labels import place, spread
from eval.report.plots.length import trend
from eval.report.plots.tradeoff import front
from eval.report.style import LOOKS, look, style
from tests.made_up_run import SYSTEMS, few, make_scores, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(write_run(tmp_path_factory.mktemp("run"), make_scores()))


def texts_of(figure):
    """Every text that is seen, with its box in pixels."""
    figure.draw_without_rendering()
    found = list(figure.texts) + [text for legend in figure.legends for text in legend.get_texts()]
    for axes in figure.axes:
        found += [*axes.texts, axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            labels = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            found += [label for place, label in labels if low <= place <= high]
    return [(text, text.get_window_extent()) for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_no_two_texts_overlap(run, plot):
    with style():
        figure = plot.draw(run)
        texts = texts_of(figure)
    names = [text.get_text() for text, _ in texts]
    assert sum(title in names for title, *_ in SYSTEMS.values()) >= 14, "systems are named in the picture"
    assert min(text.get_fontsize() for text, _ in texts) >= 8
    overlapping = [(a.get_text(), b.get_text()) for (a, one), (b, two) in combinations(texts, 2) if one.overlaps(two)]
    assert overlapping == []
    whole = figure.bbox
    outside = [
        text.get_text() for text, box in texts
        if box.x0 < whole.x0 or box.y0 < whole.y0 or box.x1 > whole.x1 or box.y1 > whole.y1
    ]  # fmt: skip
    assert outside == []


@pytest.mark.parametrize("names", [["full"], ["reuse"], ["oracle-kv"], ["full", "prefix", "prefix-warm"]], ids="+".join)
def test_few_systems_can_be_drawn(tmp_path, names):
    run = read_run(write_run(tmp_path, few(names, n=3)))
    with style():
        for plot in PLOTS:
            try:
                texts = texts_of(plot.draw(run))
            except NothingToDraw:
                continue
            assert not any(one.overlaps(two) for (_, one), (_, two) in combinations(texts, 2)), plot.name


def test_a_narrow_range_has_ticks_too(tmp_path):
    scores = [replace(s, rows=1610 + int(s.example[-1])) for s in few(["full", "epic"])]
    (plot,) = (plot for plot in PLOTS if plot.name == "length")
    with style():
        figure = plot.draw(read_run(write_run(tmp_path, scores)))
        names = {text.get_text() for text, _ in texts_of(figure)}
    assert len([name for name in names if re.fullmatch(r"1,[5-7]\d\d", name)]) >= 2


def test_known_systems_look_different():
    looks = [(its.colour, its.marker, its.hollow) for its in LOOKS.values()]
    assert len(set(looks)) == len(looks)
    assert look("a system of tomorrow") == look("a system of tomorrow")


def test_front():
    points = [(1, 1.0), (2, 0.9), (2, 0.8), (3, 0.95), (5, 0.4), (6, 0.4), (4, 0.3)]
    assert front(points, low=False) == [(1, 1.0), (3, 0.95), (6, 0.4)]
    assert front([(1, 0.0), (2, 0.5), (3, 0.2)], low=True) == [(1, 0.0), (3, 0.2)]


def test_trend_joins_groups_that_are_too_small():
    rows = np.array([100.0] * 10 + [110.0, 5000.0, 10000.0])
    line = trend(np.stack([rows, rows / 100], axis=1))
    assert line.tolist() == [[100.0, 1.0]]
    many = np.exp(np.random.default_rng(0).uniform(4, 9, 200))
    line = trend(np.stack([many, many / 100], axis=1))
    assert len(line) == 6
    assert (np.diff(line, axis=0) > 0).all()


@pytest.mark.parametrize("seed", range(20))
def test_spread_keeps_order_gaps_and_ends(seed):
    rng = np.random.default_rng(seed)
    wanted = rng.normal(50, 30, rng.integers(1, 9))
    places = spread(wanted, 10, 0, 100)
    order = np.argsort(wanted)
    assert (np.diff(places[order]) >= 10 - 1e-9).all()
    assert places.min() >= -1e-9
    assert places.max() <= 100 + 1e-9
    free = [x for x in wanted if 0 <= x <= 100 and all(x is y or abs(x - y) > 100 for y in wanted)]
    assert all(x in places for x in free)


def test_spread_moves_no_one_without_need():
    assert spread([10, 50, 90], 10, 0, 100).tolist() == [10, 50, 90]
    assert spread([50, 50], 10, 0, 100).tolist() == [45, 55]
    assert spread([0, 1, 2], 80, 0, 100).tolist() == [0, 50, 100], "no room: closer"
    assert spread([], 1, 0, 1).tolist() == []


@pytest.mark.parametrize("seed", range(10))
def test_placed_labels_never_overlap(seed):
    rng = np.random.default_rng(seed)
    count, bounds = 17, (0.0, 0.0, 500.0, 300.0)
    sizes = np.stack([rng.uniform(20, 110, count), np.full(count, 10.0)], axis=1)
    anchors = [rng.normal((250, 150), (60, 30), (rng.integers(1, 4), 2)) for _ in range(count)]
    middles, at = place(sizes, anchors, np.concatenate(anchors), np.empty((0, 2)), bounds)
    for i, j in combinations(range(count), 2):
        assert (np.abs(middles[i] - middles[j]) >= (sizes[i] + sizes[j]) / 2).any(), (i, j)
    assert (middles - sizes / 2 >= bounds[:2]).all()
    assert (middles + sizes / 2 <= bounds[2:]).all()
    assert all((anchor == own).all(axis=1).any() for anchor, own in zip(at, anchors, strict=True))
