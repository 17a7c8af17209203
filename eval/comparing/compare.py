"""What changed between two runs, or two systems: paired tests on the examples that both have. Knows no models.

The figures, as plain data::

    {"a": {"folder", "model", "system"}, "b": {...}, "level": .05, "prompts_differ": n,
     "only_a": {"systems": ["NAME at SETTING", ...], "data": [SET, ...], "examples": ["SET: ID", ...]}, "only_b": {...},
     "groups": [{"title", "n", "small", "only_a": n, "only_b": n, "data": {SET: n},
                 "measures": {NAME: {"n", "a", "b", "change", "ci", "p", "higher", "same", "lower", "verdict"}}}]}

A group is a system at a setting, or a pair of them. ``a`` and ``b`` are means (medians of the speed-up) and ``change``
is b - a over the examples that have both, with its 95 % bootstrap interval. ``p`` is the sign-flip test's; on 0/1
values McNemar's, on medians the sign test's. ``verdict`` is ``better`` or ``worse`` where p is below ``level``, else
None. ``prompts_differ`` counts pairs whose prompts are not equally long: they were made of other passages or pieces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from blend.errors import KVBlendError
from eval.comparing.show import show_comparison
from eval.runner.folder import read_scores
from eval.stats import is_small, paired
from eval.vocabulary import Score

__all__ = ["MEASURES", "CompareError", "Measure", "run_compare"]

LEVEL = 0.05
"""A change whose p is below this is called beyond chance."""


class CompareError(KVBlendError, ValueError):
    """Runs that cannot be set side by side; the message says what each of them has."""


@dataclass(frozen=True)
class Measure:
    """A figure of a score.

    Attributes:
        title: in tables, with its unit.
        of: the figure; None where the score lacks it.
        low: whether less is better.
        median: whether medians are compared, not means.
    """

    title: str
    of: Callable[[Score], float | None]
    low: bool = False
    median: bool = False


def _metric(name: str) -> Callable[[Score], float | None]:
    return lambda score: score.metrics.get(name)


MEASURES: dict[str, Measure] = {
    "kl": Measure("KL, nats a token", lambda s: s.kl, low=True),
    "same_answer": Measure("same answer", lambda s: s.same_answer),
    "f1": Measure("F1", _metric("f1")),
    "em": Measure("exact match", _metric("em")),
    "rouge_l": Measure("ROUGE-L", _metric("rouge_l")),
    "label": Measure("label", _metric("label")),
    "held": Measure("holds the answer", _metric("held")),
    "speedup": Measure("TTFT speed-up", lambda s: s.speedup, median=True),
    "charged": Measure("charged share", lambda s: s.charged and s.charged / s.full_charged, low=True),
}
"""What is compared, by name."""

Key = tuple[str, str]
"""System and setting; or set and example."""

Cases = Mapping[Key, Score]
"""Scores of one system at one setting, by set and example."""


@dataclass(frozen=True)
class _Side:
    """A run.

    Attributes:
        folder: where it is.
        system: the one to compare; None for all.
        cases: by system and setting.
    """

    folder: Path
    system: str | None
    cases: Mapping[Key, Cases]

    @classmethod
    def read(cls, folder: Path, system: str | None) -> _Side:
        cases: dict[Key, dict[Key, Score]] = {}
        for score in read_scores(folder):
            if system in (None, score.system):
                cases.setdefault((score.system, score.setting), {})[score.data, score.example] = score
        if not cases:
            raise CompareError(f"{folder} has no scores" + (f" of the system {system!r}" if system else " yet"))
        return cls(folder, system, cases)

    def record(self) -> dict[str, Any]:
        """The folder, and the model where the run's record tells it."""
        known = self.folder / "run.json"
        model = json.loads(known.read_text(encoding="utf-8")).get("model") if known.exists() else None
        return {"folder": str(self.folder), "model": model, "system": self.system}


