"""What happens inside a fusion: how far its KV is from full prefill's, and where the question looks.

Measures finished fusions and changes nothing in them; draws nothing (:mod:`eval.inside_plot` does). Two fusions are
compared that were made of one prompt: ``blender.prefill(prompt, remember=False)`` is the truth, and
``blender.fuse(prompt, selector=FullReuse())`` is reuse before any repair.

Shape suffixes: ``L`` layers, ``T`` rows of the prompt, ``Q`` rows of the question, ``H`` kv heads, ``D`` head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blend import ForeignKV, Fusion, PromptError, QueryAttention
from blend.admission import accept
from blend.hf.attention import Observer
from blend.hf.fusion_cache import FusionCache

__all__ = ["Deviation", "covered", "kv_deviation", "picked_rows", "question_attention", "reused_rows", "watch_question"]


class Deviation(NamedTuple):
    """Relative distance of each row's KV from full prefill's, fp32 ``[L, T]`` on the CPU.

    Attributes:
        keys_LT: of the keys, as they stand in attention: after rotation.
        values_LT: of the values.
    """

    keys_LT: Tensor
    values_LT: Tensor


def kv_deviation(fusion: Fusion, full: Fusion) -> Deviation:
    """How far the KV of every row is from full prefill's: ``|fused - full| / |full|`` per cache layer.

    The norm is L2 over all heads of a row. 0 is full prefill's KV; 1 is as far off as zeros would be. CacheBlend (Yao
    et al., EuroSys 2025, arXiv:2405.16444) calls this distance KV deviation. Its selector ranks by the square without
    the division, within one layer; dividing makes layers, and keys and values, comparable.

    Args:
        fusion: what is judged.
        full: the same prompt, prefilled in full.

    Raises:
        PromptError: the two are not of the same prompt.
        ForeignKV: they come from models of different shapes.
    """
    if fusion.prompt.ids != full.prompt.ids:
        rows = f"{len(fusion.prompt)} and {len(full.prompt)} rows"
        raise PromptError(f"the fusions are of two prompts, of {rows}: compare two fusions of one prompt")
    if _shapes(fusion) != _shapes(full):
        raise ForeignKV("the fusions hold KV of different shapes: make both with the same model")
    pairs = list(zip(fusion.layers, full.layers, strict=True))
    keys_LT, values_LT = (torch.stack([_distance(a[slot], b[slot]) for a, b in pairs]) for slot in (0, 1))
    return Deviation(keys_LT, values_LT)


def question_attention(fusion: Fusion) -> Tensor:
    """The question's softmax attention to every row, per decoder layer: mean over heads and question rows.

    The question runs again over the fusion's KV, as ProphetKV's probe does (arXiv:2602.02579). Of a fusion by
    ``FullReuse`` the mean over layers is the very evidence that :class:`~blend.QueryAttention` ranks by; of a full
    prefill it is what the question looks at when nothing is approximate.

    Returns:
        fp32 ``[L, T]`` on the CPU. Each layer sums to 1, or to less where the model's attention has sinks.

    Raises:
        UnsupportedModel: the model's attention cannot be watched, or its Blender is closed.
    """
    seen: dict[int, Tensor] = {}

    def observe(layer: int, weights: Tensor) -> None:
        seen[layer] = weights.mean(dim=(0, 1, 2)).cpu()

    watch_question(fusion, observe)
    return torch.stack([seen[layer] for layer in sorted(seen)])


def watch_question(fusion: Fusion, observe: Observer) -> None:
    """Runs the question again over a finished fusion's KV, and shows ``observe`` the attention of each layer.

    Args:
        observe: called with the decoder layer and its softmax weights, ``[1, heads, Q, T]``.

    Raises:
        UnsupportedModel: the model's attention cannot be watched, or its Blender is closed.
    """
    view, prompt = fusion.view, fusion.prompt
    view.require_ready()
    accept(view, QueryAttention())
    rows_Q = torch.arange(len(prompt) - len(prompt.question), len(prompt), device=view.device)
    # A copy: the pass writes the question's K/V, and a fusion is not to be written to.
    cache = FusionCache([(keys[None].clone(), values[None].clone()) for keys, values in fusion.layers], len(prompt))
    ids_1T = torch.tensor([prompt.ids], device=view.device)
    view.run(ids_1T, view.narrow_pass(cache, rows_S=rows_Q, observer=observe, only_last=False))


def picked_rows(fusion: Fusion) -> Tensor:
    """Rows whose reused KV was computed again: bool ``[T]``."""
    return torch.tensor([state == "recomputed" for state in fusion.report.states])


def reused_rows(fusion: Fusion) -> Tensor:
    """Rows that a selector could pick from, because their KV is reused and not exact: bool ``[T]``."""
    return torch.tensor([state in ("moved", "recomputed") for state in fusion.report.states])


def covered(fusion: Fusion, weight_T: Tensor) -> float:
    """Share of a weight on the reused rows that lies on the rows computed again, 0.0 where there is none.

    A selector that picks blindly covers its ratio.

    Args:
        weight_T: one number per row, 0 or more, such as a row of :func:`kv_deviation` or :func:`question_attention`.

    Raises:
        PromptError: not one number per row.
    """
    rows = len(fusion.prompt)
    if weight_T.shape != (rows,):
        raise PromptError(f"the weight has shape {tuple(weight_T.shape)}: give one number per row, {rows}")
    total = weight_T[reused_rows(fusion)].sum()
    return float(weight_T[picked_rows(fusion)].sum() / total) if total else 0.0


def _shapes(fusion: Fusion) -> list[tuple[torch.Size, torch.Size]]:
    return [(keys.shape, values.shape) for keys, values in fusion.layers]


def _distance(kv_HTD: Tensor, full_HTD: Tensor) -> Tensor:
    """Of each row of one layer, over all heads: fp32 ``[T]``."""
    kv, full = (x.float().cpu().transpose(0, 1).flatten(1) for x in (kv_HTD, full_HTD))
    scale_T = full.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    distance_T: Tensor = (kv - full).norm(dim=1) / scale_T
    return distance_T
