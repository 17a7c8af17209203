"""Chunk KV as a mean over contexts: what it equals, where it is used, and how a chunk's two entries live together."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import blend.library
from blend import (
    Background,
    Blender,
    Chunk,
    FirstK,
    FullRecompute,
    FullReuse,
    KVDeviation,
    MemoryStore,
    Prompt,
    PromptTooLong,
    QueryAttention,
    open_store,
)
from blend.averaging import Mean
from blend.encode import EncodePlan, Lead, encode_chunks
from blend.layout import lay_out
from blend.readings import means
from blend.stores import DiskStore
from blend.stores.codecs import Plain
from blend.stores.entry import pack, read_head
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import FAMILIES, tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from rope import Move

CONTEXTS = (tiny_ids(33, seed=101), tiny_ids(50, seed=102), tiny_ids(21, seed=103))
BACKGROUND = Background(CONTEXTS)
SELECTORS = (FullReuse(), FirstK(0.3), QueryAttention(0.3), KVDeviation(0.3))
EXACT = 1e-6
LIMIT = 2e-5

every_selector = pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.name)


def make(name="llama", dtype=torch.float32, **options):
    return Blender(tiny_model(name, dtype), check=False, **{"background": BACKGROUND, **options})


class Counting(MemoryStore):
    """A memory store that counts what comes in."""

    puts = 0

    def put(self, kv):
        self.puts += 1
        return super().put(kv)


@pytest.fixture
def blender():
    with make() as blender:
        yield blender


@torch.inference_mode()
def stock_pass(model, ids, base):
    """K/V ``[H, rows, D]`` of rows from ``base`` on, from one plain call of the model."""
    cache = DynamicCache()
    model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True)
    return [(layer.keys[0, :, base:], layer.values[0, :, base:]) for layer in cache.layers]


def moved(rope, layers, base, to, length, to_length):
    """The oracle's own way to turn keys: public ``Rope.move``, layer by layer."""
    rows = layers[0][0].shape[1]
    move = Move(torch.arange(base, base + rows), torch.arange(to, to + rows), length, to_length)
    return [rope.move(index, keys, values, move) for index, (keys, values) in enumerate(layers)]


def oracle(blender, prelude, chunk, contexts):
    """The mean over plain passes, one chunk and one context at a time."""
    passes = []
    for context in contexts:
        ids = (*prelude, *context, *chunk.ids)
        base = len(prelude) + len(context)
        kv = stock_pass(tiny_model("llama"), ids, base)
        passes.append(moved(blender.view.rope, kv, base, len(prelude), len(ids), len(prelude) + len(chunk)))
    return [
        tuple(torch.stack([kv[layer][slot] for kv in passes]).mean(0) for slot in (0, 1))
        for layer in range(len(passes[0]))
    ]


def off(a, b):
    """Largest difference of K/V, of the largest number of each tensor."""
    pairs = [(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)]
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)


def same_bits(a, b):
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def sources(fusion):
    return [chunk.source for chunk in fusion.report.chunks]


def stored(blender, prompt, reading="mean"):
    plan = blender.setup.plan(prompt.system, reading)
    return [blender.store.get(plan.key(chunk)) for chunk in prompt.chunks]


# --- the mean ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contexts", [CONTEXTS[:1], CONTEXTS[:2], CONTEXTS], ids=len)
@pytest.mark.parametrize("system", [0, 12])
def test_it_is_the_mean_of_plain_passes(contexts, system):
    prompt = tiny_prompt(1, system=system)
    with make(background=Background(contexts)) as blender:
        blender.encode(prompt.chunks, system=prompt.system)
        for chunk, kv in zip(prompt.chunks, stored(blender, prompt), strict=True):
            assert off(kv.layers, oracle(blender, prompt.system, chunk, contexts)) <= LIMIT
            assert (kv.averaged, kv.prelude) == (len(contexts), prompt.system)
            assert kv.length == system + len(chunk)


def test_contexts_change_it():
    """So the oracle's test can fail: another context, or none, is another mean."""
    prompt = tiny_prompt(1)
    with make() as blender:
        blender.encode(prompt.chunks, system=prompt.system)
        (kv, *_), chunk = stored(blender, prompt), prompt.chunks[0]
        assert off(kv.layers, oracle(blender, prompt.system, chunk, CONTEXTS[:2])) > 1e-2
        assert off(kv.layers, oracle(blender, prompt.system, chunk, [()])) > 1e-2


