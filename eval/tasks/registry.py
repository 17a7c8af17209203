"""The tasks by name, their sets on the hub, and what a file's own words say about its task."""

from __future__ import annotations

from eval.tasks import (
    banking77,
    cmrc2018,
    demo,
    hotpotqa,
    longbench,
    multinews,
    musique,
    needle,
    nq_open,
    qa,
    qmsum,
    samsum,
    squad,
    triviaqa,
    wikimqa,
    xquad_zh,
)
from eval.tasks.base import HubSet
from eval.vocabulary import Task

__all__ = ["HUB", "KINDS", "STEMS", "TASKS"]

_ALL = (
    *(squad.TASK, hotpotqa.TASK, wikimqa.TASK, nq_open.TASK, musique.TASK, triviaqa.TASK, qa.TASK),
    *(xquad_zh.TASK, cmrc2018.TASK),
    *(banking77.TASK, samsum.TASK, multinews.TASK, qmsum.TASK),
    *(longbench.TASK, longbench.SUMMARY, needle.TASK, demo.TASK),
)

TASKS: dict[str, Task] = {task.name: task for task in _ALL}
"""By name: English questions, Chinese ones, demonstrations and summaries, long texts, what is made on the spot."""

HUB: dict[str, HubSet] = {
    "squad": squad.HUB,
    "hotpotqa": hotpotqa.HUB,
    "2wikimqa": wikimqa.HUB,
    "nq_open": nq_open.HUB,
    "musique": musique.HUB,
    "triviaqa": triviaqa.HUB,
    "xquad_zh": xquad_zh.HUB,
    "cmrc2018": cmrc2018.HUB,
    "banking77": banking77.HUB,
    "samsum": samsum.HUB,
    "multinews": multinews.HUB,
    "longbench": longbench.HUB,
    "longbench_summary": longbench.HUB_SUMMARY,
}
"""Sets on the hub, by task."""

STEMS = {"musique_s": "musique", "wikimqa_s": "2wikimqa", "squad_xquad_en": "squad"}
"""Tasks of files that are called otherwise."""

KINDS = {"qa": "qa", "fewshot": "banking77", "summarization": "qmsum"}
"""Tasks of what a line may say in ``task`` without naming one; the file's name says more."""
