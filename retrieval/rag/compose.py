"""What a question is answered from: the passages that fit into the model's context, in order, as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blend import Blender, Chunk, Prompt, PromptTooLong
from blend.conversation import Turn, asked
from retrieval.document import Hit
from retrieval.errors import SettingError
from retrieval.order import ORDERS
from retrieval.rag.answer import RagAnswer
from retrieval.rag.settings import RagSettings

__all__ = ["Composer", "left_out"]


class Composer:
    """Puts passages and a question into a prompt.

    Args:
        blender: for its tokenizer, its context, and the prefixes it knows.
        settings: templates and order.
    """

    def __init__(self, blender: Blender, settings: RagSettings) -> None:
        assert blender.text is not None, "a pipeline is refused without a tokenizer"
        self._blender, self._text, self._settings = blender, blender.text, settings

    def asked(self, question: str, turns: Sequence[RagAnswer] = ()) -> tuple[int, ...]:
        """Ids of earlier turns and a question, as they stand behind the passages."""
        said = [Turn(turn.question, turn.text) for turn in turns]
        return asked(self._text, said, question, self._settings.system, self._settings.question)

    @property
    def system(self) -> tuple[int, ...]:
        """Ids before the first passage."""
        return self._text.system_ids(self._settings.system)

    def room(self, question: Sequence[int], answer_rows: int) -> int | None:
        """Rows that passages may take; None where the model sets no limit.

        Raises:
            PromptTooLong: not even the question fits.
        """
        view = self._blender.view
        if view.context is None or view.stretches:
            return None
        room = view.context - len(self.system) - len(question) - answer_rows
        if room < 0:
            raise PromptTooLong(
                f"instructions, question and answer take {view.context - room} tokens, and the model holds "
                f"{view.context}: ask in fewer words, or for fewer max_new_tokens (now {answer_rows})"
            )
        return room

    def require(self, size: int) -> None:
        """Raises :class:`SettingError` where a passage of ``size`` tokens does not fit the model."""
        context = self._blender.view.context
        if context is not None and len(self.system) + size >= context:
            raise SettingError(
                f"passages of {size} tokens behind instructions of {len(self.system)} do not fit the model, which "
                f"holds {context}: take a smaller size"
            )

    def prompt(self, hits: Sequence[Hit], chunks: Mapping[int, Chunk], question: Sequence[int]) -> Prompt:
        """The prompt of passages in this order, and what is asked behind them, as ids."""
        return Prompt(self.system, tuple(chunks[hit.passage.number] for hit in hits), tuple(question))

    def fitting(
        self, hits: Sequence[Hit], chunks: Mapping[int, Chunk], room: int | None
    ) -> tuple[list[Hit], list[Hit]]:
        """Hits, best first, as many as fit, and those that do not: the lowest go first."""
        kept, left = list(hits), []
        while room is not None and sum(len(chunks[hit.passage.number]) for hit in kept) > room:
            left.append(kept.pop())
        return kept, left[::-1]

    def ordered(self, hits: Sequence[Hit], chunks: Mapping[int, Chunk]) -> list[Hit]:
        """Hits in the order that the settings ask for."""

        def known(order: Sequence[Hit]) -> int:
            """Rows that a prompt with these passages in front would not have to compute."""
            # The last row of a prompt is never taken over; one more lets all of the passages count.
            return self._blender.known_rows(self.prompt(order, chunks, (0,)))

        return ORDERS[self._settings.order](hits, known, self._settings.margin)


def left_out(kept: Sequence[Hit], dropped: Sequence[Hit], room: int | None, answer_rows: int) -> tuple[str, ...]:
    """What to say of passages that did not fit."""
    if not dropped:
        return ()
    return (
        f"{len(dropped)} of {len(kept) + len(dropped)} passages were left out, the lowest ranked: the model has room "
        f"for {room} tokens of passages beside instructions, question and {answer_rows} tokens of answer",
    )
