"""The exact move of a cached key from one position to another.

RoPE (Su et al. 2021, arXiv:2104.09864) turns pairs of dims by an angle that depends on the position alone, so a
key cached at ``p`` becomes the key at ``p'`` by one more turn of ``angle(p') - angle(p)``. The difference is taken
in fp64 between the model's own fp32 angles, the turn is made in fp32, and the result is rounded once.
Attention scaling (yarn, longrope) is in the cached key already and is not applied again.

This module does not know models, chunks or attention. Shape suffixes: ``T`` rows, ``F`` frequencies,
``D`` head dim; ``x`` stands for any leading dims.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rope.errors import UnsupportedRotation
from rope.tables import FrequencyTable, RegimeTable, RopeTable

__all__ = ["LayerRotation", "Move", "Rope", "Turn", "turn_"]

Slot = Literal["key", "value"]
Pairing = Literal["half", "interleaved"]


@dataclass(frozen=True)
class LayerRotation:
    """How one layer's cached tensor carries its position.

    Attributes:
        slot: the cached tensor that is rotated; ``value`` for MLA, whose value slot holds the rotary part.
        pairing: dims ``(i, i + F)`` (half) or ``(2i, 2i + 1)`` (interleaved) form a pair.
        table: name of the angle table.
        sign: +1, or -1 where the model turns the other way.
        gain_D: weight multiplied in after the rotation (a norm behind RoPE), or None.
    """

    slot: Slot
    pairing: Pairing
    table: str
    sign: int = 1
    gain_D: Tensor | None = None

    def describe(self) -> str:
        """Short text for tables, such as ``key:half:inv_freq``."""
        marks = ("-" if self.sign < 0 else "") + ("+gain" if self.gain_D is not None else "")
        return f"{self.slot}:{self.pairing}{marks}:{self.table}"


class Move(NamedTuple):
    """Where rows stood and where they go. Lengths matter only to tables that depend on them (longrope).

    Attributes:
        from_T: positions at caching time, int64 ``[T]``.
        to_T: new positions, int64 ``[T]``.
        from_length: rows of the pass that cached the keys, one number or int64 ``[T]`` (it may differ by row).
        to_length: rows of the pass that will use them.
    """

    from_T: Tensor
    to_T: Tensor
    from_length: int | Tensor
    to_length: int


class Turn(NamedTuple):
    """cos and sin of the angle differences, fp32 ``[T, F]``; ``identity`` when no row moves."""

    cos_TF: Tensor
    sin_TF: Tensor
    identity: bool


@dataclass(frozen=True)
class Rope:
    """Everything needed to move the cached keys of one model.

    Attributes:
        layers: one entry per cache layer; None where the layer has no position (NoPE, ALiBi).
        tables: angle tables by name.
        error: the largest relative misfit seen when the rotation was read off the model.
    """

    layers: tuple[LayerRotation | None, ...]
    tables: Mapping[str, RopeTable]
    error: float

    def turns(self, move: Move) -> dict[str, Turn]:
        """The turn of each table that some layer uses; shared by all its layers.

        Raises:
            UnsupportedRotation: a table cannot serve the move's lengths.
        """
        used = {(r.table, r.sign) for r in self.layers if r is not None}
        return {turn_name(name, sign): _turn(self.tables[name], sign, move) for name, sign in used}

    def move(self, layer: int, keys_xTD: Tensor, values_xTD: Tensor, move: Move) -> tuple[Tensor, Tensor]:
        """Cached ``(keys, values)`` of one layer, moved; new tensors, dtype kept, inputs untouched."""
        rotation = self.layers[layer]
        if rotation is None:
            return keys_xTD.clone(), values_xTD.clone()
        moved, still = (keys_xTD, values_xTD) if rotation.slot == "key" else (values_xTD, keys_xTD)
        turn = _turn(self.tables[rotation.table], rotation.sign, move)
        moved = turn_(moved.clone(), rotation, turn)
        return (moved, still.clone()) if rotation.slot == "key" else (still.clone(), moved)

    def admit(self, length: int) -> None:
        """Raises :class:`UnsupportedRotation` where a table cannot serve passes of ``length`` rows."""
        self.same_angles(length, length)

    def serves(self, length: int) -> bool:
        """Whether every table can serve passes of ``length`` rows."""
        try:
            self.admit(length)
        except UnsupportedRotation:
            return False
        return True

    def same_angles(self, length: int, other: int) -> bool:
        """Whether passes of these two lengths turn every position by the same angles.

        Raises:
            UnsupportedRotation: a table cannot serve one of the lengths.
        """
        probe = torch.ones(1, dtype=torch.int64)
        return all(
            torch.equal(table.angles(probe, length), table.angles(probe, other)) for table in self.tables.values()
        )

    @property
    def by_length(self) -> bool:
        """Whether angles depend on the length of the pass (longrope), so that even unmoved rows may need a turn."""
        return any(isinstance(table, RegimeTable) for table in self.tables.values())

    def digest(self) -> bytes:
        """Identifies the rotation, for content keys."""
        state = hashlib.sha256()
        for rotation in self.layers:
            state.update((rotation.describe() if rotation else "none").encode() + b"\0")
        for name in sorted(self.tables):
            state.update(name.encode() + self.tables[name].digest())
        return state.digest()

    def describe(self) -> str:
        """The distinct layer rotations, such as ``key:half:inv_freq x28, none x8``."""
        names = [rotation.describe() if rotation else "none" for rotation in self.layers]
        return ", ".join(f"{name} x{names.count(name)}" for name in dict.fromkeys(names))


def turn_name(table: str, sign: int) -> str:
    """Key of :meth:`Rope.turns` for a layer's table and sign."""
    return table if sign > 0 else f"-{table}"


