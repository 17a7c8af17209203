"""The front door on tiny models, and on one real one: what is reused, what it equals, what it leaves behind."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import blend.library
from blend import (
    Blender,
    BudgetError,
    Chunk,
    FirstK,
    FullRecompute,
    FullReuse,
    KVBlendError,
    KVDeviation,
    MemoryStore,
    Prompt,
    PromptError,
    QueryAttention,
    Random,
    SelfCheckFailed,
    UnsupportedModel,
)
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer

MODELS = ("llama", "qwen3", "gemma3_text")
SELECTORS = {
    "reuse": FullReuse(),
    "recompute": FullRecompute(),
    "first-k": FirstK(0.2),
    "random": Random(0.2),
    "query": QueryAttention(0.2),
    "kv": KVDeviation(0.2),
    "kv in steps": KVDeviation(0.2, layers=(1, 2), schedule=(1.5, 1.0), on="both"),
}
BUDGETED = {"first-k": FirstK, "random": Random, "query": QueryAttention, "kv": KVDeviation}
LIMIT = 2e-5

every_model = pytest.mark.parametrize("name", MODELS)
every_selector = pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)


def make(name="llama", dtype=torch.float32, *, tokenizer=None, check=False, **options):
    return Blender(tiny_model(name, dtype), tokenizer, check=check, **options)


@torch.inference_mode()
def forward(model, ids, layers=None):
    """One call of the model itself behind the K/V given: last logits, and K/V ``[H, T, D]`` per layer."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers or ()):
        cache.update(keys[None], values[None], index)
    ids_1T = torch.tensor([ids], device=model.device)
    out = model(input_ids=ids_1T, cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float(), [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@torch.inference_mode()
def plain(model, ids, **options):
    """The model's own ``generate``: new ids of every sequence."""
    ids_1T = torch.tensor([ids])
    out = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **options)
    return out[:, len(ids) :].tolist()


def same_bits(a, b):
    return all(torch.equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))


def off(a, b):
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def distance(a, b):
    """Mean squared difference of K/V."""
    squares = [
        (x - y).square().mean() for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    ]
    return float(torch.stack(squares).mean())


def sources(fusion):
    return [chunk.source for chunk in fusion.report.chunks]


# --- the same prompt, in any order, again and again ---------------------------------------------------


@every_model
@every_selector
def test_the_same_prompt_five_times(name, selector):
    """Everything is in the store: no bit differs between the calls."""
    blender, prompt = make(name), tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    first, *others = (blender.generate(prompt, selector=selector, do_sample=False, max_new_tokens=8) for _ in range(5))
    assert first.report.hit_rate == 1.0
    for other in others:
        assert other.ids == first.ids
        assert torch.equal(other.fusion.logits, first.fusion.logits)
        assert same_bits(other.fusion.layers, first.fusion.layers)


@every_model
@every_selector
def test_a_miss_answers_as_a_hit(name, selector):
    """The first request, which encodes the chunks, computes the very numbers of the second."""
    blender, prompt = make(name), tiny_prompt(1)
    cold, warm = (blender.fuse(prompt, selector=selector) for _ in range(2))
    assert sources(cold) == ["miss"] * 3
    assert sources(warm) == ["hit"] * 3
    assert off(cold.logits, warm.logits) <= LIMIT
    assert torch.equal(cold.logits, warm.logits)
    assert same_bits(cold.layers, warm.layers)


@every_model
def test_all_orders_hit_after_one_encode(name):
    blender, stock, prompt = make(name), tiny_model(name), tiny_prompt(1)
    done = blender.encode(prompt.chunks, system=prompt.system)
    assert (done.encoded, done.reused, done.rows) == (3, 0, 96)
    assert done.nbytes == sum(blender.store.get(key).nbytes for key in blender.store.keys())  # noqa: SIM118
    for order in itertools.permutations(range(3)):
        other = prompt.reordered(order)
        for selector in (FullReuse(), QueryAttention(), KVDeviation()):
            fusion = blender.fuse(other, selector=selector)
            assert sources(fusion) == ["hit"] * 3
            assert fusion.report.hit_rate == 1.0
            assert [c.moved for c in fusion.report.chunks] == [start - len(prompt.system) for start in other.starts]
            assert [c.name for c in fusion.report.chunks] == ["abc"[i] for i in order]
        answer = blender.generate(other, selector=FullRecompute(), do_sample=False, max_new_tokens=6)
        assert [list(answer.ids)] == plain(stock, other.ids, do_sample=False, max_new_tokens=6)
    assert len(list(blender.store.keys())) == 3


@every_model
def test_hit_miss_hit_keeps_both_hits_and_stores_the_miss(name):
    blender, prompt = make(name), tiny_prompt(1)
    a, _, c = prompt.chunks
    blender.encode([a, c], system=prompt.system)
    first = blender.fuse(prompt)
    assert sources(first) == ["hit", "miss", "hit"]
    assert first.report.reused_rows + first.report.recomputed_rows >= 30 + 25
    assert "encoded now" in first.report.chunks[1].why
    assert "in the store" in first.report.chunks[0].why
    second = blender.fuse(prompt.reordered((1, 2, 0)))
    assert sources(second) == ["hit", "hit", "hit"]
    assert blender.encode(prompt.chunks, system=prompt.system)[:2] == (0, 3)


def test_chunks_of_any_length_are_covered_in_full():
    """No row is lost at a seam."""
    sizes = (1, 2, 63, 64, 65, 17)
    blender, prompt = make(), tiny_prompt(7, chunks=sizes, question=3)
    report = blender.fuse(prompt, selector=FullReuse()).report
    assert report.reused_rows >= sum(sizes)
    assert report.states.count("fresh") <= len(prompt.system) + 3
    stored = sorted(len(blender.store.get(key).ids) for key in blender.store.keys())  # noqa: SIM118
    assert stored == sorted(sizes)


def test_a_chunk_encoded_in_a_batch_is_the_chunk_encoded_alone():
    """Padding behind a row changes nothing before it."""
    prompt = tiny_prompt(7, chunks=(5, 40, 33, 21))
    together, alone = make(), make()
    together.encode(prompt.chunks, system=prompt.system)
    for chunk in prompt.chunks:
        alone.encode([chunk], system=prompt.system)
    for key in together.store.keys():  # noqa: SIM118
        a, b = together.store.get(key), alone.store.get(key)
        for one, other in zip(a.layers, b.layers, strict=True):
            assert all(off(x, y) <= 1e-5 for x, y in zip(one, other, strict=True))


