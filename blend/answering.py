"""From a fusion to its answer: at once, piece by piece, and on to the next question. Decides nothing about fusing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from threading import Event
from typing import Any

from blend.correctors import Corrector
from blend.fusion import Answer, Fusion
from blend.hf.generate import generate, stream
from blend.library import Library
from blend.prompt import Prompt
from blend.selectors import Selector

__all__ = ["Answering"]


class Answering(Library):
    """What a Blender does with a prompt once it can fuse it."""

    @abstractmethod
    def fuse(
        self,
        prompt: Prompt,
        *,
        selector: Selector | None = None,
        corrector: Corrector | None = None,
        past: Fusion | None = None,
    ) -> Fusion:
        """KV of every row of the prompt, and the logits of its last row."""

    def generate(
        self,
        prompt: Prompt | Fusion,
        *,
        selector: Selector | None = None,
        corrector: Corrector | None = None,
        past: Fusion | None = None,
        stop: Event | None = None,
        **options: Any,
    ) -> Answer:
        """Fuses and answers.

        Args:
            prompt: a prompt, or a fusion made before.
            stop: ends the answer with the token under way, once another thread sets it.
            options: keyword arguments of ``model.generate``.
        """
        with self.setup.afterwards.request():
            fusion = self._fused(prompt, selector, corrector, past)
            output = generate(self.setup.view, self.tokenizer, fusion.prompt.ids, fusion.layers, options, stop)
        sequences = getattr(output, "sequences", output)
        new = sequences[:, len(fusion.prompt) :]
        texts = tuple(self.tokenizer.batch_decode(new, skip_special_tokens=True)) if self.tokenizer else ()
        return Answer(texts[0].strip() if texts else "", texts, tuple(new[0].tolist()), fusion, output)

    def stream(
        self,
        prompt: Prompt | Fusion,
        *,
        selector: Selector | None = None,
        corrector: Corrector | None = None,
        past: Fusion | None = None,
        stop: Event | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Fuses and yields the answer piece by piece; leaving the loop, or setting ``stop``, ends the generation.

        Raises:
            PromptError: the Blender has no tokenizer.
        """
        self._text()
        fusion = self._fused(prompt, selector, corrector, past)
        return self._stream(fusion, options, stop)

    def _stream(self, fusion: Fusion, options: dict[str, Any], stop: Event | None) -> Iterator[str]:
        with self.setup.afterwards.request():
            yield from stream(self.setup.view, self.tokenizer, fusion.prompt.ids, fusion.layers, options, stop)

    def follow_up(self, answer: Answer, question: str, **options: Any) -> Answer:
        """Another turn on the same fused context, whose KV is taken over as it is.

        Args:
            answer: the turn before.
            question: what to ask now.
            options: keyword arguments of :meth:`generate`.
        """
        ids = self._text().turn(answer.ids, question)
        before = answer.fusion.prompt
        longer = Prompt(before.system, before.chunks, (*before.question, *ids))
        return self.generate(longer, past=answer.fusion, **options)

    def _fused(
        self, prompt: Prompt | Fusion, selector: Selector | None, corrector: Corrector | None, past: Fusion | None
    ) -> Fusion:
        if isinstance(prompt, Fusion):
            return prompt
        return self.fuse(prompt, selector=selector, corrector=corrector, past=past)
