"""A run on disk: what it is (``run.json``), its scores as they come, its summary. Knows how to go on after a stop.

::

    OUT/run.json               what was asked, with what, on what
    OUT/scores.jsonl           a Score per line; scores.1-of-4.jsonl and so on of shards
    OUT/summary.json           figures over all scores so far
    OUT/report.md, report.html, plots/

A shard has a file of its own, so several machines may write into one folder, or into several whose files are put
together afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blend import KVBlendError
from eval.vocabulary import Score

__all__ = ["RunExists", "RunFolder", "read_scores"]


class RunExists(KVBlendError, ValueError):
    """The folder holds a run that asked for something else."""


class RunFolder:
    """The folder of a run.

    Args:
        path: made if it is not there.
        shard: ``(i, n)``.
    """

    def __init__(self, path: Path, shard: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        index, count = shard
        self._file = path / ("scores.jsonl" if count == 1 else f"scores.{index}-of-{count}.jsonl")
        path.mkdir(parents=True, exist_ok=True)

    def begin(self, identity: dict[str, Any], record: dict[str, Any]) -> None:
        """Says what is run here, and cuts off a line that an interruption has left unfinished.

        Args:
            identity: must be the same for every process that writes here.
            record: model, machine and the like, of the process that came first.

        Raises:
            RunExists: another run is in the folder.
        """
        known = self.path / "run.json"
        if known.exists():
            before = json.loads(known.read_text(encoding="utf-8"))["options"]
            if changed := [key for key in identity if before.get(key) != identity[key]]:
                key = changed[0]
                raise RunExists(
                    f"{self.path} holds a run with {key} {before.get(key)!r}, and this one has {identity[key]!r}: "
                    "give another --out, or ask for the same"
                )
        else:
            _write(known, {**record, "options": identity})
        self._mend()

    def add(self, scores: Iterable[Score]) -> None:
        """Appends the scores of an example; after this they survive whatever happens to the process."""
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(score.as_dict(), ensure_ascii=False) + "\n" for score in scores)
            file.flush()
            os.fsync(file.fileno())

    def scores(self) -> list[Score]:
        """All scores so far, of all shards."""
        return read_scores(self.path)

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says."""
        plain: dict[str, Any] = json.loads((self.path / "run.json").read_text(encoding="utf-8"))
        return plain

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Keeps the figures."""
        _write(self.path / "summary.json", summary)

    def _mend(self) -> None:
        """Without this, the next line would be glued to the half of one."""
        if not self._file.exists():
            return
        data = self._file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self._file.write_bytes(whole)


def read_scores(folder: Path) -> list[Score]:
    """All scores of a run, of all shards; an unfinished last line of a file is left out, it is being written.

    Where one was measured twice, by overlapping shards, the first counts.

    Raises:
        KVBlendError: no such run, or a line that is no score.
    """
    files = sorted(folder.glob("scores*.jsonl"))
    if not (folder / "run.json").exists() and not files:
        raise KVBlendError(f"{folder} holds no run: give the --out folder of kvblend eval")
    found: dict[tuple[str, str, str, str], Score] = {}
    for file in files:
        data = file.read_bytes()  # what is unfinished may end within a character
        whole = data[: data.rfind(b"\n") + 1].decode("utf-8")
        for number, line in enumerate(whole.split("\n")[:-1], 1):  # an answer may hold what splitlines() splits at
            score = _score(line, file, number)
            found.setdefault((score.data, score.example, score.system, score.setting), score)
    return list(found.values())


def _score(line: str, file: Path, number: int) -> Score:
    try:
        return Score.from_dict(json.loads(line))
    except (ValueError, TypeError, AttributeError) as error:
        raise KVBlendError(f"{file}, line {number} is no score of this version: {error}") from error


def _write(path: Path, plain: dict[str, Any]) -> None:
    """Whole or not at all."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)
