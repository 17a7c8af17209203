"""The codec bench: its options, its store, and a short run on a real model."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

import eval.bench.codecs as bench
from blend import Blender, BudgetError
from blend.errors import StoreError
from blend.stores.codecs import codec_by_name
from blend.stores.entry import pack
from blend.testing.stores import same_kv, tiny_kv
from eval.bench.codecs import ALL, CodecOptions, PackedStore, run_codec_bench
from eval.demo import load_passages, load_questions
from eval.demo.cases import make_cases


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=200)


class AlwaysFirst:
    """Finds the first ``k`` passages, without an embedder."""

    def search(self, query, k):
        return [type("Hit", (), {"number": number}) for number in range(k)]


@pytest.fixture(autouse=True)
def quick_cases(monkeypatch):
    def cases(k, seed, limit):
        return list(make_cases(AlwaysFirst(), load_passages(), load_questions()[:limit], k=k, seed=seed))

    monkeypatch.setattr(bench, "demo_cases", cases)


@pytest.fixture(scope="module")
def blender(smollm2):
    with Blender(*smollm2, check=False) as blender:
        yield blender


@pytest.mark.parametrize("change", [{"limit": 0}, {"k": 0}, {"tokens": 0}, {"ratio": 1.5}])
def test_options_out_of_range_are_refused(change):
    with pytest.raises(BudgetError):
        CodecOptions(**change)


def test_an_unknown_codec_is_refused_before_a_model_is_loaded():
    with pytest.raises(StoreError, match="'gzip'"):
        CodecOptions(codecs=("int8", "gzip"))


def test_uncoded_is_always_measured_and_first():
    assert CodecOptions(codecs=("int8", "none", "int8")).names == ("none", "int8")
    assert CodecOptions().names == ALL


def test_the_store_hands_out_the_active_codecs_entries():
    kv = tiny_kv("a", rows=40)
    store = PackedStore()
    for name in ("none", "int4"):
        store.entries[name] = {kv.key: pack(kv, codec_by_name(name))}
    assert same_kv(store.get("a"), kv)
    store.active = "int4"
    found = store.get("a")
    assert not same_kv(found, kv)
    assert max(float((x - y).abs().max()) for x, y in zip(found.layers[0], kv.layers[0], strict=True)) < 0.5
    assert list(store.keys()) == ["a"]
    assert "a" in store
    assert store.get("b") is None


def test_a_short_run(blender, screen):
    before = blender.store
    figures = run_codec_bench(CodecOptions(codecs=("zstd", "int4"), limit=1, k=2, tokens=3), screen, blender)
    assert blender.store is before, "the caller's store is put back"
    assert figures["complete"]
    assert figures["n"] == 1
    assert list(figures["codecs"]) == ["none", "zstd", "int4"]
    none, zstd, int4 = figures["codecs"].values()
    assert none["ratio"] == pytest.approx(1, abs=0.01)
    assert none["kl_prefix"]["values"] == zstd["kl_prefix"]["values"] == [0.0]
    assert none["kl_fused"] == zstd["kl_fused"]
    assert zstd["key_rms"] == zstd["key_max"] == zstd["value_max"] == 0.0
    assert zstd["ratio"] > 1.3
    assert int4["ratio"] > 3.3
    assert int4["kl_prefix"]["mean"] > 0
    change = int4["kl_fused"]["mean"] - none["kl_fused"]["mean"]
    assert int4["kl_fused_change"]["mean"] == pytest.approx(change)
    assert change != 0
    assert 0 < int4["key_rms"] < int4["key_max"]
    assert min(int4["encode_gbps"], int4["decode_gbps"]) > 0
    json.dumps(figures)
    printed = screen.file.getvalue()
    for word in ("int4", "ratio", "prefix reuse", "1 question(s)"):
        assert word in printed


def test_an_interruption_shows_what_is_there(blender, screen, monkeypatch):
    def rows(*args):
        yield {"none": (0.0, 0.5)}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_rows", rows)
    figures = run_codec_bench(CodecOptions(codecs=(), limit=2, k=1), screen, blender)
    assert not figures["complete"]
    assert figures["n"] == 1
    assert figures["codecs"]["none"]["kl_fused"]["values"] == [0.5]
    assert "interrupted" in screen.file.getvalue()


def test_an_interruption_before_the_first_question_leaves_the_costs(blender, screen, monkeypatch):
    def rows(*args):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(bench, "_rows", rows)
    figures = run_codec_bench(CodecOptions(codecs=("int8",), limit=1, k=1), screen, blender)
    assert figures["n"] == 0
    assert figures["codecs"]["int8"]["ratio"] > 1.8
    assert "kl_fused" not in figures["codecs"]["int8"]
    json.dumps(figures)


def test_full_reuse_is_ratio_zero(blender):
    assert CodecOptions(ratio=0).selector(blender).name == "full-reuse"
    assert CodecOptions(ratio=0.3).selector(blender).ratio == 0.3


def test_errors_are_relative_to_the_size():
    x = torch.tensor([3.0, 4.0])
    rms, largest = bench._error(x, x + torch.tensor([1.0, 0.0]))
    assert rms == pytest.approx((0.5 / 12.5) ** 0.5)
    assert largest == pytest.approx(1 / 12.5**0.5)
