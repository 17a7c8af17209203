"""The loading controller: what hides a load, and what is cheaper to encode than to read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blend import Blender, FirstK, FullReuse, KVDeviation, QueryAttention
from blend.chunk import Retention
from blend.loading import LoadPlan, stored_bytes, with_ratio
from blend.pace import Pace
from blend.stores.base import Store
from blend.stores.codecs import Plain
from blend.stores.entry import pack, read_head
from blend.testing.prompts import tiny_prompt
from blend.testing.stores import tiny_kv
from blend.testing.tiny import tiny_model


def stored(kv):
    """The entry as a slow store hands it out."""
    packed = pack(kv, Plain())
    return read_head(packed.head, kv.key).lazy(packed.layers.__getitem__)


class Slow(Store):
    """Its layers are read one by one."""

    def __init__(self):
        self.kv = {}

    def get(self, key):
        return stored(self.kv[key]) if key in self.kv else None

    def put(self, kv):
        self.kv[kv.key] = kv
        return True

    def delete(self, key):
        return self.kv.pop(key, None) is not None

    def __contains__(self, key):
        return key in self.kv

    def keys(self):
        return iter(list(self.kv))


def test_a_load_takes_its_bytes_over_the_rate():
    kv = stored(tiny_kv("a"))
    assert stored_bytes(kv) == pack(tiny_kv("a"), Plain()).nbytes
    assert stored_bytes(tiny_kv("a")) == 0, "what is in memory is not read"
    assert LoadPlan(None, 1e-3).load_seconds([kv, kv]) == pytest.approx(2 * stored_bytes(kv) / 1000)
    assert LoadPlan(None, None).load_seconds([kv]) is None


@pytest.mark.parametrize(("seconds", "ratio"), [(0.1, 0.1), (0.5, 0.5), (7.0, 1.0)])
def test_the_hiding_ratio_computes_as_long_as_it_reads(seconds, ratio):
    kv = stored(tiny_kv("a"))
    plan = LoadPlan(full_seconds=1.0, byte_seconds=seconds / stored_bytes(kv))
    assert plan.hiding_ratio([kv]) == pytest.approx(ratio)
    assert LoadPlan(None, 1.0).hiding_ratio([kv]) is None
    assert plan.hiding_ratio([]) is None


def test_what_is_slower_to_read_than_to_encode():
    kv = stored(replace(tiny_kv("a"), retention=Retention(cost=0.5)))
    assert LoadPlan(1.0, 0.6 / stored_bytes(kv)).better_encoded(kv)
    assert not LoadPlan(1.0, 0.4 / stored_bytes(kv)).better_encoded(kv)
    assert not LoadPlan(1.0, None).better_encoded(kv)
    assert not LoadPlan(1.0, 1.0).better_encoded(stored(tiny_kv("a"))), "its cost is unknown"


def test_a_ratio_is_raised_never_lowered():
    assert with_ratio(KVDeviation(0.15), 0.4) == KVDeviation(0.4)
    assert with_ratio(QueryAttention(0.15), 0.05) == QueryAttention(0.15)
    assert with_ratio(FirstK(rows=9), 0.4) == FirstK(rows=9), "a budget in rows is the user's own"
    assert with_ratio(FullReuse(), 0.4) == FullReuse()
    assert with_ratio(FirstK(0.2), None) == FirstK(0.2)


def make(store, **options):
    return Blender(tiny_model("llama", torch.float32), None, check=False, store=store, **options)


def test_adapting_encodes_what_is_slow_to_read():
    prompt = tiny_prompt(3)
    for loading, source in (("adapt", "miss"), ("plain", "hit")):
        blender = make(Slow(), loading=loading)
        blender.encode(prompt.chunks, system=prompt.system)
        blender.setup.pace.note("read", 1, 1, 1.0)  # a second per byte
        report = blender.fuse(prompt).report
        assert [chunk.source for chunk in report.chunks] == [source] * 3
        assert ("longer than encoding" in report.chunks[0].why) == (loading == "adapt")


def test_adapting_raises_the_ratio_to_what_hides_the_load():
    prompt = tiny_prompt(3)
    for loading, ratio in (("adapt", 0.5), ("plain", 0.1)):
        store = Slow()
        blender = make(store, loading=loading)
        blender.encode(prompt.chunks, system=prompt.system)
        kvs = [store.get(key) for key in store.keys()]  # noqa: SIM118  # a store is no dict
        for kv in kvs:
            store.put(replace(store.kv[kv.key], retention=Retention(cost=1e9)))  # never cheaper to encode
        nbytes = sum(stored_bytes(store.get(kv.key)) for kv in kvs)
        blender.setup.pace.note("read", nbytes, 1, 1.0)
        blender.setup.pace.note("full", len(prompt), len(prompt), 2.0)
        report = blender.fuse(prompt, selector=FirstK(0.1)).report
        assert report.load.hiding_ratio == pytest.approx(0.5)
        stale = sum(chunk.rows for chunk in report.chunks if not chunk.exact)
        assert report.recomputed_rows == pytest.approx(ratio * stale, abs=1)
        assert "a ratio of 0.50 would hide it" in str(report).replace("\n", " ")


def test_the_rate_is_learnt_from_what_was_read():
    prompt = tiny_prompt(3)
    blender = make(Slow())
    blender.encode(prompt.chunks, system=prompt.system)
    load = blender.fuse(prompt).report.load
    assert load.nbytes > 0
    assert blender.setup.pace.seconds("read", load.nbytes, 1) == pytest.approx(load.seconds)


def test_the_pace_is_a_median_by_size():
    pace = Pace()
    assert pace.seconds("full", 10, 100) is None
    for seconds in (1.0, 1.0, 50.0, 1.0, 1.0):
        pace.note("full", 100, 100, seconds)
    assert pace.seconds("full", 200, 120) == pytest.approx(2.0), "one slow moment moves nothing"
    assert pace.seconds("full", 100, 1000) is None, "another size is another pace"
    assert pace.seconds("past", 100, 100) is None
    for _ in range(5):
        pace.note("full", 100, 100, 3.0)
    assert pace.seconds("full", 100, 100) == pytest.approx(3.0), "old measurements are forgotten"
    pace.note("none", 0, 100, 1.0)
    assert pace.seconds("none", 1, 100) is None
