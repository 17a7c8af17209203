"""What asking gives: the answer's text, the passages it was given, and what was reused and computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from blend import Fusion, Prompt, Report
from retrieval.document import Hit

__all__ = ["Context", "RagAnswer"]


@dataclass(frozen=True, eq=False)
class Context:
    """A question, put into a prompt.

    Attributes:
        question: as it was asked.
        prompt: for the model.
        hits: its passages, in the order in which they stand there.
        dropped: passages that were found, but did not fit.
        notes: what the asker should know: what was left out, and why.
        seconds: that finding and composing took, per stage.
    """

    question: str
    prompt: Prompt
    hits: tuple[Hit, ...]
    dropped: tuple[Hit, ...]
    notes: tuple[str, ...]
    seconds: dict[str, float]


@dataclass(frozen=True, eq=False)
class RagAnswer:
    """An answer and where it comes from.

    Attributes:
        text: the answer.
        context: what it was given from.
        fusion: KV of the prompt.
    """

    text: str
    context: Context = field(repr=False)
    fusion: Fusion = field(repr=False)

    @property
    def question(self) -> str:
        """What was asked."""
        return self.context.question

    @property
    def hits(self) -> tuple[Hit, ...]:
        """The passages in the prompt, in the order in which they stand there."""
        return self.context.hits

    @property
    def dropped(self) -> tuple[Hit, ...]:
        """Passages that were found, but did not fit."""
        return self.context.dropped

    @property
    def notes(self) -> tuple[str, ...]:
        """What the asker should know: what was left out, and why."""
        return self.context.notes

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds per stage, from the question to the first token's logits."""
        return {**self.context.seconds, **self.report.seconds}

    @property
    def report(self) -> Report:
        """What hit, moved, was recomputed, and took how long."""
        return self.fusion.report

    @property
    def citations(self) -> tuple[str, ...]:
        """Where each passage of the prompt can be read, in the order in which they stand there."""
        return tuple(hit.passage.citation for hit in self.hits)

    def __str__(self) -> str:
        return self.text
