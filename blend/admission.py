"""What is refused before anything is computed: prompts, chunks and selectors that a model cannot take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from blend.background import Background
from blend.chunk import Chunk
from blend.correctors import Corrector, MeanShift
from blend.errors import BudgetError, PromptError, PromptTooLong, UnsupportedModel
from blend.hf.view import ModelView
from blend.prompt import Prompt
from blend.selectors import ExpectedError, FirstK, Selector

__all__ = [
    "accept",
    "admit",
    "admit_chunk",
    "admit_ids",
    "default_corrector",
    "default_selector",
    "one_of",
    "targets",
]


def default_selector(view: ModelView, ratio: float | None = None) -> Selector:
    """The rows with the largest expected error where attention can be watched, else the chunks' heads."""
    kind = ExpectedError if view.observable else FirstK
    return kind() if ratio is None else kind(ratio)


def default_corrector(background: Background) -> Corrector | None:
    """A quarter of the chunk's mean residual beside averaged KV; none where chunks are encoded alone."""
    return MeanShift(weight=0.25) if background else None


def targets(
    selector: Selector | None, ratio: float | Literal["auto"] | None, max_kl: float | None, ttft_budget: float | None
) -> dict[str, float | None] | None:
    """What an adaptive selector is to be made with; None where none is asked for.

    Raises:
        BudgetError: options that exclude each other, or a ratio that is none.
    """
    asked = {"ratio": ratio, "max_kl": max_kl, "ttft_budget": ttft_budget}
    given = [name for name, value in asked.items() if value is not None]
    if selector is not None and given:
        raise BudgetError(f"a selector and {given[0]} are both given: a selector brings its own, so give one of them")
    if isinstance(ratio, str) and ratio != "auto":
        raise BudgetError(f"ratio is {ratio!r}: give a number from 0 to 1, or 'auto'")
    aimed = given[-1] in ("max_kl", "ttft_budget") if given else False
    if aimed and ratio not in (None, "auto"):
        raise BudgetError(
            f"ratio is {ratio} and {given[-1]} is given too: a target sets the ratio, so give one of them"
        )
    return {"max_kl": max_kl, "ttft_budget": ttft_budget} if aimed or ratio == "auto" else None


def accept(view: ModelView, selector: Selector, corrector: Corrector | None = None) -> None:
    """Raises :class:`UnsupportedModel` or :class:`BudgetError` when the model cannot show what the selector wants.

    And :class:`BudgetError` when the selector does not find out what the corrector needs.
    """
    if corrector is not None and corrector.needs_check and not selector.wants_fresh:
        raise BudgetError(
            f"{corrector!r} weighs rows by what a check layer shows, and {selector.name} looks at none: use a selector "
            "that does (ChunkDeviation, KVDeviation), or a corrector with a weight of its own"
        )
    if selector.wants_attention and not view.observable:
        raise UnsupportedModel(
            f"{type(view.model).__name__} computes attention outside transformers' attention interface, so the "
            f"question's attention cannot be read: use KVDeviation or FirstK in place of {selector.name}"
        )
    selector.probe_layers(len(view.layers))
    selector.check_layers(len(view.layers))


def admit(view: ModelView, tokenizer: Any, prompt: Prompt) -> None:
    """Raises :class:`PromptTooLong`, :class:`PromptError` or :class:`UnsupportedModel` for a prompt that cannot run."""
    view.require_ready()
    if view.context is not None and len(prompt) > view.context and not view.stretches:
        raise PromptTooLong(
            f"the prompt has {len(prompt)} tokens and the model holds {view.context}: drop passages or take smaller"
        )
    admit_ids(view, prompt.ids)
    for chunk in prompt.chunks:
        admit_chunk(view, tokenizer, chunk)


def admit_ids(view: ModelView, ids: Sequence[int]) -> None:
    """Raises :class:`PromptError` for a token id that the model does not embed."""
    for wrong in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= wrong < view.vocabulary:
            raise PromptError(
                f"token id {wrong} is outside the model's vocabulary of {view.vocabulary}: is it the right tokenizer?"
            )


def admit_chunk(view: ModelView, tokenizer: Any, chunk: Chunk) -> None:
    """Raises :class:`PromptError` for a chunk with a foreign token, or the tokenizer's padding token, in it."""
    admit_ids(view, chunk.ids)
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is not None and pad in chunk.ids:
        raise PromptError(
            f"chunk {chunk.name!r} holds the padding token {pad} at offset {chunk.ids.index(pad)}: chunks are of any "
            "length and need no padding; take it out"
        )


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Raises :class:`PromptError` for an option that is none of its choices."""
    if value not in choices:
        raise PromptError(f"{name} is {value!r}: choose {', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}")
