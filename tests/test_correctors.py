"""Every corrector against the conformance suite, what is particular to each, and the engine that calls them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import blend.correctors
from blend import (
    Blender,
    BudgetError,
    Chunk,
    ChunkDeviation,
    Corrector,
    FirstK,
    FullRecompute,
    FullReuse,
    KVDeviation,
    MeanShift,
    Prompt,
    QueryAttention,
    WeightedDeviation,
)
from blend.correction import Corrections
from blend.correctors import Choice, Shift
from blend.hf.fusion_cache import FusionCache
from blend.hf.oracle import oracle
from blend.layout import Layout, Piece
from blend.selectors import FreshKV
from blend.selectors.chunk_deviation import take_turns
from blend.testing.correctors import CorrectorTests, choices
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from eval.systems import SYSTEMS, Case
from rope import Move

# Half-split, interleaved, partial rotation, MLA, windows, sinks, shared KV, other angles for long prompts.
FAMILIES = ("llama", "gpt_neox", "gptj", "deepseek_v3", "minicpm3", "gemma3_text", "gemma3n_text", "phi3_longrope")
LIMIT = 2e-5

every_family = pytest.mark.parametrize("name", FAMILIES)


class TestMeanShift(CorrectorTests):
    def make(self):
        return MeanShift()


class TestMeanShiftByChunk(CorrectorTests):
    def make(self):
        return MeanShift(weight="chunk", relative=True)


class TestMeanShiftOfAnyRows(CorrectorTests):
    def make(self):
        return MeanShift(weight=0.5)


class TestMeanShiftUnrotated(CorrectorTests):
    def make(self):
        return MeanShift(rotated=False)


@dataclass(frozen=True)
class Constant(Corrector):
    """Adds 1 to keys and 2 to values, and notes what it is asked."""

    name = "constant"
    plans: list = field(default_factory=list)
    layers: list = field(default_factory=list)
    by: tuple[float, float] = (1.0, 2.0)

    def plan(self, choice):
        self.plans.append(choice)

        def correction(fresh):
            self.layers.append((fresh.layer, choice.left_N))
            shapes = ((x.shape[0], choice.left_N.numel(), x.shape[2]) for x in (fresh.fresh_keys, fresh.fresh_values))
            return Shift(*(torch.full(shape, by) for shape, by in zip(shapes, self.by, strict=True)))

        return correction


class Silent(Corrector):
    name = "silent"

    def plan(self, choice):
        return lambda fresh: Shift()


# --- the suite, and the method on its own -------------------------------------------------------------


class Broken(Corrector):
    """Each chosen row's residual, from the row before itself on; broken by ``spoil``."""

    name = "broken"

    def plan(self, choice):
        def correction(fresh):
            return self.spoil(choice, fresh, fresh.fresh_keys - fresh.cached_keys)

        return correction


def by_past(choice, off):
    """To each row the residuals of earlier chosen rows."""
    earlier_NC = (choice.chosen_C < choice.left_N[:, None]).float()
    return torch.matmul(earlier_NC, off)


calls = itertools.count(1)
BROKEN = {
    "test_shifts_have_the_shape_of_the_rows_that_stay": [
        lambda c, f, off: Shift(off),
        lambda c, f, off: Shift(by_past(c, off).double()),
        lambda c, f, off: Shift(by_past(c, off) / 0),
    ],
    "test_it_shifts_something": [lambda c, f, off: Shift(), lambda c, f, off: Shift(0 * by_past(c, off))],
    "test_where_nothing_is_off_nothing_is_shifted": [lambda c, f, off: Shift(by_past(c, f.fresh_keys))],
    "test_same_evidence_same_shift": [
        lambda c, f, off: Shift(by_past(c, off) * torch.rand(())),
        lambda c, f, off: Shift(by_past(c, off) * next(calls)),
    ],
    "test_evidence_is_left_alone": [lambda c, f, off: Shift(by_past(c, f.fresh_keys.sub_(f.cached_keys)))],
    "test_no_row_learns_of_later_chunks": [
        lambda c, f, off: Shift(off.mean(1, keepdim=True).expand(-1, c.left_N.numel(), -1))
    ],
    "test_looks_ahead_within_a_chunk_only_where_it_says_so": [
        lambda c, f, off: Shift(None, by_past(c, off).flip(1)),
    ],
}


