"""Which of an example's contexts stand in its prompt, and in which order. Knows no models but the embedder."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, get_args

from eval.vocabulary import Context, Example, Task
from retrieval import DenseIndex, Embeds, HybridIndex, SettingError, SparseIndex

__all__ = ["Arrangement", "Order", "arrange"]

Order = Literal["given", "shuffled", "retrieved"]


@dataclass(frozen=True)
class Arrangement:
    """How contexts are chosen and put in order.

    Attributes:
        order: as the set gives them, shuffled, or as our own retrieval finds them among themselves, the best one last
            and nearest to the question, as in the pipeline. Retrieval may lose gold ones: that is its point.
        k: contexts at most; None for all. Unless they are retrieved the gold ones stay, and others fill up in the
            order of the set; where none is marked, the first ``k`` stay.
        seed: of the shuffle, together with the example's id.
        context: whether there are any. Without, the answer shows what a model knows by heart.

    Raises:
        SettingError: an unknown order, or ``k`` below 1.
    """

    order: Order = "given"
    k: int | None = None
    seed: int = 0
    context: bool = True

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise SettingError(f"order is {self.order!r}: choose from {', '.join(get_args(Order))}")
        if self.k is not None and self.k < 1:
            raise SettingError(f"k is {self.k}: keep at least 1 context, or none with context=False")


def arrange(example: Example, task: Task, arrangement: Arrangement, embedder: Embeds | None = None) -> Example:
    """The example with the contexts of its prompt.

    Args:
        example: with all its contexts.
        task: writes a context as the model reads it; that is what is searched.
        arrangement: what to do with them.
        embedder: makes vectors; needed by ``retrieved`` only.

    Raises:
        SettingError: ``retrieved`` without an embedder.
    """
    if arrangement.order == "retrieved" and embedder is None:
        raise SettingError("contexts cannot be retrieved without an embedder: give one, such as retrieval.Embedder()")
    if not arrangement.context or not example.contexts:
        return replace(example, contexts=())
    k = arrangement.k or len(example.contexts)
    if embedder is not None and arrangement.order == "retrieved":
        return replace(example, contexts=_retrieved(example, task, k, embedder))
    kept = list(_kept(example.contexts, k))
    if arrangement.order == "shuffled":
        random.Random(f"{arrangement.seed} {example.id}").shuffle(kept)
    return replace(example, contexts=tuple(kept))


def _kept(contexts: tuple[Context, ...], k: int) -> tuple[Context, ...]:
    """``k`` contexts in their order: gold ones, then the first others."""
    places = sorted(range(len(contexts)), key=lambda i: not contexts[i].gold)[:k]
    return tuple(contexts[i] for i in sorted(places))


def _retrieved(example: Example, task: Task, k: int, embedder: Embeds) -> tuple[Context, ...]:
    index = HybridIndex([DenseIndex(embedder), SparseIndex()])  # the pipeline's default
    index.add([task.write(context) for context in example.contexts])
    return tuple(example.contexts[match.number] for match in reversed(index.search(example.question, k)))
