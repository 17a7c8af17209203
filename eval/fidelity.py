"""How far a fused prompt is from full prefill: divergences of next-token distributions, in nats.

Knows nothing of how the KV came about; a system is judged by the logits it gives. Shape suffixes: ``n`` tokens of the
answer, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blend import Blender, Fusion
from eval.systems.base import GREEDY, forced_logits

__all__ = [
    "Fidelity",
    "Reference",
    "compare",
    "judge",
    "kl_divergence",
    "known_answer",
    "make_reference",
]


@dataclass(frozen=True, eq=False)
class Reference:
    """Full prefill's answer, which the others are held against.

    Attributes:
        fusion: of the full prefill.
        answer: its own greedy answer, with the end token where it came to one.
        logits_nV: fp32, before each token of the answer, given those before it.
    """

    fusion: Fusion
    answer: tuple[int, ...]
    logits_nV: Tensor


class Fidelity(NamedTuple):
    """One prompt under one system, against full prefill.

    Attributes:
        kl_first: nats, of the first token's distribution.
        kl: nats per token, mean over full prefill's answer.
        same_first_token: the likeliest first token is the same.
        top1: share of the places of full prefill's answer where both find the same token likeliest.
        greedy: the token it finds likeliest at each place of full prefill's answer.
        agrees: how many leading places there are where full prefill, asked the same way, finds the same token
            likeliest; the answer's length if all.
    """

    kl_first: float
    kl: float
    same_first_token: bool
    top1: float
    greedy: tuple[int, ...]
    agrees: int


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(logits) || softmax(other)) in nats, fp64, over the last axis: ``[..., V]`` to ``[...]``.

    Raises:
        ValueError: the shapes differ.
    """
    if logits.shape != other.shape:
        raise ValueError(f"logits have shapes {tuple(logits.shape)} and {tuple(other.shape)}: they must be the same")
    p, q = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    # A token ruled out by both (-inf) adds nothing; fp64 rounding may leave a zero just below zero.
    return torch.where(p == -torch.inf, 0.0, p.exp() * (p - q)).sum(-1).clamp_min(0.0)


def make_reference(blender: Blender, full: Fusion, tokens: int) -> Reference:
    """Full prefill's greedy answer of at most ``tokens`` tokens."""
    answer = blender.generate(full, max_new_tokens=tokens, **GREEDY).ids
    return Reference(full, answer, forced_logits(full, answer))


def compare(reference: Reference, fusion: Fusion) -> Fidelity:
    """Judges one fusion of the reference's prompt."""
    return judge(reference, fusion.logits, forced_logits(fusion, reference.answer))


def judge(reference: Reference, logits: Tensor, forced_nV: Tensor) -> Fidelity:
    """Judges a system by what it shows.

    Args:
        logits: of the first token, ``[V]``.
        forced_nV: before each token of the reference's answer, given those before it.
    """
    greedy = tuple(forced_nV.argmax(-1).tolist())
    # Not with the answer itself: decoding token by token rounds otherwise than one pass over all of them, and in bf16
    # two tokens are often so close that full prefill would not agree with itself.
    own = reference.logits_nV.argmax(-1).tolist()
    same = [ours == theirs for ours, theirs in zip(greedy, own, strict=True)]
    return Fidelity(
        kl_first=float(kl_divergence(reference.fusion.logits, logits)),
        kl=float(kl_divergence(reference.logits_nV, forced_nV).mean()),
        same_first_token=bool(reference.fusion.logits.argmax() == logits.argmax()),
        top1=sum(same) / len(same),
        greedy=greedy,
        agrees=next((i for i, agrees in enumerate(same) if not agrees), len(same)),
    )


def known_answer(reference: Reference, fidelity: Fidelity) -> tuple[int, ...]:
    """What judging a system has shown of its own greedy answer.

    Up to the first difference it is full prefill's, and there the system's own token: this much need not be decoded.
    """
    if fidelity.agrees == len(reference.answer):
        return reference.answer
    return (*reference.answer[: fidelity.agrees], fidelity.greedy[fidelity.agrees])