def run_compare(
    a: Path, b: Path, console: Console, *, system_a: str | None = None, system_b: str | None = None
) -> dict[str, Any]:
    """Compares two runs, prints a table per system and setting, and returns the figures as plain data.

    Without names every system is compared with itself, at each setting that both runs have. With names, system a of
    run a is compared with system b of run b, which may be the same run, at the settings that both have; where they have
    none in common (full reuse has no ratio), at each of the one with each of the other.

    Args:
        a: folder of a run.
        b: of another, or of the same.
        console: where the tables go.
        system_a: a system of run a; both or none.
        system_b: a system of run b.

    Returns:
        See the head of this module.

    Raises:
        KVBlendError: no run in a folder, or a line that is no score.
        CompareError: one system without the other, a system that a run lacks, or no example in common.
    """
    if (system_a is None) != (system_b is None):
        raise CompareError(f"only the system {system_a or system_b!r} is named: name one of each run, or none")
    sides = _Side.read(Path(a), system_a), _Side.read(Path(b), system_b)
    pairs = _pairs(*sides)
    cases = [(one, other, sides[0].cases[one], sides[1].cases[other]) for one, other in pairs]
    groups = [_group(*case) for case in cases if case[2].keys() & case[3].keys()]
    if not groups:
        has = (f"{side.folder} has {', '.join(map(_name, side.cases))} on {', '.join(_sets(side))}" for side in sides)
        raise CompareError(f"the runs have no example in common under one system and setting: {'; '.join(has)}")
    figures = {
        "a": sides[0].record(),
        "b": sides[1].record(),
        "level": LEVEL,
        "prompts_differ": sum(_prompts_differ(one, other) for *_, one, other in cases),
        "only_a": _only(sides[0], sides[1], {one for one, _ in pairs}),
        "only_b": _only(sides[1], sides[0], {other for _, other in pairs}),
        "groups": groups,
    }
    show_comparison(figures, {name: measure.title for name, measure in MEASURES.items()}, console)
    return figures


# --- what goes with what ------------------------------------------------------------------------------


def _pairs(a: _Side, b: _Side) -> list[tuple[Key, Key]]:
    if a.system is None:
        return [(key, key) for key in a.cases if key in b.cases]
    same = [(one, other) for one in a.cases for other in b.cases if one[1] == other[1]]
    return same or [(one, other) for one in a.cases for other in b.cases]


def _only(side: _Side, other: _Side, compared: set[Key]) -> dict[str, list[str]]:
    """What one run has and the other lacks: systems at settings, sets, and examples of the sets that both have."""
    examples = dict.fromkeys(example for key in compared for example in side.cases[key])
    theirs = {example for cases in other.cases.values() for example in cases}
    sets = _sets(other)
    return {
        "systems": [_name(key) for key in side.cases if key not in compared],
        "data": [name for name in _sets(side) if name not in sets],
        "examples": [": ".join(example) for example in examples if example not in theirs and example[0] in sets],
    }


def _sets(side: _Side) -> list[str]:
    return list(dict.fromkeys(data for cases in side.cases.values() for data, _ in cases))


def _prompts_differ(a: Cases, b: Cases) -> int:
    return sum((a[key].rows, a[key].chunks) != (b[key].rows, b[key].chunks) for key in a if key in b)


def _name(key: Key) -> str:
    return f"{key[0]} at {key[1]}"


# --- figures ------------------------------------------------------------------------------------------


def _group(one: Key, other: Key, a: Cases, b: Cases) -> dict[str, Any]:
    common = [key for key in a if key in b]
    measured = {name: _measured(m, [(m.of(a[key]), m.of(b[key])) for key in common]) for name, m in MEASURES.items()}
    return {
        "title": _name(one) if one == other else f"{_name(one)} to {_name(other)}",
        "n": len(common),
        "small": is_small(len(common)),
        "only_a": len(a) - len(common),
        "only_b": len(b) - len(common),
        "data": dict(Counter(data for data, _ in common)),
        "measures": {name: figures for name, figures in measured.items() if figures is not None},
    }


def _measured(measure: Measure, both: Sequence[tuple[float | None, float | None]]) -> dict[str, Any] | None:
    """None where no example has the figure on both sides."""
    known = [(float(a), float(b)) for a, b in both if a is not None and b is not None]
    if not known:
        return None
    a, b = zip(*known, strict=True)
    found = paired(b, a)
    middle = median if measure.median else fmean
    change, low, high = found.median if measure.median else (found.mean, found.low, found.high)
    p = found.p_sign if measure.median else found.p
    rose = change > 0 if change else found.wins > found.losses
    return {
        "n": found.n,
        "a": middle(a),
        "b": middle(b),
        "change": change,
        "ci": [low, high],
        "p": p,
        "higher": found.wins,
        "same": found.ties,
        "lower": found.losses,
        "verdict": None if p >= LEVEL else "better" if rose != measure.low else "worse",
    }
