"""How far a fused prompt is from full prefill: divergences of next-token distributions, in nats.

Knows nothing of how the KV came about; a system is judged by the logits it gives. Shape suffixes: ``n`` tokens of the
answer, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blend import Blender, Fusion

__all__ = [
    "GREEDY",
    "Fidelity",
    "Interval",
    "Reference",
    "bootstrap_mean",
    "compare",
    "forced_logits",
    "kl_divergence",
    "make_reference",
]

GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
"""Arguments of ``generate`` that make it take the likeliest token each time, whatever the model's own defaults."""


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
        greedy: the token it finds likeliest at each place of full prefill's answer.
        agrees: how many leading places there are where full prefill, asked the same way, finds the same token
            likeliest; the answer's length if all.
    """

    kl_first: float
    kl: float
    same_first_token: bool
    greedy: tuple[int, ...]
    agrees: int


class Interval(NamedTuple):
    """A mean, and the range it would fall in for 95 % of samples like this one."""

    mean: float
    low: float
    high: float


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


@torch.inference_mode()
def forced_logits(fusion: Fusion, answer: Sequence[int]) -> Tensor:
    """Logits before each token of ``answer``, given the prompt's KV and the tokens before: fp32 ``[n, V]``.

    One forward pass of the model itself, as decoding would go: the prompt's last row runs again over the KV of the
    others.

    Raises:
        ValueError: an empty answer.
    """
    if not answer:
        raise ValueError("the answer is empty: there is no token to look at")
    inputs = fusion.inputs()
    ids = torch.tensor([[fusion.prompt.ids[-1], *answer[:-1]]], device=fusion.view.device)
    seen = torch.ones(1, len(fusion.prompt) + len(answer) - 1, dtype=torch.long, device=ids.device)
    out = fusion.view.model(**{**inputs, "input_ids": ids, "attention_mask": seen}, use_cache=True)
    logits_nV: Tensor = out.logits[0].float()
    return logits_nV


def make_reference(blender: Blender, full: Fusion, tokens: int) -> Reference:
    """Full prefill's greedy answer of at most ``tokens`` tokens."""
    answer = blender.generate(full, max_new_tokens=tokens, **GREEDY).ids
    return Reference(full, answer, forced_logits(full, answer))


def compare(reference: Reference, fusion: Fusion) -> Fidelity:
    """Judges one fusion of the reference's prompt."""
    logits_nV = forced_logits(fusion, reference.answer)
    greedy = tuple(logits_nV.argmax(-1).tolist())
    # Not with the answer itself: decoding token by token rounds otherwise than one pass over all of them, and in bf16
    # two tokens are often so close that full prefill would not agree with itself.
    pairs = enumerate(zip(greedy, reference.logits_nV.argmax(-1).tolist(), strict=True))
    return Fidelity(
        kl_first=float(kl_divergence(reference.fusion.logits, fusion.logits)),
        kl=float(kl_divergence(reference.logits_nV, logits_nV).mean()),
        same_first_token=bool(reference.fusion.logits.argmax() == fusion.logits.argmax()),
        greedy=greedy,
        agrees=next((i for i, (own, other) in pairs if own != other), len(greedy)),
    )


def bootstrap_mean(values: Sequence[float], *, seed: int = 0, draws: int = 2000) -> Interval:
    """The mean of ``values`` and its 95 % percentile-bootstrap interval; the same for the same seed.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("there are no values to take a mean of")
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(draws, len(data)))
    low, high = np.quantile(data[picks].mean(axis=1), [0.025, 0.975])
    return Interval(float(data.mean()), float(low), float(high))
