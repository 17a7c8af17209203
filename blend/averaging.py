"""The mean of a chunk's KV over passes in which it stood behind different contexts. Knows nothing of models or stores.

Of a row's KV in prompts to come, the mean is the estimate with the least expected squared error, and the only part of
the error that it leaves is what differs from context to context. Keys of different positions have no mean worth
having: each is turned first to where it would stand behind the prelude alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blend.chunk import KVLayers
from rope import Move, Rope
from rope.rotation import turn_, turn_name

__all__ = ["Mean"]


class Mean:
    """The mean of one chunk's KV, in fp32.

    Args:
        rope: of the model.
        base: position that the chunk's first row is turned to.
        rows: of the chunk.
    """

    def __init__(self, rope: Rope, base: int, rows: int) -> None:
        self._rope, self._base, self._rows = rope, base, rows
        self._sums: list[tuple[Tensor, Tensor]] = []
        self._squares: list[tuple[Tensor, Tensor]] = []  # of each row's length
        self._count = 0

    @torch.inference_mode()
    def add(self, layers: KVLayers, base: int, length: int) -> None:
        """Counts one pass in.

        Args:
            layers: the chunk's KV in it, ``[H, rows, D]``; left as it is.
            base: where its first row stood.
            length: rows of the pass.

        Raises:
            UnsupportedRotation: an angle table cannot serve the pass.
        """
        device = layers[0][0].device
        olds_T, news_T = (torch.arange(start, start + self._rows, device=device) for start in (base, self._base))
        turns = self._rope.turns(Move(olds_T, news_T, length, self._base + self._rows))
        for index, (keys_HTD, values_HTD) in enumerate(layers):
            pair = (keys_HTD.to(torch.float32, copy=True), values_HTD.to(torch.float32, copy=True))
            rotation = self._rope.layers[index]
            if rotation is not None:
                turn_(
                    pair[0 if rotation.slot == "key" else 1], rotation, turns[turn_name(rotation.table, rotation.sign)]
                )
            squares = _lengths_squared(pair[0]), _lengths_squared(pair[1])
            if self._count:
                for total, x in zip(self._sums[index] + self._squares[index], pair + squares, strict=True):
                    total += x
            else:
                self._sums.append(pair)
                self._squares.append(squares)
        self._count += 1

    def layers(self, dtype: torch.dtype) -> KVLayers:
        """The mean so far, rounded once."""
        return tuple(((keys / self._count).to(dtype), (values / self._count).to(dtype)) for keys, values in self._sums)

    def spread(self) -> tuple[float, ...]:
        """How much each row differs from pass to pass, of all but the first layer: the mean over keys and values.

        It is the standard deviation of a row's KV, as the length of a vector over all heads, over the rms length of
        the chunk's rows; to four digits. Empty where one pass says nothing about it. In the first layer, KV depends on
        the token alone.
        """
        if self._count < 2 or len(self._sums) < 2:
            return ()
        shares = [
            _deviation(total / self._count, squares / self._count)
            for sums, lengths in zip(self._sums[1:], self._squares[1:], strict=True)
            for total, squares in zip(sums, lengths, strict=True)
        ]
        unbiased = (self._count / (self._count - 1)) ** 0.5
        spread_T = torch.stack(shares).mean(0) * unbiased
        return tuple(float(f"{x:.4g}") for x in spread_T.tolist())


def _lengths_squared(x_HTD: Tensor) -> Tensor:
    """``[T]``: over heads and dims."""
    return x_HTD.square().sum(dim=(0, 2))


def _deviation(mean_HTD: Tensor, square_T: Tensor) -> Tensor:
    """``[T]``: standard deviation over the rms length of the means; 0 where there is nothing (a slot without dims)."""
    length_T = _lengths_squared(mean_HTD)
    scale = length_T.mean().clamp_min(torch.finfo(torch.float32).tiny)
    return ((square_T - length_T).clamp_min(0) / scale).sqrt()
