"""From the name of a set to its examples and its task.

=============================== ===================================================================================
name                            set
=============================== ===================================================================================
``FOLDER/FILE.jsonl``           a file in the form of :mod:`eval.tasks.jsonl`
``hotpotqa``                    such a file in the folder that ``KVBLEND_DATA`` names, or in ``../shared/data``
``demo``, ``needle:KIND``       made on the spot; see :mod:`eval.tasks.demo` and :mod:`eval.tasks.needle`
``hub:hotpotqa``                the task's set on the hub; ``?config=..&split=..`` take another part of it
``hub:PLACE``                   a local folder or file, or another set on the hub, with the columns of a task's hub set
=============================== ===================================================================================

What is read is checked as a whole: an example that cannot be asked or judged is an error, not a gap.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.tasks import demo, needle
from eval.tasks.base import DataError
from eval.tasks.hub import read_hub
from eval.tasks.jsonl import Line, read_lines
from eval.tasks.registry import HUB, KINDS, STEMS, TASKS
from eval.tasks.source import Source, whole_numbers
from eval.vocabulary import Example, Task

__all__ = ["DataSet", "load_set"]


@dataclass(frozen=True)
class DataSet:
    """Examples, and how they are put and judged.

    Attributes:
        name: in reports: the stem of a local file or folder, otherwise what was asked for.
        task: of all examples.
        examples: in the order in which they are to be taken.
    """

    name: str
    task: Task
    examples: tuple[Example, ...]


@dataclass(frozen=True)
class _Sample:
    """Which examples are taken, and the seed of what is drawn."""

    limit: int | None
    order: int | None

    @property
    def seed(self) -> int:
        return self.order or 0

    def of(self, examples: Sequence[Example]) -> list[Example]:
        """The first ``limit`` in the seeded order, which goes by ids: it stays when the set grows."""
        if self.order is None:
            return list(examples)[: self.limit]
        return sorted(examples, key=lambda e: hashlib.sha256(f"{self.order} {e.id}".encode()).digest())[: self.limit]


def load_set(data: str, *, task: str | None = None, limit: int | None = None, seed: int | None = 0) -> DataSet:
    """Reads a set, or makes it.

    Args:
        data: its name, as in the table above.
        task: key of ``TASKS``. By default the one that the lines of a file name, or that the file is called after, or
            that fits what the lines say (``qa``); for ``hub:``, the one in the name.
        limit: take so many examples, or all if there are fewer.
        seed: of the order in which they are taken: a greater limit takes the same ones and more. None takes them in
            the set's own order. Also of whatever is drawn or generated, where None counts as 0.

    Raises:
        DataError: no such set or task, or one that cannot be used as it is.
    """
    if limit is not None and limit < 1:
        raise DataError(f"limit is {limit}: take at least 1 example")
    if task is not None:
        _task(task, data)
    sample = _Sample(limit, seed)
    if data.startswith("hub:"):
        return _hub(data, task, sample)
    if data.partition("?")[0].partition(":")[0] in ("demo", "needle"):
        return _made(data, task, sample)
    return _file(data, task, sample)


def _task(name: str, data: str) -> Task:
    if name not in TASKS:
        raise DataError(f"{data}: there is no task {name!r}; choose from {', '.join(TASKS)}")
    return TASKS[name]


def _checked(data: str, examples: Sequence[Example], places: Sequence[str] | None = None) -> Sequence[Example]:
    """The examples, if each can be asked and judged. Raises ``DataError``, naming the place of one that cannot."""
    if not examples:
        raise DataError(f"{data} holds no examples")
    for example, place in zip(examples, places or [f"{data}, example {e.id}" for e in examples], strict=True):
        if not example.question.strip():
            raise DataError(f"{place}: the question is empty")
        if not example.answers or not all(answer.strip() for answer in example.answers):
            raise DataError(f"{place}: no answers, or an empty one: nothing could be judged")
        if not all(context.text.strip() for context in example.contexts):
            raise DataError(f"{place}: a context has no text: leave it out of the set")
    twice, count = Counter(example.id for example in examples).most_common(1)[0]
    if count > 1:
        raise DataError(f"{data}: the id {twice!r} is there {count} times: each example needs an id of its own")
    return examples


# --- files ----------------------------------------------------------------------------------------


def _file(data: str, task: str | None, sample: _Sample) -> DataSet:
    path = _path(data)
    lines = list(read_lines(path))
    examples = _checked(str(path), [line.example for line in lines], [line.place for line in lines])
    return DataSet(path.stem, _task(task or _said(path, lines), data), tuple(sample.of(examples)))


def _path(data: str) -> Path:
    if data.endswith(".jsonl"):
        if not Path(data).is_file():
            raise DataError(f"there is no file {data}")
        return Path(data)
    folder = Path(os.environ.get("KVBLEND_DATA", "../shared/data"))
    path = folder / f"{data}.jsonl"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in folder.glob("*.jsonl"))) or "no sets"
        more = f", hub:{data}" if data in HUB else ""
        raise DataError(
            f"there is no set {data!r}: {folder} (KVBLEND_DATA) holds {there}; or give a .jsonl file, demo, "
            f"needle{more} or hub:NAME"
        )
    return path


def _said(path: Path, lines: Sequence[Line]) -> str:
    """The task of a file that nobody has named one for."""
    said = sorted({line.task for line in lines})
    if len(said) > 1:
        raise DataError(f"{path}: its lines say different tasks ({', '.join(map(repr, said))}): give one for all")
    if said[0] and said[0] not in KINDS:
        return said[0]
    stem = STEMS.get(path.stem, path.stem)
    if stem not in TASKS and not said[0]:
        raise DataError(f"{path}: neither its lines nor its name say a task: give one of {', '.join(TASKS)}")
    return stem if stem in TASKS else KINDS[said[0]]


# --- made on the spot -----------------------------------------------------------------------------


def _made(data: str, task: str | None, sample: _Sample) -> DataSet:
    source = Source.of(data)
    name, colon, kind = source.name.partition(":")
    if task not in (None, name):
        raise DataError(f"{data} is made for the task {name}, not for {task}: leave the task out")
    if name == "demo":
        if colon:
            raise DataError(f"{data}: the demo set has no kinds: say demo, or demo?contexts=6")
        examples = demo.make(sample.seed, **whole_numbers(source, ("contexts",)))
    else:
        options = whole_numbers(source, ("contexts", "words", "needles", "n"))
        examples = needle.make(sample.seed, kind if colon else "single", **options)
    return DataSet(data, TASKS[name], tuple(sample.of(_checked(data, examples))))


# --- hub ------------------------------------------------------------------------------------------


def _hub(data: str, task: str | None, sample: _Sample) -> DataSet:
    source = Source.of(data.removeprefix("hub:"))
    place = source.name
    local = Path(place).exists()
    source.allow(() if Path(place).is_file() else ("split",) if local else ("config", "split"))
    name = task or (place if place in HUB else STEMS.get(Path(place).stem, Path(place).stem))
    if name not in HUB:
        raise DataError(f"{data}: give the task whose columns it has, one of {', '.join(HUB)}; {name!r} has no hub set")
    hub = HUB[name] if place == name else replace(HUB[name], path=place, config=None, revision=None)
    hub = replace(hub, config=source.options.get("config", hub.config), split=source.options.get("split", hub.split))
    examples = read_hub(hub, lambda found: sample.of(_checked(data, found)), sample.seed)
    return DataSet(Path(place).stem if local else data, TASKS[name], tuple(examples))
