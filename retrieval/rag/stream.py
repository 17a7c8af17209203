"""An answer piece by piece, for ``for`` and for ``async for``. Knows nothing of how it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Executor, Future
from threading import Event
from typing import TypeVar

from blend import Fusion, Report
from retrieval.document import Hit
from retrieval.rag.answer import Context, RagAnswer

__all__ = ["AsyncRagStream", "RagStream", "awaited"]

Result = TypeVar("Result")


class RagStream(Iterator[str]):
    """An answer piece by piece. Its passages and report are there before the first piece.

    :meth:`close`, or the end of a ``with``, stops the generation.

    Args:
        context: what the answer is given from.
        fusion: KV of the prompt.
        pieces: the text as it comes.
        done: told the answer when it has ended, or was stopped.
    """

    def __init__(
        self, context: Context, fusion: Fusion, pieces: Iterator[str], done: Callable[[RagAnswer], None] | None = None
    ) -> None:
        self.context, self.fusion = context, fusion
        self._pieces, self._done = pieces, done
        self._text: list[str] = []

    def __next__(self) -> str:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self._end()
            raise
        self._text.append(piece)
        return piece

    @property
    def hits(self) -> tuple[Hit, ...]:
        """The passages in the prompt, in the order in which they stand there."""
        return self.context.hits

    @property
    def report(self) -> Report:
        """What hit, moved, was recomputed, and took how long."""
        return self.fusion.report

    @property
    def answer(self) -> RagAnswer:
        """The answer as far as it has come; all of it behind the loop."""
        return RagAnswer("".join(self._text).strip(), self.context, self.fusion)

    def close(self) -> None:
        """Stops the generation; what has come stays in :attr:`answer`."""
        close: Callable[[], None] | None = getattr(self._pieces, "close", None)
        if close is not None:
            close()
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(self.answer)

    def __enter__(self) -> RagStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncRagStream(AsyncIterator[str]):
    """The same for ``async for``. Nothing begins before the first piece is asked for; cancelling stops the generation.

    Args:
        begin: makes the stream; it ends once the event that it is given is set.
        executor: whose threads compute.
    """

    def __init__(self, begin: Callable[[Event], RagStream], executor: Executor) -> None:
        self._begin, self._executor = begin, executor
        self._stop = Event()
        self._stream: RagStream | None = None

    async def __anext__(self) -> str:
        piece = await awaited(self._executor, self._next, self._stop, self._close)
        if piece is None:
            raise StopAsyncIteration
        return piece

    @property
    def answer(self) -> RagAnswer:
        """The answer as far as it has come.

        Raises:
            RuntimeError: nothing has been asked for yet.
        """
        if self._stream is None:
            raise RuntimeError("the answer has not begun: read the stream first")
        return self._stream.answer

    async def aclose(self) -> None:
        """Stops the generation; what has come stays in :attr:`answer`."""
        self._stop.set()
        await awaited(self._executor, self._close, self._stop)

    def _next(self) -> str | None:
        if self._stream is None:
            self._stream = self._begin(self._stop)
        return next(self._stream, None)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()


async def awaited(
    executor: Executor, call: Callable[[], Result], stop: Event, abandoned: Callable[[], None] | None = None
) -> Result:
    """What ``call`` returns, computed on another thread.

    Args:
        stop: set when the caller is cancelled.
        abandoned: called when ``call``, which nobody waits for any more, has returned.
    """
    future: Future[Result] = executor.submit(call)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        stop.set()
        if abandoned is not None:
            future.add_done_callback(lambda _: abandoned())
        raise
