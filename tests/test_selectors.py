"""Every selector against the conformance suite, and what is particular to each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blend.selectors
from blend import (
    Adaptive,
    BudgetError,
    ChunkDeviation,
    ExpectedError,
    FirstK,
    FullRecompute,
    FullReuse,
    KVDeviation,
    QueryAttention,
    Random,
    Selector,
    WeightedDeviation,
)
from blend.layout import Layout, Piece
from blend.selectors.base import BudgetedSelector, Candidates, budget_rows
from blend.testing.selectors import SelectorTests, evidence, layouts, select


class TestFirstK(SelectorTests):
    def make(self, ratio):
        return FirstK(ratio)


class TestRandom(SelectorTests):
    def make(self, ratio):
        return Random(ratio, seed=3)


class TestQueryAttention(SelectorTests):
    def make(self, ratio):
        return QueryAttention(ratio)


class TestQueryAttentionOfSomeLayers(SelectorTests):
    def make(self, ratio):
        return QueryAttention(ratio, layers=(4, 2))


class TestExpectedError(SelectorTests):
    def make(self, ratio):
        return ExpectedError(ratio)


class TestAdaptive(SelectorTests):
    def make(self, ratio):
        return Adaptive(mass=1.0, most=ratio)


class TestKVDeviation(SelectorTests):
    def make(self, ratio):
        return KVDeviation(ratio)


class TestKVDeviationOfKeys(SelectorTests):
    def make(self, ratio):
        return KVDeviation(ratio, on="key", layers=(2,))


class TestKVDeviationOfBoth(SelectorTests):
    def make(self, ratio):
        return KVDeviation(ratio, on="both")


class TestKVDeviationInSteps(SelectorTests):
    def make(self, ratio):
        return KVDeviation(ratio, layers=(1, 2, 4), schedule=(2.0, 1.5, 1.0))


class TestChunkDeviation(SelectorTests):
    def make(self, ratio):
        return ChunkDeviation(ratio)


class TestChunkDeviationRelative(SelectorTests):
    def make(self, ratio):
        return ChunkDeviation(ratio, layer=3, relative=True)


class TestWeightedDeviation(SelectorTests):
    def make(self, ratio):
        return WeightedDeviation(ratio)


class TestWeightedDeviationOfValues(SelectorTests):
    def make(self, ratio):
        return WeightedDeviation(ratio, on="value", layer=2, layers=(5, 0))


class Broken(BudgetedSelector):
    name = "broken"

    def choose(self, candidates):
        count = self.budget(candidates.stale.numel())
        return self.spoil(candidates, candidates.stale[:count], count)


def _class(spoil):
    return type("B", (Broken,), {"spoil": lambda self, candidates, rows, count: spoil(candidates, rows, count)})


BROKEN = {
    "test_rows_are_sorted_unique_and_stale": [
        lambda c, rows, n: rows.flip(0),
        lambda c, rows, n: rows[torch.arange(n) // 2],
        lambda c, rows, n: torch.arange(n),
        lambda c, rows, n: rows + c.layout.rows,
        lambda c, rows, n: rows.int(),
    ],
    "test_budget_is_kept": [lambda c, rows, n: c.stale[: n + 1]],
    "test_ratio_0_chooses_nothing": [lambda c, rows, n: c.stale[: max(n, 1)]],
    "test_ratio_1_chooses_everything": [lambda c, rows, n: rows[:-1]],
    "test_count_rises_with_the_ratio": [
        lambda c, rows, n: c.stale[: c.stale.numel() - n],
        lambda c, rows, n: c.stale[:3],
    ],
    "test_same_evidence_same_rows": [lambda c, rows, n: c.stale[torch.randperm(c.stale.numel())[:n].sort().values]],
    "test_evidence_is_left_alone": [lambda c, rows, n: c.attention_T.zero_()],
}


@pytest.mark.parametrize(("name", "spoil"), [(name, s) for name, spoils in BROKEN.items() for s in spoils])
def test_the_suite_finds_a_broken_selector(name, spoil):
    broken = type("T", (SelectorTests,), {"make": lambda self, ratio: _class(spoil)(ratio)})
    with pytest.raises(AssertionError):
        getattr(broken(), name)()


def test_full_reuse_and_full_recompute():
    for layout in layouts():
        assert select(FullReuse(), layout).numel() == 0
        assert torch.equal(select(FullRecompute(), layout), layout.stale)


def test_every_selector_is_tested_here():
    known = {getattr(blend.selectors, name) for name in blend.selectors.__all__}
    here = [t for t in SelectorTests.__subclasses__() if t.__module__ == __name__]  # other files test their own
    made = {type(t().make(0.5)) for t in here} | {FullReuse, FullRecompute}
    concrete = {c for c in known if isinstance(c, type) and issubclass(c, Selector) and not c.__abstractmethods__}
    assert concrete == made - {c for c in made if issubclass(c, Broken)}


KINDS = [FirstK, Random, QueryAttention, ExpectedError, KVDeviation, ChunkDeviation, WeightedDeviation]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 7, 10_000])
def test_a_budget_in_rows_takes_the_place_of_the_ratio(kind, rows):
    for layout in layouts():
        assert select(kind(ratio=1.0, rows=rows), layout).numel() == min(rows, layout.stale.numel())


@pytest.mark.parametrize("kind", KINDS)
def test_the_budget_is_spent(kind):
    for layout in layouts():
        assert select(kind(0.3), layout).numel() == round(0.3 * layout.stale.numel())


@pytest.mark.parametrize("ratio", [-0.01, 1.01, float("nan"), 15])
@pytest.mark.parametrize("kind", KINDS)
def test_a_ratio_outside_0_1_is_refused(kind, ratio):
    with pytest.raises(BudgetError, match=r"ratio is .*must lie in \[0, 1\]"):
        kind(ratio)


@pytest.mark.parametrize("rows", [-1, 2.5])
def test_a_strange_number_of_rows_is_refused(rows):
    with pytest.raises(BudgetError, match="whole number, 0 or more"):
        FirstK(rows=rows)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FirstK(k=-1), "k is -1"),
        (lambda: QueryAttention(layers=()), "layers is"),
        (lambda: QueryAttention(layers=(-1,)), "layers is"),
        (lambda: QueryAttention(layers=(9,)).probe_layers(4), "layer 9 does not exist: the model has layers 0 to 3"),
        (lambda: KVDeviation(on="keys"), "on is 'keys'"),
        (lambda: KVDeviation(layers=(0,)), "layers is"),
        (lambda: KVDeviation(layers=(2, 1), schedule=(2.0, 1.0)), "ascending"),
        (lambda: KVDeviation(layers=(1, 2)), "schedule is"),
        (lambda: KVDeviation(layers=(1, 2), schedule=(2.0, 1.5)), "ending in 1"),
        (lambda: KVDeviation(layers=(1, 2), schedule=(0.5, 1.0)), "1 or more"),
        (lambda: ChunkDeviation(layer=0), "layer is 0"),
        (lambda: ChunkDeviation(layer=4).check_layers(4), "check layer 4 does not exist"),
        (lambda: WeightedDeviation(on="keys"), "on is 'keys'"),
        (lambda: WeightedDeviation(layer=0), "layer is 0"),
        (lambda: WeightedDeviation(layers=()), "layers is"),
        (lambda: WeightedDeviation(layer=4).check_layers(4), "check layer 4 does not exist"),
        (lambda: WeightedDeviation(layers=(9,)).probe_layers(4), "layer 9 does not exist"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(BudgetError, match=message):
        make()


def test_first_k_takes_the_head_of_every_stale_chunk():
    layout = layouts()[0]
    assert select(FirstK(k=4), layout).tolist() == [30, 31, 32, 33, 57, 58, 59, 60, 61]
    assert select(FirstK(k=0), layout).numel() == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), rows=st.integers(0, 200))
def test_first_k_spreads_its_budget_evenly(sizes, rows):
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    spans = [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
    chunks = [Piece(start, stop, "chunk", False, index) for index, (start, stop) in enumerate(spans)]
    layout = Layout((*chunks, Piece(stops[-1], stops[-1] + 1, "fresh", True)), stops[-1] + 1)
    chosen = set(select(FirstK(rows=rows), layout).tolist())
    shares = [len(chosen & set(range(p.start, p.stop))) for p in chunks]
    assert sum(shares) == min(rows, sum(sizes))
    for piece, share in zip(chunks, shares, strict=True):
        assert chosen >= set(range(piece.start, piece.start + share)), "a chunk's rows are its first ones"
    # A chunk gets less than another only where it is used up, or by the one row that does not divide.
    assert all(share >= max(shares) - 1 or share == size for share, size in zip(shares, sizes, strict=True))


def test_query_attention_takes_the_rows_looked_at_most():
    layout = layouts()[0]
    attention_T = torch.zeros(layout.rows)
    attention_T[[5, 15, 31, 57, 100, 125]] = torch.tensor([9.0, 8.0, 3.0, 2.0, 1.0, 7.0])
    rows = QueryAttention(rows=3).choose(Candidates(layout.stale, layout, attention_T))
    assert rows.tolist() == [31, 57, 100], "exact and fresh rows get no budget, however much they are looked at"


def test_kv_deviation_takes_the_rows_that_differ_most():
    layout = layouts()[0]
    for on, moved in (("value", 0), ("key", 1), ("both", 0), ("both", 1)):
        given_kv = evidence(layout)
        fresh = given_kv.fresh
        same = fresh._replace(cached_keys=fresh.fresh_keys.clone(), cached_values=fresh.fresh_values.clone())
        target = same.cached_keys if moved else same.cached_values
        places = [fresh.rows_R.tolist().index(row) for row in (33, 57, 119)]
        target[:, places] += 1.0
        other = same.cached_values if moved else same.cached_keys
        if on != "both":
            other += 5 * torch.randn(other.shape, generator=torch.Generator().manual_seed(1))
        rows = KVDeviation(rows=3, on=on).choose(given_kv._replace(fresh=same))
        assert rows.tolist() == [33, 57, 119], on


def test_chunk_deviation_spends_each_chunks_share_in_turns():
    """Chunks of 2 and 48 stale rows: the short one gets none, however far off its rows are."""
    layout = layouts()[3]
    assert layout.stale_spans == ((50, 52), (52, 100))
    given_kv = evidence(layout)
    fresh = given_kv.fresh
    same = fresh._replace(cached_keys=fresh.fresh_keys.clone(), cached_values=fresh.fresh_values.clone())
    place = {row: i for i, row in enumerate(fresh.rows_R.tolist())}
    for row, by in ((50, 9.0), (51, 8.0), (60, 4.0), (61, 3.0), (62, 2.0)):
        same.cached_keys[:, place[row]] += by
    for row, by in ((60, 7.0), (70, 6.0), (71, 5.0)):
        same.cached_values[:, place[row]] += by
    for rows, expected in (
        (1, [60]),
        (2, [60, 61]),
        (3, [60, 61, 70]),
        (4, [60, 61, 62, 70]),
        (5, [60, 61, 62, 70, 71]),
    ):
        assert ChunkDeviation(rows=rows).choose(given_kv._replace(fresh=same)).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), rows=st.integers(0, 200))
def test_chunk_deviation_shares_by_length(sizes, rows):
    stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    chunks = [
        Piece(stop - size, stop, "chunk", False, i) for i, (size, stop) in enumerate(zip(sizes, stops, strict=True))
    ]
    layout = Layout((*chunks, Piece(stops[-1], stops[-1] + 1, "fresh", True)), stops[-1] + 1)
    chosen = select(ChunkDeviation(rows=rows), layout)
    budget = min(rows, sum(sizes))
    assert chosen.numel() == budget
    for piece, size in zip(chunks, sizes, strict=True):
        share = int(((chosen >= piece.start) & (chosen < piece.stop)).sum())
        assert abs(share - budget * size / sum(sizes)) < 1


def test_weighted_deviation_wants_rows_that_changed_and_are_looked_at():
    layout = layouts()[0]
    given_kv = evidence(layout)
    fresh = given_kv.fresh
    same = fresh._replace(cached_keys=fresh.fresh_keys.clone(), cached_values=fresh.fresh_values.clone())
    place = {row: i for i, row in enumerate(fresh.rows_R.tolist())}
    attention_T = torch.zeros(layout.rows)
    for row, looked, by in ((33, 0.1, 4.0), (57, 0.4, 2.0), (60, 0.0, 50.0), (61, 0.9, 0.0), (119, 0.05, 3.0)):
        attention_T[row] = looked
        same.cached_values[:, place[row]] += by
        same.cached_keys[:, place[row]] += by
    for on in ("value", "key", "both"):
        asked = given_kv._replace(fresh=same, attention_T=attention_T)
        assert WeightedDeviation(rows=2, on=on).choose(asked).tolist() == [33, 57]
        assert WeightedDeviation(rows=3, on=on).choose(asked).tolist() == [33, 57, 119]


def test_ties_go_to_the_earlier_row():
    layout = layouts()[2]
    rows = QueryAttention(rows=5).choose(Candidates(layout.stale, layout, torch.ones(layout.rows)))
    assert rows.tolist() == [0, 1, 2, 3, 4]


def test_a_check_layer_beyond_the_model_is_refused():
    assert KVDeviation(layers=(1, 3), schedule=(2.0, 1.0)).check_layers(4) == (1, 3)
    with pytest.raises(BudgetError, match="check layer 9 does not exist: the model has layers 0 to 3"):
        KVDeviation(layers=(1, 9), schedule=(2.0, 1.0)).check_layers(4)


def test_a_schedule_narrows_in_steps():
    layout, selector = layouts()[0], KVDeviation(0.1, layers=(1, 2, 4), schedule=(4.0, 2.0, 1.0))
    stale, counts, left = layout.stale.numel(), [], layout.stale
    for layer in selector.check_layers(6):
        before = set(left.tolist())
        left = selector.choose(evidence(layout, left, layer))
        assert set(left.tolist()) <= before
        counts.append(left.numel())
    assert counts == [4 * round(0.1 * stale), 2 * round(0.1 * stale), round(0.1 * stale)]


def test_random_depends_on_its_seed_alone():
    layout = layouts()[0]
    assert not torch.equal(select(Random(0.3, seed=1), layout), select(Random(0.3, seed=2), layout))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(stale=st.integers(0, 5000), ratio=st.floats(0, 1), rows=st.none() | st.integers(0, 9999))
def test_budget_rows(stale, ratio, rows):
    budget = budget_rows(stale, ratio, rows)
    assert 0 <= budget <= stale
    assert budget == min(stale, rows) if rows is not None else abs(budget - ratio * stale) <= 0.5


def layout_of(spread, others=()):
    """Rows 0-3 exact, chunks of four rows behind them, the first of which has a spread, and two fresh rows."""
    pieces = [Piece(0, 4, "prefix", True), Piece(4, 8, "chunk", False, 0), Piece(8, 12, "chunk", False, 1)]
    return Layout((*pieces, Piece(12, 14, "fresh", True)), 14, ((), spread, others, ()))


def test_expected_error_is_attention_times_variance():
    layout, attention_T = layout_of((0.1, 0.2, 0.3, 0.1), (0.2, 0.2, 0.2, 0.2)), torch.ones(14)
    attention_T[4], attention_T[9] = 16.0, 3.0  # .16 and .12; .09 of row 6, .04 of the others, .01 of row 7
    picked = [ExpectedError(rows=n).choose(Candidates(layout.stale, layout, attention_T)).tolist() for n in (1, 2, 3)]
    assert picked == [[4], [4, 9], [4, 6, 9]]


def test_expected_error_without_spread_is_query_attention():
    attention_T = torch.rand(14, generator=torch.Generator().manual_seed(2))
    layout = layout_of(())
    assert layout.spread is None
    candidates = Candidates(layout.stale, layout, attention_T)
    assert torch.equal(ExpectedError(0.5).choose(candidates), QueryAttention(0.5).choose(candidates))


def test_rows_of_unknown_spread_have_the_mean_of_the_others():
    spread = layout_of((0.1, 0.2, 0.3, 0.4)).spread
    assert spread[4:8].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert spread[8:12].tolist() == pytest.approx([0.25] * 4)
