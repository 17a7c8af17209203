"""The conformance suite of correctors: whatever they shift, their answers obey the same bounds.

::

    class TestMyCorrector(CorrectorTests):
        def make(self):
            return MyCorrector()

Any test runner that collects ``test_`` methods will do. The evidence is synthetic; no model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blend.correctors import Choice, Corrector, Shift
from blend.layout import Layout
from blend.selectors import FreshKV
from blend.testing.selectors import layouts
from rope import FrequencyTable, LayerRotation, Rope

__all__ = ["CorrectorTests", "choices", "drift"]

_LAYER, _HEADS, _DIM = 3, 2, 8


class CorrectorTests:
    """Tests of one corrector."""

    def make(self) -> Corrector:
        """The corrector under test."""
        raise NotImplementedError("a subclass says how its corrector is made")

    def test_has_a_name(self) -> None:
        assert self.make().name, "a report shows the name"

    def test_shifts_have_the_shape_of_the_rows_that_stay(self) -> None:
        for choice in self._choices():
            for x in self._shift(choice, drift(choice)):
                if x is not None:
                    expected = _HEADS, choice.left_N.numel(), _DIM
                    assert (tuple(x.shape), x.dtype) == (expected, torch.float32), f"{tuple(x.shape)} {x.dtype}"
                    assert bool(x.isfinite().all()), "a shift is not finite"

    def test_it_shifts_something(self) -> None:
        shifted = any(bool(x.any()) for c in self._choices() for x in self._shift(c, drift(c)) if x is not None)
        assert shifted, "no row was ever shifted"

    def test_where_nothing_is_off_nothing_is_shifted(self) -> None:
        for choice in self._choices():
            fresh = drift(choice)
            same = fresh._replace(cached_keys=fresh.fresh_keys.clone(), cached_values=fresh.fresh_values.clone())
            assert not any(bool(x.any()) for x in self._shift(choice, same) if x is not None), "exact rows were off"

    def test_same_evidence_same_shift(self) -> None:
        for choice in self._choices():
            correction, fresh = self.make().plan(choice), drift(choice)
            first = correction(fresh)
            correction(drift(choice, seed=5)._replace(layer=1))
            assert _equal(first, correction(fresh)), "what was seen in another layer changed the answer"
            assert _equal(first, self._shift(choice, fresh)), "an equal corrector gave another shift"

    def test_evidence_is_left_alone(self) -> None:
        for choice in self._choices():
            fresh = drift(choice)
            seen = [*_tensors(choice), *_tensors(fresh), *(_tensors(choice.fresh) if choice.fresh else ())]
            before = [x.clone() for x in seen]
            self._shift(choice, fresh)
            assert all(torch.equal(x, y) for x, y in zip(before, seen, strict=True)), "the evidence was written to"

    def test_no_row_learns_of_later_chunks(self) -> None:
        for choice in self._choices():
            for _, stop in choice.layout.stale_spans:
                earlier = self._before(choice, stop), self._before(_disturbed(choice, stop), stop, stop)
                assert _equal(*earlier), f"rows before {stop} depend on what is behind it"

    def test_looks_ahead_within_a_chunk_only_where_it_says_so(self) -> None:
        looked = False
        for choice in self._choices():
            for row in choice.chosen_C.tolist():
                earlier = self._before(choice, row), self._before(_disturbed(choice, row), row, row)
                looked |= not _equal(*earlier)
        assert looked == self.make().looks_ahead, f"looks_ahead is {not looked}, and it is {looked}"

    def _choices(self) -> Iterator[Choice]:
        needs = self.make().needs_check
        return (choice for choice in choices() if choice.fresh is not None or not needs)

    def _shift(self, choice: Choice, fresh: FreshKV) -> Shift:
        return self.make().plan(choice)(fresh)

    def _before(self, choice: Choice, row: int, disturbed_from: int | None = None) -> Shift:
        """Shifts of the rows before ``row``."""
        shift = self._shift(choice, _from(drift(choice), disturbed_from))
        count = int((choice.left_N < row).sum())
        return Shift(*(None if x is None else x[:, :count] for x in shift))


def choices() -> Iterator[Choice]:
    """Chosen rows as they come, with and without a check: every third, the heads, a single one, none in a chunk."""
    for layout in layouts():
        stale = layout.stale
        for chosen_C in (stale[1::3].clone(), stale[: stale.numel() // 2], stale[-1:]):
            left_N = stale[~torch.isin(stale, chosen_C)]
            for fresh in (None, _check(layout)):
                yield Choice(chosen_C, left_N, layout, _rope(), fresh)


def drift(choice: Choice, seed: int = 0) -> FreshKV:
    """Random fresh and cached K/V of the rows computed again, at some layer."""
    return _random_kv(_LAYER, choice.chosen_C, seed + 1)


def _check(layout: Layout) -> FreshKV:
    """What the selector saw at layer 1."""
    return _random_kv(1, torch.cat([layout.stale, layout.forced]).sort().values, 0)


def _random_kv(layer: int, rows: Tensor, seed: int) -> FreshKV:
    generator = torch.Generator().manual_seed(seed)
    kv = (torch.randn(_HEADS, rows.numel(), _DIM, generator=generator) for _ in range(4))
    return FreshKV(layer, rows, *kv)


def _disturbed(choice: Choice, row: int) -> Choice:
    """The same rows, but from ``row`` on the check has seen something else."""
    return choice._replace(fresh=None if choice.fresh is None else _from(choice.fresh, row))


def _from(fresh: FreshKV, row: int | None) -> FreshKV:
    """Other fresh K/V from ``row`` on."""
    if row is None:
        return fresh
    change_R1 = (fresh.rows_R >= row)[:, None] * torch.linspace(0.3, 3.0, fresh.rows_R.numel())[:, None]
    return fresh._replace(fresh_keys=fresh.fresh_keys + change_R1, fresh_values=fresh.fresh_values - change_R1)


def _rope() -> Rope:
    """Four layers of which one has no position."""
    table = FrequencyTable(1.0 / 100.0 ** (torch.arange(3) / 3))
    turned = LayerRotation("key", "half", "table")
    return Rope((turned, turned, None, turned), {"table": table}, 0.0)


def _equal(a: Shift, b: Shift) -> bool:
    pairs = zip(a, b, strict=True)
    return all(x is y is None or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)


def _tensors(seen: Choice | FreshKV) -> list[Tensor]:
    return [x for x in seen if isinstance(x, Tensor)]