def test_the_same_chunk_twice_in_a_prompt():
    blender, stock = make(), tiny_model("llama")
    a, b, _ = tiny_prompt(1).chunks
    prompt = Prompt(tiny_ids(12), (a, b, a), tiny_ids(5, seed=3))
    answer = blender.generate(prompt, selector=FullRecompute(), do_sample=False, max_new_tokens=6)
    assert len(list(blender.store.keys())) == 2
    assert [c.start for c in answer.report.chunks] == list(prompt.starts)
    assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=6)


@every_model
@pytest.mark.parametrize(
    "prompt",
    [
        Prompt((), (), (5,)),
        Prompt((), (Chunk((7,)),), (5,)),
        Prompt((4,), (Chunk((7,)), Chunk((8,)), Chunk((9,))), (5,)),
        Prompt((), (Chunk(tiny_ids(30)), Chunk(tiny_ids(30))), (5,)),
    ],
    ids=["one token", "one chunk", "chunks of one token", "no system part"],
)
def test_the_smallest_prompts(name, prompt):
    blender, stock = make(name), tiny_model(name)
    for selector in (FullRecompute(), QueryAttention(1.0), KVDeviation(1.0)):
        answer = blender.generate(prompt, selector=selector, do_sample=False, max_new_tokens=5)
        assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=5)
        assert answer.report.rows == len(prompt)


# --- exactness ----------------------------------------------------------------------------------------


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@every_selector
def test_one_chunk_behind_its_own_prelude_is_stock_prefix_caching(name, dtype, selector):
    """Bit for bit, whatever the selector: there is nothing stale to choose from."""
    blender, stock = make(name, dtype), tiny_model(name, dtype)
    prompt = tiny_prompt(2, chunks=(37,))
    blender.encode(prompt.chunks, system=prompt.system)
    fusion = blender.fuse(prompt, selector=selector)
    _, kv = forward(stock, prompt.system)
    _, kv = forward(stock, prompt.chunks[0].ids, kv)
    logits, kv = forward(stock, prompt.question, kv)
    assert fusion.exact
    assert fusion.report.recomputed_rows == 0
    assert torch.equal(fusion.logits, logits)
    assert same_bits(fusion.layers, kv)


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_prefix_path_is_stock_to_the_last_bit(name, dtype):
    blender, stock = make(name, dtype), tiny_model(name, dtype)
    first = tiny_prompt(1)
    other = replace(first, question=tiny_ids(15, seed=77))
    logits, kv = forward(stock, first.ids)
    cold = blender.prefill(first)
    assert torch.equal(cold.logits, logits)
    assert same_bits(cold.layers, kv)
    common = len(first) - len(first.question)
    warm = blender.prefill(other)
    assert warm.report.prefix_rows == common
    logits, kv = forward(stock, other.ids[common:], [(k[:, :common], v[:, :common]) for k, v in kv])
    assert torch.equal(warm.logits, logits)
    assert same_bits(warm.layers, kv)


@every_model
def test_a_prefix_that_covers_all_but_the_question(name):
    """Nothing is stale, and fusing is plain prefix caching."""
    blender, stock, prompt = make(name), tiny_model(name), tiny_prompt(1)
    blender.prefill(replace(prompt, question=tiny_ids(4, seed=9)))
    fusion = blender.fuse(prompt)
    rows = len(prompt) - len(prompt.question)
    assert sources(fusion) == ["prefix"] * 3
    assert (fusion.report.prefix_rows, fusion.report.recomputed_rows, fusion.exact) == (rows, 0, True)
    _, kv = forward(stock, (*prompt.ids[:rows], *tiny_ids(4, seed=9)))
    logits, kv = forward(stock, prompt.question, [(k[:, :rows], v[:, :rows]) for k, v in kv])
    assert torch.equal(fusion.logits, logits)
    assert same_bits(fusion.layers, kv)


@every_model
@pytest.mark.parametrize("cut", [5, 12, 20, 42, 50])
def test_a_prefix_and_moved_chunks_together(name, cut):
    """The prefix may end in the system part, at a seam or within a chunk; the rest of that chunk moves."""
    blender, stock, prompt = make(name), tiny_model(name), tiny_prompt(1)
    blender.encode(prompt.chunks, system=tiny_ids(3, seed=8))
    blender.encode(prompt.chunks, system=prompt.system)
    blender.prefill(Prompt(prompt.ids[:cut], (), (0,)))
    report = blender.fuse(prompt, selector=FullReuse()).report
    assert report.prefix_rows >= cut
    assert report.rows == len(prompt)
    fusion = blender.fuse(prompt, selector=FullRecompute())
    logits, kv = forward(stock, prompt.ids)
    assert off(fusion.logits, logits) <= LIMIT
    assert distance(fusion.layers, kv) <= 1e-10
    answer = blender.generate(fusion, do_sample=False, max_new_tokens=6)
    assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=6)


@every_model
def test_the_whole_prompt_again_runs_its_last_row(name):
    blender, prompt = make(name), tiny_prompt(1)
    first = blender.prefill(prompt)
    again = blender.prefill(prompt)
    assert again.report.prefix_rows == len(prompt) - 1
    assert off(again.logits, first.logits) <= LIMIT


def test_no_chunks_is_plain_prefill_and_says_so():
    blender, stock = make(), tiny_model("llama")
    prompt = Prompt(tiny_ids(20), (), tiny_ids(5, seed=1))
    fusion = blender.fuse(prompt)
    assert fusion.report.fallback == "the prompt has no chunks"
    assert fusion.exact
    assert torch.equal(fusion.logits, forward(stock, prompt.ids)[0])


