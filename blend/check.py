"""Proofs that a model fuses correctly: run in full by ``kvblend check``, in short at load.

Every proof compares with the model's own stock forward on random tokens and returns a number and its limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from blend.chunk import KVLayers
from blend.errors import SelfCheckFailed
from blend.hf.fusion_cache import FusionCache
from blend.hf.oracle import oracle
from blend.hf.view import ModelView
from rope.probe import tolerance

__all__ = ["Proof", "prove", "quick_check"]

_TAIL = 8  # rows of the fresh end of a prompt

# Logits may differ by the rounding of other kernels and block sizes, relative to the largest logit. In 16 bits that is
# as much as the dtype itself is off: a full prefill of Gemma 3 270M in bf16 differs from fp32 by 4e-2.
_LOGIT_LIMIT = {torch.float32: 2e-5, torch.float64: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Proof(NamedTuple):
    """One proof: what was compared, the difference found, the largest allowed, and a remark."""

    name: str
    value: float
    limit: float
    note: str

    @property
    def passed(self) -> bool:
        return self.value <= self.limit


class _Case(NamedTuple):
    """A random prompt with its full prefill."""

    ids_1T: Tensor
    logits: Tensor
    kv: KVLayers


def quick_check(view: ModelView, rows: int = 48) -> None:
    """The all-rows identity and one partial selection, on a short prompt.

    Raises:
        SelfCheckFailed: with the proof that failed.
    """
    name = type(view.model).__name__
    try:
        case = _case(view, rows)
        proofs = [_identity(view, case), _partial(view, case)]
    except Exception as error:
        raise SelfCheckFailed(
            f"{name} does not run narrowed to selected rows ({type(error).__name__}: {error}). Use full prefill for it."
        ) from error
    for proof in proofs:
        if not proof.passed:
            raise SelfCheckFailed(
                f"{name} failed its load-time proof: {proof.name} is off by {proof.value:.1e} "
                f"(limit {proof.limit:.0e}). Use full prefill for this model, or check=False to go on all the same; "
                "'kvblend check' shows every proof."
            )


def prove(view: ModelView, rows: int | None = None) -> Iterator[Proof]:
    """Every proof, one by one.

    Args:
        rows: length of the random prompt; None takes one longer than a short sliding window.
    """
    case = _case(view, rows or _telling_length(view))
    yield Proof("rotation probe", view.rope.error, tolerance(view.dtype), view.rope.describe())
    yield _identity(view, case)
    yield _prefix(view, case)
    yield _partial(view, case)
    yield _future(view, case)
    yield _repeats(view, case)


def _telling_length(view: ModelView) -> int:
    spans = [reach.window or reach.chunk or 0 for reach in view.reaches]
    longest = max(spans, default=0)
    rows = longest + longest // 2 if 0 < longest <= 1024 else 160
    return min(max(rows, 160), view.context or rows)


def _case(view: ModelView, rows: int) -> _Case:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, view.vocabulary, (1, rows), generator=generator).to(view.device)
    logits, layers = view.prefill(ids)
    return _Case(ids, logits[0], tuple((keys[0], values[0]) for keys, values in layers))


def _identity(view: ModelView, case: _Case) -> Proof:
    """All rows recomputed over junk KV are full prefill."""
    cache = _junk(case, 1.0)
    view.run(case.ids_1T, view.narrow_pass(cache, rows_S=None))
    limit = 0.0 if view.device.type == "cpu" else _LOGIT_LIMIT[view.dtype]
    return Proof("all rows over junk KV", _kv_difference(cache.kv, case.kv), limit, "K/V against full prefill")


def _prefix(view: ModelView, case: _Case) -> Proof:
    """Exact KV and a fresh tail is full prefill."""
    rows = case.ids_1T.shape[1]
    cache = _junk(case, 0.0)
    tail = torch.arange(rows - _TAIL, rows, device=view.device)
    logits = view.run(case.ids_1T, view.narrow_pass(cache, rows_S=tail))
    note = "exact KV, fresh tail: logits"
    return Proof("prefix identity", _logit_difference(logits, case.logits), _LOGIT_LIMIT[view.dtype], note)


def _partial(view: ModelView, case: _Case) -> Proof:
    """A random third of the rows over disturbed KV equals the oracle, which narrows nothing."""
    rows = _selection(view, case)
    cache = _junk(case, 0.3)
    before = tuple((keys.clone(), values.clone()) for keys, values in cache.kv)
    truth, _ = oracle(view.model, case.ids_1T, before, rows)
    logits = view.run(case.ids_1T, view.narrow_pass(cache, rows_S=rows))
    note = f"{rows.numel()} of {case.ids_1T.shape[1]} rows, logits against the oracle"
    return Proof("partial selection", _logit_difference(logits, truth), _LOGIT_LIMIT[view.dtype], note)


def _future(view: ModelView, case: _Case) -> Proof:
    """Another last token changes nothing before it."""
    rows = _selection(view, case)
    changed = case.ids_1T.clone()
    changed[0, -1] = (changed[0, -1] + 1) % view.vocabulary
    results = []
    for ids in (case.ids_1T, changed):
        cache = _junk(case, 0.3)
        view.run(ids, view.narrow_pass(cache, rows_S=rows, only_last=False))
        results.append(tuple((keys[:, :-1].clone(), values[:, :-1].clone()) for keys, values in cache.kv))
    return Proof("no row sees the future", _kv_difference(*results), 0.0, "K/V before a changed last token")


def _repeats(view: ModelView, case: _Case) -> Proof:
    """Five identical passes give identical logits."""
    rows = _selection(view, case)
    first, *others = (view.run(case.ids_1T, view.narrow_pass(_junk(case, 0.3), rows_S=rows)) for _ in range(5))
    assert first is not None
    limit = 0.0 if view.device.type == "cpu" else _LOGIT_LIMIT[view.dtype]
    return Proof("five repeats", max(_logit_difference(o, first) for o in others), limit, "logits")


def _selection(view: ModelView, case: _Case) -> Tensor:
    rows = case.ids_1T.shape[1]
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(rows - _TAIL, generator=generator)[: rows // 3]
    return torch.cat([chosen, torch.arange(rows - _TAIL, rows)]).sort().values.to(view.device)


def _junk(case: _Case, noise: float) -> FusionCache:
    """The exact KV plus ``noise`` times a standard normal, the same at each call."""
    generator = torch.Generator().manual_seed(2)

    def disturb(x: Tensor) -> Tensor:
        wave = torch.randn(x.shape, generator=generator) * noise
        return (x.float() + wave.to(x.device)).to(x.dtype)[None]

    layers = [(disturb(keys), disturb(values)) for keys, values in case.kv]
    return FusionCache(layers, case.ids_1T.shape[1])


def _kv_difference(a: KVLayers, b: KVLayers) -> float:
    pairs = ((x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))
    return max(float((x.float() - y.float()).abs().max()) for x, y in pairs)


def _logit_difference(logits: Tensor | None, truth: Tensor) -> float:
    assert logits is not None
    return float((logits - truth).abs().max() / truth.abs().max().clamp_min(1e-30))
