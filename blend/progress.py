"""A progress bar around an iterator: on a terminal's standard error, or in a notebook that has ipywidgets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["track"]

Item = TypeVar("Item")


def track(items: Iterable[Item], *, total: int, label: str, show: bool = True) -> Iterator[Item]:
    """Yields ``items`` and moves a bar along; with ``show=False``, or where nobody watches, just yields them."""
    # Rich needs widgets in a notebook; without them it would warn at every bar.
    console = Console(file=sys.stderr, force_jupyter=None if find_spec("ipywidgets") else False)
    if not show or total == 0 or not (console.is_terminal or console.is_jupyter):
        yield from items
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        for item in items:
            yield item
            bar.advance(task)
