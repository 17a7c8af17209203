"""The steps from a question to an answer: find, compose, fuse, generate. Knows nothing of how documents come in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blend import Blender, Chunk, Fusion
from blend.clock import Clock
from blend.selectors import Selector
from retrieval.document import Hit
from retrieval.errors import SettingError
from retrieval.indexes.base import at_least_one
from retrieval.rag.answer import Context
from retrieval.rag.catalogue import Catalogue
from retrieval.rag.compose import Composer, left_out
from retrieval.rag.finder import Finder
from retrieval.rag.settings import RagSettings
from retrieval.rerank import Reranker

__all__ = ["Steps"]

_ANSWER = 128
_RERANKED = 4  # hits that a reranker chooses from, per hit that is kept


class Steps:
    """What a pipeline does about one question, step by step; a conversation takes the same steps.

    Attributes:
        blender: the model, and the store of chunk KV.
        settings: how passages and questions are put to the model.
        compose: makes prompts.
    """

    blender: Blender
    settings: RagSettings
    compose: Composer
    _catalogue: Catalogue
    _finder: Finder
    _reranker: Reranker | None

    def retrieve(self, question: str, k: int | None = None) -> list[Hit]:
        """The passages that match a question best, best first.

        Args:
            k: how many; ``settings.k`` if not given.

        Raises:
            SettingError: ``k`` below 1, or no documents.
        """
        k = self.settings.k if k is None else k
        at_least_one(k)
        if not len(self._catalogue):
            raise SettingError("there are no documents to answer from: add some first")
        matches = self._finder.search(question, k * _RERANKED if self._reranker else k)
        scores = {match.number: match.score for match in matches}
        hits = [Hit(passage, scores[passage.number]) for passage in self._catalogue.passages(list(scores))]
        return self._reranker.rerank(question, hits)[:k] if self._reranker else hits

    def context(self, question: str, k: int | None = None, answer_rows: int = _ANSWER) -> Context:
        """The prompt of a question: passages found, as many as fit, in order.

        Args:
            answer_rows: rows that the model has to have left for an answer.
        """
        clock = Clock(self.blender.view.device)
        asked = self.compose.asked(question)
        room = self.compose.room(asked, answer_rows)
        with clock("retrieve"):
            hits = self.retrieve(question, k)
        with clock("compose"):
            chunks = self.chunks(hits)
            hits = [hit for hit in hits if hit.passage.number in chunks]
            kept, dropped = self.compose.fitting(hits, chunks, room)
            ordered = self.compose.ordered(kept, chunks)
            prompt = self.compose.prompt(ordered, chunks, asked)
        notes = [*left_out(kept, dropped, room, answer_rows)]
        if not hits:
            notes.append("no passage matched the question: it is asked without any")
        return Context(question, prompt, tuple(ordered), tuple(dropped), tuple(notes), clock.seconds)

    def fuse(
        self, context: Context, *, full: bool = False, selector: Selector | None = None, past: Fusion | None = None
    ) -> Fusion:
        """KV of a prompt, fused or by a plain full prefill."""
        if full:
            return self.blender.prefill(context.prompt, remember=False)
        fusion = self.blender.fuse(context.prompt, selector=selector, past=past)
        if fusion.report.hit_rate < 1.0:
            self._forget_removed(context)
        return fusion

    def _forget_removed(self, context: Context) -> None:
        """A passage that was removed while its question encoded it must not come back into the store."""
        there = self._catalogue.ids([hit.passage.number for hit in context.hits])
        places = zip(context.hits, context.prompt.chunks, strict=True)
        gone = [chunk for hit, chunk in places if hit.passage.number not in there]
        if gone:
            self.blender.forget(gone, system=self.settings.system)

    def generate(self, fusion: Fusion, answer_rows: int, **options: Any) -> str:
        """The answer's text."""
        return self.blender.generate(fusion, **{"do_sample": False, "max_new_tokens": answer_rows, **options}).text

    def pieces(self, fusion: Fusion, answer_rows: int, **options: Any) -> Iterator[str]:
        """The answer's text as it comes."""
        return self.blender.stream(fusion, **{"do_sample": False, "max_new_tokens": answer_rows, **options})

    def answer_rows(self, max_new_tokens: int | None) -> int:
        """Rows to leave for an answer.

        Raises:
            SettingError: less than one.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise SettingError(f"max_new_tokens is {max_new_tokens}: an answer takes at least 1")
        return max_new_tokens or _ANSWER

    def chunks(self, hits: Sequence[Hit]) -> dict[int, Chunk]:
        """The chunks of passages, by number; none for a passage that was removed meanwhile."""
        ids = self._catalogue.ids([hit.passage.number for hit in hits])
        passages = (hit.passage for hit in hits if hit.passage.number in ids)
        return {passage.number: Chunk(ids[passage.number], passage.citation) for passage in passages}