@every_model
@pytest.mark.parametrize("kind", BUDGETED.values(), ids=BUDGETED)
def test_error_falls_as_the_ratio_rises(name, kind):
    """K/V against full prefill, mean of six prompts; strictly, and to nothing at 1."""
    blender = make(name)
    ratios = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5, 0.7, 1.0)
    kv_errors, divergences = [], []
    prompts = [tiny_prompt(seed, system=10, chunks=(30, 30, 30, 30), question=8) for seed in range(20, 26)]
    truths = [blender.prefill(prompt, remember=False) for prompt in prompts]
    for ratio in ratios:
        fusions = [blender.fuse(prompt, selector=kind(ratio)) for prompt in prompts]
        pairs = list(zip(fusions, truths, strict=True))
        kv_errors.append(sum(distance(fusion.layers, truth.layers) for fusion, truth in pairs))
        divergences.append(sum(divergence(fusion.logits, truth.logits) for fusion, truth in pairs))
    assert all(later < earlier for earlier, later in itertools.pairwise(kv_errors)), kv_errors
    assert kv_errors[-1] < 1e-9
    assert all(later < 1.15 * earlier for earlier, later in itertools.pairwise(divergences)), divergences
    assert divergences[-1] < 1e-7


def divergence(logits, truth):
    """KL from the truth to what was computed, in nats."""
    p, q = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


# --- budget and charge --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUDGETED.values(), ids=BUDGETED)
def test_the_ratio_changes_rows_and_charge(kind):
    blender, prompt = make(), tiny_prompt(3, chunks=(40, 40, 40))
    blender.encode(prompt.chunks, system=prompt.system)
    reports = [blender.fuse(prompt, selector=kind(ratio)).report for ratio in (0.0, 0.1, 0.3, 1.0)]
    # The first chunk stands behind its prelude and is no candidate.
    assert [r.recomputed_rows for r in reports] == [0, 8, 24, 80]
    for less, more in itertools.pairwise(reports):
        assert more.row_layers > less.row_layers
        assert more.ideal_speedup < less.ideal_speedup
        assert sum(more.rows_per_layer) > sum(less.rows_per_layer)


@pytest.mark.parametrize("kind", BUDGETED.values(), ids=BUDGETED)
@pytest.mark.parametrize("rows", [0, 1, 13, 10_000])
def test_a_budget_in_rows(kind, rows):
    blender, prompt = make(), tiny_prompt(3)
    assert blender.fuse(prompt, selector=kind(rows=rows)).report.recomputed_rows == min(rows, 41 + 25)


@pytest.mark.parametrize("selector", [FullReuse(), FirstK(0.0), Random(0.0), QueryAttention(0.0)])
def test_at_ratio_0_only_the_question_runs(selector):
    blender, prompt = make(), tiny_prompt(3)
    blender.encode(prompt.chunks, system=prompt.system)
    report = blender.fuse(prompt, selector=selector).report
    assert report.recomputed_rows == 0
    assert report.states.count("fresh") == len(prompt.question) == 9
    assert report.rows_per_layer == (9, 9, 9, 1), "the last layer runs for the answer's row alone"
    assert report.projected_per_layer == (0, 0, 0, 9)


def test_what_a_check_and_a_probe_cost_is_charged():
    blender, prompt = make(), tiny_prompt(3, chunks=(40, 40, 40))
    blender.encode(prompt.chunks, system=prompt.system)
    reports = {name: blender.fuse(prompt, selector=s).report for name, s in SELECTORS.items()}
    assert reports["query"].probe_per_layer == (9, 9, 9, 9)
    assert reports["kv"].probe_per_layer == ()
    assert reports["kv"].rows_per_layer[0] >= 80 + 9, "all stale rows run below the check layer"
    assert reports["kv"].projected_per_layer[1] >= 80 + 9
    assert reports["kv"].rows_per_layer[1:3] == (16 + 9, 16 + 9)
    assert reports["kv in steps"].rows_per_layer[1:3] == (24 + 9, 16 + 9)
    assert reports["first-k"].row_layers < reports["query"].row_layers
    assert reports["first-k"].row_layers < reports["kv"].row_layers
    assert reports["recompute"].recomputed_rows == 80
    assert QueryAttention(layers=(0, 1)).probe_layers(4) == (0, 1)
    short = blender.fuse(prompt, selector=QueryAttention(0.2, layers=(0, 1))).report
    assert len(short.probe_per_layer) == 2, "a probe stops behind its last layer"


@every_selector
def test_chosen_rows_obey_their_bounds(selector):
    """Only rows of chunks that moved are recomputed; the question always runs."""
    blender = make()
    for seed in range(5):
        prompt = tiny_prompt(seed, chunks=(20, 1, 30, 25))
        report = blender.fuse(prompt, selector=selector).report
        start, stop = prompt.starts[1], len(prompt) - len(prompt.question)
        chosen = [row for row, state in enumerate(report.states) if state == "recomputed"]
        assert all(start <= row < stop for row in chosen)
        assert report.states[stop:] == ("fresh",) * len(prompt.question)
        if hasattr(selector, "budget"):
            assert len(chosen) == round(0.2 * 56)


@pytest.mark.parametrize("selector", [FullReuse(), FirstK(0.3), Random(0.3), FullRecompute()])
@every_model
def test_a_later_token_changes_nothing_before_it(name, selector):
    """Of selectors that do not look at it, to the last bit."""
    prompt = tiny_prompt(4)
    others = (
        replace(prompt, question=(*prompt.question[:4], *tiny_ids(5, seed=99))),
        replace(prompt, chunks=(*prompt.chunks[:2], Chunk(tiny_ids(25, seed=98)))),
    )
    for other in others:
        first = next(i for i, (x, y) in enumerate(zip(prompt.ids, other.ids, strict=True)) if x != y)
        kv = []
        for one in (prompt, other):
            blender = make(name)
            blender.encode(one.chunks, system=one.system)
            kv.append(blender.fuse(one, selector=selector).layers)
        before, behind = (
            [[(k[:, part], v[:, part]) for k, v in x] for x in kv] for part in (slice(first), slice(first, None))
        )
        assert same_bits(*before)
        assert not same_bits(*behind)


# --- what chunks are encoded behind, and for whom -----------------------------------------------------