def test_layer_0_is_what_it_is_alone():
    """That layer has seen no other row: all passes agree, once their keys are turned back."""
    prompt = tiny_prompt(1)
    with make() as blender:
        blender.encode(prompt.chunks, system=prompt.system)
        for mean, alone in zip(stored(blender, prompt), stored(blender, prompt, "alone"), strict=True):
            assert off(mean.layers[:1], alone.layers[:1]) <= EXACT
            assert off(mean.layers[1:], alone.layers[1:]) > 1e-2


def test_contexts_that_say_the_same_count_once():
    prompt = tiny_prompt(1)
    with make(background=Background(CONTEXTS[:1])) as one, make(background=Background(CONTEXTS[:1] * 3)) as three:
        for blender in (one, three):
            blender.encode(prompt.chunks, system=prompt.system)
        for a, b in zip(stored(one, prompt), stored(three, prompt), strict=True):
            assert off(b.layers, a.layers) <= EXACT
            assert (a.averaged, b.averaged) == (1, 3)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "smollm3", "hunyuan_v1_dense", "nanochat"])
def test_mean_turns_and_adds_up(name):
    """``Mean`` by itself, on random KV, in fp32."""
    with make(name, background=None) as blender:
        rope, rows, base, generator = blender.view.rope, 7, 5, torch.Generator().manual_seed(1)
        passes = [
            [
                tuple(torch.randn(x.shape[0], rows, x.shape[2], generator=generator) for x in p)
                for p in blender.view.kv_like
            ]
            for _ in range(4)
        ]
        mean, before = Mean(rope, base, rows), [[(k.clone(), v.clone()) for k, v in kv] for kv in passes]
        for at, kv in enumerate(passes):
            mean.add(kv, 11 * at, 11 * at + rows)
        turned = [moved(rope, kv, 11 * at, base, 11 * at + rows, base + rows) for at, kv in enumerate(passes)]
        truth = [
            tuple(sum(kv[layer][slot].double() for kv in turned) / 4 for slot in (0, 1))
            for layer in range(len(turned[0]))
        ]
        assert off(mean.layers(torch.float32), truth) <= EXACT
        assert all(same_bits(kv, old) for kv, old in zip(passes, before, strict=True)), "what is added stays as it is"


def test_the_mean_is_kept_in_the_dtype_of_the_model():
    prompt = tiny_prompt(1)
    with make(dtype=torch.bfloat16) as blender:
        blender.encode(prompt.chunks, system=prompt.system)
        kinds = {x.dtype for kv in stored(blender, prompt) for pair in kv.layers for x in pair}
        assert kinds == {torch.bfloat16}
        passes = [stock_pass(blender.model, (*prompt.system, *c, *prompt.chunks[0].ids), 12 + len(c)) for c in CONTEXTS]
        values = torch.stack([kv[2][1].float() for kv in passes]).mean(0)
        kept = stored(blender, prompt)[0].layers[2][1]
        assert float((kept.float() - values).abs().max() / values.abs().max()) <= 2**-8 + 2**-7


# --- batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 50, 1024])
def test_a_batch_is_the_chunks_one_by_one(rows):
    prompt = tiny_prompt(7, chunks=(5, 40, 33, 21))
    with make() as together, make() as apart:
        together.setup = replace(together.setup, batch_rows=rows)
        together.encode(prompt.chunks, system=prompt.system)
        for chunk in prompt.chunks:
            apart.encode([chunk], system=prompt.system)
        for a, b in zip(stored(together, prompt), stored(apart, prompt), strict=True):
            assert off(a.layers, b.layers) <= LIMIT


