"""Oracles: rows chosen by what only a full prefill knows, at no time of their own.

Each is the truth of what a published method estimates. It bounds the estimate and not the outcome: the rows that the
truth ranks highest need not be those whose computing again helps most, so a method may do better than its oracle.

Shape suffixes: ``T`` rows of the prompt, ``L`` layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from blend import Blender, Fusion, KVBlendError
from blend.selectors import BudgetedSelector, Candidates, FullReuse, top_rows
from eval.inside import kv_deviation, question_attention
from eval.systems.base import Case, System
from eval.systems.fusing import fused

__all__ = ["NoTruth", "RowScores", "oracle_attention", "oracle_kv"]


class NoTruth(KVBlendError, ValueError):
    """An oracle is asked about a prompt whose full prefill it is not given."""


@dataclass(frozen=True)
class RowScores(BudgetedSelector):
    """The rows of highest score, whatever the score.

    Attributes:
        score_T: one number per row of the prompt, fp32.
    """

    name: ClassVar[str] = "row-scores"
    score_T: Tensor = field(default_factory=lambda: torch.empty(0), repr=False, compare=False)

    def choose(self, candidates: Candidates) -> Tensor:
        return top_rows(candidates.stale, self.score_T, self.budget(candidates.stale.numel()))


def oracle_kv(ratio: float) -> System:
    """The rows whose reused KV is furthest from full prefill's.

    Relative distance of keys and of values, summed over layers (:func:`eval.inside.kv_deviation`): what CacheBlend
    estimates from one layer (arXiv:2405.16444). It restores the most KV, which need not help the answer most: rows that
    nothing looks at count like any other.
    """
    return _oracle("oracle-kv", "oracle: KV", ratio, _distance)


def oracle_attention(ratio: float) -> System:
    """The rows that the question attends to in the full prefill, mean over layers.

    What ProphetKV estimates from stale KV (arXiv:2602.02579).
    """
    return _oracle("oracle-attention", "oracle: attention", ratio, _attention)


def _distance(blender: Blender, truth: Fusion) -> Tensor:
    deviation = kv_deviation(blender.fuse(truth.prompt, selector=FullReuse()), truth)
    return (deviation.keys_LT + deviation.values_LT).sum(0)


def _attention(blender: Blender, truth: Fusion) -> Tensor:
    return question_attention(truth).mean(0)


def _oracle(name: str, title: str, ratio: float, score: Callable[[Blender, Fusion], Tensor]) -> System:
    blind = RowScores(ratio)  # a ratio out of range is told now

    def make(blender: Blender, case: Case) -> RowScores:
        if case.truth is None:
            raise NoTruth(f"{name} chooses by the full prefill: give Case(..., truth=) the prompt's")
        return replace(blind, score_T=score(blender, case.truth))

    return replace(fused(name, title, f"{ratio:g}", make), timed=False)
