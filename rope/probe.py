"""Reads a rotation off observed keys: the same tokens cached at two positions.

A sequence of one token attends to nothing but itself, so its hidden states do not depend on where it stands and
the two caches differ by the rotation alone. The fit tries every slot, pairing, sign and table and keeps the one
that explains the difference to rounding; nothing is looked up by a model's name.

This module does not know transformers. Shape suffixes: ``N`` tokens, ``H`` kv heads, ``D`` head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rope.errors import UnsupportedRotation
from rope.rotation import LayerRotation, Move, Pairing, Rope, Slot, _turn, turn_
from rope.tables import RopeTable

__all__ = ["LayerSample", "fit_layer", "fit_rope", "tolerance"]

# Largest misfit accepted, relative to the largest entry. The rotation is computed once in fp32 by us and once by
# the model; in 16 bits the model rounds the rotated key, and again the one that we compare with.
_TOLERANCE = {torch.float32: 3e-6, torch.float64: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class LayerSample(NamedTuple):
    """One layer's cache of N one-token sequences, at the base position and at the probed one.

    Attributes:
        keys: two tensors ``[N, H, D]``, at ``positions[0]`` and ``positions[1]``.
        values: likewise.
        gains: candidates for a weight behind the rotation, each ``[D]``.
    """

    keys: tuple[Tensor, Tensor]
    values: tuple[Tensor, Tensor]
    gains: Sequence[Tensor] = ()


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative misfit that counts as rounding in ``dtype``."""
    return _TOLERANCE[dtype]


def fit_rope(samples: Sequence[LayerSample], tables: Mapping[str, RopeTable], positions: tuple[int, int]) -> Rope:
    """Fits every layer.

    Raises:
        UnsupportedRotation: some layer's cache changes with the position in a way that is no known rotation.
    """
    layers: list[LayerRotation | None] = []
    worst = 0.0
    for index, sample in enumerate(samples):
        rotation, error = fit_layer(sample, tables, positions, index)
        layers.append(rotation)
        worst = max(worst, error)
    return Rope(tuple(layers), dict(tables), worst)


def fit_layer(
    sample: LayerSample, tables: Mapping[str, RopeTable], positions: tuple[int, int], index: int = 0
) -> tuple[LayerRotation | None, float]:
    """The rotation of one layer and its relative misfit; None where the cache does not depend on the position."""
    limit = tolerance(sample.keys[0].dtype)
    changes: dict[Slot, float] = {
        "key": _misfit(sample.keys[0], sample.keys[1]),
        "value": _misfit(sample.values[0], sample.values[1]),
    }
    moving = [slot for slot, change in changes.items() if change > limit]
    if not moving:
        return None, max(changes.values())
    if len(moving) == 2:
        raise UnsupportedRotation(
            f"layer {index}: cached keys and values both depend on the position, as with position embeddings that are "
            "added to the token embeddings: a cached chunk cannot be moved. Use a model with rotary position "
            "embeddings (Llama, Qwen, Mistral, Gemma, ...), or the prefix path, which moves nothing."
        )
    best, error = _best_fit(sample, moving[0], tables, positions)
    if best is None or error > limit:
        raise UnsupportedRotation(
            f"layer {index}: no rotation explains how the cached {moving[0]}s change with the position "
            f"(best relative misfit {error:.1e}, limit {limit:.0e}; tables tried: {', '.join(tables) or 'none'}). "
            "Use full prefill or the prefix path for this model."
        )
    return best, error


def _best_fit(
    sample: LayerSample, slot: Slot, tables: Mapping[str, RopeTable], positions: tuple[int, int]
) -> tuple[LayerRotation | None, float]:
    before, after = sample.keys if slot == "key" else sample.values
    count = before.shape[0]
    move = Move(
        torch.full((count,), positions[0]), torch.full((count,), positions[1]), positions[0] + 1, positions[1] + 1
    )
    best: LayerRotation | None = None
    best_error = float("inf")
    for rotation in _candidates(slot, tables, before.shape[-1], sample.gains):
        turn = _turn(tables[rotation.table], rotation.sign, move)
        # [N, H, D] -> [H, N, D]: one row per token, as in a cache.
        guess = turn_(before.cpu().float().transpose(0, 1).clone(), rotation, turn).transpose(0, 1)
        error = _misfit(after.cpu().float(), guess)
        if error < best_error:
            best, best_error = rotation, error
    return best, best_error


def _candidates(
    slot: Slot, tables: Mapping[str, RopeTable], dim: int, gains: Sequence[Tensor]
) -> Iterator[LayerRotation]:
    fitting = [gain.detach().cpu().float() for gain in gains if gain.numel() == dim and bool((gain != 0).all())]
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    # The plain rotation comes first: a gain is only believed where it fits better.
    for gain in (None, *fitting):
        for name, table in tables.items():
            if 2 * table.width > dim:
                continue
            for pairing in pairings:
                for sign in (1, -1):
                    yield LayerRotation(slot, pairing, name, sign, gain)


def _misfit(truth: Tensor, guess: Tensor) -> float:
    scale = truth.float().abs().max().clamp_min(1e-30)
    return float((truth.float() - guess.float()).abs().max() / scale)
