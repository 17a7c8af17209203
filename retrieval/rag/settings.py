"""What a pipeline is set to, and how passages and questions are put to the model. Plain data, kept in its folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from string import Formatter
from typing import Any, Literal

from retrieval.errors import SettingError

__all__ = ["DEFAULT_INSTRUCTIONS", "RagSettings"]

DEFAULT_INSTRUCTIONS = (
    "Answer the question from the passages below, in a few words. "
    "If the passages do not hold the answer, say that you do not know."
)

_CHOICES = {
    "retriever": ("dense", "sparse", "hybrid"),
    "dense": ("flat", "ivf", "hnsw"),
    "order": ("score", "best-last", "cache-aware"),
}


@dataclass(frozen=True)
class RagSettings:
    """Settings of a pipeline.

    Attributes:
        size: tokens of a passage at most, title included, counted by the model's own tokenizer.
        overlap: tokens that neighbouring passages may share.
        retriever: ``dense`` (by meaning), ``sparse`` (by words, BM25), or ``hybrid`` (both, by reciprocal ranks).
        dense: kind of the dense index: ``flat`` (exact), ``ivf`` or ``hnsw`` (for very many passages).
        k: passages per question.
        order: of the passages in the prompt: ``best-last``, nearest the question, where small models read best; by
            ``score``; or ``cache-aware``: by score, but among ties what goes on with a known exact prefix comes first.
        margin: scores no further apart are ties (``cache-aware``).
        system: instructions, before the passages. Every passage is encoded behind them.
        passage: how a passage is put, with ``{text}`` and, where wanted, ``{title}`` and ``{source}``.
        question: how a question is put, with ``{question}``. As in ``system``, control tokens of the chat template act.

    Raises:
        SettingError: a value out of range.
    """

    size: int = 256
    overlap: int = 32
    retriever: Literal["dense", "sparse", "hybrid"] = "hybrid"
    dense: Literal["flat", "ivf", "hnsw"] = "flat"
    k: int = 6
    order: Literal["score", "best-last", "cache-aware"] = "best-last"
    margin: float = 0.0
    system: str = DEFAULT_INSTRUCTIONS
    passage: str = "{title}\n{text}"
    question: str = "Question: {question}"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise SettingError(f"{name} is {value!r}: choose from {', '.join(choices)}")
        if self.k < 1:
            raise SettingError(f"k is {self.k}: ask for at least 1 passage")
        if self.size < 1 or not 0 <= self.overlap < self.size:
            raise SettingError(
                f"size is {self.size} and overlap {self.overlap} tokens: size must be 1 or more, and overlap below it"
            )
        if self.margin < 0:
            raise SettingError(f"margin is {self.margin}: it must be 0 or more")
        _check_template("passage", self.passage, "text", {"text", "title", "source"})
        _check_template("question", self.question, "question", {"question"})

    def written(self, text: str, title: str = "", source: str = "") -> str:
        """A passage as the model reads it."""
        return self.passage.format(text=text.strip(), title=title.strip(), source=source.strip()).strip()

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> RagSettings:
        """The settings of :meth:`as_dict`.

        Raises:
            SettingError: a name that is no setting.
        """
        known = {field.name for field in fields(cls)}
        if strange := set(plain) - known:
            raise SettingError(f"there are no settings {', '.join(sorted(strange))}: choose from {', '.join(known)}")
        return cls(**plain)


def _check_template(name: str, template: str, needed: str, known: set[str]) -> None:
    try:
        found = {part for _, part, _, _ in Formatter().parse(template) if part is not None}
    except ValueError as error:
        raise SettingError(f"the template of the {name}, {template!r}, is not well formed: {error}") from error
    if needed not in found or found - known:
        raise SettingError(
            f"the template of the {name} is {template!r}: it must hold {{{needed}}}, "
            f"and may hold {', '.join(f'{{{part}}}' for part in sorted(known))}"
        )
