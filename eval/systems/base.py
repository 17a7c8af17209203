"""What a system is given and what it answers. Knows nothing of tasks, and nothing of how systems are judged.

Shape suffixes: ``n`` tokens of an answer, ``V`` vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from blend import Blender, Chunk, Fusion, KVBlendError, Prompt

__all__ = ["GREEDY", "Case", "Corpus", "Fused", "Outcome", "System", "UnknownSystem", "forced_logits"]

GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}
"""Arguments of ``generate`` that make it take the likeliest token each time, whatever the model's own defaults."""


class UnknownSystem(KVBlendError, ValueError):
    """A system's name that does not exist; the message lists those that do."""


class Corpus(Protocol):
    """All passages of a run, for offline stages that look beyond the prompt."""

    def neighbours(self, chunk: Chunk, count: int) -> list[Chunk]:
        """The ``count`` chunks that are most like ``chunk``, nearest first, itself left out."""


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt, and what only some systems may look at.

    Attributes:
        prompt: to be answered.
        truth: its full prefill, for oracles.
        corpus: for offline stages; None where there is nothing but the prompt.
    """

    prompt: Prompt
    truth: Fusion | None = None
    corpus: Corpus | None = None


class Outcome(ABC):
    """A prompt with its first token found, ready to be judged and answered.

    Attributes:
        ttft: seconds from token ids to the first token's logits: everything that is not offline.
        seconds: the same by stage.
        row_layers: computed rows times layers (probe, check, repair); None where the system does not tell.
        logits: of the last row, fp32 ``[V]``; None where the system shows no distribution.
        fusion: the prompt's KV; None for systems that are not ours.
        own_full_s: TTFT of the system's own full prefill of the prompt; None where ours is the one to compare with.
    """

    ttft: float
    seconds: Mapping[str, float]
    row_layers: float | None
    logits: Tensor | None
    fusion: Fusion | None = None
    own_full_s: float | None = None

    @abstractmethod
    def forced(self, answer: Sequence[int]) -> Tensor | None:
        """Logits before each token of ``answer``, given those before it: fp32 ``[n, V]``; None like ``logits``."""

    @abstractmethod
    def decode(self, said: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The greedy answer that begins with ``said``, of at most ``tokens`` tokens in all, end token included."""


@dataclass(frozen=True, eq=False)
class Fused(Outcome):
    """An outcome that is a fusion of ours.

    Attributes:
        fusion: KV of all rows, and the report that time and cost are taken from.
        during: opened while the model runs over the KV; for methods that change attention in decoding too (APE).
    """

    fusion: Fusion
    during: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)

    # Read off the report; the base class declares them as attributes.
    @property
    def ttft(self) -> float:  # type: ignore[override]
        return self.fusion.report.ttft

    @property
    def seconds(self) -> Mapping[str, float]:  # type: ignore[override]
        return self.fusion.report.seconds

    @property
    def row_layers(self) -> float:  # type: ignore[override]
        return self.fusion.report.row_layers

    @property
    def logits(self) -> Tensor:  # type: ignore[override]
        return self.fusion.logits

    def forced(self, answer: Sequence[int]) -> Tensor:
        with self.during():
            return forced_logits(self.fusion, answer)

    @torch.inference_mode()
    def decode(self, said: Sequence[int], tokens: int) -> tuple[int, ...]:
        if len(said) >= tokens or (said and said[-1] in self._ends()):
            return tuple(said)
        ids = torch.tensor([[*self.fusion.prompt.ids, *said]], device=self.fusion.view.device)
        inputs = {**self.fusion.inputs(), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        model: Any = self.fusion.view.model  # torch types the modules' methods as tensors
        with self.during():
            out = model.generate(**inputs, max_new_tokens=tokens - len(said), **GREEDY)
        return tuple(out[0, len(self.fusion.prompt) :].tolist())

    def _ends(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        end = self.fusion.view.model.generation_config.eos_token_id
        return tuple(end) if isinstance(end, list) else (end,)


@torch.inference_mode()
def forced_logits(fusion: Fusion, answer: Sequence[int]) -> Tensor:
    """Logits before each token of ``answer``, given the prompt's KV and the tokens before: fp32 ``[n, V]``.

    One forward pass of the model itself, as decoding would go: the prompt's last row runs again over the KV of the
    others.

    Raises:
        ValueError: an empty answer.
    """
    if not answer:
        raise ValueError("the answer is empty: there is no token to look at")
    inputs = fusion.inputs()
    ids = torch.tensor([[fusion.prompt.ids[-1], *answer[:-1]]], device=fusion.view.device)
    seen = torch.ones(1, len(fusion.prompt) + len(answer) - 1, dtype=torch.long, device=ids.device)
    out = fusion.view.model(**{**inputs, "input_ids": ids, "attention_mask": seen}, use_cache=True)
    logits_nV: Tensor = out.logits[0].float()
    return logits_nV


def _nothing(blender: Blender, case: Case) -> None:
    """No offline stage."""


@dataclass(frozen=True)
class System:
    """One way from a prompt to its first token.

    Attributes:
        name: its key in ``SYSTEMS``, on the command line and in JSON files.
        title: what a table calls it.
        setting: the ratio as text, or what stands for it where the system has none (``"0"``: full reuse; ``"1"``: full
            prefill; ``"k=16"``).
        run: answers a case. Everything in it counts to TTFT, as far as the outcome's report says.
        prepare: the offline stage, beyond encoding each chunk once: told apart, and not part of TTFT. Doing it again is
            quick, and interrupting it loses nothing.
        timed: False for oracles: they know what only a full prefill knows, so their TTFT means nothing.
        exact: what it answers is full prefill's by design: falling back to a prefill is no news, and KV has no error.
        in_place: keys are turned to the rows where they stand; False where they are meant to be elsewhere (APE), so
            that their distance from full prefill's says nothing.
    """

    name: str
    title: str
    setting: str
    run: Callable[[Blender, Case], Outcome]
    prepare: Callable[[Blender, Case], None] = _nothing
    timed: bool = True
    exact: bool = False
    in_place: bool = True
