"""A progress bar around an iterator, on standard error and only where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["track"]

Item = TypeVar("Item")


def track(items: Iterable[Item], *, total: int, label: str, show: bool = True) -> Iterator[Item]:
    """Yields ``items`` and moves a bar along; with ``show=False``, or off a terminal, just yields them."""
    if not show or total == 0:
        yield from items
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(label, total=total)
        for item in items:
            yield item
            bar.advance(task)
