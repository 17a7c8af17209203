"""The GPU backends: what is wrapped around their kernels, with these emulated, against the specification.

``tests/gpu/run.py`` puts the same suite to the real kernels.
"""

from __future__ import annotations

import re
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as flex

from blend.hf.attention import (
    BACKENDS,
    SETTING,
    BackendMissing,
    FusionMask,
    Reach,
    attend_eager,
    attend_fa4,
    attend_flash,
    attend_flex,
    attend_whole,
    choose_backend,
)
from blend.hf.attention import choice as choosing
from blend.hf.attention.bounds import block_lists, first_seen
from blend.testing.attention import AttentionTests
from tests.flash_kernels import FA4, FLASH, expand

REACHES = (Reach(), Reach(window=1), Reach(window=9), Reach(window=150), Reach(chunk=32), Reach(chunk=100))


@pytest.fixture(autouse=True)
def flex_as_written(monkeypatch):
    """Uncompiled, which torch takes for a mistake."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


class TestFlash(AttentionTests):
    attend = staticmethod(partial(attend_flash, kernels=FLASH))


class TestFa4(AttentionTests):
    attend = staticmethod(partial(attend_fa4, kernel=FA4))


class TestFlex(AttentionTests):
    attend = staticmethod(attend_flex)


class TestWhole(AttentionTests):
    attend = staticmethod(attend_whole)


def test_every_backend_is_tested():
    here = {"flash": TestFlash, "fa4": TestFa4, "flex": TestFlex, "sdpa": TestWhole}
    elsewhere = {"gemm", "blocked", "eager"}  # tests/test_attention.py
    assert set(BACKENDS) == elsewhere | set(here)
    for name, suite in here.items():
        attend = suite.__dict__["attend"].__func__
        assert getattr(attend, "func", attend) is BACKENDS[name]


# --- blocks of what is seen -----------------------------------------------------------------------


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("size", [(128, 128), (16, 8), (7, 50)], ids=str)
def test_block_lists_hold_every_visible_key_and_call_full_what_is(reach, size):
    generator = torch.Generator().manual_seed(0)
    for total in (1, 16, 200, 333):
        rows = torch.randperm(total, generator=generator)[: max(1, total * 2 // 3)].sort().values
        seen = FusionMask(rows, total, reach).dense()
        lists = [x[None, None] for x in block_lists(first_seen(rows, reach), rows, total, *size)]
        partial, full = (expand(*pair, *size, len(rows), total) for pair in (lists[:2], lists[2:]))
        assert not (partial & full).any()
        assert seen[full].all(), "a full block holds a key that some row does not see"
        assert (partial | full)[seen].all(), "a visible key is in no block"


def test_block_lists_leave_out_most_of_a_long_prompt():
    rows, total = torch.arange(0, 8192, 7), 8192
    lists = block_lists(first_seen(rows, Reach(window=300)), rows, total, 128, 128)
    assert int((lists.partial_count_B + lists.full_count_B).max()) <= (300 + 7 * 128) // 128 + 2
    causal = block_lists(first_seen(rows, Reach()), rows, total, 128, 128)
    assert int(causal.partial_count_B.max()) <= 8, "only the diagonal needs a mask"
    assert int(causal.full_count_B.sum()) > 4 * int(causal.partial_count_B.sum())


def test_what_a_backend_makes_of_a_mask_is_made_once_per_reach():
    mask = FusionMask(torch.arange(3, 200), 200, Reach())
    query, key, value = (torch.randn(1, h, n, 16) for h, n in ((4, 197), (2, 200), (2, 200)))
    for _ in range(3):
        for reach in (None, Reach(window=20)):
            attend_flash(query, key, value, mask, scaling=0.25, reach=reach, kernels=FLASH)
    assert set(mask.memo) == {("flash", Reach()), ("flash", Reach(window=20))}


# --- flash: the suite must be able to fail ---------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        ("an empty span counts", "test_one_row"),
        ("top left", "test_prompts_of_many_blocks"),
        ("no left pad", "test_any_rows"),
        ("forgets the cap", "test_softcap"),
    ],
)
def test_the_suite_finds_a_kernel_that_behaves_otherwise(broken, test):
    def varlen(*args, **options):
        if broken == "top left" and args[9]:
            options["seqused_k"] = args[3].diff()
        if broken == "forgets the cap":
            options["softcap"] = 0.0
        return FLASH.varlen(*args, **options)

    def with_kvcache(*args, **options):
        if broken == "no left pad":
            options["cache_leftpad"] = torch.zeros_like(options["cache_leftpad"])
        out, lse = FLASH.with_kvcache(*args, **options)
        return out, lse.masked_fill(lse == float("inf"), 0.0) if broken == "an empty span counts" else lse

    kernels = FLASH._replace(varlen=varlen, with_kvcache=with_kvcache)
    suite = type("Broken", (AttentionTests,), {"attend": staticmethod(partial(attend_flash, kernels=kernels))})
    with pytest.raises(AssertionError, match="off by"):
        getattr(suite(), test)()


def test_flash_gives_long_runs_a_sequence_each_and_all_single_rows_one_call():
    calls = []

    def varlen(*args, **options):
        calls.append(("varlen", args[3].numel() - 1, args[9]))
        return FLASH.varlen(*args, **options)

    def with_kvcache(*args, **options):
        calls.append(("kvcache", args[0].shape[0], options["causal"]))
        return FLASH.with_kvcache(*args, **options)

    rows = torch.cat([torch.arange(0, 300, 3), torch.arange(300, 400), torch.arange(500, 563), torch.arange(600, 664)])
    mask = FusionMask(rows, 700, Reach())
    query, key, value = (torch.randn(1, h, n, 16) for h, n in ((4, len(rows)), (2, 700), (2, 700)))
    kernels = FLASH._replace(varlen=varlen, with_kvcache=with_kvcache)
    got = attend_flash(query, key, value, mask, scaling=0.25, kernels=kernels)
    assert calls == [("varlen", 2, True), ("varlen", 2, False), ("kvcache", 163, True)]
    assert (got - attend_eager(query, key, value, mask, scaling=0.25)).abs().max() < 5e-6


# --- flex: compiled ---------------------------------------------------------------------------------


def prompt(total, count, heads=4):
    generator = torch.Generator().manual_seed(total + count)
    rows = torch.cat(
        [torch.randperm(total - 1, generator=generator)[: count - 1].sort().values, torch.tensor([total - 1])]
    )
    query, key, value = (
        torch.randn(1, h, n, 16, generator=generator) for h, n in ((heads, count), (2, total), (2, total))
    )
    return query, key, value, FusionMask(rows, total, Reach())


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_flex_is_traced_once_for_all_lengths_layers_and_reaches():
    counter = CompileCounter()
    torch.compiler.reset()
    kernel = torch.compile(flex.flex_attention, backend=counter, dynamic=True)

    def run(total, count, **options):
        before = counter.frame_count
        given = prompt(total, count)
        with torch.inference_mode():
            got = attend_flex(*given, scaling=0.25, kernel=kernel, **options)
        assert (got - attend_eager(*given, scaling=0.25, **options)).abs().max() < 5e-6
        return counter.frame_count - before

    assert run(1000, 300) == 1
    for total, count in ((1000, 300), (1500, 700), (2001, 301), (2048, 640)):
        assert run(total, count) == 0, "another length is no other kernel"
    assert run(1400, 300, reach=Reach(window=100)) == run(1300, 300, reach=Reach(chunk=64)) == 0
    assert run(1000, 300, softcap=30.0) == 1
    assert run(1200, 400, softcap=20.0) == 0, "another cap is no other kernel"
    assert run(1000, 300, sinks=torch.zeros(4)) == 1
    assert run(1100, 500, sinks=torch.ones(4)) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_flex_compiled_for_the_cpu_reads_the_blocks():
    """As written it reads the mask alone; compiled, it visits the listed blocks."""
    kernel = torch.compile(flex.flex_attention, dynamic=True)
    with torch.inference_mode():
        for reach in (Reach(), Reach(window=200), Reach(chunk=300)):
            given = prompt(1000, 300)
            got = attend_flex(*given, scaling=0.25, reach=reach, kernel=kernel)
            assert (got - attend_eager(*given, scaling=0.25, reach=reach)).abs().max() < 5e-6


# --- the choice -------------------------------------------------------------------------------------


def heads(dtype=torch.float32, dim=64):
    return torch.zeros(1, 4, 3, dim, dtype=dtype), torch.zeros(1, 2, 9, dim, dtype=dtype)


def test_cpus_take_what_they_always_took(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    assert choose_backend(*heads()) == "blocked"
    monkeypatch.setattr(choosing, "_has_bf16_gemm", lambda: True)
    assert choose_backend(*heads(torch.bfloat16)) == "gemm"
    monkeypatch.setattr(choosing, "_has_bf16_gemm", lambda: False)
    assert choose_backend(*heads(torch.bfloat16)) == "blocked"


def test_the_environment_names_a_backend(monkeypatch):
    for name in ("eager", "sdpa", "gemm"):
        monkeypatch.setenv(SETTING, name)
        assert choose_backend(*heads()) == name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fastest", ["'fastest'", "gemm", "flash", "unset"]),
        ("flash", ["compute capability 8.0", "cpu", "unset"]),
        ("fa4", ["compute capability 9", "cpu"]),
        ("flex", ["CUDA", "cpu"]),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_by_name(monkeypatch, name, words):
    monkeypatch.setenv(SETTING, name)
    with pytest.raises(BackendMissing) as refused:
        choose_backend(*heads())
    assert all(word in str(refused.value) for word in words)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="flash-attn is installed")
@pytest.mark.parametrize(("attend", "words"), [(attend_flash, "kvblend[flash]"), (attend_fa4, "flash-attn-4")])
def test_a_missing_package_is_named_with_the_way_to_get_it(attend, words):
    mask = FusionMask(torch.tensor([0, 2]), 3, Reach())
    query, key = torch.zeros(1, 4, 2, 64), torch.zeros(1, 2, 3, 64)
    with pytest.raises(BackendMissing, match=re.escape(words)):
        attend(query, key, key, mask, scaling=1.0)


class TestProof:
    """What a CUDA device does, on the CPU: the kinds are made up, the backends are real."""

    kind = choosing._Kind(torch.device("cpu"), torch.float32, 4, 2, 16, 16, False, False)

    def choose(self, monkeypatch, **backends):
        monkeypatch.setattr(choosing, "REFUSES", {name: lambda query, value: None for name in backends})
        monkeypatch.setattr(choosing, "BACKENDS", {**BACKENDS, **backends})
        return choosing._fastest.__wrapped__(self.kind)

    def test_the_first_that_agrees_is_taken(self, monkeypatch):
        assert self.choose(monkeypatch, flash=partial(attend_flash, kernels=FLASH), flex=attend_flex) == "flash"

    def test_one_that_is_off_is_left_out_with_a_warning(self, monkeypatch):
        def off(*args, **options):
            return attend_eager(*args, **options) * 1.05

        with pytest.warns(RuntimeWarning, match="'flash' is left out on cpu: it is off by"):
            assert self.choose(monkeypatch, flash=off, flex=attend_flex) == "flex"

    def test_one_that_raises_or_gives_no_numbers_is_left_out_too(self, monkeypatch):
        def breaks(*args, **options):
            raise RuntimeError("no kernel image is available for execution on the device")

        def nothing(*args, **options):
            return attend_eager(*args, **options) * float("nan")

        with pytest.warns(RuntimeWarning) as warned:
            assert self.choose(monkeypatch, fa4=breaks, flash=nothing) == "sdpa"
        assert "no kernel image" in str(warned[0].message)
        assert "inf" in str(warned[1].message)

    def test_it_is_proved_with_the_extras_that_it_is_chosen_for(self, monkeypatch):
        def forgets(*args, softcap=None, sinks=None, **options):
            return attend_eager(*args, **options)

        for extra in ({"softcap": True}, {"sinks": True}):
            self.kind = TestProof.kind._replace(**extra)
            with pytest.warns(RuntimeWarning, match="is off by"):
                assert self.choose(monkeypatch, flash=forgets) == "sdpa"