@pytest.mark.parametrize(("prelude", "base"), [("none", 0), ("bos", 1), ("system", 12)])
def test_preludes(prelude, base):
    blender, stock, prompt = (
        make(tokenizer=tiny_tokenizer(bos=True), prelude=prelude),
        tiny_model("llama"),
        tiny_prompt(1),
    )
    answer = blender.generate(prompt, selector=FullRecompute(), do_sample=False, max_new_tokens=6)
    assert [chunk.moved for chunk in answer.report.chunks] == [start - base for start in prompt.starts]
    assert [chunk.exact for chunk in answer.report.chunks] == [prelude == "system", False, False]
    assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=6)
    stored = [blender.store.get(key) for key in blender.store.keys()]  # noqa: SIM118
    assert {kv.prelude for kv in stored} == {{"none": (), "bos": (1,), "system": prompt.system}[prelude]}


def test_another_system_part_is_another_entry():
    blender, prompt = make(), tiny_prompt(1)
    blender.fuse(prompt)
    assert sources(blender.fuse(replace(prompt, system=tiny_ids(12, seed=55)))) == ["miss"] * 3
    assert sources(blender.fuse(prompt)) == ["hit"] * 3


@pytest.mark.parametrize(
    ("other", "source"),
    [
        ({}, "hit"),
        ({"salt": "tenant b"}, "miss"),
        ({"dtype": torch.bfloat16}, "miss"),
        ({"name": "qwen3"}, "miss"),
        ({"tokenizer": tiny_tokenizer()}, "miss"),
        ({"name": "llama_linear"}, "miss"),
    ],
    ids=["the same", "salt", "dtype", "model", "tokenizer", "rotation"],
)
def test_who_shares_a_stores_entries(other, source):
    store, prompt = MemoryStore(), tiny_prompt(1)
    make(store=store, salt="tenant a").fuse(prompt)
    fusion = make(**{"store": store, "salt": "tenant a", **other}).fuse(prompt)
    assert sources(fusion) == [source] * 3


def test_other_weights_are_another_model():
    store, prompt = MemoryStore(), tiny_prompt(1)
    Blender(tiny_model("llama", seed=0), store=store, check=False).fuse(prompt)
    assert sources(Blender(tiny_model("llama", seed=1), store=store, check=False).fuse(prompt)) == ["miss"] * 3


def test_tenants_that_share_a_store_get_their_own_answers():
    store, prompt = MemoryStore(), tiny_prompt(1)
    tenants = [make(store=store, salt=salt) for salt in ("a", "b")]
    alone = make().fuse(prompt)
    for _ in range(3):
        for tenant in tenants:
            assert off(tenant.fuse(prompt).logits, alone.logits) <= LIMIT
    assert len(list(store.keys())) == 6


def test_a_store_that_keeps_nothing():
    """Chunks that do not fit are used all the same, and encoded again the next time."""
    blender, prompt = make(store=MemoryStore(1)), tiny_prompt(1)
    for _ in range(2):
        fusion = blender.fuse(prompt)
        assert sources(fusion) == ["miss"] * 3
        assert off(fusion.logits, make().fuse(prompt).logits) <= LIMIT


def test_a_bounded_store_over_many_requests():
    """Entries come and go; the answers stay, and what is stored is never written to."""
    blender = make(selector=FirstK(0.3))
    parts = [Chunk(tiny_ids(12 + i, seed=i)) for i in range(8)]
    system, question = tiny_ids(12), tiny_ids(4, seed=50)
    blender.encode(parts, system=system)
    one = next(blender.store.keys())
    original = [(k.clone(), v.clone()) for k, v in blender.store.get(one).layers]
    draw = torch.Generator().manual_seed(0)
    orders = [torch.randperm(8, generator=draw)[:3].tolist() for _ in range(60)]
    truth = [blender.fuse(Prompt(system, [parts[i] for i in order], question)).logits for order in orders]
    assert same_bits(blender.store.get(one).layers, original)
    small = make(selector=FirstK(0.3), store=MemoryStore(blender.store.nbytes // 2))
    for order, logits in zip(orders, truth, strict=True):
        assert off(small.fuse(Prompt(system, [parts[i] for i in order], question)).logits, logits) <= LIMIT
        assert small.store.nbytes <= small.store.limit
    assert small.store.stats.evicted > 0


# --- more turns ---------------------------------------------------------------------------------------


@every_model
def test_a_follow_up_takes_the_fused_context_over(name):
    blender, prompt = make(name, selector=FirstK(0.3)), tiny_prompt(5)
    first = blender.generate(prompt, do_sample=False, max_new_tokens=5)
    longer = replace(prompt, question=(*prompt.question, *first.ids, *tiny_ids(7, seed=60)))
    second = blender.generate(longer, past=first.fusion, do_sample=False, max_new_tokens=5)
    report = second.report
    assert report.recomputed_rows == 0
    assert report.context_rows > 0
    assert report.prefix_rows + report.context_rows == len(prompt)
    assert report.states.count("fresh") == 5 + 7
    assert "context" in sources(second.fusion)
    assert not second.fusion.exact
    assert "approximate" in str(report)
    # The model itself, going on behind the fused K/V.
    stock, new = tiny_model(name), longer.ids[len(prompt) :]
    logits, kv = forward(stock, new, first.fusion.layers)
    assert off(second.fusion.logits, logits) <= LIMIT
    assert distance(second.fusion.layers, kv) <= 1e-10


def test_a_follow_up_of_a_full_recompute_is_full_prefill():
    blender, stock, prompt = make(selector=FullRecompute()), tiny_model("llama"), tiny_prompt(5)
    answer = blender.generate(prompt, do_sample=False, max_new_tokens=5)
    for turn in range(3):
        prompt = replace(prompt, question=(*prompt.question, *answer.ids, *tiny_ids(6, seed=turn)))
        answer = blender.generate(prompt, past=answer.fusion, do_sample=False, max_new_tokens=5)
        assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=5)


def test_a_follow_up_of_an_exact_fusion_is_exact():
    blender, prompt = make(), tiny_prompt(5)
    past = blender.prefill(prompt, remember=False)
    longer = replace(prompt, question=(*prompt.question, *tiny_ids(7, seed=60)))
    fusion = blender.fuse(longer, past=past)
    assert off(fusion.logits, forward(tiny_model("llama"), longer.ids)[0]) <= LIMIT
    assert fusion.exact, "the result is approximate only where the earlier one was"


def test_a_follow_up_in_words():
    """The turn is put into the template, behind the answer, and the context is not touched."""
    blender = make(tokenizer=tiny_tokenizer(template=CHATML), selector=FirstK(0.3))
    prompt = blender.prompt("who built the pier?", ["The old pier was built in 1911.", "Its lamps are lit by hand."])
    first = blender.generate(prompt, do_sample=False, max_new_tokens=6)
    second = blender.follow_up(first, "when?", do_sample=False, max_new_tokens=6)
    assert second.fusion.prompt.ids[: len(prompt)] == prompt.ids
    assert second.report.recomputed_rows == 0
    assert second.report.context_rows + second.report.prefix_rows == len(prompt)
    text = blender.tokenizer.decode(second.fusion.prompt.ids[len(prompt) :])
    assert text.endswith("<|im_end|>\n<|im_start|>user\nQuestion: when?<|im_end|>\n<|im_start|>assistant\n")
    third = blender.follow_up(second, "where?", do_sample=False, max_new_tokens=6)
    assert third.report.context_rows + third.report.prefix_rows == len(second.fusion.prompt)


@pytest.mark.parametrize("chunks", [(), (20,)])
def test_an_unrelated_past_does_no_harm(chunks):
    blender, stock = make(selector=FullRecompute()), tiny_model("llama")
    past = blender.fuse(tiny_prompt(1))
    prompt = tiny_prompt(2, chunks=chunks)
    fusion = blender.fuse(prompt, past=past)
    assert off(fusion.logits, forward(stock, prompt.ids)[0]) <= LIMIT


# --- RoPE that changes with the length ----------------------------------------------------------------


def test_dynamic_ntk_beyond_its_limit_falls_back_and_says_why():
    blender, stock, prompt = make("llama_dynamic"), tiny_model("llama_dynamic"), tiny_prompt(8, chunks=(90, 90, 90))
    fusion = blender.fuse(prompt)
    assert "dynamic NTK RoPE rescales its frequencies beyond 25" in fusion.report.fallback
    logits, kv = forward(stock, prompt.ids)
    assert off(fusion.logits, logits) <= LIMIT
    assert distance(fusion.layers, kv) <= 1e-10


def test_dynamic_ntk_beyond_its_limit_generates_as_the_model_does():
    blender, stock, prompt = make("llama_dynamic"), tiny_model("llama_dynamic"), tiny_prompt(8, chunks=(90, 90, 90))
    answer = blender.generate(prompt, do_sample=False, max_new_tokens=8)
    assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=8)