def test_where_a_context_is_cut_depends_on_the_chunk_alone():
    """Contexts longer than the model: whatever a chunk shares its batch with, it sees as much of them."""
    chunks = [Chunk(tiny_ids(n, seed=n)) for n in (20, 60, 130, 270, 300)]
    long = Background((tiny_ids(600, seed=1), tiny_ids(700, seed=2)))
    with make(background=long) as together, make(background=long) as apart:
        together.encode(chunks, system=(9,))
        for chunk in chunks[::-1]:
            apart.encode([chunk], system=(9,))
        prompt = Prompt((9,), tuple(chunks), (5,))
        for a, b in zip(stored(together, prompt), stored(apart, prompt), strict=True):
            assert off(a.layers, b.layers) <= LIMIT


def test_without_kv_of_the_leads_they_are_computed_with_every_batch():
    prompt = tiny_prompt(1)
    with make() as blender:
        plan = blender.setup.plan(prompt.system)
        blender.encode(prompt.chunks, system=prompt.system)
        for kv in encode_chunks(blender.view, prompt.chunks, plan):
            assert off(kv.layers, blender.store.get(kv.key).layers) <= LIMIT


def test_the_kv_of_the_contexts_is_computed_once():
    prompt, passes = tiny_prompt(1), []
    with make() as blender:
        handle = blender.model.register_forward_pre_hook(
            lambda module, args, options: passes.append(options["input_ids"].shape[1]), with_kwargs=True
        )
        blender.encode(prompt.chunks[:1], system=prompt.system)
        first = list(passes)
        blender.encode(prompt.chunks[1:2], system=prompt.system)
        handle.remove()
    assert first == [12, 30, *map(len, CONTEXTS), 30, 30, 30]
    assert passes[len(first) :] == [41] * 4


# --- no room ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"), [("llama", 512), ("llama_dynamic", 255), ("phi3_longrope", 64), ("gptj", 512), ("bloom", 1000)]
)
@pytest.mark.parametrize("system", [0, 12])
def test_a_context_is_cut_where_there_is_no_room(name, limit, system):
    """No pass is longer than the model, or than the rotation of the chunk's keys holds."""
    prompt, lengths = tiny_prompt(1, system=system, chunks=(30, 31)), []
    with make(name, background=Background((tiny_ids(900, seed=1), tiny_ids(3, seed=2)))) as blender:
        plan = blender.setup.plan(prompt.system)

        class Watched:
            def __getattr__(self, attribute):
                return getattr(blender.view, attribute)

            def prefill(self, ids, past=None):
                lengths.append(ids.shape[1] + (past[0][0].shape[1] if past else 0))
                return blender.view.prefill(ids, past)

        encoded = list(encode_chunks(Watched(), prompt.chunks, plan))
        assert max(lengths) <= limit
        assert max(lengths) > (limit if name != "bloom" else 900) / 4, "not all of the context is gone"
        blender.encode(prompt.chunks, system=prompt.system)
        for kv in encoded:
            assert off(kv.layers, blender.store.get(kv.key).layers) <= LIMIT
        full = Blender(tiny_model(name), check=False).prefill(prompt).logits
        assert off([(blender.fuse(prompt, selector=FullRecompute()).logits,)], [(full,)]) <= LIMIT


def test_a_chunk_that_fills_the_model_is_its_own_mean():
    chunk, system = Chunk(tiny_ids(500, seed=3)), tiny_ids(12)
    with make() as blender:
        blender.encode([chunk], system=system)
        prompt = Prompt(system, (chunk,), (5,))
        (mean,), (alone,) = stored(blender, prompt), stored(blender, prompt, "alone")
        assert off(mean.layers, alone.layers) <= LIMIT
        assert mean.averaged == 3
        blender.setup = replace(blender.setup, batch_rows=50)  # the small one could be done first
        with pytest.raises(PromptTooLong, match="512"):
            blender.encode([Chunk((7,)), Chunk(tiny_ids(501, seed=3))], system=system)
        with pytest.raises(PromptTooLong, match="split it into smaller chunks"):
            blender.encode([Chunk((7,))], system=tiny_ids(512))
        assert len(list(blender.store.keys())) == 2


