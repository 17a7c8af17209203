"""What a request does about chunks that are missing, damaged, slow to read, or another tenant's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from blend import Blender, Chunk, FirstK, FullReuse, KVDeviation, MemoryStore, Prompt, PromptError, QueryAttention
from blend.errors import CorruptEntry, StoreError
from blend.prefix import BlockPrefixCache
from blend.stores.base import Store
from blend.stores.codecs import Plain
from blend.stores.entry import pack, read_head
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model

SELECTORS = [FullReuse(), FirstK(0.3), KVDeviation(0.3), QueryAttention(0.3)]
every_selector = pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: s.name)


def make(name="llama", **options):
    return Blender(tiny_model(name, torch.float32), None, check=False, **options)


def sources(fusion):
    return [chunk.source for chunk in fusion.report.chunks]


class SlowStore(Store):
    """Entries as bytes, read layer by layer, as a disk or a server would have it; one may be spoilt."""

    def __init__(self):
        self.entries = {}
        self.before_read = lambda key, layer: None

    def put(self, kv):
        self.entries[kv.key] = pack(kv, Plain())
        return True

    def get(self, key):
        return self.get_many([key])[0]

    def get_many(self, keys, *, layerwise=False):
        return [self._open(key, layerwise) if key in self.entries else None for key in keys]

    def _open(self, key, layerwise):
        packed = self.entries[key]
        head = read_head(packed.head, key)

        def read(layer):
            self.before_read(key, layer)
            self.stats.add(bytes_read=len(packed.layers[layer]), read_seconds=1e-3)
            return packed.layers[layer]

        return head.lazy(read) if layerwise else head.whole(read)

    def delete(self, key):
        return self.entries.pop(key, None) is not None

    def __contains__(self, key):
        return key in self.entries

    def keys(self):
        return iter(list(self.entries))

    def spoil(self, key, layer):
        head, layers = self.entries[key]
        wrong = bytes([layers[layer][0] ^ 1]) + layers[layer][1:]
        self.entries[key] = type(self.entries[key])(head, (*layers[:layer], wrong, *layers[layer + 1 :]))


# --- layers that are read while others compute -----------------------------------------------------------


@every_selector
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "phi3", "deepseek_v3"])
def test_a_slow_store_changes_nothing(name, overlap, selector):
    prompt = tiny_prompt(3)
    plain, slow = make(name), make(name, store=SlowStore())
    slow.setup = replace(slow.setup, overlap=overlap)
    for blender in (plain, slow):
        blender.encode(prompt.chunks, system=prompt.system)
    a, b = plain.fuse(prompt, selector=selector), slow.fuse(prompt, selector=selector)
    assert torch.equal(a.logits, b.logits)
    assert all(torch.equal(x, y) for p, q in zip(a.layers, b.layers, strict=True) for x, y in zip(p, q, strict=True))
    assert sources(b) == ["hit"] * 3
    assert a.report.load.nbytes == 0
    assert b.report.load.nbytes == sum(p.nbytes for p in slow.store.entries.values())
    assert "read" in str(b.report)


def test_early_layers_compute_while_late_ones_are_read():
    """The last layer of a chunk is handed out only once layer 0 of the pass has run."""
    blender, prompt = make(store=SlowStore()), tiny_prompt(3)
    blender.encode(prompt.chunks, system=prompt.system)
    ran = threading.Event()
    handle = blender.view.layers[0].register_forward_hook(lambda *_: ran.set())
    last = len(blender.view.layers) - 1

    def wait(key, layer):
        if layer == last:
            assert ran.wait(60), "layer 0 has waited for the last layer's KV"

    blender.store.before_read = wait
    fusion = blender.fuse(prompt, selector=FirstK(0.3))
    handle.remove()
    assert fusion.report.load.seconds > 0


@every_selector
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_damaged_layer_is_a_miss(layer, overlap, selector):
    prompt = tiny_prompt(3)
    blender = make(store=SlowStore())
    blender.setup = replace(blender.setup, overlap=overlap)
    truth = blender.fuse(prompt, selector=selector)
    again = blender.fuse(prompt, selector=selector)
    key = blender.setup.plan(prompt.system).key(prompt.chunks[1])
    blender.store.spoil(key, layer)
    healed = blender.fuse(prompt, selector=selector)
    assert sources(healed) == ["hit", "miss", "hit"]
    assert "damaged in the store" in healed.report.chunks[1].why
    assert torch.equal(again.logits, truth.logits)
    assert torch.allclose(healed.logits, truth.logits, atol=1e-5)
    assert sources(blender.fuse(prompt, selector=selector)) == ["hit"] * 3, "the entry is whole again"


def test_several_damaged_chunks_and_one_that_cannot_be_removed():
    class Stubborn(SlowStore):
        def delete(self, key):
            return False

    prompt = tiny_prompt(3)
    blender = make(store=Stubborn())
    blender.encode(prompt.chunks, system=prompt.system)
    for chunk in prompt.chunks:
        blender.store.spoil(blender.setup.plan(prompt.system).key(chunk), 1)
    assert sources(blender.fuse(prompt)) == ["miss"] * 3


def test_a_reader_that_fails_in_its_own_way_is_an_error():
    """Only damage is a miss: a bug is not hidden."""
    prompt = tiny_prompt(3)
    blender = make(store=SlowStore())
    blender.encode(prompt.chunks, system=prompt.system)

    def broken(key, layer):
        raise ZeroDivisionError

    blender.store.before_read = broken
    with pytest.raises(ZeroDivisionError):
        blender.fuse(prompt)
    blender.store.before_read = lambda key, layer: None
    assert sources(blender.fuse(prompt)) == ["hit"] * 3


def test_damage_is_an_error_for_whoever_reads_layers_himself():
    prompt = tiny_prompt(3)
    blender = make(store=SlowStore())
    blender.encode(prompt.chunks, system=prompt.system)
    key = next(blender.store.keys())
    blender.store.spoil(key, 0)
    with pytest.raises(CorruptEntry, match="not what was written"):
        blender.store.get(key)


# --- foreign entries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["fingerprint", "ids", "layers"])
def test_an_entry_that_is_not_this_chunk_is_removed(what):
    prompt = tiny_prompt(3)
    blender = make()
    blender.encode(prompt.chunks, system=prompt.system)
    key = blender.setup.plan(prompt.system).key(prompt.chunks[0])
    kv = blender.store.get(key)
    wrong = {"fingerprint": "another", "ids": (1, 2, 3), "layers": kv.layers[:1]}
    blender.store.put(replace(kv, **{what: wrong[what]}))
    assert sources(blender.fuse(prompt)) == ["miss", "hit", "hit"]
    assert blender.store.stats.foreign == 1
    assert sources(blender.fuse(prompt)) == ["hit"] * 3


def test_an_adapter_has_entries_of_its_own():
    prompt, store = tiny_prompt(3), MemoryStore()
    model = tiny_model("llama", torch.float32)
    with Blender(model, None, check=False, store=store, adapter="lora-1") as one:
        one.encode(prompt.chunks, system=prompt.system)
    with Blender(model, None, check=False, store=store) as other:
        assert sources(other.fuse(prompt)) == ["miss"] * 3
    with Blender(model, None, check=False, store=store, adapter="lora-1") as same:
        assert sources(same.fuse(prompt)) == ["hit"] * 3


# --- prefill first, encode afterwards ----------------------------------------------------------------------


def test_prefill_on_a_miss_answers_exactly_and_encodes_afterwards():
    prompt = tiny_prompt(3)
    blender = make(on_miss="prefill")
    first = blender.fuse(prompt)
    assert first.exact
    assert first.report.method == "prefill"
    assert "3 of 3 chunks are not in the store" in first.report.fallback
    assert all("encoded afterwards" in chunk.why for chunk in first.report.chunks)
    assert torch.equal(first.logits, make().prefill(prompt).logits)
    blender.drain()
    assert len(list(blender.store.keys())) == 3
    moved = prompt.reordered([2, 0, 1])
    second = blender.fuse(moved)
    assert sources(second) == ["hit"] * 3
    assert torch.allclose(second.logits, _encoded(moved).logits, atol=1e-5)


def _encoded(prompt):
    blender = make()
    for chunk in prompt.reordered([1, 2, 0]).chunks:
        blender.encode([chunk], system=prompt.system)
    return blender.fuse(prompt)


def test_prefill_on_a_miss_encodes_only_what_is_missing():
    prompt = tiny_prompt(3)
    blender = make(on_miss="prefill")
    blender.encode(prompt.chunks[:2], system=prompt.system)
    report = blender.fuse(prompt).report
    assert "1 of 3" in report.fallback
    blender.drain()
    assert sources(blender.fuse(prompt.reordered([1, 2, 0]))) == ["hit"] * 3


def test_closing_encodes_what_is_left():
    prompt, store = tiny_prompt(3), MemoryStore()
    with make(on_miss="prefill", store=store) as blender:
        blender.fuse(prompt)
    assert len(list(store.keys())) == 3


@pytest.mark.parametrize("option", [{"on_miss": "guess"}, {"loading": "fast"}, {"prelude": "all"}])
def test_a_wrong_choice_says_what_there_is(option):
    ((name, value),) = option.items()
    with pytest.raises(PromptError, match=f"{name} is '{value}': choose '"):
        make(**option)


def test_a_store_that_cannot_be_opened_leaves_the_model_as_it_was():
    model = tiny_model("llama", torch.float32)
    with pytest.raises(StoreError, match="gopher"):
        Blender(model, None, check=False, store="gopher://hole")
    assert not any(module._forward_pre_hooks for module in model.modules())


# --- what is worth keeping ---------------------------------------------------------------------------------


def crowded(policy, keep):
    """A store with room for three chunks: ``keep(blender, chunk, system)``, then five others; is the first there?"""
    prompt = tiny_prompt(3, chunks=(30, 30, 30, 30, 30, 30))
    size = make().encode(prompt.chunks[:1], system=prompt.system).nbytes
    blender = make(store=MemoryStore(3 * size, policy=policy))
    keep(blender, prompt.chunks[0], prompt.system)
    for chunk in prompt.chunks[1:]:
        blender.encode([chunk], system=prompt.system)
    return blender, prompt, blender.setup.plan(prompt.system).key(prompt.chunks[0]) in blender.store


@pytest.mark.parametrize(("priority", "stays"), [(90, True), (35, False), (0, False)])
def test_a_priority_keeps_a_chunk(priority, stays):
    def keep(blender, chunk, system):
        blender.encode([chunk], system=system, priority=priority)

    assert crowded("priority", keep)[2] == stays


def test_a_pin_keeps_a_chunk_until_it_is_taken_off():
    def keep(blender, chunk, system):
        blender.encode([chunk], system=system)
        assert blender.pin([chunk], system=system) == 1

    blender, prompt, there = crowded("lru", keep)
    assert there
    assert blender.pin([Chunk((9, 9))], system=prompt.system) == 0, "nothing is there to pin"
    assert blender.unpin(prompt.chunks[:1], system=prompt.system) == 1
    assert blender.unpin(prompt.chunks[:1], system=prompt.system) == 0
    blender.encode(prompt.chunks[1:4], system=prompt.system)
    assert blender.setup.plan(prompt.system).key(prompt.chunks[0]) not in blender.store


def test_what_encoding_took_is_kept_with_the_entry():
    prompt = tiny_prompt(3)
    blender = make()
    blender.encode(prompt.chunks, system=prompt.system, priority=80, duration=60.0)
    for key in blender.store.keys():  # noqa: SIM118  # a store is no dict
        cost, priority, duration = blender.store.get(key).retention
        assert cost > 0
        assert (priority, duration) == (80, 60.0)


# --- once for all who want it ------------------------------------------------------------------------------


def test_the_same_missing_chunks_are_encoded_once():
    blender, prompt = make(), tiny_prompt(1)
    start = threading.Barrier(8)

    def work(seed):
        start.wait()
        order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
        return blender.fuse(prompt.reordered(order), selector=FirstK(0.3)).report

    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(work, range(8)))
    made = [chunk for report in reports for chunk in report.chunks if chunk.source == "miss"]
    assert len(made) == 3, "each of the three chunks is encoded by one request"


def test_if_the_first_fails_another_does_it():
    """A request that is interrupted while it encodes does not take the waiting ones with it."""
    blender, prompt = make(), tiny_prompt(1)
    entered, go = threading.Event(), threading.Event()
    inner = blender.store.put

    def put(kv):
        if not entered.is_set():
            entered.set()
            assert go.wait(60)
            raise KeyboardInterrupt
        return inner(kv)

    blender.store.put = put
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(blender.fuse, prompt)
        assert entered.wait(60)
        second = pool.submit(blender.fuse, prompt)
        go.set()
        with pytest.raises(KeyboardInterrupt):
            first.result(60)
        assert sources(second.result(60)).count("miss") >= 1
    assert len(list(blender.store.keys())) == 3


# --- tenants -----------------------------------------------------------------------------------------------


def visible(report):
    """Everything that a tenant can see of a request but its clock."""
    return {k: v for k, v in report.as_dict().items() if k not in ("seconds", "ttft", "load")}


def test_a_tenant_cannot_tell_another_tenants_hit():
    """What a request does, look-ups and computing alike, is the same whether or not another tenant knows the text."""
    prompt, unknown = tiny_prompt(1), tiny_prompt(1)
    for known in (True, False):
        blender = make()
        if known:
            other = blender.tenant("other")
            other.fuse(prompt)
            other.prefill(prompt)
        spy = blender.tenant("spy")
        before = vars(blender.store.stats).copy()
        report = spy.fuse(unknown).report
        done = {name: getattr(blender.store.stats, name) - before[name] for name in ("hits", "misses")}
        seen = visible(report), visible(spy.prefill(unknown).report), done
        if known:
            expected = seen
    assert seen == expected


def test_a_tenant_finds_its_own():
    blender, prompt = make(), tiny_prompt(1)
    one, two = blender.tenant("one"), blender.tenant("two")
    one.encode(prompt.chunks, system=prompt.system)
    assert sources(one.fuse(prompt)) == ["hit"] * 3
    assert sources(two.fuse(prompt)) == ["miss"] * 3
    assert sources(blender.fuse(prompt)) == ["miss"] * 3
    assert sources(blender.tenant("one").fuse(prompt)) == ["hit"] * 3
    one.close()
    assert blender.fuse(prompt).report.rows == len(prompt), "a tenant's close leaves the model to the others"


def test_eight_threads_and_two_tenants():
    """Interleaved fusions equal their single runs, bit for bit."""
    blender = make()
    prompts = [tiny_prompt(seed) for seed in range(4)]
    tenants = {salt: blender.tenant(salt) for salt in ("one", "two")}
    jobs = [(salt, prompt, selector) for salt in tenants for prompt in prompts for selector in SELECTORS]
    for tenant in tenants.values():
        for prompt in prompts:
            tenant.encode(prompt.chunks, system=prompt.system)
    single = [tenants[salt].fuse(prompt, selector=selector).logits for salt, prompt, selector in jobs]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(tenants[salt].fuse, prompt, selector=selector) for salt, prompt, selector in jobs * 3]
        for future, truth in zip(futures, single * 3, strict=True):
            fusion = future.result(120)
            assert torch.equal(fusion.logits, truth)
            assert sources(fusion) == ["hit"] * 3


def test_jitter_delays_and_changes_nothing(monkeypatch):
    delays = []
    monkeypatch.setattr("blend.engine.time.sleep", delays.append)
    prompt, blender = tiny_prompt(1), make(jitter=0.5)
    fusions = [blender.fuse(prompt) for _ in range(20)]
    assert len(set(delays)) == 20
    assert all(0 <= delay <= 0.5 for delay in delays)
    assert torch.equal(fusions[5].logits, fusions[-1].logits)
    with pytest.raises(PromptError, match="jitter is -1"):
        make(jitter=-1)


# --- quicker without ---------------------------------------------------------------------------------------


def long_prompt(rows=300):
    return Prompt(tiny_ids(8, 1), (Chunk(tiny_ids(rows, 2)),), tiny_ids(8, 3))


def test_fusing_that_turned_out_slower_is_bypassed():
    blender, prompt = make(), long_prompt()
    blender.encode(prompt.chunks, system=prompt.system)
    selector, size = blender.selector, len(prompt)
    blender.setup.pace.note("full", size, size, 1.0)
    assert blender.fuse(prompt).report.fallback is None, "nothing is known of fusing yet"
    for _ in range(5):
        blender.setup.pace.note(("fuse", repr((selector, None))), 1, size, 1.0)
    slow = blender.fuse(prompt).report
    assert "fusing takes about" in slow.fallback
    assert "in the store, but not used" in slow.chunks[0].why
    assert blender.fuse(prompt, selector=FirstK(0.3)).report.fallback is None, "who names a selector gets it"
    never = make(bypass=False)
    never.setup = replace(blender.setup, view=never.view)
    assert never.fuse(prompt).report.fallback is None


def test_a_short_known_prefix_is_used_when_that_is_quicker():
    blender, prompt = make(), Prompt((), (), tiny_ids(400, 1))
    blender.prefill(Prompt((), (), prompt.ids[:10]))
    report = blender.prefill(prompt, remember=False).report
    assert report.prefix_rows == 0
    assert "too short to save anything" in report.fallback
    for _ in range(5):
        blender.setup.pace.note("full", 400, 400, 1.0)
        blender.setup.pace.note("past", 390, 400, 0.1)
    assert blender.prefill(prompt, remember=False).report.prefix_rows == 10
    for _ in range(5):
        blender.setup.pace.note("past", 390, 400, 2.0)
    assert blender.prefill(prompt, remember=False).report.prefix_rows == 0


# --- what is exact, and what is not ------------------------------------------------------------------------


@every_selector
def test_fused_kv_is_never_served_as_exact(selector):
    """What fusing has left behind changes no later plain answer, however much the prompts share."""
    prompt = tiny_prompt(3)
    longer = Prompt(prompt.system, prompt.chunks, (*prompt.question, *tiny_ids(5, 77)))
    blender = make()
    fusion = blender.fuse(prompt, selector=selector)
    assert not fusion.exact
    assert fusion.report.prefix_rows <= len(prompt.system)
    follow_up = blender.fuse(longer, selector=selector, past=fusion)
    assert follow_up.report.context_rows > 0
    assert not follow_up.exact, "a follow-up of an approximate context is approximate"
    plain = blender.prefill(longer)
    assert plain.exact
    assert plain.report.prefix_rows <= len(prompt.system)
    assert torch.allclose(plain.logits, make().prefill(longer).logits, atol=1e-5)


def test_a_process_that_only_reads_chunks_learns_the_prelude_once():
    store, prompt = MemoryStore(), tiny_prompt()
    writer = make(store=store)
    writer.encode(prompt.chunks, system=prompt.system)
    expected = writer.fuse(prompt)
    reader = make(store=store)
    first, second = reader.fuse(prompt), reader.fuse(prompt)
    assert first.report.prefix_rows == second.report.prefix_rows == len(prompt.system)
    assert sources(first) == ["hit"] * 3
    assert torch.equal(first.logits, expected.logits)
    assert torch.equal(second.logits, expected.logits)


def test_a_prelude_of_broken_blocks_is_not_computed_again_and_again():
    prompt = tiny_prompt(system=37)
    blender = make(prefix=BlockPrefixCache(block=16))
    blender.encode(prompt.chunks, system=prompt.system)
    assert blender.fuse(prompt).report.prefix_rows == 32
    assert not blender.setup.learn_prelude(prompt.system, 32)
    assert blender.setup.learn_prelude(prompt.system, 16)
