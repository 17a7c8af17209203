"""What a report knows of a run: its ``summary.json``, its scores and, where it is there, its ``run.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blend.errors import KVBlendError
from eval.runner.folder import read_scores
from eval.vocabulary import Score

__all__ = ["ReportError", "Row", "Run", "read_run", "rows_of"]

_USUAL = 0.15  # the ratio that papers compare at, and our default


class ReportError(KVBlendError, ValueError):
    """A run's folder that no report can be made of; the message names the file and the way out."""


@dataclass(frozen=True)
class Row:
    """One system at one setting: what a line of a table and a point of a picture are made of.

    Attributes:
        name: key of the system.
        setting: as in ``summary.json``.
        ratio: the setting as a number, for systems that were given one; None for those with a setting of their own.
        entry: its figures.
    """

    name: str
    setting: str
    ratio: float | None
    entry: Mapping[str, Any]

    @property
    def title(self) -> str:
        return str(self.entry.get("title") or self.name)

    @property
    def exact(self) -> bool:
        """Whether it is full prefill by other means: the setting ``"1"`` of a system that has no other."""
        return self.ratio is None and self.setting == "1"

    def get(self, key: str) -> float | None:
        """A figure; None where it was not measured."""
        value = self.entry.get(key)
        return None if value is None else float(value)

    def interval(self, key: str) -> tuple[float, float] | None:
        """The figure's 95 % interval; None where there is none."""
        found = (self.entry.get("ci") or {}).get(key)
        return None if not found or None in found else (float(found[0]), float(found[1]))


def rows_of(systems: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Row]:
    """The rows of ``summary["systems"]`` or of one set, in its order, ratios rising."""
    rows = []
    for name, entries in systems.items():
        ratios = _ratios(entries)
        by_ratio = sorted(entries.items(), key=lambda item: ratios.get(item[0], 0.0))
        rows += [Row(name, setting, ratios.get(setting), entry) for setting, entry in by_ratio]
    return rows


def _ratios(settings: Mapping[str, Any]) -> dict[str, float]:
    """The settings that are ratios. A lone ``0`` or ``1`` is the system's own: full reuse, full prefill."""
    numbers = {}
    for setting in settings:
        try:
            numbers[setting] = float(setting)
        except ValueError:
            continue
    return {} if len(numbers) == 1 and set(numbers.values()) <= {0.0, 1.0} else numbers


@dataclass(frozen=True)
class Run:
    """What a run's folder holds.

    Attributes:
        summary: of ``summary.json``.
        scores: of all shards.
        options: of ``run.json``; empty where that is absent.
    """

    summary: Mapping[str, Any]
    scores: tuple[Score, ...]
    options: Mapping[str, Any]

    @cached_property
    def rows(self) -> list[Row]:
        """All sets together."""
        return rows_of(self.summary["systems"])

    @cached_property
    def ratios(self) -> tuple[float, ...]:
        """Those of any system, rising."""
        return tuple(sorted({row.ratio for row in self.rows if row.ratio is not None}))

    @property
    def ratio(self) -> float | None:
        """The one for pictures and tables that show a single one: 0.15 or the nearest to it."""
        return min(self.ratios, key=lambda ratio: abs(ratio - _USUAL), default=None)

    def at(self, ratio: float | None) -> list[Row]:
        """Rows at one ratio, and all of systems with settings of their own."""
        return [row for row in self.rows if row.ratio is None or row.ratio == ratio]

    def scores_of(self, row: Row) -> list[Score]:
        """The scores that a row sums up."""
        return self._by_row.get((row.name, row.setting), [])

    @cached_property
    def _by_row(self) -> dict[tuple[str, str], list[Score]]:
        found: dict[tuple[str, str], list[Score]] = {}
        for score in self.scores:
            found.setdefault((score.system, score.setting), []).append(score)
        return found


def read_run(folder: Path) -> Run:
    """Reads a run's folder.

    Raises:
        ReportError: a file that is missing or cannot be read.
        KVBlendError: a line of the scores that is no score.
    """
    summary = _json(folder / "summary.json")
    missing = {"model", "dtype", "machine", "complete", "data", "systems"} - summary.keys()
    if missing:
        raise ReportError(f"{folder / 'summary.json'} lacks {', '.join(sorted(missing))}: run `kvblend eval` again")
    record = _json(folder / "run.json") if (folder / "run.json").exists() else {}
    return Run(summary, tuple(read_scores(folder)), record.get("options") or {})


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"there is no {path}: give the folder of a run of `kvblend eval`") from None
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read ({error}): run `kvblend eval` again") from error
    if not isinstance(read, dict):
        raise ReportError(f"{path} holds a {type(read).__name__}, not an object: run `kvblend eval` again")
    return read