def test_longrope_chunks_are_turned_within_their_own_angles():
    """Beyond the switch all passes are long, and the context stays."""
    chunk, system = Chunk(tiny_ids(60, seed=3)), tiny_ids(12)
    with make("phi3_longrope", background=Background(CONTEXTS[:1])) as blender:
        blender.encode([chunk], system=system)
        (mean,) = stored(blender, Prompt(system, (chunk,), (5,)))
        kv = stock_pass(tiny_model("phi3_longrope"), (*system, *CONTEXTS[0], *chunk.ids), 12 + 33)
        truth = moved(blender.view.rope, kv, 12 + 33, 12, 12 + 33 + 60, 72)
        assert off(mean.layers, truth) <= LIMIT


def test_the_first_rows_of_a_lead():
    kv = ((torch.arange(12.0).reshape(1, 6, 2), torch.ones(1, 6, 2)),)
    lead = Lead(tuple(range(6)), kv)
    assert lead.first(6) is lead
    assert lead.first(2).ids == (0, 1)
    assert torch.equal(lead.first(2).kv[0][0], kv[0][0][:, :2])
    assert Lead((1, 2, 3)).first(2) == Lead((1, 2))


# --- where it is used -------------------------------------------------------------------------------------


def test_a_mean_is_exact_nowhere():
    prompt = tiny_prompt(1, chunks=(30,))
    for system in ((), prompt.system):
        at = replace(prompt, system=system)
        with make() as blender:
            blender.encode(at.chunks, system=system)
            (mean,), (alone,) = stored(blender, at), stored(blender, at, "alone")
        assert [p.exact for p in lay_out(at, chunks=[alone]).pieces if p.origin == "chunk"] == [True]
        assert [p.exact for p in lay_out(at, chunks=[mean]).pieces if p.origin == "chunk"] == [False]
        assert lay_out(at, chunks=[mean]).stale.numel() == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_selector
def test_the_first_chunk_is_what_it_is_without_background(selector, dtype):
    """Bit for bit: it stands right behind its prelude, and nothing needs to be guessed."""
    prompt = tiny_prompt(1)
    with make(dtype=dtype) as blender, make(dtype=dtype, background=None) as plain:
        first = replace(prompt, chunks=prompt.chunks[:1])
        a, b = blender.fuse(first, selector=selector), plain.fuse(first, selector=selector)
        assert a.exact
        assert torch.equal(a.logits, b.logits)
        assert same_bits(a.layers, b.layers)
        whole, other = blender.fuse(prompt, selector=selector), plain.fuse(prompt, selector=selector)
        head = slice(len(prompt.system) + len(prompt.chunks[0]))
        assert same_bits(*([(k[:, head], v[:, head]) for k, v in f.layers] for f in (whole, other)))
        assert not same_bits(whole.layers, other.layers)
        assert [chunk.exact for chunk in whole.report.chunks] == [True, False, False]
        assert "right behind its prelude" in whole.report.chunks[0].why
        assert "the mean over 3 contexts" not in whole.report.chunks[0].why
        assert "the mean over 3 contexts" in whole.report.chunks[1].why


