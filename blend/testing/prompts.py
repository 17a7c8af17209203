"""Prompts of random token ids, for models with random weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blend.chunk import Chunk
from blend.prompt import Prompt

__all__ = ["tiny_ids", "tiny_prompt"]

# Below the first are pad, BOS and EOS of the tiny models; from the second on their image tokens.
_FIRST, _LAST = 3, 250


def tiny_ids(count: int, seed: int = 0) -> tuple[int, ...]:
    """``count`` random ids that every tiny model reads as ordinary text; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(_FIRST, _LAST, (count,), generator=generator).tolist())


def tiny_prompt(seed: int = 0, *, system: int = 12, chunks: Sequence[int] = (30, 41, 25), question: int = 9) -> Prompt:
    """A prompt of random ids; prompts of the same seed share system part, leading chunks and question.

    Args:
        seed: of all ids.
        system: rows of the system part.
        chunks: rows of each chunk.
        question: rows of the question.
    """
    parts = tuple(
        Chunk(tiny_ids(rows, 1000 * seed + index + 2), chr(ord("a") + index)) for index, rows in enumerate(chunks)
    )
    return Prompt(tiny_ids(system, 1000 * seed), parts, tiny_ids(question, 1000 * seed + 1))