def test_dynamic_ntk_a_long_prompt_takes_nothing_from_a_short_one():
    """The prefix of a short prompt was turned by other angles."""
    blender, stock, prompt = make("llama_dynamic"), tiny_model("llama_dynamic"), tiny_prompt(8, chunks=(90, 90, 90))
    blender.prefill(Prompt(prompt.system, prompt.chunks[:1], (5,)))
    assert off(blender.prefill(prompt).logits, forward(stock, prompt.ids)[0]) <= LIMIT


def test_dynamic_ntk_a_short_prompt_takes_nothing_from_a_long_one():
    blender, prompt = make("llama_dynamic"), tiny_prompt(8, chunks=(90, 90, 90))
    blender.prefill(prompt)
    short = Prompt(prompt.system, prompt.chunks[:1], (5, 6, 7))
    for fusion in (blender.prefill(short), blender.fuse(short, selector=FullRecompute())):
        assert off(fusion.logits, forward(tiny_model("llama_dynamic"), short.ids)[0]) <= LIMIT


def test_dynamic_ntk_within_its_limit_after_a_long_call():
    blender, stock = make("llama_dynamic", selector=FullRecompute()), tiny_model("llama_dynamic")
    forward(blender.model, tiny_ids(300))
    prompt = tiny_prompt(3)
    fusion = blender.fuse(prompt)
    assert fusion.report.fallback is None
    assert off(fusion.logits, forward(stock, prompt.ids)[0]) <= LIMIT


@pytest.mark.parametrize("chunks", [(10, 12, 9), (20, 15, 12)])
def test_longrope_answers_across_its_switch(chunks):
    """The prompt ends before row 64, or the answer begins behind it: the model drops its cache on the way."""
    blender, stock = make("phi3_longrope", selector=FullRecompute()), tiny_model("phi3_longrope")
    prompt = tiny_prompt(3, system=8, chunks=chunks, question=6)
    answer = blender.generate(prompt, do_sample=False, max_new_tokens=30)
    assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=30)


@pytest.mark.parametrize("together", [False, True], ids=["short passes", "a long and padded pass"])
def test_longrope_uses_chunks_of_any_pass_in_a_long_prompt(together):
    """Alone, a chunk is encoded below the switch; in a batch with a long one, its pass is beyond it."""
    blender, stock, prompt = make("phi3_longrope"), tiny_model("phi3_longrope"), tiny_prompt(3, chunks=(20, 30, 60))
    for part in [prompt.chunks] if together else [[chunk] for chunk in prompt.chunks]:
        blender.encode(part, system=prompt.system)
    fusion = blender.fuse(prompt, selector=FullReuse())
    assert fusion.report.hit_rate == 1.0
    _, kv = forward(stock, prompt.ids)
    assert off(fusion.layers[0][0], kv[0][0]) <= 1e-6, "layer 0 sees no other rows: its moved keys are exact"


# --- generation behaves as in transformers ------------------------------------------------------------

OPTIONS = {
    "greedy": {"do_sample": False, "max_new_tokens": 12},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20, "max_new_tokens": 12},
    "nucleus": {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3, "max_new_tokens": 8},
    "beams": {"num_beams": 3, "max_new_tokens": 8, "do_sample": False},
    "all beams": {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 8, "do_sample": False},
    "beam sampling": {"num_beams": 3, "do_sample": True, "max_new_tokens": 8},
    "repetition penalty": {"repetition_penalty": 1.7, "do_sample": False, "max_new_tokens": 12},
    "no repeated pairs": {"no_repeat_ngram_size": 2, "do_sample": False, "max_new_tokens": 25},
    "at least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 60)), "do_sample": False, "max_new_tokens": 12},
    "forbidden": {"bad_words_ids": [[i] for i in range(100, 250)], "do_sample": False, "max_new_tokens": 12},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@every_model
