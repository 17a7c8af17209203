"""Brings layers into a fusion cache, before the pass or beside it. Knows nothing of what a layer holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["Arrival", "LayerFilling"]


class Arrival(Protocol):
    """When a layer that was filled is on its device, such as :class:`blend.hf.transfer.Transfer`."""

    def wait(self, layer: int) -> None:
        """What the calling thread queues from here on runs when the layer is there."""

    def close(self) -> None:
        """What the calling thread queues from here on runs behind all copies."""


class LayerFilling:
    """Calls ``fill(0)``, ``fill(1)``, ... in order; a layer can be waited for.

    On a thread of its own, reading layer i + 1 hides behind computing layer i (CacheBlend, arXiv 2405.16444, section 5;
    layer-wise loading of CachedAttention, arXiv 2403.19708).

    Args:
        fill: brings one layer in.
        count: layers.
        arrival: of layers whose copies are still on their way to a device when they are filled.

    Attributes:
        busy: seconds spent filling.
        waited: seconds that :meth:`wait` has waited: the part of ``busy`` that was not hidden.
    """

    def __init__(self, fill: Callable[[int], None], count: int, arrival: Arrival | None = None) -> None:
        self.count = count
        self.busy = 0.0
        self.waited = 0.0
        self._fill = fill
        self._arrival = arrival
        self._filled = 0
        self._error: BaseException | None = None
        self._stopped = False
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def beside(self) -> bool:
        """Whether it runs beside the pass."""
        return self._thread is not None

    def run(self) -> None:
        """Fills all layers now."""
        for index in range(self.count):
            self._one(index)
        self.waited = self.busy

    def start(self) -> None:
        """Fills them in order on a thread."""
        self._thread = threading.Thread(target=self._work, name="kvblend-filling", daemon=True)
        self._thread.start()

    def wait(self, index: int) -> None:
        """Returns when layer ``index`` is in place; raises what filling it, or one before it, has raised."""
        if self._filled <= index:
            began = time.perf_counter()
            with self._news:
                self._news.wait_for(lambda: self._filled > index or self._error is not None)
            self.waited += time.perf_counter() - began
            if self._filled <= index and self._error is not None:
                raise self._error
        if self._arrival is not None:
            self._arrival.wait(index)

    def close(self) -> None:
        """Stops after the layer at hand. Waiting for a layer that is not filled then is an error."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()
        if self._arrival is not None:
            self._arrival.close()
        if self._error is None:
            self._error = RuntimeError(f"the filling was closed after {self._filled} of {self.count} layers")

    def _one(self, index: int) -> None:
        began = time.perf_counter()
        self._fill(index)
        self.busy += time.perf_counter() - began
        self._filled = index + 1

    @torch.inference_mode()  # the mode is each thread's own
    def _work(self) -> None:
        try:
            for index in range(self.count):
                if self._stopped:
                    return
                self._one(index)
                with self._news:
                    self._news.notify_all()
        except BaseException as error:  # handed to whoever waits
            with self._news:
                self._error = error
                self._news.notify_all()