@pytest.mark.parametrize(("name", "spoil"), [(name, s) for name, spoils in BROKEN.items() for s in spoils])
def test_the_suite_finds_a_broken_corrector(name, spoil):
    kind = type("B", (Broken,), {"spoil": lambda self, *given: spoil(*given)})
    broken = type("T", (CorrectorTests,), {"make": lambda self: kind()})
    with pytest.raises(AssertionError):
        getattr(broken(), name)()


def test_the_suite_passes_a_sound_one():
    kind = type("B", (Broken,), {"spoil": lambda self, choice, fresh, off: Shift(by_past(choice, off))})
    sound = type("T", (CorrectorTests,), {"make": lambda self: kind()})()
    for name in dir(CorrectorTests):
        if name.startswith("test_"):
            getattr(sound, name)()


def test_every_corrector_is_tested_here():
    known = {getattr(blend.correctors, name) for name in blend.correctors.__all__}
    concrete = {c for c in known if isinstance(c, type) and issubclass(c, Corrector) and not c.__abstractmethods__}
    made = {type(t().make()) for t in CorrectorTests.__subclasses__()}
    assert concrete == made - {c for c in made if issubclass(c, Broken)}


@pytest.mark.parametrize("weight", [-0.1, 1.01, float("nan"), "token"])
def test_a_strange_weight_is_refused(weight):
    with pytest.raises(BudgetError, match=r"weight is .*'row', 'chunk' or a number in \[0, 1\]"):
        MeanShift(weight=weight)


def by_hand(rows, off_keys, off_values, check=None):
    """A choice of ``rows`` in two chunks (10 to 19, 20 to 29) and its fresh K/V, one head of two dims."""
    layout = Layout(
        (
            Piece(0, 10, "prefix", True),
            Piece(10, 20, "chunk", False, 0),
            Piece(20, 30, "chunk", False, 1),
            Piece(30, 32, "fresh", True),
        ),
        32,
    )
    chosen_C = torch.tensor(rows)
    left_N = torch.tensor([row for row in range(10, 30) if row not in rows])
    cached = torch.randn(1, len(rows), 8, generator=torch.Generator().manual_seed(2))
    off = [torch.tensor(x, dtype=torch.float32)[None, :, None] for x in (off_keys, off_values)]
    choice = Choice(chosen_C, left_N, layout, next(choices()).rope, check)
    return choice, FreshKV(2, chosen_C, cached + off[0], cached + off[1], cached, cached)


def checked(key_d, value_d):
    """What a check layer has seen: rows 10 to 31 with these divergences, length of every fresh row 4."""
    rows = torch.arange(10, 32)
    fresh = torch.zeros(1, 22, 8)
    fresh[..., 0] = 4.0
    cached = [fresh.clone(), fresh.clone()]
    for slot, by_row in enumerate((key_d, value_d)):
        for row, d in by_row.items():
            cached[slot][0, row - 10, 1] = d
    return FreshKV(1, rows, fresh, fresh, *cached)


def test_each_chunk_has_the_mean_of_its_own_rows():
    choice, fresh = by_hand([12, 15, 29], [1.0, 3.0, 10.0], [0.0, -4.0, 6.0])
    keys, values = MeanShift(weight=0.5).plan(choice)(fresh)
    first_N = choice.left_N < 20
    assert torch.allclose(keys[0, first_N], torch.tensor(0.5 * 2.0))
    assert torch.allclose(values[0, first_N], torch.tensor(0.5 * -2.0))
    assert torch.allclose(keys[0, ~first_N], torch.tensor(5.0))
    assert torch.allclose(values[0, ~first_N], torch.tensor(3.0))