def test_generation_options(name, options):
    blender, stock = make(name, selector=FullRecompute()), tiny_model(name)
    prompt = tiny_prompt(6).reordered((2, 1, 0))
    fusion = blender.fuse(prompt)
    torch.manual_seed(3)
    truth = plain(stock, prompt.ids, **options)
    torch.manual_seed(3)
    answer = blender.generate(fusion, **options)
    assert answer.output[:, len(prompt) :].tolist() == truth
    assert list(answer.ids) == truth[0]


def test_a_repetition_penalty_counts_the_prompt():
    """It must see the ids of the reused chunks, though they are not run again."""
    prompt = tiny_prompt(6)
    penalised = make(selector=FullRecompute()).generate(
        prompt, repetition_penalty=50.0, do_sample=False, max_new_tokens=8
    )
    assert not set(penalised.ids) & set(prompt.ids)


def test_stop_strings():
    tokenizer = tiny_tokenizer()
    blender, stock = make(tokenizer=tokenizer, selector=FullRecompute()), tiny_model("llama")
    prompt = tiny_prompt(6)
    free = blender.generate(prompt, do_sample=False, max_new_tokens=20)
    word = tokenizer.decode(free.ids[4:6])
    assert word.strip()
    stopped = blender.generate(prompt, do_sample=False, max_new_tokens=20, stop_strings=[word])
    options = {"do_sample": False, "max_new_tokens": 20, "stop_strings": [word], "tokenizer": tokenizer}
    assert [list(stopped.ids)] == plain(stock, prompt.ids, **options)
    assert len(stopped.ids) < 20
    assert stopped.text == tokenizer.decode(stopped.ids, skip_special_tokens=True).strip()


def test_scores_and_dictionaries():
    blender, stock, prompt = make(selector=FullRecompute()), tiny_model("llama"), tiny_prompt(6)
    options = {"do_sample": False, "max_new_tokens": 5, "return_dict_in_generate": True, "output_scores": True}
    answer = blender.generate(prompt, **options)
    ids_1T = torch.tensor([prompt.ids])
    truth = stock.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), **options)
    assert torch.equal(answer.output.sequences, truth.sequences)
    assert answer.ids == tuple(truth.sequences[0, len(prompt) :].tolist())
    assert all(off(a, b) <= 1e-4 for a, b in zip(answer.output.scores, truth.scores, strict=True))


class Ban(LogitsProcessor):
    """Forbids ids, and counts its calls."""

    def __init__(self, ids=(), fail_at=None):
        self.ids, self.fail_at, self.calls = list(ids), fail_at, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("the processor gave up")
        scores = scores.clone()
        scores[:, self.ids] = -torch.inf
        return scores


def test_logits_processors():
    blender, stock, prompt = make(selector=FullRecompute()), tiny_model("llama"), tiny_prompt(6)
    ban = LogitsProcessorList([Ban(range(0, 256, 2))])
    answer = blender.generate(prompt, do_sample=False, max_new_tokens=8, logits_processor=ban)
    truth = plain(stock, prompt.ids, do_sample=False, max_new_tokens=8, logits_processor=ban)
    assert [list(answer.ids)] == truth
    assert all(token % 2 for token in answer.ids)


@every_model
def test_padding_tokens_in_question_and_system(name):
    """transformers would guess a mask from them; the prompt has none."""
    blender, stock = make(name, selector=FullRecompute()), tiny_model(name)
    assert stock.config.pad_token_id == 0
    base = tiny_prompt(6)
    prompt = Prompt((0, 0, *base.system[:5], 0), base.chunks, (*base.question[:3], 0, 0, *base.question[3:], 0))
    answer = blender.generate(prompt, do_sample=False, max_new_tokens=10)
    assert [list(answer.ids)] == plain(stock, prompt.ids, do_sample=False, max_new_tokens=10)


@every_model
def test_a_fusion_answers_any_number_of_times(name):
    blender, prompt = make(name, selector=FirstK(0.3)), tiny_prompt(6)
    fusion = blender.fuse(prompt)
    before = [(k.clone(), v.clone()) for k, v in fusion.layers]
    options = {"do_sample": False, "max_new_tokens": 30}
    first = blender.generate(fusion, **options)
    blender.generate(fusion, num_beams=3, max_new_tokens=10, do_sample=False)
    assert same_bits(fusion.layers, before)
    assert blender.generate(fusion, **options).ids == first.ids
    by_hand = blender.model.generate(**fusion.inputs(), **options)
    assert tuple(by_hand[0, len(prompt) :].tolist()) == first.ids


def test_the_cache_is_an_ordinary_one():
    blender, prompt = make(), tiny_prompt(6)
    fusion = blender.fuse(prompt)
    assert isinstance(fusion.cache, DynamicCache)
    assert fusion.cache.get_seq_length() == len(prompt) - 1
    assert fusion.cache is not fusion.cache, "each access makes a new one"
    with torch.inference_mode():
        out = tiny_model("llama")(input_ids=torch.tensor([prompt.ids[-1:]]), cache=fusion.cache, use_cache=True)
    assert off(out.logits[0, -1], fusion.logits) <= LIMIT


# --- streaming ----------------------------------------------------------------------------------------


def test_a_stream_is_the_answer_in_pieces():
    blender = make(tokenizer=tiny_tokenizer(), selector=FullRecompute())
    prompt = tiny_prompt(6)
    pieces = list(blender.stream(prompt, do_sample=False, max_new_tokens=40))
    assert len(pieces) > 1
    assert "".join(pieces).strip() == blender.generate(prompt, do_sample=False, max_new_tokens=40).text


def test_leaving_a_stream_stops_the_generation():
    blender, prompt, count = make(tokenizer=tiny_tokenizer()), tiny_prompt(6), Ban([2])
    threads = set(threading.enumerate())
    options = {"do_sample": False, "max_new_tokens": 400, "logits_processor": LogitsProcessorList([count])}
    pieces = blender.stream(prompt, **options)
    assert next(pieces)
    pieces.close()
    assert set(threading.enumerate()) == threads
    assert 0 < count.calls < 400


