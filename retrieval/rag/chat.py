"""A conversation over documents. What a turn has fused, the next takes over: only what is new is fetched and computed.

::

    turn 1    | system | passages a b   | question 1                                |
    turn 2    | system | passages a b   | passages c | question 1, answer 1, question 2 |
              | taken over from turn 1  | moved      | computed                        |

Where turn 2 needs no other passages, question 1 is taken over too.
"""

from __future__ import annotations

import threading
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

from blend import Fusion, PromptTooLong
from blend.clock import Clock
from retrieval.rag.answer import Context, RagAnswer
from retrieval.rag.compose import left_out
from retrieval.rag.stream import AsyncRagStream, RagStream, awaited

if TYPE_CHECKING:
    from retrieval.rag.pipeline import RagPipeline

__all__ = ["Chat"]


class _Turn(NamedTuple):
    """A question put behind what was said before.

    Attributes:
        context: its prompt.
        past: KV that the prompt's beginning is taken over from.
        first: the first of the earlier turns that still stands in the prompt.
    """

    context: Context
    past: Fusion | None
    first: int


class Chat:
    """Questions and answers that build on each other. One turn at a time; :attr:`turns` has those that are over.

    Args:
        pipeline: what is talked about.
        k: passages found per question; the pipeline's own if not given.
    """

    def __init__(self, pipeline: RagPipeline, k: int | None = None) -> None:
        self._pipeline, self._k = pipeline, k
        self._compose = pipeline.compose
        self._turns: list[RagAnswer] = []
        self._first = 0  # of the turns in the last prompt
        self._lock = threading.Lock()

    @property
    def turns(self) -> tuple[RagAnswer, ...]:
        """The answers so far, each with its question."""
        return tuple(self._turns)

    def ask(
        self, question: str, *, max_new_tokens: int | None = None, stop: Event | None = None, **options: Any
    ) -> RagAnswer:
        """Answers the next question; arguments and errors are those of :meth:`RagPipeline.ask`."""
        with self._lock:
            rows = self._pipeline.answer_rows(max_new_tokens)
            turn = self._next(question, rows)
            fusion = self._pipeline.fuse(turn.context, past=turn.past)
            text = self._pipeline.generate(fusion, rows, stop=stop, **options)
            answer = RagAnswer(text, turn.context, fusion)
            self._over(turn, answer)
            return answer

    def stream(
        self, question: str, *, max_new_tokens: int | None = None, stop: Event | None = None, **options: Any
    ) -> RagStream:
        """The same piece by piece. A stream that is closed early leaves a turn with the answer as far as it came."""
        with self._lock:
            rows = self._pipeline.answer_rows(max_new_tokens)
            turn = self._next(question, rows)
            fusion = self._pipeline.fuse(turn.context, past=turn.past)
            pieces = self._pipeline.pieces(fusion, rows, stop=stop, **options)
            return RagStream(turn.context, fusion, pieces, partial(self._over, turn))

    async def aask(self, question: str, **options: Any) -> RagAnswer:
        """:meth:`ask` on another thread; cancelling it stops the generation."""
        stop = Event()
        return await awaited(self._pipeline.executor, partial(self.ask, question, stop=stop, **options), stop)

    def astream(self, question: str, **options: Any) -> AsyncRagStream:
        """:meth:`stream` for ``async for``; cancelling it stops the generation."""
        return AsyncRagStream(lambda stop: self.stream(question, stop=stop, **options), self._pipeline.executor)

    # --- helpers ----------------------------------------------------------------------------------

    def _over(self, turn: _Turn, answer: RagAnswer) -> None:
        self._turns.append(answer)
        self._first = turn.first

    def _next(self, question: str, answer_rows: int) -> _Turn:
        if not self._turns:
            return _Turn(self._pipeline.context(question, self._k, answer_rows), None, 0)
        return self._grown(question, answer_rows) or self._anew(question, answer_rows)

    def _grown(self, question: str, answer_rows: int) -> _Turn | None:
        """The last turn's prompt with what is new behind its passages; None where that does not fit the model."""
        last = self._turns[-1]
        clock = Clock(self._pipeline.blender.view.device)
        asked = self._compose.asked(question, self._turns[self._first :])
        try:
            room = self._compose.room(asked, answer_rows)
        except PromptTooLong:
            return None
        with clock("retrieve"):
            held = {hit.passage.number for hit in last.hits}
            new = [hit for hit in self._pipeline.retrieve(question, self._k) if hit.passage.number not in held]
        with clock("compose"):
            hits = [*last.hits, *new]
            chunks = self._pipeline.chunks(hits)
            if any(hit.passage.number not in chunks for hit in hits):
                return None  # a passage was removed meanwhile, and must not be answered from any more
            if room is not None and sum(map(len, chunks.values())) > room:
                return None
            ordered = [*last.hits, *self._compose.ordered(new, chunks)]
            prompt = self._compose.prompt(ordered, chunks, asked)
        return _Turn(Context(question, prompt, tuple(ordered), (), (), clock.seconds), last.fusion, self._first)

    def _anew(self, question: str, answer_rows: int) -> _Turn:
        """This question's own passages, and as many of the turns before as fit beside them."""
        clock = Clock(self._pipeline.blender.view.device)
        with clock("retrieve"):
            hits = self._pipeline.retrieve(question, self._k)
            chunks = self._pipeline.chunks(hits)
        with clock("compose"):
            asked, first = self._history(question, answer_rows, sum(map(len, chunks.values())))
            room = self._compose.room(asked, answer_rows)
            kept, dropped = self._compose.fitting(hits, chunks, room)
            ordered = self._compose.ordered(kept, chunks)
            prompt = self._compose.prompt(ordered, chunks, asked)
        notes = [
            "the passages of earlier turns are left out: they do not fit the model any more, or were removed",
            *([f"the first {first} of {len(self._turns)} turns are left out: they do not fit either"] if first else []),
            *left_out(kept, dropped, room, answer_rows),
        ]
        context = Context(question, prompt, tuple(ordered), tuple(dropped), tuple(notes), clock.seconds)
        return _Turn(context, None, first)

    def _history(self, question: str, answer_rows: int, rows: int) -> tuple[tuple[int, ...], int]:
        """Ids of the latest turns that leave ``rows`` for passages, and of the question; how many are left out."""
        for first in range(len(self._turns)):
            asked = self._compose.asked(question, self._turns[first:])
            try:
                room = self._compose.room(asked, answer_rows)
            except PromptTooLong:
                continue
            if room is None or room >= rows:
                return asked, first
        return self._compose.asked(question), len(self._turns)
