"""Correcting while the pass runs: asks the corrector layer by layer, and writes what it answers into the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blend.correctors import Choice, Correction, Corrector
from blend.hf.fusion_cache import FusionCache
from blend.layout import Layout
from blend.selectors import FreshKV
from rope import Rope

__all__ = ["Corrections"]


class _Plan(NamedTuple):
    """What is done while one set of rows runs: rows computed again, their places among the running ones, rows left."""

    chosen_C: Tensor
    places_C: Tensor
    left_N: Tensor
    correction: Correction


class Corrections:
    """The corrections of one pass.

    Args:
        corrector: says by how much.
        layout: says which rows are stale.
        cache: holds them.
        rope: of the model.
    """

    def __init__(self, corrector: Corrector, layout: Layout, cache: FusionCache, rope: Rope) -> None:
        self._corrector, self._layout, self._cache, self._rope = corrector, layout, cache, rope
        self._stale = layout.stale.to(cache.states[0].keys.device)
        self._fresh: FreshKV | None = None
        self._running: Tensor | None = None
        self._plan: _Plan | None = None

    def see(self, fresh: FreshKV) -> None:
        """Keeps what the first check layer shows: later ones do not run all stale rows any more."""
        self._fresh = self._fresh or fresh

    def __call__(self, layer: int, rows_S: Tensor, keys: Tensor, values: Tensor) -> None:
        """Shifts the stale rows that do not run; called before the fresh K/V ``[1, H, S, D]`` are written."""
        if layer == 0:
            return  # K/V of the token alone: cached ones are exact
        if rows_S is not self._running:
            self._running, self._plan = rows_S, self._make_plan(rows_S)
        if self._plan is None:
            return
        state = self._cache.states[layer]
        chosen_C, places_C, left_N, correction = self._plan
        fresh = keys[0].index_select(1, places_C), values[0].index_select(1, places_C)
        cached = state.keys[0].index_select(1, chosen_C), state.values[0].index_select(1, chosen_C)
        shift = correction(FreshKV(layer, chosen_C, *fresh, *cached))
        _add(state.keys[0], left_N, shift.keys_HND)
        _add(state.values[0], left_N, shift.values_HND)

    def _make_plan(self, rows_S: Tensor) -> _Plan | None:
        # The rows that always run are among them, which tells how many others are. To count these would have the
        # host of a GPU wait.
        chosen, stale = rows_S.numel() - self._layout.forced.numel(), self._stale.numel()
        if not 0 < chosen < stale:
            return None
        runs = torch.isin(self._stale, rows_S, assume_unique=True)
        left_first = self._stale.index_select(0, runs.to(torch.uint8).argsort(stable=True))
        left_N, chosen_C = left_first[: stale - chosen], left_first[stale - chosen :]
        choice = Choice(chosen_C, left_N, self._layout, self._rope, self._fresh)
        return _Plan(chosen_C, torch.searchsorted(rows_S, chosen_C), left_N, self._corrector.plan(choice))


def _add(x_HTD: Tensor, rows_N: Tensor, shift_HND: Tensor | None) -> None:
    """Adds in fp32, rounds once."""
    if shift_HND is not None:
        x_HTD.index_copy_(1, rows_N, x_HTD.index_select(1, rows_N).float().add_(shift_HND).to(x_HTD.dtype))
