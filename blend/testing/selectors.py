"""The conformance suite of selectors: whatever they look at, their answers obey the same bounds.

::

    class TestMySelector(SelectorTests):
        def make(self, ratio):
            return MySelector(ratio=ratio)

Any test runner that collects ``test_`` methods will do. The evidence is synthetic; no model is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blend.layout import Layout, Piece
from blend.selectors.base import Candidates, FreshKV, Selector, budget_rows

__all__ = ["SelectorTests", "evidence", "layouts", "select"]

_DEPTH = 6
_RATIOS = (0.0, 0.01, 0.05, 0.1, 0.15, 0.3, 0.5, 0.77, 0.99, 1.0)


class SelectorTests:
    """Tests of one selector with a budget. Those of a ratio that spends less than it may still pass."""

    depth: int = _DEPTH

    def make(self, ratio: float) -> Selector:
        """The selector under test, with a budget of ``ratio`` of the stale rows."""
        raise NotImplementedError("a subclass says how its selector is made")

    def test_rows_are_sorted_unique_and_stale(self) -> None:
        for layout in layouts():
            for ratio in _RATIOS:
                rows = select(self.make(ratio), layout, self.depth)
                assert (rows.dtype, rows.ndim) == (torch.int64, 1), f"rows are {rows.dtype} {tuple(rows.shape)}"
                assert bool((rows.diff() > 0).all()), f"rows are not sorted, or not unique: {rows.tolist()}"
                strange = set(rows.tolist()) - set(layout.stale.tolist())
                assert not strange, f"rows {sorted(strange)} may not be chosen: they are exact, fresh, or nowhere"

    def test_budget_is_kept(self) -> None:
        for layout in layouts():
            stale = layout.stale.numel()
            for ratio in _RATIOS:
                count, allowed = select(self.make(ratio), layout, self.depth).numel(), budget_rows(stale, ratio)
                assert count <= allowed, f"{count} of {stale} rows at ratio {ratio}, which allows {allowed}"

    def test_ratio_0_chooses_nothing(self) -> None:
        for layout in layouts():
            assert select(self.make(0.0), layout, self.depth).numel() == 0, "rows were chosen at ratio 0"

    def test_ratio_1_chooses_everything(self) -> None:
        for layout in layouts():
            rows = select(self.make(1.0), layout, self.depth)
            assert torch.equal(rows, layout.stale), f"{rows.numel()} of {layout.stale.numel()} rows at ratio 1"

    def test_count_rises_with_the_ratio(self) -> None:
        for layout in layouts():
            counts = [select(self.make(ratio), layout, self.depth).numel() for ratio in _RATIOS]
            assert counts == sorted(counts), f"counts at ratios {_RATIOS} are {counts}"
            assert len(set(counts)) > 1, "the ratio changes nothing"

    def test_same_evidence_same_rows(self) -> None:
        for layout in layouts():
            selector = self.make(0.3)
            first = select(selector, layout, self.depth)
            assert torch.equal(first, select(selector, layout, self.depth)), "a second call chose other rows"
            assert torch.equal(first, select(self.make(0.3), layout, self.depth)), "an equal selector chose other rows"

    def test_evidence_is_left_alone(self) -> None:
        for layout in layouts():
            given = evidence(layout, layer=self._first_check())
            before = [x.clone() for x in _tensors(given)]
            self.make(0.3).choose(given)
            same = (torch.equal(x, y) for x, y in zip(before, _tensors(given), strict=True))
            assert all(same), "the evidence was written to"

    def test_layers_exist(self) -> None:
        selector = self.make(0.3)
        for depth in (self.depth, 24, 80):
            for layers in (selector.check_layers(depth), selector.probe_layers(depth)):
                assert list(layers) == sorted(set(layers)), f"layers {layers} are not ascending"
                assert all(0 <= layer < depth for layer in layers), f"layers {layers} of a model of {depth}"

    def test_says_what_it_needs(self) -> None:
        selector = self.make(0.3)
        assert selector.name, "a report shows the name"
        checks, probes = bool(selector.check_layers(self.depth)), bool(selector.probe_layers(self.depth))
        wanted = selector.wants_fresh, selector.wants_attention
        assert wanted == (checks, probes), f"wants {selector.wants!r} and names no layers for it"

    def _first_check(self) -> int:
        return next(iter(self.make(0.3).check_layers(self.depth)), 0)


def layouts() -> list[Layout]:
    """Prompts as they come: one chunk, many, an exact prefix, an exact chunk, tiny chunks, an earlier context."""
    many = (
        Piece(0, 10, "prefix", True),
        Piece(10, 30, "chunk", True, 0),
        Piece(30, 57, "chunk", False, 1),
        Piece(57, 58, "chunk", False, 2),
        Piece(58, 120, "chunk", False, 3),
        Piece(120, 131, "fresh", True),
    )
    cut = (Piece(0, 25, "prefix", True), Piece(25, 60, "chunk", False, 0, 15), Piece(60, 64, "fresh", True))
    bare = (Piece(0, 40, "chunk", False, 0), Piece(40, 41, "fresh", True))
    grown = (
        Piece(0, 50, "fused", False),
        Piece(50, 52, "chunk", False, 1),
        Piece(52, 100, "chunk", False, 2),
        Piece(100, 109, "fresh", True),
    )
    crumbs = (*(Piece(i, i + 1, "chunk", False, i) for i in range(12)), Piece(12, 20, "fresh", True))
    return [Layout(pieces, pieces[-1].stop) for pieces in (many, cut, bare, grown, crumbs)]


def evidence(layout: Layout, stale: Tensor | None = None, layer: int = 1, seed: int = 0) -> Candidates:
    """Random attention and K/V for a layout: all that any selector may ask for.

    Args:
        layout: the prompt.
        stale: rows that are still to choose from; None for all.
        layer: the check layer of the fresh K/V.
        seed: of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    stale = layout.stale if stale is None else stale
    running = torch.cat([stale, layout.forced]).sort().values
    kv = [torch.randn(2, layout.rows, 8, generator=generator)[:, running] for _ in range(4)]
    attention_T = torch.randn(layout.rows, generator=generator).softmax(0)
    return Candidates(stale, layout, attention_T, FreshKV(layer, running, *kv))


def select(selector: Selector, layout: Layout, depth: int = _DEPTH, seed: int = 0) -> Tensor:
    """The rows that ``selector`` ends up with, asked as the engine asks it, for a model of ``depth`` layers.

    It is shown what it wants and nothing else.
    """
    attention_T = evidence(layout, seed=seed).attention_T if selector.wants_attention else None
    if not selector.wants_fresh:
        return selector.choose(Candidates(layout.stale, layout, attention_T))
    left = layout.stale
    for layer in selector.check_layers(depth):
        left = selector.choose(evidence(layout, left, layer, seed)._replace(attention_T=attention_T))
    return left


def _tensors(given: Candidates) -> list[Tensor]:
    assert given.attention_T is not None
    assert given.fresh is not None
    return [given.stale, given.attention_T, *(x for x in given.fresh if isinstance(x, Tensor))]
