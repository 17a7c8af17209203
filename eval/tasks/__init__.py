"""The QA sets and how each is put and judged: one file per task. Knows no models."""

from __future__ import annotations

from eval.vocabulary import Task

__all__ = ["TASKS"]

TASKS: dict[str, Task] = {}
"""By name."""