def test_without_a_prelude_of_its_own_the_first_chunk_is_a_mean_too():
    prompt = tiny_prompt(1)
    with make(prelude="none") as blender:
        report = blender.fuse(prompt, selector=FullReuse()).report
        assert [chunk.exact for chunk in report.chunks] == [False] * 3
        assert all("the mean over 3 contexts" in chunk.why for chunk in report.chunks)
        bare = blender.fuse(replace(prompt, system=()), selector=FullReuse()).report
        assert [chunk.exact for chunk in bare.chunks] == [True, False, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_averages_and_fuses(name):
    """All rows recomputed is full prefill; reused, layer 0 of every chunk is that of full prefill."""
    prompt = tiny_prompt(4, system=7, chunks=(21, 30, 12), question=6).reordered((2, 0, 1))
    with make(name, background=Background(CONTEXTS[:2])) as blender, make(name, background=None) as plain:
        full = plain.prefill(prompt, remember=False)
        reused = blender.fuse(prompt, selector=FullReuse())
        assert sources(reused) == ["miss"] * 3
        assert [kv and kv.averaged for kv in stored(blender, prompt)] == [2, 2, 2]
        head, rest = ([(k[:, s], v[:, s]) for k, v in f.layers[:1]] for f in (reused, full) for s in [slice(70)])
        assert off(head, rest) <= LIMIT
        assert torch.isfinite(reused.logits).all()
        again = blender.fuse(prompt, selector=FullRecompute())
        assert sources(again) == ["hit"] * 3
        assert off([(again.logits,)], [(full.logits,)]) <= LIMIT
        short = blender.fuse(replace(prompt, chunks=prompt.chunks[:1]), selector=FullReuse())
        assert short.exact


def test_an_average_is_nearer_to_what_comes_than_a_chunk_alone():
    """The purpose of it all, as KV: over prompts of other chunks."""
    far = {True: 0.0, False: 0.0}
    for seed in range(6):
        prompt = tiny_prompt(20 + seed, system=12, chunks=(40, 40, 40))
        background = Background(tuple(tiny_ids(60, seed=500 + i) for i in range(4)))
        with make(background=background) as mean, make(background=None) as alone:
            full = alone.prefill(prompt, remember=False)
            rows = slice(12 + 40, 12 + 120)
            for blender in (mean, alone):
                fused = blender.fuse(prompt, selector=FullReuse())
                far[blender is mean] += sum(
                    float((a[:, rows] - b[:, rows]).square().mean())
                    for one, other in zip(fused.layers, full.layers, strict=True)
                    for a, b in zip(one, other, strict=True)
                )
    assert far[True] < far[False]


# --- keys and entries -------------------------------------------------------------------------------------


def test_backgrounds_have_keys_of_their_own():
    chunk, prelude = Chunk((3, 4)), (1, 2)
    plans = [
        EncodePlan(prelude, "model", background=Background(c)) for c in ((), CONTEXTS[:1], CONTEXTS, CONTEXTS[::-1])
    ]
    keys = [plan.key(chunk) for plan in plans]
    assert len(set(keys)) == 4
    assert keys[0] == EncodePlan(prelude, "model").key(chunk)
    with make() as blender, make(background=None) as plain:
        assert blender.setup.keys(chunk, prelude)[:1] == plain.setup.keys(chunk, prelude)
        assert len(set(blender.setup.keys(chunk, prelude))) == 3


def test_an_entry_remembers_that_it_is_a_mean(tmp_path):
    prompt = tiny_prompt(1)
    with make() as blender:
        blender.encode(prompt.chunks[:1], system=prompt.system)
        mean, alone = stored(blender, prompt)[0], stored(blender, prompt, "alone")[0]
    assert b"averaged" in bytes(pack(mean, Plain()).head)
    assert b"averaged" not in bytes(pack(alone, Plain()).head), "as before there were any means"
    for kv in (mean, alone):
        assert read_head(pack(kv, Plain()).head, kv.key).kv.averaged == kv.averaged
        for address in (f"file://{tmp_path}/kv", f"file://{tmp_path}/packed?codec=int8"):
            with open_store(address) as store:
                store.put(kv)
                assert store.get(kv.key).averaged == kv.averaged
                assert store.get_many([kv.key], layerwise=True)[0].averaged == kv.averaged


# --- hits and misses --------------------------------------------------------------------------------------


@every_selector
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_miss_answers_as_a_hit_five_times(selector, codec):
    prompt = tiny_prompt(1)
    with make(store=f"memory://1GiB?codec={codec}") as blender:
        first, *others = (blender.fuse(prompt, selector=selector) for _ in range(5))
        assert sources(first) == ["miss"] * 3
        for other in others:
            assert sources(other) == ["hit"] * 3
            assert torch.equal(other.logits, first.logits)
            assert same_bits(other.layers, first.layers)


def test_encoded_chunks_hit_in_every_order(blender):
    prompt = tiny_prompt(1)
    done = blender.encode(prompt.chunks, system=prompt.system)
    assert (done.encoded, done.reused, done.rows) == (3, 0, 2 * 96), "each chunk alone, and as a mean"
    assert done.nbytes == sum(blender.store.get(key).nbytes for key in list(blender.store.keys()))
    assert len(list(blender.store.keys())) == 6
    assert blender.encode(prompt.chunks, system=prompt.system) == (0, 3, 0, 0)
    for order in itertools.permutations(range(3)):
        fusion = blender.fuse(prompt.reordered(order))
        assert sources(fusion) == ["hit"] * 3
        assert [chunk.exact for chunk in fusion.report.chunks] == [True, False, False]
    assert len(list(blender.store.keys())) == 6


def test_progress_counts_chunks(blender, monkeypatch):
    prompt, bars = tiny_prompt(9, chunks=(20, 21, 22, 23, 24, 25)), []

    def bar(items, *, total, **options):
        for item in items:
            bars.append((total, len(list(blender.store.keys()))))
            yield item

    blender.setup = replace(blender.setup, batch_rows=50)
    blender.encode(prompt.chunks[:1], system=prompt.system)
    monkeypatch.setattr(blend.library, "track", bar)
    blender.encode(prompt.chunks, system=prompt.system)
    assert [total for total, _ in bars] == [5] * 5
    assert [kept // 2 for _, kept in bars] == [2, 3, 4, 5, 6], "each time that one is whole"


def test_after_a_request_every_order_hits(blender):
    prompt = tiny_prompt(1)
    report = blender.fuse(prompt).report
    assert [chunk.source for chunk in report.chunks] == ["miss"] * 3
    assert all(kv is not None for reading in ("mean", "alone") for kv in stored(blender, prompt, reading))
    assert blender.missing(prompt.chunks, system=prompt.system) == []
    for order in itertools.permutations(prompt.chunks):
        assert blender.fuse(replace(prompt, chunks=order)).report.hit_rate == 1.0


def test_the_same_chunk_twice(blender):
    prompt = tiny_prompt(1)
    a, b, _ = prompt.chunks
    twice = replace(prompt, chunks=(a, b, a))
    truth = Blender(tiny_model("llama"), check=False).prefill(twice).logits
    assert off([(blender.fuse(twice, selector=FullRecompute()).logits,)], [(truth,)]) <= LIMIT
    assert sources(blender.fuse(twice)) == ["hit"] * 3


def test_a_prefix_that_ends_within_the_first_chunk(blender):
    prompt = tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    truth = blender.fuse(prompt, selector=FullReuse())
    blender.prefill(Prompt(prompt.ids[:25], (), (9,)))
    fusion = blender.fuse(prompt, selector=FullReuse())
    assert fusion.report.prefix_rows == 25
    assert off([(fusion.logits,)], [(truth.logits,)]) <= LIMIT
    assert fusion.report.chunks[0].exact


# --- two entries of one chunk -----------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["alone", "mean"])
def test_one_of_the_two_was_evicted(blender, gone):
    prompt = tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    truth = blender.fuse(prompt, selector=FullReuse())
    assert blender.store.delete(blender.setup.plan(prompt.system, gone).key(prompt.chunks[0]))
    assert blender.missing(prompt.chunks, system=prompt.system) == [prompt.chunks[0]]
    fusion = blender.fuse(prompt, selector=FullReuse())  # where only its KV alone is wanted of that chunk
    assert sources(fusion) == ["miss" if gone == "alone" else "hit", "hit", "hit"]
    assert off([(fusion.logits,)], [(truth.logits,)]) <= LIMIT
    again = blender.encode(prompt.chunks, system=prompt.system)
    assert (again.encoded, again.reused) == ((0, 3) if gone == "alone" else (1, 2))
    assert sources(blender.fuse(prompt.reordered((1, 0, 2)))) == ["hit"] * 3


@pytest.mark.parametrize("gone", [None, "alone", "mean"])
def test_forgetting_takes_both(blender, gone):
    prompt = tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    if gone:
        blender.store.delete(blender.setup.plan(prompt.system, gone).key(prompt.chunks[0]))
    assert blender.forget(prompt.chunks[:2], system=prompt.system) == 2
    assert len(list(blender.store.keys())) == 2
    assert blender.forget(prompt.chunks[:2], system=prompt.system) == 0
    assert blender.missing(prompt.chunks, system=prompt.system) == list(prompt.chunks[:2])


def test_pins_hold_both_and_come_off_both():
    prompt = tiny_prompt(1)
    with make() as blender:
        first = prompt.chunks[:1]
        assert blender.pin(first, system=prompt.system) == 0
        blender.encode(prompt.chunks, system=prompt.system)
        size = sum(blender.store.get(key).nbytes for key in blender.setup.keys(first[0], prompt.system)[:2])
    with make(store=MemoryStore(limit=3 * size)) as blender:
        blender.encode(first, system=prompt.system)
        assert blender.pin(first, system=prompt.system) == 1
        for seed in range(5, 12):
            blender.encode(tiny_prompt(seed).chunks, system=prompt.system)
        assert blender.missing(first, system=prompt.system) == []
        assert blender.unpin(first, system=prompt.system) == 1
        assert blender.unpin(first, system=prompt.system) == 0
        for seed in range(12, 15):
            blender.encode(tiny_prompt(seed).chunks, system=prompt.system)
        assert blender.missing(first, system=prompt.system) == list(first)


def test_encoding_afterwards_makes_both(blender):
    prompt = tiny_prompt(1)
    blender.encode(prompt.chunks[:1], system=prompt.system)
    assert blender.encode_afterwards(prompt.chunks, system=prompt.system) == list(prompt.chunks[1:])
    blender.drain()
    assert blender.missing(prompt.chunks, system=prompt.system) == []
    with make() as other:
        other.encode(prompt.chunks, system=prompt.system)
        for alone in (False, True):
            for a, b in zip(stored(blender, prompt, alone), stored(other, prompt, alone), strict=True):
                assert off(a.layers, b.layers) <= LIMIT


def test_what_is_forgotten_is_not_encoded_later(blender):
    prompt = tiny_prompt(1)
    with blender.setup.afterwards.request():
        blender.encode_afterwards(prompt.chunks, system=prompt.system)
        blender.forget(prompt.chunks[:2], system=prompt.system)
    blender.drain()
    assert blender.missing(prompt.chunks, system=prompt.system) == list(prompt.chunks[:2])


def test_a_miss_that_is_prefilled_is_encoded_in_full():
    prompt = tiny_prompt(1)
    with make(on_miss="prefill") as blender:
        assert "3 of 3 chunks are not in the store" in blender.fuse(prompt).report.fallback
        blender.drain()
        assert blender.missing(prompt.chunks, system=prompt.system) == []
        assert {chunk.source for chunk in blender.fuse(prompt.reordered((2, 1, 0))).report.chunks} <= {"hit", "prefix"}


@pytest.mark.parametrize("place", [0, 1])
def test_a_damaged_entry_on_disk_is_encoded_again(tmp_path, place):
    prompt = tiny_prompt(1)
    with make(store=DiskStore(tmp_path)) as blender:
        blender.encode(prompt.chunks, system=prompt.system)
        truth = blender.fuse(prompt, selector=FirstK(0.3))
        key = blender.setup.plan(prompt.system, "alone" if place == 0 else "mean").key(prompt.chunks[place])
        (file,) = (path for path in tmp_path.rglob(f"{key}*") if path.is_file())
        data = bytearray(file.read_bytes())
        data[-3] ^= 1  # in the last layer
        file.write_bytes(bytes(data))
        healed = blender.fuse(prompt, selector=FirstK(0.3))
        assert [chunk == "miss" for chunk in sources(healed)] == [index == place for index in range(3)]
        assert "damaged in the store" in healed.report.chunks[place].why
        assert off([(healed.logits,)], [(truth.logits,)]) <= LIMIT
        assert blender.store.get(key).averaged == (0 if place == 0 else 3)
        assert sources(blender.fuse(prompt)) == ["hit"] * 3


# --- tenants, other backgrounds, threads, Ctrl-C ----------------------------------------------------------


def test_tenants_share_no_means(blender):
    prompt = tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    other = blender.tenant("other")
    assert other.missing(prompt.chunks, system=prompt.system) == list(prompt.chunks)
    passes = []
    handle = blender.model.register_forward_pre_hook(
        lambda module, args, options: passes.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    fusion = other.fuse(prompt, selector=FullReuse())
    handle.remove()
    assert sources(fusion) == ["miss"] * 3
    assert passes[: 2 + len(CONTEXTS)].count(12) == 1
    assert [n for n in passes if n in map(len, CONTEXTS)] == [33, 50, 21], "nor the KV of contexts behind a prelude"
    assert off([(fusion.logits,)], [(blender.fuse(prompt, selector=FullReuse()).logits,)]) <= LIMIT


def test_the_same_model_under_another_background(blender):
    prompt = tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    other, none = blender.averaged(Background(CONTEXTS[:1])), blender.averaged(None)
    assert other.view is blender.view
    assert other.store is blender.store
    first = other.fuse(prompt, selector=FullReuse())
    assert sources(first) == ["hit", "miss", "miss"], "the first chunk's KV alone is the same under every background"
    assert "the mean over 1 contexts" in first.report.chunks[1].why
    assert sources(other.fuse(prompt.reordered((0, 2, 1)))) == ["hit"] * 3
    with make(background=None) as plain:
        bare = none.fuse(prompt, selector=FullReuse())
        assert sources(bare) == ["hit"] * 3
        assert off([(bare.logits,)], [(plain.fuse(prompt, selector=FullReuse()).logits,)]) <= LIMIT
    assert none.missing(prompt.chunks, system=prompt.system) == []
    other.close()
    assert sources(blender.fuse(prompt)) == ["hit"] * 3, "the one that it came from is not closed"


def test_bundled_passages_come_back_by_an_empty_list():
    tokenizer = tiny_tokenizer(template=CHATML)
    with Blender(tiny_model("llama"), tokenizer, check=False) as usual:
        assert usual.averaged(None).averaged(()).setup.background == usual.setup.background
        prompt = usual.prompt(
            "Who lights the lamps?", ["The lamps are lit by hand.", "The keeper lives above the bakery."]
        )
        assert [kv and kv.averaged for kv in (usual.fuse(prompt), stored(usual, prompt))[1]] == [4, 4]


def test_two_threads_encode_a_mean_once():
    prompt = tiny_prompt(1)
    with make(store=Counting()) as blender, ThreadPoolExecutor(2) as pool:
        fusions = list(pool.map(lambda _: blender.fuse(prompt, selector=FullReuse()), range(2)))
        assert torch.equal(fusions[0].logits, fusions[1].logits)
        assert blender.store.puts == 6, "three chunks, alone and as a mean"
        backgrounds = [Background(CONTEXTS[:1]), Background(CONTEXTS[1:])]
        sharing = [replace(blender.setup, background=b) for b in backgrounds]  # one room for the contexts' KV

        def encode(setup):
            done = (found for _ in range(3) for found in setup.encode(means(prompt.chunks), prompt.system))
            return {found.kv.ids: found.kv for found in done}

        for background, kvs in zip(backgrounds, pool.map(encode, sharing), strict=True):
            for chunk in prompt.chunks:
                assert off(kvs[chunk.ids].layers, oracle(blender, prompt.system, chunk, background.contexts)) <= LIMIT


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_ctrl_c_keeps_finished_batches(batches):
    """Pressed in the second context of a batch: none of its means is kept, and all chunks before it are whole."""
    prompt, passes = tiny_prompt(9, chunks=(20, 21, 22, 23, 24, 25)), itertools.count()
    with make() as blender:
        blender.setup = replace(blender.setup, batch_rows=50)  # two chunks at a time
        blender.encode([Chunk((7,))], system=prompt.system)  # so that prelude and contexts are there
        for key in list(blender.store.keys()):
            blender.store.delete(key)

        def pressed(*_):
            if next(passes) == 4 * batches + 2:
                raise KeyboardInterrupt

        handle = blender.model.register_forward_pre_hook(pressed)
        if batches < 3:
            with pytest.raises(KeyboardInterrupt):
                blender.encode(prompt.chunks, system=prompt.system)
        else:
            blender.encode(prompt.chunks, system=prompt.system)
        handle.remove()
        left = prompt.chunks[2 * batches :]
        assert len(list(blender.store.keys())) == 4 * batches + len(left[:2])
        assert blender.missing(prompt.chunks, system=prompt.system) == list(left)
        done = blender.encode(prompt.chunks, system=prompt.system)
        assert (done.encoded, done.reused) == (6 - 2 * batches, 2 * batches)
        with make() as whole:
            whole.setup = replace(whole.setup, batch_rows=50)
            whole.encode(prompt.chunks, system=prompt.system)
            assert torch.equal(blender.fuse(prompt).logits, whole.fuse(prompt).logits)
