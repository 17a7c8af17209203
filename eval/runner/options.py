"""What an evaluation is asked to do. Knows no models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from blend import BudgetError
from eval.arrange import Arrangement
from eval.systems import make_systems
from eval.systems.base import UnknownSystem

__all__ = ["EvalOptions", "Plan", "shard_of"]

Plan = tuple[tuple[str, float, str], ...]
"""Of each run of an example: the system's name, the ratio it is made with, and its setting."""


@dataclass(frozen=True)
class EvalOptions:
    """An evaluation.

    Attributes:
        data: sets, as :func:`eval.tasks.load_set` reads them; with ``?k=3`` behind it, one takes so many passages.
        out: the run's folder; an unfinished run in it is gone on with.
        systems: keys of ``SYSTEMS``.
        ratios: shares of the reused rows computed again; systems without a choice run once.
        model: hub id, folder, file or alias.
        dtype: of weights and KV; None for the model's own.
        limit: questions per set; None for all.
        seed: of their choice and of the order of their passages.
        task: in place of the one that each set names.
        arrangement: which passages in which order.
        store: where chunk KV is kept, as ``blend.open_store`` takes it; memory by default.
        shard: this process does every n-th question, starting with the i-th: ``(i, n)``.

    Raises:
        BudgetError: no data, a ratio, limit or shard out of range.
        UnknownSystem: a system that is not there.
    """

    data: tuple[str, ...]
    out: Path
    systems: tuple[str, ...] = ("full", "reuse", "cacheblend", "epic", "prophetkv")
    ratios: tuple[float, ...] = (0.15,)
    model: str = "smollm2"
    dtype: torch.dtype | None = None
    limit: int | None = None
    seed: int = 0
    task: str | None = None
    arrangement: Arrangement = field(default_factory=Arrangement)
    store: str | None = None
    shard: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if not self.data:
            raise BudgetError("there is no data: name at least one set")
        if not self.ratios or not self.systems:
            raise BudgetError("give at least one system and one ratio")
        if twice := [name for name in self.systems if self.systems.count(name) > 1]:
            raise UnknownSystem(f"the system {twice[0]!r} is named twice: once is enough")
        for ratio in self.ratios:
            make_systems(self.systems, ratio)  # raises for what is not there or out of range
        index, count = self.shard
        if not 0 <= index < count:
            raise BudgetError(f"shard is {index}/{count}: give i/n with i from 0 to n - 1")

    @property
    def plan(self) -> Plan:
        """What every example runs through, in order; settings that do not depend on the ratio come once."""
        made = [(name, ratio, make_systems([name], ratio)[0].setting) for name in self.systems for ratio in self.ratios]
        first = {(name, setting): ratio for name, ratio, setting in reversed(made)}
        return tuple((name, ratio, setting) for (name, setting), ratio in reversed(first.items()))

    @property
    def identity(self) -> dict[str, Any]:
        """What two processes that write into one folder must have in common; systems and ratios may be added."""
        return {
            "data": list(self.data),
            "model": self.model,
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "limit": self.limit,
            "seed": self.seed,
            "task": self.task,
            "arrangement": asdict(self.arrangement),
        }


def shard_of(text: str | None) -> tuple[int, int]:
    """``i/n`` as numbers; None is the whole.

    Raises:
        BudgetError: not of that form.
    """
    if text is None:
        return 0, 1
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise BudgetError(f"shard is {text!r}: give i/n, such as 0/4") from error
    return index, count
