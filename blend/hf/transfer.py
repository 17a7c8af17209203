"""Bringing KV from the host to a GPU on a stream of its own, while the pass computes. On a CPU it just copies.

What a pass queues on its stream runs in order, so a copy queued there would stand in its way, and one from ordinary
memory holds the host up as well. Here copies go through page-locked memory on a second stream::

    filling thread   | stage layer 0 | stage 1 | stage 2 ...        host
    copy stream      .... | layer 0 | layer 1 | ...                 events ^0 ^1 ...
    pass             ............... | layer 0 ........ | layer 1   its stream waits for ^0, ^1; the host does not

Knows nothing of what a layer holds. Not run on a GPU yet: ``tests/gpu/run.py`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Transfer"]


class Transfer:
    """The copies of one request.

    Make it where the request runs, when all that the copies read and write on the device has been queued: they begin
    behind that.

    Args:
        device: where the layers go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._events: dict[int, Any] = {}
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._slots = (_Slot(), _Slot())  # while one is on its way, the other is filled
        self._turn = 0

    @contextmanager
    def filling(self, layer: int) -> Iterator[None]:
        """What is done to the layer's tensors inside, on any thread, is queued on the copy stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._events[layer] = self._stream.record_event()

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copies into a view of a layer; inside :meth:`filling`. The source may be gone when this returns."""
        if self._stream is None or source.device == target.device:
            target.copy_(source)
        else:
            self._turn = 1 - self._turn
            self._slots[self._turn].send(source, target, self._stream)

    def wait(self, layer: int) -> None:
        """What the calling thread queues from here on runs when the layer is there, and those filled before it."""
        event = self._events.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def close(self) -> None:
        """What the calling thread queues from here on runs behind all copies: their memory may be given back."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


@dataclass
class _Slot:
    """A piece of page-locked memory, and when it is free again."""

    memory: Tensor | None = None
    free: Any = None

    def send(self, source: Tensor, target: Tensor, stream: Any) -> None:
        if source.is_pinned():
            target.copy_(source, non_blocking=True)
            # The allocator of page-locked memory waits for copies by itself.
            return
        if self.free is not None:
            self.free.synchronize()
        staged = self._room(source)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self.free = stream.record_event()

    def _room(self, source: Tensor) -> Tensor:
        size = source.numel() * source.element_size()
        if self.memory is None or self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self.memory[:size].view(source.dtype).view(source.shape)