def test_a_chunk_without_a_recomputed_row_stays():
    choice, fresh = by_hand([12, 15], [1.0, 3.0], [1.0, 3.0])
    for x in MeanShift(weight=1.0).plan(choice)(fresh):
        assert bool(x[0, choice.left_N < 20].all())
        assert not bool(x[0, choice.left_N >= 20].any())


def test_keys_and_values_have_their_own_rows_and_weights():
    """12 is taken by keys, 15 by values; each row is weighed by its own divergence, at most 1."""
    check = checked({12: 3.0, 15: 0.1, 11: 0.25, 13: 2.0}, {12: 0.1, 15: 3.0, 11: 0.5, 14: 9.0})
    choice, fresh = by_hand([12, 15], [1.0, 3.0], [5.0, 7.0], check)
    keys, values = MeanShift().plan(choice)(fresh)
    got = {row: (float(keys[0, i, 0]), float(values[0, i, 0])) for i, row in enumerate(choice.left_N.tolist())}
    assert got[11] == pytest.approx((0.25 * 1.0, 0.5 * 7.0))
    assert got[13] == pytest.approx((1.0, 0.0))
    assert got[14] == pytest.approx((0.0, 7.0))
    assert got[10] == got[22] == (0.0, 0.0)
    keys, _ = MeanShift(relative=True).plan(choice)(fresh)
    assert float(keys[0, 1, 0]) == pytest.approx(0.25 / 4)
    keys, _ = MeanShift(weight="chunk").plan(choice)(fresh)
    assert float(keys[0, 0, 0]) == float(keys[0, 1, 0]) == pytest.approx((3.0 + 0.1 + 0.25 + 2.0) / 10)


def test_a_row_that_leads_in_both_counts_for_both():
    check = checked({12: 3.0, 15: 2.0}, {12: 3.0, 16: 2.0})
    choice, fresh = by_hand([12, 15, 16], [1.0, 3.0, 5.0], [1.0, 3.0, 5.0], check)
    keys, values = MeanShift(weight=1.0).plan(choice)(fresh)
    assert float(keys[0, 0, 0]) == pytest.approx((1.0 + 3.0) / 2)
    assert float(values[0, 0, 0]) == pytest.approx((1.0 + 5.0) / 2)


