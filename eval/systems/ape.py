"""APE: passages encoded side by side, at the same positions, and looked at with an attention of its own.

Yang et al. 2025, "APE: Faster and Longer Context-Augmented Generation via Adaptive Parallel Encoding"
(arXiv:2502.05431). Three things differ from full reuse:

1. every passage begins at the same position, right behind the system part, and the question begins behind the longest::

       APE          | system | chunk 0 ....... | question        positions, not rows
                             | chunk 1 .. |
                             | chunk 2 ..... |

2. attention to the passages has a temperature ``T`` below 1, which sharpens it;
3. their share against everything else is weighed by a scale ``S``.

RoPE knows only how far apart two positions are. So question and answer can stay at their rows, where ``generate`` puts
them, while the keys before them are turned until the distances are APE's: the first row of every chunk to ``Q - L``,
where ``Q`` is the question's first row and ``L`` the longest chunk's length, and the system part to the rows right
before that. This holds where rotation is all that a layer knows of positions (not with ALiBi, nor where queries are
scaled by position).

T and S want tuning per model; the paper finds them on a validation set, and its code's demo has 0.9 for both, which is
what stands here. Shape suffixes: ``B`` batch, ``Hq`` query heads, ``Hkv`` kv heads, ``S`` rows that run, ``T`` rows in
KV, ``D`` head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from blend import Blender, BudgetError, PromptError, UnsupportedModel
from blend.hf.attention import Reach, attending
from blend.hf.attention.eager import mix_eager
from eval.systems.base import Case, Fused, System
from eval.systems.placed import place

__all__ = ["ape", "ape_with", "attend_apart"]


def ape(ratio: float) -> System:
    """APE with the T and S of its authors' demo (arXiv:2502.05431). Nothing is computed again."""
    return ape_with(temperature=0.9, scale=0.9)


def ape_with(temperature: float, scale: float) -> System:
    """APE with a temperature and a scale of one's own; both 1 leave the attention as it is, and only move the passages.

    Raises:
        BudgetError: one of them is not positive.
    """
    for name, value in (("temperature", temperature), ("scale", scale)):
        if not value > 0:
            raise BudgetError(f"the {name} of APE is {value}: it must be above 0")

    def run(blender: Blender, case: Case) -> Fused:
        prompt = case.prompt
        _admit(blender)
        if not prompt.chunks:
            return Fused(blender.fuse(prompt))
        first = len(prompt) - len(prompt.question)
        start = first - max(map(len, prompt.chunks))
        context = slice(len(prompt.system), first)
        during = partial(attending, partial(attend_apart, context=context, temperature=temperature, scale=scale))
        starts = [start] * len(prompt.chunks)
        fusion = place(blender, prompt, "ape", starts, system=start - len(prompt.system), during=during)
        return Fused(fusion, during)

    return System("ape", "APE", f"T={temperature:g},S={scale:g}", run, in_place=False)


def attend_apart(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    context: slice,
    temperature: float,
    scale: float,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention of ``query [B, Hq, S, D]``, the last S rows, over ``key, value [B, Hkv, T, D]``, context set apart.

    The two parts have a softmax each, that of the context at temperature T, and are merged in the shares
    ``softmax([S * T * lse_context, lse_other])``. That is one softmax over all, once ``(S * T - 1) * lse_context`` is
    added to the scores of the context: at T = S = 1 it adds nothing.

    Args:
        mask: the model's own, which is not needed: nothing is padded, and a row sees those before it.
        context: rows of the passages.
        scaling: multiplies the dot products; other arguments as transformers passes them.

    Returns:
        ``[B, S, Hq, D]`` in the query's dtype; scores and softmax in fp32.

    Raises:
        UnsupportedModel: the model does more to its scores than scale them.
        PromptError: some of the rows that run are not behind the context.
    """
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise UnsupportedModel(f"{type(module).__name__} attends with a softcap, sinks or a bias: leave ape out")
    batch, heads, count, dim = query.shape
    kv_heads, total = key.shape[1], key.shape[2]
    if total - count < context.stop:
        raise PromptError(f"rows from {total - count} on run, and the context ends at {context.stop}: run it before")
    folded = query.float().reshape(batch, kv_heads, heads // kv_heads * count, dim)
    scores = (folded @ key.float().transpose(-1, -2)).reshape(batch, heads, count, total)
    scores *= dim**-0.5 if scaling is None else scaling
    inside = scores[..., context] / temperature
    scores[..., context] = inside + (scale * temperature - 1) * inside.logsumexp(-1, keepdim=True)
    rows = torch.arange(total, device=key.device)
    scores.masked_fill_(rows > rows[total - count :, None], float("-inf"))
    return mix_eager(scores.softmax(-1), value), None


def _admit(blender: Blender) -> None:
    """Raises where APE is not what would come out."""
    name = type(blender.model).__name__
    if not blender.view.observable:
        raise UnsupportedModel(f"the attention of {name} cannot be replaced, and APE needs its own: leave ape out")
    if any(reach != Reach() for reach in blender.view.reaches):
        raise UnsupportedModel(f"{name} has layers that see a window or a chunk of the rows only: leave ape out")
    if blender.setup.prelude != "system":
        raise PromptError(
            f"chunks are encoded behind prelude={blender.setup.prelude!r}, and APE wants them behind the system part: "
            "build the Blender with prelude='system', or leave ape out"
        )
