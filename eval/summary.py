"""Figures over the scores of a run: means and medians with bootstrap intervals. Knows no models and draws nothing.

``summary.json``, which others read, is::

    {"model", "dtype", "machine": {...}, "options": {...}, "complete": bool,
     "data": [{"name", "task", "n", "rows_mean"}], "common": [{"name", "n"}],
     "systems": {NAME: {SETTING: ENTRY}},
     "by_data": {SET: {NAME: {SETTING: ENTRY}}}}

SETTING is the ratio as text (``"0.15"``), or what stands for it: ``"0"`` for full reuse, ``"1"`` for full prefill and
the prefix path, ``"k=16"`` and the like. ENTRY has

* ``title``, ``n``, ``timed``, ``fallbacks`` (prompts that were prefilled in full);
* ``charged_mean`` (row-layers), ``charged_share_mean`` (of full prefill's);
* ``kl_mean``, ``kl_median``, ``kl_first_mean``, ``kl_first_median`` (nats), ``top1``, ``same_answer`` (shares);
* ``em``, ``f1``, ``rouge_l``, ``label``, ``held``, and ``headline``: each task's first metric (means in [0, 1]);
* ``ttft_s_median``, ``speedup_median``, ``speedup_mean``, ``seconds`` (median by stage), ``offline_s_mean``;
* ``kv_error`` (mean per layer), ``recovery`` (``{"headline", "f1", "kl"}``);
* ``ci``: ``{figure: [low, high]}``, 95 % bootstrap.

What was not measured is null. Over several sets every example counts the same. ``systems`` is over the examples that
all systems have in common (``common``), so that they are judged by the same questions; where there are none, each is
over its own, as it is in ``by_data``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from eval.stats import bootstrap_mean, bootstrap_median, recovery
from eval.systems import make_systems
from eval.vocabulary import Score

__all__ = ["METRIC_NAMES", "summarize"]

METRIC_NAMES = ("em", "f1", "rouge_l", "label", "held")

_Get = Callable[[Score], "float | None"]


def _metric(name: str) -> _Get:
    return lambda score: score.metrics.get(name)


_MEANS: dict[str, _Get] = {
    "kl_mean": lambda s: s.kl,
    "kl_first_mean": lambda s: s.kl_first,
    "top1": lambda s: s.top1,
    "same_answer": lambda s: s.same_answer,
    **{name: _metric(name) for name in METRIC_NAMES},
    "headline": lambda s: next(iter(s.metrics.values()), None),
    "charged_mean": lambda s: s.charged,
    "charged_share_mean": lambda s: None if s.charged is None else s.charged / s.full_charged,
    "offline_s_mean": lambda s: s.offline_s,
    "speedup_mean": lambda s: s.speedup,
}
_MEDIANS: dict[str, _Get] = {
    "kl_median": lambda s: s.kl,
    "kl_first_median": lambda s: s.kl_first,
    "ttft_s_median": lambda s: s.ttft_s,
    "speedup_median": lambda s: s.speedup,
}
_BARE = ("charged_mean", "charged_share_mean", "offline_s_mean", "ttft_s_median")  # without an interval


def summarize(scores: Sequence[Score], record: Mapping[str, Any]) -> dict[str, Any]:
    """The figures as plain data; see the module for their form.

    Args:
        scores: of all sets, systems and settings, in any order.
        record: of ``run.json``: model, dtype, machine, options.
    """
    sets = _by(scores, lambda s: s.data)
    shared = _shared(scores)
    return {
        "model": record.get("model"),
        "dtype": record.get("dtype"),
        "machine": record.get("machine", {}),
        "options": record.get("options", {}),
        "data": [_set(name, some) for name, some in sets.items()],
        "common": [{"name": name, "n": n} for name, n in Counter(data for data, _ in shared).items()],
        "systems": _systems([s for s in scores if (s.data, s.example) in shared] or scores),
        "by_data": {name: _systems(some) for name, some in sets.items()},
    }


def _shared(scores: Sequence[Score]) -> dict[tuple[str, str], None]:
    """Sets and ids of the examples that every system has at every setting, in order."""
    runs = _by(scores, lambda s: (s.system, s.setting)).values()
    ids = [{(score.data, score.example) for score in run} for run in runs]
    return {(s.data, s.example): None for s in scores if all((s.data, s.example) in one for one in ids)}


def _set(name: str, scores: Sequence[Score]) -> dict[str, Any]:
    rows = {score.example: score.rows for score in scores}
    return {"name": name, "task": scores[0].task, "n": len(rows), "rows_mean": fmean(rows.values())}


def _systems(scores: Sequence[Score]) -> dict[str, dict[str, Any]]:
    reuse = [score for score in scores if score.system == "reuse"]
    full = [score for score in scores if score.system == "full"]
    found: dict[str, dict[str, Any]] = {}
    for (name, setting), some in _by(scores, lambda s: (s.system, s.setting)).items():
        found.setdefault(name, {})[setting] = _entry(some, reuse, full)
    return {name: dict(sorted(by.items(), key=_setting_order)) for name, by in found.items()}


def _setting_order(item: tuple[str, Any]) -> tuple[float, str]:
    try:
        return float(item[0]), ""
    except ValueError:
        return 0.0, item[0]


def _entry(scores: Sequence[Score], reuse: Sequence[Score], full: Sequence[Score]) -> dict[str, Any]:
    (system,) = make_systems([scores[0].system], 0.5)
    entry: dict[str, Any] = {"title": system.title, "n": len(scores), "timed": system.timed, "ci": {}}
    for names, bootstrap in ((_MEANS, bootstrap_mean), (_MEDIANS, bootstrap_median)):
        for name, get in names.items():
            values = _known(scores, get)
            entry[name] = None
            if not values:
                continue
            if name in _BARE:
                entry[name] = fmean(values) if names is _MEANS else median(values)
                continue
            middle, low, high = bootstrap(values)
            entry[name], entry["ci"][name] = middle, [low, high]
    stages = dict.fromkeys(stage for score in scores for stage in score.seconds)
    entry["seconds"] = {stage: median([score.seconds.get(stage, 0.0) for score in scores]) for stage in stages}
    errors = [score.kv_error for score in scores if score.kv_error]
    entry["kv_error"] = [fmean(layer) for layer in zip(*errors, strict=True)] if errors else None
    entry["recovery"] = {name: _recovery(scores, reuse, full, _MEANS[get]) for name, get in _RECOVERED.items()}
    entry["fallbacks"] = sum(score.fallback is not None for score in scores)
    return entry


_RECOVERED = {"headline": "headline", "f1": "f1", "kl": "kl_mean"}


def _recovery(scores: Sequence[Score], reuse: Sequence[Score], full: Sequence[Score], get: _Get) -> float | None:
    """(x - reuse) / (full - reuse) over the examples that all three have; None where there is nothing to recover."""
    ours, lowest, highest = ({(s.data, s.example): value for s in some if (value := get(s)) is not None}
                             for some in (scores, reuse, full))  # fmt: skip
    keys = [key for key in ours if key in lowest and key in highest]
    if not keys:
        return None
    found = recovery(*([some[key] for key in keys] for some in (ours, lowest, highest)))
    return None if found is None else found.value


def _known(scores: Iterable[Score], get: _Get) -> list[float]:
    return [float(value) for score in scores if (value := get(score)) is not None]


def _by(scores: Sequence[Score], key: Callable[[Score], Any]) -> dict[Any, list[Score]]:
    """Groups, in the order of their first score."""
    order = {k: place for place, k in reversed(list(enumerate(map(key, scores))))}
    ranked = sorted(scores, key=lambda s: order[key(s)])
    return {k: list(some) for k, some in groupby(ranked, key)}
