"""Runs systems over sets of questions: resumable, sharded, here or on a Ray cluster. ``kvblend eval`` is its face."""

from __future__ import annotations

from eval.runner.folder import RunFolder
from eval.runner.jobs import Job
from eval.runner.lab import Lab
from eval.runner.options import EvalOptions
from eval.runner.run import run_eval

__all__ = ["EvalOptions", "Job", "Lab", "RunFolder", "run_eval"]
