"""Questions and passages of a QA set with gold passages, as a folder of files. Knows no models."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blend.errors import KVBlendError

__all__ = ["RagQuestion", "RagSet", "read_set", "write_files"]


class RagQuestion(NamedTuple):
    """A question, its accepted answers, and the file that holds them."""

    text: str
    answers: tuple[str, ...]
    gold: str


class RagSet(NamedTuple):
    """Texts by file name, with their titles, and questions about them."""

    texts: dict[str, tuple[str, str]]
    questions: tuple[RagQuestion, ...]


def read_set(data: str, *, passages: int, questions: int, seed: int = 0) -> RagSet:
    """Chooses questions, then passages: gold ones first, others of the set until there are enough.

    Args:
        data: a JSONL set with gold passages, or the name of one in ``$KVBLEND_DATA``.
        passages: how many different ones.
        questions: how many.
        seed: of the choice.

    Raises:
        KVBlendError: no such set, or too small a one.
    """
    folder = Path(os.environ.get("KVBLEND_DATA", "../shared/data"))
    path = Path(data) if data.endswith(".jsonl") else folder / f"{data}.jsonl"
    if not path.is_file():
        raise KVBlendError(f"there is no set {path}: give a .jsonl file, or set KVBLEND_DATA to the folder of the sets")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(rows)
    asked, others = rows[:questions], rows[questions:]
    pairs = [*_contexts(asked, True), *_contexts(asked, False), *_contexts(others, True), *_contexts(others, False)]
    names: dict[str, str] = {}
    texts: dict[str, tuple[str, str]] = {}
    for title, text in pairs:
        if text not in names and len(texts) < passages:
            names[text] = f"{len(texts):04}.md"
            texts[names[text]] = title, text
    if len(asked) < questions or len(texts) < passages:
        raise KVBlendError(f"{path.name} has {len(rows)} questions over {len(texts)} passages: ask for fewer")
    gold = [next(context["text"] for context in row["contexts"] if context["is_gold"]) for row in asked]
    chosen = (RagQuestion(row["question"], tuple(row["answers"]), names[g]) for row, g in zip(asked, gold, strict=True))
    return RagSet(texts, tuple(chosen))


def _contexts(rows: Sequence[dict[str, Any]], gold: bool) -> Iterator[tuple[str, str]]:
    for row in rows:
        for context in row["contexts"]:
            if bool(context["is_gold"]) == gold:
                yield context["title"], context["text"]


def write_files(chosen: RagSet, folder: Path) -> None:
    """One Markdown file per passage, with its title in front."""
    folder.mkdir()
    for name, (title, text) in chosen.texts.items():
        head = json.dumps(title, ensure_ascii=False)  # JSON is YAML
        (folder / name).write_text(f"---\ntitle: {head}\n---\n{text}\n", encoding="utf-8")