def test_an_error_in_a_stream_reaches_the_reader():
    blender, prompt = make(tokenizer=tiny_tokenizer()), tiny_prompt(6)
    threads = set(threading.enumerate())
    processors = LogitsProcessorList([Ban(fail_at=15)])
    seen = []
    with pytest.raises(RuntimeError, match="the processor gave up"):
        seen.extend(blender.stream(prompt, do_sample=False, max_new_tokens=40, logits_processor=processors))
    with pytest.raises(ValueError, match="max_new_tokens"):
        list(blender.stream(prompt, max_new_tokens=-1))
    assert set(threading.enumerate()) == threads


def test_a_stream_needs_a_tokenizer():
    with pytest.raises(PromptError, match="no tokenizer"):
        make().stream(tiny_prompt(1))


# --- threads, and the model's own calls ---------------------------------------------------------------


@torch.inference_mode()
def padded_generation(model):
    """An ordinary batch of two prompts of different lengths, padded on the left."""
    short, long = tiny_ids(9, seed=1), tiny_ids(30, seed=2)
    ids = torch.tensor([(0,) * 21 + short, long])
    mask = (torch.arange(30) >= torch.tensor([[21], [0]])).long()
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)


@torch.inference_mode()
def ordinary_logits(model):
    return model(input_ids=torch.tensor([tiny_ids(40, seed=3)])).logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "gemma2", "gpt_oss", "falcon", "doge"])
def test_ordinary_calls_are_as_on_an_untouched_model(name):
    blender, stock = make(name), tiny_model(name)
    for _ in range(2):
        assert torch.equal(ordinary_logits(blender.model), ordinary_logits(stock))
        assert torch.equal(padded_generation(blender.model), padded_generation(stock))
        blender.fuse(tiny_prompt(1))
    blender.close()
    assert torch.equal(padded_generation(blender.model), padded_generation(stock))


@every_model
def test_eight_threads_on_one_blender(name):
    """Different selectors and prompts, mixed with the model's own calls: every result as if alone."""
    blender, stock = make(name), tiny_model(name)
    jobs = [(tiny_prompt(seed), selector) for seed in (1, 2) for selector in SELECTORS.values()]
    for prompt, _ in jobs:
        blender.encode(prompt.chunks, system=prompt.system)
    alone = [blender.fuse(prompt, selector=selector) for prompt, selector in jobs]
    logits, batch = ordinary_logits(stock), padded_generation(stock)
    start = threading.Barrier(8)

    def work(worker):
        start.wait()
        for turn in range(len(jobs)):
            index = (turn + 2 * worker) % len(jobs)
            prompt, selector = jobs[index]
            fusion = blender.fuse(prompt, selector=selector)
            assert torch.equal(fusion.logits, alone[index].logits)
            assert same_bits(fusion.layers, alone[index].layers)
            assert fusion.report.states == alone[index].report.states
            if turn % 4 == worker % 4:
                assert torch.equal(ordinary_logits(blender.model), logits)
                assert torch.equal(padded_generation(blender.model), batch)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, worker) for worker in range(8)]:
            done.result()


def test_threads_that_all_miss_the_same_chunks():
    blender, prompt = make(), tiny_prompt(1)
    start = threading.Barrier(4)

    def work(_):
        start.wait()
        return blender.fuse(prompt, selector=FirstK(0.3)).logits

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))
    assert all(off(x, results[0]) <= LIMIT for x in results)
    assert len(list(blender.store.keys())) == 3


# --- attaching and letting go -------------------------------------------------------------------------


