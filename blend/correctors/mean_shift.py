"""AgentKVShift: a chunk's other rows are moved by what its recomputed rows were found to be off (arXiv:2607.21604)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from blend.correctors.base import Choice, Correction, Corrector, Shift
from blend.errors import BudgetError
from blend.layout import Layout
from blend.selectors import FreshKV
from blend.selectors.chunk_deviation import take_turns
from blend.selectors.deviation import distance, spread
from rope import Move, Rope
from rope.rotation import Turn, turn_, turn_name

__all__ = ["MeanShift"]


@dataclass(frozen=True)
class MeanShift(Corrector):
    """Per chunk and layer, the mean of (fresh - cached) over its recomputed rows, times a weight, for all others.

    Keys and values apart: of a chunk's recomputed rows, the mean of keys is over those whose keys diverged most at the
    check layer, and that of values over those whose values did, as :class:`~blend.ChunkDeviation` picked them. After
    a selector that picks otherwise, both are the shortest such lists that cover its rows; after one that looks at
    no K/V, both means are over all of them. A chunk without a recomputed row stays as it is.

    The mean knows later rows of the chunk, so an earlier row learns of tokens behind it: that is the method. It never
    learns of later chunks.

    The weight is ``min(d, 1)``, d the divergence of keys or values at the check layer. The paper leaves open whether d
    is relative, whether it is the row's or the chunk's, and whether keys are averaged as rotated. Here it is the row's
    own L2 distance over all heads, in the model's own unit, and keys are averaged as they are cached. On SmolLM2-135M
    that distance is .5 in keys and .16 in values for the median row; relative ones are .015 and .03, which shifts
    next to nothing. How keys are averaged made no difference there.

    Attributes:
        weight: ``"row"``: each row's own divergence, at most 1; ``"chunk"``: the mean of its chunk's stale rows, at
            most 1; a number: the same for all rows, and then any selector will do.
        relative: the divergence is over the fresh row's length, as :class:`~blend.ChunkDeviation` has it; the two
            are to agree.
        rotated: average keys as they are cached. If False, each is turned back to position 0 first, and the mean is
            turned to where each row stands: what a rotation by different angles would cancel out is kept.

    Raises:
        BudgetError: a weight that is none of these.
    """

    name: ClassVar[str] = "mean-shift"
    looks_ahead: ClassVar[bool] = True
    weight: Literal["row", "chunk"] | float = "row"
    relative: bool = False
    rotated: bool = True

    def __post_init__(self) -> None:
        known = self.weight in ("row", "chunk") if isinstance(self.weight, str) else 0.0 <= self.weight <= 1.0
        if not known:
            raise BudgetError(f"weight is {self.weight!r}: give 'row', 'chunk' or a number in [0, 1]")

    @property
    def needs_check(self) -> bool:
        return isinstance(self.weight, str)

    def plan(self, choice: Choice) -> Correction:
        key_T, value_T = self._divergence(choice)
        chunk_C, chunk_N = (_chunk_of(rows, choice.layout) for rows in (choice.chosen_C, choice.left_N))
        keyed_C, valued_C = _probes(choice.chosen_C, chunk_C, key_T, value_T)
        chunks = len(choice.layout.stale_spans)
        return _Shifting(
            chunk_N,
            _averages(chunk_C, keyed_C, chunks),
            _averages(chunk_C, valued_C, chunks),
            self._weights(key_T, choice, chunk_N),
            self._weights(value_T, choice, chunk_N),
            None if self.rotated else _Turns.between(choice),
        )

    def _divergence(self, choice: Choice) -> tuple[Tensor | None, Tensor | None]:
        """Of keys and of values at the check layer, fp32 ``[T]``; None where nothing was checked."""
        fresh, total = choice.fresh, choice.layout.rows
        if fresh is None:
            return None, None
        key_R = distance(fresh.fresh_keys, fresh.cached_keys, self.relative)
        value_R = distance(fresh.fresh_values, fresh.cached_values, self.relative)
        return spread(fresh.rows_R, key_R, total), spread(fresh.rows_R, value_R, total)

    def _weights(self, drift_T: Tensor | None, choice: Choice, chunk_N: Tensor) -> Tensor | float:
        """Of each row that stays, ``[N]``, or of all of them."""
        if not isinstance(self.weight, str):
            return float(self.weight)
        assert drift_T is not None, "the engine refuses selectors without a check where one is needed"
        if self.weight == "row":
            return drift_T[choice.left_N].clamp_max(1.0)
        means = [drift_T[start:stop].mean() for start, stop in choice.layout.stale_spans]
        return torch.stack(means).clamp_max_(1.0)[chunk_N]


@dataclass(frozen=True, eq=False)
class _Shifting:
    """The shift of one set of running rows. ``P`` chunks.

    Attributes:
        chunk_N: chunk of each row that stays.
        keys_PC: what each recomputed row counts for in its chunk's mean of keys.
        values_PC: in that of values.
        key_weight_N: of the mean of keys; one number for all rows is weighed in before the mean goes out to them.
        value_weight_N: of the mean of values.
        turns: None to average rotated keys.
    """

    chunk_N: Tensor
    keys_PC: Tensor
    values_PC: Tensor
    key_weight_N: Tensor | float
    value_weight_N: Tensor | float
    turns: _Turns | None

    def __call__(self, fresh: FreshKV) -> Shift:
        off = [fresh.fresh_keys.float() - fresh.cached_keys, fresh.fresh_values.float() - fresh.cached_values]
        if self.turns:
            self.turns.to_origin_(fresh.layer, off)
        shifts = [
            self._to_rows(torch.matmul(self.keys_PC, off[0]), self.key_weight_N),
            self._to_rows(torch.matmul(self.values_PC, off[1]), self.value_weight_N),
        ]
        if self.turns:
            self.turns.to_rows_(fresh.layer, shifts)
        return Shift(*shifts)

    def _to_rows(self, mean_HPD: Tensor, weight_N: Tensor | float) -> Tensor:
        if isinstance(weight_N, float):
            return (mean_HPD * weight_N).index_select(1, self.chunk_N)
        return mean_HPD.index_select(1, self.chunk_N) * weight_N[:, None]


class _Turns:
    """Turns recomputed rows to position 0, and from there to the rows that stay."""

    def __init__(self, rope: Rope, back: Mapping[str, Turn], out: Mapping[str, Turn]) -> None:
        self._rope, self._back, self._out = rope, back, out

    @classmethod
    def between(cls, choice: Choice) -> _Turns:
        total, chosen_C, left_N = choice.layout.rows, choice.chosen_C, choice.left_N
        back = choice.rope.turns(Move(chosen_C, torch.zeros_like(chosen_C), total, total))
        out = choice.rope.turns(Move(torch.zeros_like(left_N), left_N, total, total))
        return cls(choice.rope, back, out)

    def to_origin_(self, layer: int, pair: list[Tensor]) -> None:
        self._turn_(layer, pair, self._back)

    def to_rows_(self, layer: int, pair: list[Tensor]) -> None:
        self._turn_(layer, pair, self._out)

    def _turn_(self, layer: int, pair: list[Tensor], turns: Mapping[str, Turn]) -> None:
        rotation = self._rope.layers[layer]
        if rotation is not None:
            turn_(pair[0 if rotation.slot == "key" else 1], rotation, turns[turn_name(rotation.table, rotation.sign)])


def _chunk_of(rows: Tensor, layout: Layout) -> Tensor:
    """Number of the stale span that each row lies in."""
    stops = torch.tensor([stop for _, stop in layout.stale_spans], device=rows.device)
    return torch.bucketize(rows, stops, right=True)


def _probes(chosen_C: Tensor, chunk_C: Tensor, key_T: Tensor | None, value_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which recomputed rows tell of keys and which of values, bool ``[C]``."""
    keyed_C, valued_C = (torch.ones_like(chosen_C, dtype=torch.bool) for _ in range(2))
    if key_T is not None and value_T is not None:
        for chunk in chunk_C.unique():
            mine = torch.nonzero(chunk_C == chunk)[:, 0]
            rows = chosen_C[mine]
            keyed_C[mine], valued_C[mine] = take_turns(key_T[rows], value_T[rows], rows.numel())
    return keyed_C, valued_C


def _averages(chunk_C: Tensor, counted_C: Tensor, chunks: int) -> Tensor:
    """``[P, C]``: times rows, the mean over each chunk's counted ones; zero where there are none."""
    member_PC = (chunk_C == torch.arange(chunks, device=chunk_C.device)[:, None]) & counted_C
    return member_PC / member_PC.sum(dim=1, keepdim=True).clamp_min(1)
