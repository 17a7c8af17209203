"""What fusing returns: KV of every row, the last row's logits, and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from blend.chunk import KVLayers
from blend.hf.generate import generation_inputs, hand_over
from blend.hf.view import ModelView
from blend.prompt import Prompt
from blend.report import Report

__all__ = ["Answer", "Fusion"]


@dataclass(frozen=True, eq=False)
class Fusion:
    """A prompt that is ready to be answered, any number of times.

    Attributes:
        prompt: its parts.
        logits: of the last row, fp32 ``[V]``.
        report: what was reused and computed.
        exact: the KV is full prefill's; False where chunks were reused elsewhere than behind their prelude.
        layers: KV of all rows, ``[H, T, D]`` per cache layer. Not to be written to.
    """

    prompt: Prompt
    logits: Tensor
    report: Report
    exact: bool
    layers: KVLayers
    view: ModelView

    @property
    def cache(self) -> Any:
        """A fresh ``DynamicCache`` of all rows but the last, for ``model.generate``; a new one at each access."""
        return hand_over(self.view, tuple((keys[:, :-1], values[:, :-1]) for keys, values in self.layers))

    def inputs(self, copies: int = 1) -> dict[str, Any]:
        """``input_ids``, ``attention_mask`` and a fresh cache: ``model.generate(**fusion.inputs())``.

        Args:
            copies: beams or returned sequences.
        """
        return generation_inputs(self.view, self.prompt.ids, self.layers, copies)


@dataclass(frozen=True, eq=False)
class Answer:
    """A generated answer.

    Attributes:
        text: the first sequence, special tokens dropped.
        texts: all returned sequences.
        ids: new token ids of the first sequence.
        fusion: the prompt's KV, for follow-up questions.
        output: what ``model.generate`` returned.
    """

    text: str
    texts: tuple[str, ...]
    ids: tuple[int, ...]
    fusion: Fusion
    output: Any

    @property
    def report(self) -> Report:
        """What was reused and computed."""
        return self.fusion.report

    def __str__(self) -> str:
        return self.text
