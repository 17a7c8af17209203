"""The questions of a run, one job each, and how a question becomes a prompt. Computes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from blend import BudgetError, Prompt, PromptError
from blend.text import PromptText
from eval.arrange import Arrangement, arrange
from eval.runner.options import EvalOptions, Plan
from eval.tasks import DataSet, load_set
from eval.vocabulary import Example, Task
from retrieval import Embeds

__all__ = ["Job", "Jobs", "make_jobs", "make_prompt"]


@dataclass(frozen=True)
class Job:
    """One example, with its passages chosen and in order, and what is still to be measured of it."""

    data: str
    task: Task
    example: Example
    todo: Plan

    def without(self, done: Iterable[tuple[str, str]]) -> Job:
        """Less the (system, setting) pairs that are done."""
        known = set(done)
        return Job(self.data, self.task, self.example, tuple(t for t in self.todo if (t[0], t[2]) not in known))


@dataclass(frozen=True)
class Jobs:
    """All jobs of a run, of every shard, and the passages of each set, as the model reads them."""

    jobs: tuple[Job, ...]
    passages: dict[str, tuple[str, ...]]


def make_jobs(options: EvalOptions) -> Jobs:
    """Reads the sets and arranges their passages.

    Raises:
        DataError: a set that cannot be read.
        BudgetError: two sets of one name, whose results could not be told apart.
    """
    asked = [_own_k(data, options.arrangement) for data in options.data]
    sets = [load_set(data, task=options.task, limit=options.limit, seed=options.seed) for data, _ in asked]
    names = [one.name for one in sets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BudgetError(f"two sets are called {twice[0]!r}: give one at a time, into different folders")
    embedder = _embedder(options)
    jobs: list[Job] = []
    passages: dict[str, tuple[str, ...]] = {}
    for one, (_, arrangement) in zip(sets, asked, strict=True):
        arranged = [arrange(example, one.task, arrangement, embedder) for example in one.examples]
        jobs += [Job(one.name, one.task, example, options.plan) for example in arranged]
        passages[one.name] = _passages(one, arranged)
    return Jobs(tuple(jobs), passages)


def make_prompt(text: PromptText, task: Task, example: Example) -> Prompt:
    """An example as the model reads it.

    Raises:
        PromptError: an empty question or passage; the message names the example.
    """
    try:
        chunks = [
            text.chunk(task.write(context), context.title or f"passage {number}")
            for number, context in enumerate(example.contexts, 1)
        ]
        return text.prompt(example.question, chunks, task.system, task.ask)
    except PromptError as error:
        raise PromptError(f"example {example.id!r}: {error}") from error


def _own_k(data: str, arrangement: Arrangement) -> tuple[str, Arrangement]:
    """``SET?k=3`` as the set and an arrangement of three passages."""
    name, mark, k = data.rpartition("?k=")
    if not mark:
        return data, arrangement
    if not k.isdecimal():
        raise BudgetError(f"the set {data!r} asks for {k!r} passages: give a whole number, such as {name}?k=3")
    return name, replace(arrangement, k=int(k))


def _passages(one: DataSet, arranged: list[Example]) -> tuple[str, ...]:
    texts = (one.task.write(context) for example in arranged for context in example.contexts)
    return tuple(dict.fromkeys(texts))


def _embedder(options: EvalOptions) -> Embeds | None:
    if options.arrangement.order != "retrieved" or not options.arrangement.context:
        return None
    from retrieval import Embedder  # loads a model

    return Embedder()
