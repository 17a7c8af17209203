"""The QA sets and how each is put and judged: one file per task. Knows no models."""

from eval.tasks.base import DataError
from eval.tasks.load import DataSet, load_set
from eval.tasks.registry import TASKS

__all__ = ["TASKS", "DataError", "DataSet", "load_set"]
