"""Every tiny family against transformers itself: the invariants of fusion, one by one, in fp32.

The truth always comes from a second model with the same weights that kvblend never touched.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from blend import Blender, FullRecompute, FullReuse, Prompt
from blend.check import prove
from blend.hf.fusion_cache import FusionCache
from blend.hf.oracle import oracle
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import FAMILIES, tiny_model

ROWS = 100  # four windows, three attention chunks, and beyond the switch of longrope
LIMIT = 2e-5  # of the largest number: fp32 rounding of other kernels and block sizes
BF16 = ("llama", "qwen3", "gemma2", "gemma3_text", "phi3_longrope", "cohere", "deepseek_v3", "falcon", "bloom")


@torch.inference_mode()
def full_prefill(model, ids, layers=None):
    """Last logits and K/V ``[H, T, D]`` per layer, as transformers computes them, behind the KV given."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers or ()):
        cache.update(keys[None], values[None], index)
    out = model(input_ids=torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)
    return out.logits[0, -1].float(), [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    """A family: stock model, Blender on its twin, a prompt and its full prefill."""
    return make_case(request.param, torch.float32)


def make_case(name, dtype):
    stock = tiny_model(name, dtype)
    blender = Blender(tiny_model(name, dtype), selector=FullRecompute(), check=False)
    ids = tiny_ids(ROWS)
    logits, kv = full_prefill(stock, ids)
    return SimpleNamespace(
        name=name, stock=stock, blender=blender, view=blender.view, ids=ids, logits=logits, kv=kv, dtype=dtype
    )


def disturbed(case, noise, seed=0):
    """The full prefill's K/V with ``noise`` added, as a fusion cache."""
    generator = torch.Generator().manual_seed(seed)
    layers = [
        tuple((x.float() + noise * torch.randn(x.shape, generator=generator)).to(x.dtype)[None] for x in pair)
        for pair in case.kv
    ]
    return FusionCache(layers, ROWS)


def run(case, cache, rows, **plan):
    rows_S = None if rows is None else torch.tensor(sorted(rows))
    return case.view.run(torch.tensor([case.ids]), case.view.narrow_pass(cache, rows_S=rows_S, **plan))


def off(a, b):
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def kv_off(a, b):
    """Largest difference of K/V, in their own unit: 0.0 means bit for bit."""
    return max(
        float((x.float() - y.float()).abs().max())
        for one, other in zip(a, b, strict=True)
        for x, y in zip(one, other, strict=True)
    )


SELECTIONS = {
    "the last row": [ROWS - 1],
    "a run": [*range(30, 60), ROWS - 1],
    "singles": [*range(0, ROWS, 3)],
    "all but a few": [row for row in range(ROWS) if row not in (0, 7, 8, 50)],
    "scattered": [*torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(3))[:40].tolist(), ROWS - 1],
}


def test_all_rows_over_junk_are_full_prefill_bit_for_bit(case):
    cache = disturbed(case, 3.0)
    assert kv_off(cache.kv, case.kv) > 1
    logits = run(case, cache, None)
    assert kv_off(cache.kv, case.kv) == 0.0
    assert off(logits, case.logits) <= LIMIT


def test_all_rows_through_the_narrowed_path_are_full_prefill(case):
    cache = disturbed(case, 3.0)
    logits = run(case, cache, range(ROWS))
    assert kv_off(cache.kv, case.kv) <= LIMIT * max(float(x.abs().max()) for pair in case.kv for x in pair)
    assert off(logits, case.logits) <= LIMIT


@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
def test_any_rows_over_exact_kv_are_full_prefill(case, rows):
    cache = disturbed(case, 0.0)
    assert off(run(case, cache, rows), case.logits) <= LIMIT
    assert kv_off(cache.kv, case.kv) <= LIMIT * max(float(x.abs().max()) for pair in case.kv for x in pair)


@pytest.mark.parametrize("rows", SELECTIONS.values(), ids=SELECTIONS)
def test_partial_selection_is_the_oracle(case, rows):
    cache = disturbed(case, 0.5)
    before = tuple((keys.clone(), values.clone()) for keys, values in cache.kv)
    truth, mixed = oracle(case.stock, torch.tensor([case.ids]), before, torch.tensor(sorted(rows)))
    logits = run(case, cache, rows)
    assert off(logits, truth) <= LIMIT
    assert kv_off(cache.kv, mixed) <= LIMIT * max(float(x.abs().max()) for pair in mixed for x in pair)
    others = [row for row in range(ROWS) if row not in rows]
    for (keys, values), (old_keys, old_values) in zip(cache.kv, before, strict=True):
        assert torch.equal(keys[:, others], old_keys[:, others]), "rows that were not chosen stay as they are"
        assert torch.equal(values[:, others], old_values[:, others])
    assert off(truth, case.logits) > 1e-3, "the disturbance shows, so the test can fail"