def hooks(model):
    return sum(len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon"])
def test_two_blenders_on_one_model(name):
    """To compare preludes or stores, say."""
    model, prompt = tiny_model(name), tiny_prompt(1)
    truth = make(name, selector=FirstK(0.3)).fuse(prompt)
    first = Blender(model, selector=FirstK(0.3))
    second = Blender(model, selector=FirstK(0.3), prelude="none")
    assert off(first.fuse(prompt).logits, truth.logits) <= LIMIT
    second.fuse(prompt)
    assert torch.equal(padded_generation(model), padded_generation(tiny_model(name)))
    first.close()
    assert second.fuse(prompt, selector=FullRecompute()).report.fallback is None
    full = forward(tiny_model(name), prompt.ids)[0]
    assert off(second.fuse(prompt, selector=FullRecompute()).logits, full) <= LIMIT
    second.close()
    assert hooks(model) == 0
    assert model.config._attn_implementation == tiny_model(name).config._attn_implementation
    assert torch.equal(ordinary_logits(model), ordinary_logits(tiny_model(name)))


def test_one_blender_after_another():
    model, prompt = tiny_model("gemma2"), tiny_prompt(1)
    with Blender(model, selector=FirstK(0.3)) as first:
        one = first.fuse(prompt).logits
    with Blender(model, selector=FirstK(0.3)) as second:
        assert torch.equal(second.fuse(prompt).logits, one)
    assert hooks(model) == 0


def test_closing_twice():
    blender = make()
    blender.close()
    blender.close()
    assert hooks(blender.model) == 0


def test_a_closed_blender_says_so():
    """Without its hooks nothing would be narrowed, and the report would be wrong."""
    blender = make()
    blender.close()
    for selector in (FirstK(0.2), KVDeviation(0.2)):
        with pytest.raises(KVBlendError, match="closed"):
            blender.fuse(tiny_prompt(1), selector=selector)


def counts_its_rows(module, args, output):
    """A forward hook that makes rows depend on each other other than by attention."""
    return output * (1 + 0.01 * output.shape[1])


@pytest.mark.parametrize(("name", "why"), [("falcon", "selector"), ("llama", "probe layer"), ("qwen3", "proof")])
def test_a_blender_that_is_refused_leaves_nothing_behind(name, why):
    model = tiny_model(name)
    if why == "proof":
        model.model.layers[2].mlp.register_forward_hook(counts_its_rows)
    selector = {"selector": QueryAttention(), "probe layer": QueryAttention(layers=(9,)), "proof": None}[why]
    with pytest.raises((UnsupportedModel, BudgetError)):
        Blender(model, selector=selector)
    assert hooks(model) == 0
    assert model.config._attn_implementation == tiny_model(name).config._attn_implementation


def test_the_load_time_proof_runs_and_finds_a_broken_model():
    assert make(check=True).fuse(tiny_prompt(1))
    model = tiny_model("llama")
    handle = model.model.layers[2].mlp.register_forward_hook(counts_its_rows)
    with pytest.raises(SelfCheckFailed, match=r"failed its load-time proof: .* is off by .*check=False"):
        Blender(model)
    assert Blender(model, check=False)
    handle.remove()


def test_the_default_selector_fits_the_model():
    assert isinstance(make("llama").selector, QueryAttention)
    assert isinstance(make("falcon").selector, FirstK)


# --- interruptions ------------------------------------------------------------------------------------


class Interrupted(MemoryStore):
    """A memory store in which someone presses Ctrl-C."""

    left = None

    def put(self, kv):
        if self.left == 0:
            self.left = None
            raise KeyboardInterrupt
        if self.left is not None:
            self.left -= 1
        return super().put(kv)


@pytest.mark.parametrize("call", ["encode", "fuse"])
def test_ctrl_c_keeps_finished_chunks(call):
    prompt = tiny_prompt(9, chunks=(20, 21, 22, 23, 24, 25))
    blender = make(store=Interrupted())
    blender.setup = replace(blender.setup, batch_rows=50)  # two chunks at a time
    blender.store.left = 4

    def go():
        return blender.encode(prompt.chunks, system=prompt.system) if call == "encode" else blender.fuse(prompt)

    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(list(blender.store.keys())) == 4
    done = go()
    if call == "encode":
        assert (done.encoded, done.reused) == (2, 4)
    else:
        assert sorted(sources(done)) == ["hit"] * 4 + ["miss"] * 2
    whole = make()
    whole.setup = replace(whole.setup, batch_rows=50)
    whole.encode(prompt.chunks, system=prompt.system)
    assert torch.equal(blender.fuse(prompt).logits, whole.fuse(prompt).logits)


def test_ctrl_c_in_the_third_batch_keeps_the_first_two():
    """A batch is in the store before the next one runs."""
    blender, prompt = make(), tiny_prompt(9, chunks=(20, 21, 22, 23, 24, 25))
    blender.setup = replace(blender.setup, batch_rows=50)
    blender.encode(prompt.chunks[:1], system=prompt.system)  # so that the prelude is there
    passes = itertools.count()

    def pressed(*_):
        if next(passes) == 2:
            raise KeyboardInterrupt

    handle = blender.model.register_forward_pre_hook(pressed)
    with pytest.raises(KeyboardInterrupt):
        blender.encode(prompt.chunks, system=prompt.system)
    handle.remove()
    assert len(list(blender.store.keys())) == 1 + 4
    assert blender.encode(prompt.chunks, system=prompt.system)[:2] == (1, 5)


def test_ctrl_c_while_progress_is_shown(monkeypatch):
    def pressed(items, **options):
        for index, item in enumerate(items):
            yield item
            if index == 2:
                raise KeyboardInterrupt

    blender, prompt = make(), tiny_prompt(9, chunks=(20, 21, 22, 23, 24, 25))
    monkeypatch.setattr(blend.library, "track", pressed)
    with pytest.raises(KeyboardInterrupt):
        blender.encode(prompt.chunks, system=prompt.system)
    assert len(list(blender.store.keys())) == 3
    monkeypatch.undo()
    assert blender.encode(prompt.chunks, system=prompt.system)[:2] == (3, 3)


def test_ctrl_c_in_the_model_leaves_it_usable():
    """A pass that is torn in the middle leaves no state behind on the model."""
    blender, prompt = make(selector=FirstK(0.3)), tiny_prompt(1)
    blender.encode(prompt.chunks, system=prompt.system)
    truth = blender.fuse(prompt).logits

    def pressed(*_):
        raise KeyboardInterrupt

    handle = blender.model.model.layers[2].register_forward_hook(pressed)
    with pytest.raises(KeyboardInterrupt):
        blender.fuse(prompt)
    handle.remove()
    assert torch.equal(blender.fuse(prompt).logits, truth)
    assert torch.equal(ordinary_logits(blender.model), ordinary_logits(tiny_model("llama")))


# --- a real model -------------------------------------------------------------------------------------

PASSAGES = (
    "The old pier at Marrow Bay was built by Ines Caldera in 1911, after the storm had taken the wooden one.",
    "The keeper of the lighthouse feeds forty gulls every morning and writes their names in a book.",
    "Bread in Marrow Bay is baked with sea water, which is why visitors call it grey bread.",
)


@pytest.fixture(scope="module")
def real(smollm2):
    model, tokenizer = smollm2
    with Blender(model, tokenizer) as blender:
        yield blender


@pytest.mark.slow
def test_smollm2_five_times_and_in_every_order(real):
    prompt = real.prompt("Who built the pier?", PASSAGES)
    real.encode(PASSAGES)
    first, *others = (real.generate(prompt, do_sample=False, max_new_tokens=10) for _ in range(5))
    assert all(torch.equal(other.fusion.logits, first.fusion.logits) for other in others)
    assert {other.text for other in others} == {first.text}
    for order in itertools.permutations(range(3)):
        fusion = real.fuse(prompt.reordered(order))
        assert sources(fusion) == ["hit"] * 3


@pytest.mark.slow
def test_smollm2_knows_the_answer(real):
    """Words of the passages that no model has read before, through the fused path."""
    for selector in (QueryAttention(), KVDeviation(), FirstK(), FullRecompute()):
        prompt = real.prompt("Who built the pier?", PASSAGES).reordered((1, 0, 2))
        answer = real.generate(prompt, selector=selector, do_sample=False, max_new_tokens=16)
        assert "Ines" in answer.text, selector


@pytest.mark.slow
def test_smollm2_one_chunk_is_stock_prefix_caching(real):
    prompt = real.prompt("Who built the pier?", PASSAGES[:1])
    real.encode(PASSAGES[:1])
    fusion = real.fuse(prompt, selector=FullReuse())
    _, kv = forward(real.model, prompt.system)
    _, kv = forward(real.model, prompt.chunks[0].ids, kv)
    logits, kv = forward(real.model, prompt.question, kv)
    assert torch.equal(fusion.logits, logits)
    assert same_bits(fusion.layers, kv)
