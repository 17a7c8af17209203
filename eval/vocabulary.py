"""The words of the evaluation: Example, Task, Score. (System and Outcome are in :mod:`eval.systems.base`.)

::

    Task -- examples of a set, how they are put, how answers are judged
    Example -> Prompt -> System -> Outcome -> Score -> summary.json -> report

Knows no models, no files, no figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Context", "Example", "Score", "Task"]


@dataclass(frozen=True)
class Context:
    """A passage that comes with a question.

    Attributes:
        text: its words.
        title: of the document it is from; may be empty.
        gold: whether the answer rests on it; None where the set does not say.
    """

    text: str
    title: str = ""
    gold: bool | None = None


@dataclass(frozen=True)
class Example:
    """A question with its passages and accepted answers.

    Attributes:
        id: unique in its set.
        question: what is asked.
        answers: accepted ones, the first the usual; at least one.
        contexts: passages in the order of the set; may be empty.
        meta: whatever else the set tells (hops, type).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    contexts: tuple[Context, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """How the examples of one kind are put to a model, and how its answers are judged.

    Attributes:
        name: on the command line, such as ``hotpotqa``.
        title: in tables and plots.
        system: instructions, in front of the passages.
        ask: how the question is put, with ``{question}`` where it goes.
        passage: how a passage is written, with ``{title}`` and ``{text}``; a passage without a title is its text.
        tokens: longest answer, in tokens.
        metrics: keys of ``eval.metrics.METRICS`` that judge an answer, the headline first.
    """

    name: str
    title: str
    system: str
    ask: str
    tokens: int
    metrics: tuple[str, ...]
    passage: str = "{title}\n{text}"

    def write(self, context: Context) -> str:
        """A passage as the model reads it."""
        return self.passage.format(title=context.title, text=context.text) if context.title else context.text


@dataclass(frozen=True)
class Score:
    """One example under one system at one setting: a line of ``scores.jsonl``.

    Attributes:
        data: name of the set.
        task: name of the task that put and judged it.
        example: id of the example.
        system: key of ``SYSTEMS``.
        setting: the ratio as text (``"0.15"``), or the system's own (``"0"`` for full reuse, ``"k=16"``).
        rows: of the prompt.
        chunks: of the prompt.
        charged: row-layers computed: probe, check and repair. None for peers, which do not tell.
        full_charged: row-layers of a full prefill.
        ttft_s: seconds from token ids to the first token's logits. None where it means nothing (oracles).
        full_ttft_s: the same of the full prefill of this prompt in the same process, or of the peer's own.
        seconds: ``ttft_s`` by stage.
        offline_s: seconds of work before the question was known, beyond encoding each chunk once.
        kl_first: nats from full prefill's first token. None where the system shows no distribution.
        kl: nats per token, mean along full prefill's own greedy answer (teacher-forced).
        top1: share of that answer's places where both find the same token likeliest.
        same_answer: at all of them.
        answer: its own greedy answer.
        metrics: judged by the task's metrics, each in [0, 1].
        kv_error: per cache layer, mean relative distance of keys and values of the reused rows from full prefill's.
        kv_bytes: of the prompt's KV.
        recomputed: rows whose reused KV was computed again.
        fallback: why the prompt was prefilled in full instead of fused; None if it was not.
    """

    data: str
    task: str
    example: str
    system: str
    setting: str
    rows: int
    chunks: int
    charged: float | None
    full_charged: float
    ttft_s: float | None
    full_ttft_s: float
    seconds: Mapping[str, float]
    offline_s: float
    kl_first: float | None
    kl: float | None
    top1: float | None
    same_answer: bool | None
    answer: str
    metrics: Mapping[str, float]
    kv_error: tuple[float, ...] | None = None
    kv_bytes: int | None = None
    recomputed: int | None = None
    fallback: str | None = None

    @property
    def speedup(self) -> float | None:
        """Full prefill's seconds over these."""
        return self.full_ttft_s / self.ttft_s if self.ttft_s else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Score:
        """What :meth:`as_dict` gave. Raises ``TypeError`` for keys that are missing or unknown."""
        error = plain.get("kv_error")
        return cls(**{**plain, "kv_error": None if error is None else tuple(error)})
