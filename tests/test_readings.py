"""Text that an earlier chunk has said already: which rows that is, and that their KV come from behind the same text."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from blend import (
    Background,
    Blender,
    Chunk,
    FirstK,
    FullRecompute,
    FullReuse,
    KVDeviation,
    MeanShift,
    MemoryStore,
    Prompt,
    QueryAttention,
)
from blend.encode import has_room_again
from blend.layout import Again, lay_out
from blend.readings import Wanted, means, overlapping, repeated_runs
from blend.stores import DiskStore
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from rope import Move

BACKGROUND = Background((tiny_ids(33, seed=101), tiny_ids(50, seed=102)))
SYSTEM, QUESTION = tiny_ids(12, seed=1), tiny_ids(9, seed=2)
LIMIT = 2e-5
A, B = (Chunk(tiny_ids(rows, seed=rows), name) for rows, name in ((60, "a"), (50, "b")))
# Half of it is the end of A, the rest is its own.
C = Chunk((*A.ids[30:], *tiny_ids(30, seed=7)), "c")


def make(name="llama", **options):
    return Blender(tiny_model(name), check=False, **{"background": BACKGROUND, **options})


def prompt_of(*chunks):
    return Prompt(SYSTEM, chunks, QUESTION)


def off(a, b):
    return float((a - b).abs().max() / b.abs().max())


def off_layers(a, b):
    return max(off(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


@pytest.fixture
def blender():
    with make() as blender:
        yield blender


# --- which rows -------------------------------------------------------------------------------------------


def by_hand(prompt):
    """Runs of eight tokens that an earlier chunk holds, and gaps below eight between them; half at least."""
    found, earlier = {}, set()
    for index, (start, chunk) in enumerate(zip(prompt.starts, prompt.chunks, strict=True)):
        grams = {at: chunk.ids[at : at + 8] for at in range(len(chunk) - 7)}
        rows = {at + step for at, gram in grams.items() if gram in earlier for step in range(8)}
        edges = sorted(rows)
        for a, b in itertools.pairwise(edges):
            if b - a <= 8:
                rows |= set(range(a, b))
        if rows and 2 * len(rows) >= len(chunk):
            found[index] = {start + row for row in rows}
        earlier |= set(grams.values())
    return found


few = st.integers(0, 2)  # so that texts repeat
texts = st.lists(st.lists(few, min_size=1, max_size=40).map(lambda ids: Chunk(tuple(ids))), max_size=5)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(chunks=texts, system=st.lists(few, max_size=5).map(tuple))
def test_repeated_rows_by_hand(chunks, system):
    prompt = Prompt(system, tuple(chunks), (1,))
    runs = repeated_runs(prompt)
    assert {i: {row for run in rows for row in range(*run)} for i, rows in runs.items()} == by_hand(prompt)
    for rows in runs.values():
        assert list(rows) == sorted(rows)
        assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(rows)), "runs do not touch"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(chunks=texts)
def test_overlapping_chunks_are_those_that_repeat_each_other(chunks):
    """Of two chunks, the later one repeats the earlier; in whichever order they come."""
    two = list(dict.fromkeys(chunks))[:2]
    told = overlapping(two)
    for first, second in (two, two[::-1]) if len(two) == 2 else ():
        assert (second in told) == (1 in by_hand(Prompt((), (first, second), (1,))))
    assert set(told) <= set(overlapping(list(dict.fromkeys(chunks)))), "more chunks, more overlap"


def test_where_the_text_was_said_does_not_matter():
    assert repeated_runs(prompt_of(A, B, C)) == {2: ((122, 152),)}
    assert repeated_runs(prompt_of(C, B, A)) == {2: ((12 + 60 + 50 + 30, 12 + 60 + 50 + 60),)}
    assert repeated_runs(prompt_of(A, A)) == {1: ((72, 132),)}
    assert repeated_runs(prompt_of(A, B)) == repeated_runs(Prompt(A.ids, (B, A), A.ids)) == {}
    assert repeated_runs(prompt_of(Chunk(A.ids[:20] * 3))) == {}, "what a chunk says twice itself, it knows"
    assert repeated_runs(prompt_of()) == repeated_runs(prompt_of(Chunk((1,)), Chunk((1,)))) == {}


def test_little_is_no_repetition():
    most = Chunk((*A.ids[:7], *tiny_ids(20, seed=8)))  # seven in a row
    short = Chunk((*A.ids[:20], *tiny_ids(21, seed=8)))  # 20 of 41
    assert repeated_runs(prompt_of(A, most)) == repeated_runs(prompt_of(A, short)) == {}
    assert overlapping([A, most]) == overlapping([A, short]) == overlapping([]) == []
    assert repeated_runs(prompt_of(A, Chunk((*A.ids[:20], *tiny_ids(20, seed=8))))) == {1: ((72, 92),)}


def test_a_changed_word_parts_no_run():
    changed = Chunk((*A.ids[:20], 1, 2, *A.ids[22:]))
    assert repeated_runs(prompt_of(A, changed)) == {1: ((72, 132),)}
    assert repeated_runs(prompt_of(A, Chunk((*A.ids[:20], *tiny_ids(8, seed=9), *A.ids[28:])))) == {
        1: ((72, 92), (100, 132))
    }


# --- the KV -----------------------------------------------------------------------------------------------


@torch.inference_mode()
def second_copy(blender, name, chunk):
    """K/V of the second copy in one plain pass, keys turned to behind the system part; the oracle."""
    ids, base, rows = (*SYSTEM, *chunk.ids, *chunk.ids), len(SYSTEM) + len(chunk), len(chunk)
    cache = DynamicCache()
    tiny_model(name)(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
    move = Move(torch.arange(base, base + rows), torch.arange(12, 12 + rows), len(ids), 12 + rows)
    pairs = ((layer.keys[0, :, base:], layer.values[0, :, base:]) for layer in cache.layers)
    return [blender.view.rope.move(index, *pair, move) for index, pair in enumerate(pairs)]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "smollm3", "cohere2", "falcon_alibi"])
def test_it_is_the_second_copy(name):
    with make(name) as blender:
        wanted = [Wanted(chunk, "again") for chunk in (A, B, Chunk((5,)))]
        for found in blender.setup.encode(wanted, SYSTEM):
            assert off_layers(found.kv.layers, second_copy(blender, name, found.want.chunk)) <= LIMIT
            assert (found.kv.averaged, found.kv.spread, found.kv.prelude) == (1, (), SYSTEM)
        stored = blender.setup.fetch(wanted, SYSTEM)
        assert list(stored) == wanted
        blender.encode([A], system=SYSTEM)
        for reading in ("alone", "mean"):
            kv = blender.setup.fetch([Wanted(A, reading)], SYSTEM)[Wanted(A, reading)]
            assert off_layers(stored[wanted[0]].layers, kv.layers) > 1e-2, "so the oracle can fail"


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "gpt_neox", "qwen3"])
@pytest.mark.parametrize(
    "selector", [FullReuse(), FirstK(0.3), QueryAttention(0.3), KVDeviation(0.3)], ids=lambda s: s.name
)
def test_a_chunk_behind_itself_is_exact(name, selector):
    """Nothing is left to repair: its KV were computed behind the very same text."""
    with make(name) as blender, make(name, background=None) as other:
        prompt = prompt_of(A, A)
        fusion = blender.fuse(prompt, selector=selector)
        assert fusion.report.fallback is None
        assert [chunk.repeated for chunk in fusion.report.chunks] == [0, 60]
        if isinstance(selector, FullReuse):
            plain = other.fuse(prompt, selector=selector)
            assert off(plain.logits, fusion.logits) > 1e-2, "so the test can fail"
        assert off(fusion.logits, other.prefill(prompt).logits) <= LIMIT


def test_every_row_comes_from_where_it_should(blender):
    prompt = prompt_of(A, B, C)
    fusion = blender.fuse(prompt, selector=FullReuse())
    wanted = [Wanted(C, "mean"), Wanted(C, "again")]
    mean, again = (blender.setup.fetch([want], SYSTEM)[want] for want in wanted)
    rows = len(C)
    move = Move(torch.arange(12, 12 + rows), torch.arange(122, 122 + rows), 12 + rows, len(prompt))
    moved = [
        [blender.view.rope.move(index, *pair, move) for index, pair in enumerate(kv.layers)] for kv in (mean, again)
    ]
    for layer, pair in enumerate(fusion.layers):
        for slot in (0, 1):
            assert off(pair[slot][:, 122:152], moved[1][layer][slot][:, :30]) <= LIMIT
            assert off(pair[slot][:, 152:182], moved[0][layer][slot][:, 30:]) <= LIMIT


def test_all_recomputed_is_the_full_prefill(blender):
    prompt = prompt_of(A, C, A, B, C)
    fusion = blender.fuse(prompt, selector=FullRecompute())
    assert off(fusion.logits, blender.averaged(None).prefill(prompt).logits) <= LIMIT


# --- the layout -------------------------------------------------------------------------------------------


def test_the_pieces_of_a_chunk(blender):
    blender.encode([A, B, C], system=SYSTEM)
    wanted = [Wanted(A, "alone"), *means([B, C]), Wanted(C, "again")]
    first, second, third, again = blender.setup.fetch(wanted, SYSTEM).values()
    prompt = prompt_of(A, B, C)
    layout = lay_out(prompt, 20, 0, [first, second, third], again={2: Again(again, ((122, 130), (140, 152)))})
    assert [(p.start, p.stop, p.skip, p.again) for p in layout.pieces if p.chunk == 2] == [
        (122, 130, 0, True),
        (130, 140, 8, False),
        (140, 152, 18, True),
        (152, 182, 30, False),
    ]
    assert [p.kv for p in layout.pieces if p.chunk == 2] == [again, third, again, third]
    assert layout.stale_spans == ((72, 122), (122, 182)), "a chunk is one span"
    known = torch.tensor([*second.spread, *third.spread[8:18], *third.spread[30:]])
    assert torch.allclose(layout.spread[130:140], torch.tensor(third.spread[8:18]))
    assert torch.allclose(layout.spread[140:152], known.mean().expand(12)), "of these rows nobody knows"


def test_a_prefix_that_ends_in_repeated_text(blender):
    prompt = prompt_of(A, B, C)
    blender.encode([A, B, C], system=SYSTEM)
    truth = blender.prefill(Prompt(prompt.ids[:140], (), (9,)))
    fusion = blender.fuse(prompt, selector=FullReuse())
    assert fusion.report.prefix_rows == 140
    assert fusion.report.chunks[2].repeated == 12
    assert off(fusion.layers[1][0][:, :140], truth.layers[1][0][:, :140]) <= LIMIT


@pytest.mark.parametrize("corrector", [None, MeanShift(weight=0.25)])
def test_correctors_see_one_chunk(blender, corrector):
    fusion = blender.fuse(prompt_of(A, B, C), selector=QueryAttention(0.3), corrector=corrector)
    assert fusion.report.recomputed_rows == 33


# --- what is stored ---------------------------------------------------------------------------------------


def test_chunks_that_are_encoded_together(blender):
    done = blender.encode([A, B, C], system=SYSTEM)
    assert (done.encoded, done.reused, done.rows) == (3, 0, 3 * 60 + 2 * 50 + 3 * 60)
    assert len(list(blender.store.keys())) == 8, "A and C overlap"
    assert blender.encode([A, B, C], system=SYSTEM) == (0, 3, 0, 0)
    report = blender.fuse(prompt_of(B, A, C)).report
    assert [chunk.source for chunk in report.chunks] == ["hit"] * 3
    assert [chunk.repeated for chunk in report.chunks] == [0, 0, 30]
    assert "30 rows repeat earlier chunks, their KV behind the same text: found in the store" in report.chunks[2].why
    assert report.as_dict()["chunks"][2]["repeated"] == 30
    assert len(list(blender.store.keys())) == 8


def test_chunks_that_were_encoded_apart(blender):
    """Nobody knew that they would meet: the missing reading is a miss, once."""
    for chunk in (A, B, C):
        blender.encode([chunk], system=SYSTEM)
    assert len(list(blender.store.keys())) == 6
    first, second = (blender.fuse(prompt_of(A, B, C), selector=FullReuse()) for _ in range(2))
    assert [chunk.source for chunk in first.report.chunks] == ["hit", "hit", "miss"]
    assert "their KV behind the same text: not in the store: encoded now and kept" in first.report.chunks[2].why
    assert [chunk.source for chunk in second.report.chunks] == ["hit"] * 3
    assert torch.equal(first.logits, second.logits)
    assert len(list(blender.store.keys())) == 7


def test_encoded_together_or_apart_is_the_same(blender):
    apart = make()
    with apart:
        for chunk in (C, A, B):
            apart.encode([chunk], system=SYSTEM)
        blender.encode([A, B, C], system=SYSTEM)
        a, b = (x.fuse(prompt_of(A, B, C), selector=FullReuse()) for x in (apart, blender))
        assert off(a.logits, b.logits) <= LIMIT


def test_a_miss_that_is_prefilled_is_read_again_afterwards():
    with make(on_miss="prefill") as blender:
        for chunk in (A, B, C):
            blender.encode([chunk], system=SYSTEM)
        assert "1 of 3 chunks are not in the store" in blender.fuse(prompt_of(A, B, C)).report.fallback
        blender.drain()
        report = blender.fuse(Prompt(SYSTEM, (A, B, C), (5,))).report
        assert report.fallback is None or "1 of 3" not in report.fallback
        assert len(list(blender.store.keys())) == 7


def test_without_background_nothing_is_read_again():
    with make(background=None) as blender:
        report = blender.fuse(prompt_of(A, B, C)).report
        assert [chunk.repeated for chunk in report.chunks] == [0, 0, 0]
        assert len(list(blender.store.keys())) == 3


def test_forgetting_takes_it_too(blender):
    blender.encode([A, B, C], system=SYSTEM)
    assert blender.forget([A, C], system=SYSTEM) == 2
    assert len(list(blender.store.keys())) == 2
    assert blender.missing([A, B, C], system=SYSTEM) == [A, C]


def test_pins_hold_it_where_it_is_there():
    with make(store=MemoryStore(limit=1 << 30)) as blender:
        blender.encode([A, B, C], system=SYSTEM)
        assert blender.pin([A, B, C], system=SYSTEM) == 3
        key = blender.setup.plan(SYSTEM, "again").key(A)
        assert blender.store.unpin(key)
        assert not blender.store.unpin(blender.setup.plan(SYSTEM, "again").key(B))
        assert blender.unpin([A, B, C], system=SYSTEM) == 3


def test_a_damaged_entry_on_disk_is_encoded_again(tmp_path):
    with make(store=DiskStore(tmp_path)) as blender:
        blender.encode([A, B, C], system=SYSTEM)
        truth = blender.fuse(prompt_of(A, B, C), selector=FirstK(0.3))
        key = blender.setup.plan(SYSTEM, "again").key(C)
        (file,) = (path for path in tmp_path.rglob(f"{key}*") if path.is_file())
        data = bytearray(file.read_bytes())
        data[-3] ^= 1  # in the last layer
        file.write_bytes(bytes(data))
        healed = blender.fuse(prompt_of(A, B, C), selector=FirstK(0.3))
        assert [chunk.source for chunk in healed.report.chunks] == ["hit", "hit", "miss"]
        assert "behind the same text: damaged in the store: encoded again" in healed.report.chunks[2].why
        assert off(healed.logits, truth.logits) <= LIMIT
        assert [c.source for c in blender.fuse(prompt_of(A, B, C)).report.chunks] == ["hit"] * 3


def test_tenants_share_none_of_it(blender):
    blender.encode([A, B, C], system=SYSTEM)
    other = blender.tenant("other")
    assert not set(blender.setup.keys(A, SYSTEM)) & set(other.setup.keys(A, SYSTEM))
    assert [c.source for c in other.fuse(prompt_of(A, B, C)).report.chunks] == ["miss"] * 3


# --- no room ----------------------------------------------------------------------------------------------


def test_a_chunk_too_long_to_be_read_twice_is_read_as_new(blender):
    """The tiny model holds 512 rows."""
    assert has_room_again(blender.view, 12, 250)
    assert not has_room_again(blender.view, 12, 251)
    long = Chunk(tiny_ids(240, seed=3)), Chunk(tiny_ids(251, seed=3))
    fitting, not_fitting = (Prompt(SYSTEM[:4], (chunk, Chunk(chunk.ids[:230])), (9,)) for chunk in long)
    assert list(blender.setup.repeats(fitting)) == [1]
    twice = Prompt(SYSTEM, (Chunk(tiny_ids(40, seed=3)), Chunk(tiny_ids(251, seed=3))), (9,))
    assert repeated_runs(twice) == {}
    assert list(repeated_runs(not_fitting)) == [1]
    assert blender.setup.overlapping([*long, A], SYSTEM) == [long[0]]


def test_angles_that_depend_on_the_length_of_the_pass():
    with make("phi3_longrope") as blender:
        report = blender.fuse(prompt_of(A, C), selector=FullReuse()).report
        assert [chunk.repeated for chunk in report.chunks] == [0, 0]


def test_a_conversation_goes_on_over_repeated_text(blender):
    one = blender.fuse(prompt_of(A, B), selector=FullReuse())
    fusion = blender.fuse(prompt_of(A, B, C), past=one, selector=FullReuse())
    assert fusion.report.context_rows > 0
    assert fusion.report.chunks[2].repeated == 30


def test_tiny_prompts_repeat_nothing():
    """So that what the other tests show is not this."""
    assert repeated_runs(tiny_prompt(1)) == {}