def test_no_row_sees_the_future(case):
    """Other tokens from row 61 on change no bit of the K/V before them, and some of it from there on."""
    results = []
    for ids in (case.ids, (*case.ids[:61], *tiny_ids(ROWS - 61, seed=9))):
        cache = disturbed(case, 0.5)
        rows_S = torch.tensor(sorted({*range(0, ROWS, 3)}))
        case.view.run(torch.tensor([ids]), case.view.narrow_pass(cache, rows_S=rows_S, only_last=False))
        results.append(cache.kv)
    head, tail = (
        [[(k[:, part], v[:, part]) for k, v in kv] for kv in results] for part in (slice(61), slice(61, None))
    )
    assert kv_off(*head) == 0.0
    assert kv_off(*tail) > 0.0


def test_a_chunk_behind_its_own_prelude_is_stock_prefix_caching_bit_for_bit(case):
    """Nothing is recomputed, nothing moves; three calls of the model itself are the truth."""
    prompt = tiny_prompt(3, system=8, chunks=(20,), question=5)
    case.blender.encode(prompt.chunks, system=prompt.system)
    fusion = case.blender.fuse(prompt, selector=FullReuse())
    assert fusion.exact
    assert fusion.report.chunks[0].source == "hit"
    if case.name == "phi3_longrope":  # keeps no prefixes, as its angles depend on the whole prompt's length
        assert off(fusion.logits, full_prefill(case.stock, prompt.ids)[0]) <= LIMIT
        return
    _, kv = full_prefill(case.stock, prompt.system)
    _, kv = full_prefill(case.stock, prompt.chunks[0].ids, kv)
    logits, kv = full_prefill(case.stock, prompt.question, kv)
    assert kv_off(fusion.layers, kv) == 0.0
    assert torch.equal(fusion.logits, logits)


@pytest.mark.parametrize("cut", [0, 15])
def test_moved_chunks_have_the_keys_of_full_prefill_in_layer_0(case, cut):
    """That layer has seen no other row, so moving is all that a reused chunk needs there."""
    prompt = tiny_prompt(7 + cut, system=6, chunks=(30, 33, 28), question=5).reordered((1, 2, 0))
    if cut:  # an exact prefix that ends within the first chunk
        case.blender.prefill(Prompt(prompt.ids[:cut], (), (9,)))
    fusion = case.blender.fuse(prompt, selector=FullReuse())
    assert fusion.report.reused_rows >= 91
    logits, kv = full_prefill(case.stock, prompt.ids)
    assert all(off(x, y) <= 1e-6 for x, y in zip(fusion.layers[0], kv[0], strict=True))
    assert off(fusion.logits, logits) > 1e-4, "deeper layers did see other rows, so the test can fail"


@torch.inference_mode()
def plain_greedy(model, ids, count):
    ids_1T = torch.tensor([ids])
    out = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), do_sample=False, max_new_tokens=count)
    return tuple(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("seed", [4, 5])
def test_greedy_answers_are_those_of_plain_generation(case, seed):
    """Chunks from the store, all moved, all recomputed; sliding windows are passed on the way."""
    prompt = tiny_prompt(seed, system=7, chunks=(21, 30, 12), question=6).reordered((2, 0, 1))
    answer = case.blender.generate(prompt, do_sample=False, max_new_tokens=10)
    # The first chunk stands behind its prelude and is exact, unless the length of the pass changes the angles.
    assert answer.report.recomputed_rows == (63 if case.name == "phi3_longrope" else 51)
    assert answer.ids == plain_greedy(case.stock, prompt.ids, 10)
    again = case.blender.generate(prompt, do_sample=False, max_new_tokens=10)
    assert [chunk.source for chunk in again.report.chunks] == ["hit"] * 3
    assert again.ids == answer.ids


def test_a_short_prompt_too(case):
    """Within every window, and on the near side of longrope's switch."""
    prompt = tiny_prompt(6, system=3, chunks=(9, 7), question=4)
    answer = case.blender.generate(prompt, do_sample=False, max_new_tokens=8)
    assert answer.ids == plain_greedy(case.stock, prompt.ids, 8)


def test_every_proof_passes(case):
    proofs = list(prove(case.view))
    assert len(proofs) >= 6
    assert [proof for proof in proofs if not proof.passed] == []


def test_closing_gives_the_model_back(case):
    model = tiny_model(case.name)
    before = model.config._attn_implementation
    with Blender(model, check=False):
        assert any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", BF16)
def test_bf16(name):
    case = make_case(name, torch.bfloat16)
    cache = disturbed(case, 3.0)
    run(case, cache, None)
    assert kv_off(cache.kv, case.kv) == 0.0
    for rows in SELECTIONS.values():
        cache = disturbed(case, 0.5)
        before = tuple((keys.clone(), values.clone()) for keys, values in cache.kv)
        truth, _ = oracle(case.stock, torch.tensor([case.ids]), before, torch.tensor(sorted(rows)))
        assert off(run(case, cache, rows), truth) <= 5e-2
    prompt = Prompt(tiny_ids(8), tiny_prompt(3, chunks=(20,)).chunks, tiny_ids(5, seed=8))
    fusion = case.blender.fuse(prompt, selector=FullRecompute())
    assert off(fusion.logits, full_prefill(case.stock, prompt.ids)[0]) <= 5e-2
    assert [proof for proof in prove(case.view) if not proof.passed] == []
