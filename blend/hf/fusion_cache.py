"""The fusion cache: moved KV of the whole prompt, into which a narrowed forward pass scatters fresh rows.

transformers sees an ordinary cache that is empty before the pass and holds all rows in attention; what it hands to
``update`` are the fresh K/V of the rows that run. Where chunks come from a slow store, a :class:`Filling` brings their
layers in while earlier layers compute; a layer waits for its own K/V and for no other's.

Shape suffixes: ``T`` rows of the prompt, ``S`` rows that run, ``H`` kv heads, ``D`` head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from blend.chunk import KVLayers

__all__ = ["Correct", "Filling", "FusionCache", "FusionLayer", "LayerKnown", "cached_kv"]

Correct = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called with (layer, running rows ``[S]``, their fresh keys, fresh values ``[1, H, S, D]``); may shift other rows."""


def cached_kv(cache: Cache) -> KVLayers:
    """Keys and values ``[B, H, rows, D]`` of every layer that owns some."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    return tuple((layer.keys, layer.values) for layer in layers if layer.keys is not None and layer.values is not None)


class Filling(Protocol):
    """Brings the moved K/V of each layer into the fusion cache, in order."""

    def wait(self, index: int) -> None:
        """Returns when layer ``index`` is filled; raises what went wrong with it."""


class LayerKnown(Exception):
    """Leaves a layer right after its fresh K/V are known, before its attention: the cheap check."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__("left behind the K/V projection on purpose")
        self.keys = keys
        self.values = values


class FusionLayer(DynamicLayer):
    """One layer's K/V, ``[1, H, T, D]``, written in place.

    Args:
        ready: called before the first use of the K/V; returns when they are there.
    """

    def __init__(self, keys: Tensor, values: Tensor, ready: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        self._ready = ready
        self.keys: Tensor = keys
        self.values: Tensor = values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.rows_S: Tensor | None = None  # rows that run now; None for all
        self.stop = False  # leave the layer in update()
        self.settled = False  # fresh K/V of every row that runs are in place already
        self.correct: Callable[[Tensor, Tensor, Tensor], None] | None = None  # shifts stale rows that do not run

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Scatters the fresh rows and returns the K/V of all rows."""
        self.settle_in()
        if self.stop:
            raise LayerKnown(key_states, value_states)
        # Once settled, a second projection of fewer rows would only put other rounding in place of the same values.
        if not self.settled:
            self.scatter(key_states, value_states)
        return self.keys, self.values

    def settle_in(self) -> None:
        """Waits until the K/V that are taken over are in place; fresh rows may be written over them then."""
        if self._ready is not None:
            self._ready()
            self._ready = None

    def scatter(self, keys: Tensor, values: Tensor) -> None:
        """Writes fresh K/V ``[1, H, S, D]`` over the rows that run; once per layer and pass."""
        if self.rows_S is None:
            self.keys.copy_(keys)
            self.values.copy_(values)
        else:
            if self.correct is not None:  # here fresh K/V are known, and cached ones are still there
                self.correct(self.rows_S, keys, values)
            self.keys.index_copy_(2, self.rows_S, keys)
            self.values.index_copy_(2, self.rows_S, values)

    def get_seq_length(self) -> Any:
        """0: nothing precedes the prompt. While narrowed, the offset of each running row to its index.

        Some attentions (Llama 4's temperature tuning) take ``arange(S) + get_seq_length()`` for the queries'
        positions; a tensor of offsets makes that exact.
        """
        if self.rows_S is None:
            return 0
        return self.rows_S - torch.arange(self.rows_S.numel(), device=self.rows_S.device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All rows of the prompt, from row 0."""
        return int(self.keys.shape[-2]), 0


class FusionCache(Cache):
    """K/V of every row of one prompt, per cache layer, and the pass that is running over it.

    Args:
        layers: per layer keys ``[1, H, T, Dk]`` and values ``[1, H, T, Dv]``; written to in place.
        rows: T.
        filling: brings K/V in while the pass runs; None where they are in place.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], rows: int, filling: Filling | None = None) -> None:
        waits = [partial(filling.wait, index) if filling else None for index in range(len(layers))]
        self.states = [FusionLayer(*pair, ready) for pair, ready in zip(layers, waits, strict=True)]
        super().__init__(layers=list(self.states))
        self.rows = rows
        self.current: Any = None  # the NarrowPass that runs, read by the layer hooks

    @property
    def kv(self) -> KVLayers:
        """Views ``[H, T, D]`` of keys and values per layer, all in place."""
        for layer in self.states:
            layer.settle_in()
        return tuple((layer.keys[0], layer.values[0]) for layer in self.states)

    def show_rows(self, rows_S: Tensor | None) -> None:
        """Tells every layer which rows run from now on (None: all)."""
        for layer in self.states:
            layer.rows_S = rows_S

    def correct_with(self, correct: Correct) -> None:
        """Lets ``correct`` shift rows of each layer before its fresh K/V are written."""
        for index, layer in enumerate(self.states):
            layer.correct = partial(correct, index)

    def reset_pass(self) -> None:
        """Makes the cache ready for another pass; K/V stay."""
        self.current = None
        for layer in self.states:
            layer.rows_S, layer.settled, layer.correct = None, False, None