def _turn(table: RopeTable, sign: int, move: Move) -> Turn:
    to_TF = table.angles(move.to_T, move.to_length)
    delta_TF = (to_TF - _angles_before(table, move)) * sign
    # To know costs a GPU's host a wait for all that is queued; a turn of zero changes no bit there either.
    identity = delta_TF.device.type == "cpu" and not bool(delta_TF.any())
    return Turn(delta_TF.cos().float(), delta_TF.sin().float(), identity)


def _angles_before(table: RopeTable, move: Move) -> Tensor:
    if isinstance(move.from_length, int):
        return table.angles(move.from_T, move.from_length)
    if isinstance(table, FrequencyTable):  # the same at every length
        return table.angles(move.from_T, 0)
    angles_TF = torch.empty(move.from_T.numel(), table.width, dtype=torch.float64, device=move.from_T.device)
    for length in move.from_length.unique().tolist():
        rows_T = move.from_length == length
        angles_TF[rows_T] = table.angles(move.from_T[rows_T], int(length))
    return angles_TF


def turn_(x_xTD: Tensor, rotation: LayerRotation, turn: Turn) -> Tensor:
    """Turns ``x_xTD`` in place by ``turn`` and returns it; dims beyond the rotary part stay as they are.

    Computed in fp32 and rounded once to the tensor's dtype. A turn of zero changes no bit.
    """
    if turn.identity:
        return x_xTD
    width = turn.cos_TF.shape[-1]
    first, second = _pairs(x_xTD, rotation.pairing, width)
    gain_D = None if rotation.gain_D is None else rotation.gain_D.to(x_xTD.device, torch.float32)
    gain = None if gain_D is None else _pairs(gain_D, rotation.pairing, width)
    a, b = first.float(), second.float()
    if gain is not None:
        a, b = a / gain[0], b / gain[1]
    new_first = (a * turn.cos_TF).addcmul_(b, turn.sin_TF, value=-1)
    new_second = (b * turn.cos_TF).addcmul_(a, turn.sin_TF)
    if gain is not None:
        new_first, new_second = new_first * gain[0], new_second * gain[1]
        # Dividing and multiplying again may cost a bit, which rows that do not move must not pay.
        still_T1 = (turn.sin_TF == 0).all(dim=-1, keepdim=True)
        new_first, new_second = torch.where(still_T1, first, new_first), torch.where(still_T1, second, new_second)
    first.copy_(new_first)
    second.copy_(new_second)
    return x_xTD


def _pairs(x: Tensor, pairing: Pairing, width: int) -> tuple[Tensor, Tensor]:
    """Views of the first and the second dim of every rotary pair."""
    if pairing == "half":
        return x[..., :width], x[..., width : 2 * width]
    return x[..., 0 : 2 * width : 2], x[..., 1 : 2 * width : 2]