def test_unrotated_keys_are_averaged_where_they_have_no_position():
    """Rows that are off by one vector, each turned to its place: the shift is that vector at every row's place."""
    choice, fresh = by_hand([12, 15], [0.0, 0.0], [0.0, 0.0])
    fresh = fresh._replace(layer=3)
    delta = torch.arange(1.0, 9.0).expand(1, 32, 8)
    placed, _ = choice.rope.move(3, delta, delta, Move(torch.zeros(32, dtype=torch.int64), torch.arange(32), 32, 32))
    fresh = fresh._replace(fresh_keys=fresh.cached_keys + placed[:, choice.chosen_C])
    keys, _ = MeanShift(weight=1.0, rotated=False).plan(choice)(fresh)
    first_N = choice.left_N < 20
    assert torch.allclose(keys[:, first_N], placed[:, choice.left_N[first_N]], atol=1e-5)
    other, _ = MeanShift(weight=1.0).plan(choice)(fresh)
    assert not torch.allclose(other[:, first_N], placed[:, choice.left_N[first_N]], atol=1e-2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_taking_turns(data):
    """Against picking one by one; ties, which are common among few numbers, included."""
    size = data.draw(st.integers(1, 20))
    numbers = st.lists(st.integers(0, 6), min_size=size, max_size=size)
    key, value, count = data.draw(numbers), data.draw(numbers), data.draw(st.integers(0, size))
    lists = [sorted(range(size), key=lambda i, of=of: (-of[i], i)) for of in (key, value)]
    taken = (set(), set())
    for turn in itertools.count():
        who, place = turn % 2, turn // 2
        row = lists[who][place] if place < size else None
        if row is None or (row not in taken[0] | taken[1] and len(taken[0] | taken[1]) == count):
            break
        taken[who].add(row)
    masks = take_turns(torch.tensor(key, dtype=torch.float32), torch.tensor(value, dtype=torch.float32), count)
    got = [set(torch.nonzero(mask)[:, 0].tolist()) for mask in masks]
    assert len(got[0] | got[1]) == count
    # A row that is next but taken already costs nothing: the last turns may or may not have been looked at.
    assert got[0] <= taken[0]
    assert got[1] <= taken[1]
    assert got[0] | got[1] == taken[0] | taken[1]


# --- the engine ---------------------------------------------------------------------------------------


def make(name="llama", **options):
    return Blender(tiny_model(name), check=False, **options)


def same_bits(a, b):
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def off(a, b):
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


@torch.inference_mode()
def full_prefill(name, ids):
    cache = DynamicCache()
    out = tiny_model(name)(input_ids=torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float(), [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def moved(seed=3):
    """A prompt none of whose chunks stands behind its prelude."""
    return tiny_prompt(seed, system=8, chunks=(1, 30, 33, 20), question=6)


@every_family
def test_where_every_row_is_computed_again_nothing_is_corrected(name):
    prompt, corrector = moved(), Constant()
    blender = make(name)
    logits, kv = full_prefill(name, prompt.ids)
    plain = blender.fuse(prompt, selector=FullRecompute())
    for selector in (FullRecompute(), FirstK(1.0), KVDeviation(1.0)):
        fusion = blender.fuse(prompt, selector=selector, corrector=corrector)
        assert off(fusion.logits, logits) <= LIMIT
        assert all(
            off(x, y) <= 5 * LIMIT for a, b in zip(fusion.layers, kv, strict=True) for x, y in zip(a, b, strict=True)
        )
    again = blender.fuse(prompt, selector=FullRecompute(), corrector=MeanShift(weight=1.0))
    assert same_bits(again.layers, plain.layers)
    assert corrector.plans == []


@every_family
def test_rows_that_stay_are_shifted_once_and_no_others(name):
    """Against the moved K/V of full reuse: bit for bit, in every layer, with and without a check."""
    prompt = moved()
    blender = make(name)
    before = blender.fuse(prompt, selector=FullReuse()).layers
    steps = KVDeviation(0.2, layers=(1, 2), schedule=(2.0, 1.0))
    for selector in (FirstK(0.3), ChunkDeviation(0.3), steps):
        corrector = Constant()
        plain = blender.fuse(prompt, selector=selector)
        fusion = blender.fuse(prompt, selector=selector, corrector=corrector)
        left = dict(corrector.layers)
        assert len(left) == len(corrector.layers), "a layer was corrected twice"
        first = max(selector.check_layers(9)[:1], default=0) + 1
        assert list(left) == list(range(first, len(before))), "from the layer behind the first check on"
        states = fusion.report.states
        exact = [row for row, state in enumerate(states) if state == "exact"]
        for layer, (old, new, as_ever) in enumerate(zip(before, fusion.layers, plain.layers, strict=True)):
            rows = left.get(layer, torch.empty(0, dtype=torch.int64))
            assert all(states[row] in ("moved", "recomputed") for row in rows.tolist())
            for x, y, same, by in zip(old, new, as_ever, corrector.by, strict=True):
                assert torch.equal(y[:, rows], x[:, rows] + by)
                assert torch.equal(y[:, exact], same[:, exact])
        kept = [row for row, state in enumerate(states) if state == "moved"]
        assert left[len(before) - 1].tolist() == kept


@every_family
@pytest.mark.parametrize("only_last", [True, False])
def test_a_corrected_pass_is_the_oracle_over_corrected_kv(name, only_last):
    """Fresh rows attend to shifted ones: as if the shift had been made beforehand."""
    blender, prompt = make(name), moved()
    old = blender.fuse(prompt, selector=FullReuse()).layers
    total = len(prompt)
    layout = Layout(
        (Piece(0, 9, "prefix", True), *(Piece(a, b, "chunk", False, i) for i, (a, b) in enumerate([(9, 39), (39, 92)])),
         Piece(92, total, "fresh", True)), total)  # fmt: skip
    rows = torch.tensor([*range(11, 40, 3), *range(60, 70), *range(92, total)])
    left = [row for row in range(9, 92) if row not in rows.tolist()]
    cache = FusionCache([(k[None].clone(), v[None].clone()) for k, v in old], total)
    ready = tuple((k.clone(), v.clone()) for k, v in old)
    for keys, values in ready[1:]:
        keys[:, left] += 1.0
        values[:, left] += 2.0
    ids_1T = torch.tensor([prompt.ids])
    truth, mixed = oracle(tiny_model(name), ids_1T, ready, rows)
    correct = Corrections(Constant(), layout, cache, blender.view.rope)
    logits = blender.view.run(
        ids_1T, blender.view.narrow_pass(cache, rows_S=rows, correct=correct, only_last=only_last)
    )
    assert off(logits, truth) <= LIMIT
    assert all(off(x, y) <= LIMIT for a, b in zip(cache.kv, mixed, strict=True) for x, y in zip(a, b, strict=True))
    assert all(state.correct is None for state in cache.states), "the next pass starts without"


@pytest.mark.parametrize("selector", [QueryAttention(0.3), WeightedDeviation(0.3)])
def test_the_probe_corrects_nothing(selector):
    blender, prompt, corrector = make(), moved(), Constant()
    plain = blender.fuse(prompt, selector=selector)
    fusion = blender.fuse(prompt, selector=selector, corrector=corrector)
    assert fusion.report.states == plain.report.states, "the probe has seen the same"
    layers = [layer for layer, _ in corrector.layers]
    assert layers == sorted(set(layers))


@pytest.mark.parametrize("selector", [FirstK(0.3), ChunkDeviation(0.3), QueryAttention(0.3), FullReuse()])
def test_a_corrector_that_shifts_nothing_changes_no_bit(selector):
    blender, prompt = make(), moved()
    plain = blender.fuse(prompt, selector=selector)
    fusion = blender.fuse(prompt, selector=selector, corrector=Silent())
    assert torch.equal(fusion.logits, plain.logits)
    assert same_bits(fusion.layers, plain.layers)
    assert fusion.report.row_layers == plain.report.row_layers


def test_nothing_chosen_nothing_known():
    blender, prompt, corrector = make(), moved(), Constant()
    plain = blender.fuse(prompt, selector=FullReuse())
    assert same_bits(blender.fuse(prompt, selector=FullReuse(), corrector=corrector).layers, plain.layers)
    assert corrector.plans == []


def test_what_the_corrector_is_told():
    blender, prompt, corrector = make(), moved(), Constant()
    fusion = blender.fuse(prompt, selector=KVDeviation(0.2, layers=(1, 2), schedule=(2.0, 1.0)), corrector=corrector)
    first, second = corrector.plans
    stale = {row for row, state in enumerate(fusion.report.states) if state in ("moved", "recomputed")}
    for choice in (first, second):
        assert set(choice.chosen_C.tolist()) | set(choice.left_N.tolist()) == stale
        assert not set(choice.chosen_C.tolist()) & set(choice.left_N.tolist())
        assert choice.fresh.layer == 1
        assert stale <= set(choice.fresh.rows_R.tolist()), "the first check has seen all of them"
    assert second.chosen_C.numel() < first.chosen_C.numel()
    assert second.chosen_C.numel() == fusion.report.recomputed_rows


@every_family
def test_mean_shift_brings_rows_that_stay_nearer_to_full_prefill(name):
    """On random weights too, the mean residual of a chunk tells something of its other rows; summed over prompts."""
    blender, errors = make(name), {"plain": 0.0, "shifted": 0.0}
    for seed in range(5, 9):
        prompt = moved(seed)
        _, kv = full_prefill(name, prompt.ids)
        for label, corrector in (("plain", None), ("shifted", MeanShift(weight=0.3))):
            fusion = blender.fuse(prompt, selector=ChunkDeviation(0.5), corrector=corrector)
            left = [row for row, state in enumerate(fusion.report.states) if state == "moved"]
            for one, other in zip(fusion.layers[2:], kv[2:], strict=True):
                errors[label] += sum(
                    float((x - y)[:, left].square().mean() / y.square().mean()) for x, y in zip(one, other, strict=True)
                )
    assert errors["shifted"] < errors["plain"]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma3_text"])
def test_invariant_5_no_row_learns_of_later_chunks(name):
    """Other tokens in a chunk change no bit before the chunk."""
    blender, prompt = make(name), moved()
    chunks = list(prompt.chunks)
    chunks[2] = Chunk((*chunks[2].ids[:20], *tiny_ids(len(chunks[2].ids) - 20, seed=91)))
    start, prompts = prompt.starts[2], (prompt, replace(prompt, chunks=tuple(chunks)))
    # Rows chosen by their place alone, some of them among those that differ.
    options = {"selector": FirstK(k=25), "corrector": MeanShift(weight=1.0)}
    a, b = ([(k[:, :start], v[:, :start]) for k, v in blender.fuse(p, **options).layers] for p in prompts)
    assert same_bits(a, b)


def test_a_later_probe_reaches_earlier_rows_of_its_chunk():
    """What ``looks_ahead`` admits to, seen in the engine."""
    assert MeanShift.looks_ahead
    blender, prompt = make(), moved()
    chunks = list(prompt.chunks)
    chunks[2] = Chunk((*chunks[2].ids[:-1], tiny_ids(1, seed=91)[0]))
    start, stop = prompt.starts[2], prompt.starts[2] + len(chunks[2].ids)

    class Last(FirstK):
        def choose(self, candidates):
            return torch.tensor([start + 1, stop - 1])

    prompts = prompt, replace(prompt, chunks=tuple(chunks))
    for corrector, same in ((None, True), (MeanShift(weight=1.0), False)):
        a, b = (blender.fuse(p, selector=Last(), corrector=corrector).layers for p in prompts)
        rows = slice(start, stop - 1)
        assert same_bits([(k[:, rows], v[:, rows]) for k, v in a], [(k[:, rows], v[:, rows]) for k, v in b]) == same


# --- the front door -----------------------------------------------------------------------------------


def test_the_report_names_the_corrector():
    blender, prompt = make(), moved()
    fusion = blender.fuse(prompt, selector=ChunkDeviation(0.3), corrector=MeanShift())
    assert fusion.report.corrector == "mean-shift"
    assert fusion.report.as_dict()["corrector"] == "mean-shift"
    assert "chunk-deviation + mean-shift:" in str(fusion.report)
    plain = blender.fuse(prompt, selector=ChunkDeviation(0.3)).report
    assert plain.corrector is None
    assert "mean-shift" not in str(plain)
    assert plain.row_layers == fusion.report.row_layers
    assert not torch.equal(fusion.logits, blender.fuse(prompt, selector=ChunkDeviation(0.3)).logits)


def test_a_blender_has_a_corrector_of_its_own():
    prompt, own = moved(), Constant()
    blender = make(selector=ChunkDeviation(0.3), corrector=own)
    assert blender.fuse(prompt).report.corrector == "constant"
    assert blender.generate(prompt, max_new_tokens=2, do_sample=False).report.corrector == "constant"
    assert blender.fuse(prompt, corrector=MeanShift()).report.corrector == "mean-shift"
    assert blender.fuse(prompt, selector=FirstK()).report.corrector is None, "who names a selector names both"
    both = blender.generate(prompt, selector=FirstK(), corrector=Silent(), max_new_tokens=2, do_sample=False)
    assert (both.report.method, both.report.corrector) == ("first-k", "silent")


@pytest.mark.parametrize("selector", [FirstK(0.3), QueryAttention(0.3), FullReuse()])
def test_weights_from_a_check_need_a_check(selector):
    message = rf"MeanShift\(.*\) weighs rows by .* and {selector.name} looks at none: use .*ChunkDeviation"
    with pytest.raises(BudgetError, match=message):
        make().fuse(moved(), selector=selector, corrector=MeanShift())
    with pytest.raises(BudgetError, match=message):
        make(selector=selector, corrector=MeanShift())
    assert make().fuse(moved(), selector=selector, corrector=MeanShift(weight=0.5)).report.corrector == "mean-shift"


def test_five_times_the_same_and_a_miss_as_a_hit():
    blender, prompt = make(selector=ChunkDeviation(0.3), corrector=MeanShift()), moved()
    first, *others = (blender.fuse(prompt) for _ in range(5))
    assert first.report.chunks[1].source == "miss"
    for other in others:
        assert torch.equal(other.logits, first.logits)
        assert same_bits(other.layers, first.layers)


def test_a_single_exact_chunk_has_nothing_to_correct():
    blender, corrector = make(), Constant()
    prompt = tiny_prompt(2, chunks=(37,))
    blender.encode(prompt.chunks, system=prompt.system)
    fusion = blender.fuse(prompt, selector=FirstK(0.3), corrector=corrector)
    assert fusion.exact
    assert corrector.plans == []


@pytest.mark.parametrize("selector", [ChunkDeviation(0.5), WeightedDeviation(0.5)])
@pytest.mark.parametrize("corrector", [None, MeanShift(), MeanShift(rotated=False)])
def test_the_smallest_prompts(selector, corrector):
    blender = make()
    for prompt in (
        Prompt((), (Chunk((7,)),), (5,)),
        Prompt((4,), (Chunk((7,)), Chunk((8,)), Chunk((9,))), (5,)),
        Prompt((), (Chunk(tiny_ids(30)), Chunk(tiny_ids(30))), (5,)),
    ):
        fusion = blender.fuse(prompt, selector=selector, corrector=corrector)
        assert bool(fusion.logits.isfinite().all())


def test_the_systems_that_weigh_run_what_they_say():
    """Each of the evaluation's three, on a model of four layers, at an equal budget."""
    blender, prompt = make(), moved()
    reports = {}
    for name in ("cacheblend-paper", "agentkvshift", "kvshare"):
        system = SYSTEMS[name](0.2)
        assert (system.name, system.setting) == (name, "0.2")
        reports[name] = system.run(blender, Case(prompt)).fusion.report
    assert [r.method for r in reports.values()] == ["kv-deviation", "chunk-deviation", "weighted-deviation"]
    assert [r.corrector for r in reports.values()] == [None, "mean-shift", None]
    assert len({r.recomputed_rows for r in reports.values()}) == 1
    paper = reports["cacheblend-paper"]
    assert sum(count > 0 for count in paper.projected_per_layer) == 3, "filtered at layers 1, 2 and 3"
    assert paper.rows_per_layer[1] > paper.rows_per_layer[2]
    assert sum(reports["kvshare"].probe_per_layer) > 0
    assert sum(reports["kvshare"].projected_per_layer) > 0


@pytest.mark.slow
def test_smollm2_is_nearer_to_full_prefill_with_its_rows_shifted(smollm2):
    """The first token's divergence, on a real model."""
    model, tokenizer = smollm2
    passages = (
        "The keeper of the lighthouse feeds forty gulls every morning and writes their names in a book.",
        "The old pier at Marrow Bay was built by Ines Caldera in 1911, after the storm had taken the wooden one.",
        "Bread in Marrow Bay is baked with sea water, which is why visitors call it grey bread.",
    )
    with Blender(model, tokenizer, background=None) as blender:
        divergences = {}
        prompt = blender.prompt("Who built the pier?", passages)
        truth = blender.prefill(prompt, remember=False).logits.double().log_softmax(-1)
        for corrector in (None, MeanShift()):
            fusion = blender.fuse(prompt, selector=ChunkDeviation(), corrector=corrector)
            other = fusion.logits.double().log_softmax(-1)
            divergences[corrector] = float((truth.exp() * (truth - other)).sum())
        assert divergences[MeanShift()] < divergences[None]
