"""A made-up run of every system, for tests of what is made of runs: scores and their summary, with no model."""

from __future__ import annotations

import json
from statistics import fmean, median

import numpy as np

from eval.vocabulary import Score

# A made-up run: title, setting (None: a ratio), KL at 15 %, share charged beside the ratio, oracle.
SYSTEMS = {
    "full": ("full prefill", "1", 0.0, 1.0, False),
    "prefix": ("prefix cache", "1", 0.0, 0.93, False),
    "prefix-warm": ("prefix cache, warm", "1", 0.0, 0.05, False),
    "reuse": ("full reuse", "0", 0.19, 0.05, False),
    "reuse-unrotated": ("full reuse, not rotated", "0", 0.52, 0.05, False),
    "cacheblend": ("CacheBlend", None, 0.085, 0.06, False),
    "cacheblend-paper": ("CacheBlend, paper", None, 0.08, 0.09, False),
    "epic": ("EPIC", None, 0.165, 0.05, False),
    "epic-16": ("EPIC-16", "k=16", 0.15, 0.12, False),
    "prophetkv": ("ProphetKV", None, 0.056, 0.08, False),
    "a3": ("A3", None, 0.06, 0.07, False),
    "kvshare": ("KVShare", None, 0.07, 0.1, False),
    "fusionrag-online": ("FusionRAG, online", None, 0.062, 0.08, False),
    "fusionrag": ("FusionRAG", None, 0.03, 0.08, False),
    "cachecraft": ("Cache-Craft", None, 0.075, 0.09, False),
    "agentkvshift": ("AgentKVShift", None, 0.072, 0.07, False),
    "ape": ("APE", "T=0.9,S=0.9", 0.14, 0.04, False),
    "random": ("random rows", None, 0.16, 0.05, False),
    "oracle-kv": ("oracle: KV", None, 0.05, 0.1, True),
    "oracle-attention": ("oracle: attention", None, 0.026, 0.1, True),
}
SETS = {"squad_en": "squad", "hotpotqa": "hotpotqa", "2wikimqa": "hotpotqa", "nq_open": "nq", "musique_s": "hotpotqa"}
LAYERS = 30
SECRET = "the words of an answer"


def make_scores(systems=SYSTEMS, ratios=(0.05, 0.15, 0.3), sets=SETS, n=24, seed=0):
    """Scores as a run would leave them: paired, skewed, with a few prompts that fell back."""
    rng = np.random.default_rng(seed)
    scores = []
    for data, task in sets.items():
        for number in range(n):
            rows, hard, right = int(np.exp(rng.normal(7.2, 0.45))), rng.lognormal(0, 0.7), rng.random() < 0.55
            full_s = rows * 1.5e-3 * (1 + rows / 9000)
            prompt = (rows, full_s, hard, right)
            scores += [
                _score(rng, (data, task, f"{data}-{number}"), name, system, ratio, prompt)
                for name, system in systems.items()
                for ratio in (ratios if system[1] is None else (None,))
            ]
    return scores


def _score(rng, where, name, system, ratio, prompt):
    (_, own, kl15, beside, oracle), (rows, full_s, hard, right) = system, prompt
    kl = kl15 * hard * rng.lognormal(0, 0.35) * (0.15 / (ratio or 0.15)) ** 0.7
    share = min(1.0, beside + (ratio or 0) * 1.02)
    ttft = None if oracle else full_s * (1.0 if name == "full" else share) * rng.lognormal(0, 0.05)
    f1 = float(np.clip(right * rng.beta(5, 2) - 0.35 * kl, 0, 1))
    stages = {"prefill": ttft} if own == "1" else ttft and {
        "lookup": 0.01 * ttft, "assemble": 0.08 * ttft, "probe": 0.25 * ttft, "check": 0.06 * ttft, "repair": 0.6 * ttft
    }  # fmt: skip
    fell = "the probe found nothing to choose from" if name == "cachecraft" and rng.random() < 0.03 else None
    error = [float(2.2 * kl15**0.5 * (0.2 + 0.8 * (1 - np.exp(-layer / 8))) * hard**0.2) for layer in range(LAYERS)]
    return Score(
        *where, name, own or f"{ratio:g}", rows, 8, share * rows * LAYERS, rows * LAYERS, ttft, full_s,
        stages or {}, 0.4 if name == "fusionrag" else 0.0, kl * 0.8, kl, float(np.exp(-kl)), bool(kl < 0.05), SECRET,
        {"f1": f1, "em": float(f1 > 0.8), "rouge_l": f1 * 0.95}, None if own == "1" else tuple(error), rows * 23040,
        round(rows * (ratio or 0)), fell,
    )  # fmt: skip


def make_summary(scores, systems=SYSTEMS, complete=True):
    """What the runner makes of scores, in short: means, medians, and intervals from the standard error."""
    found: dict[str, dict[str, list[Score]]] = {}
    for s in scores:
        found.setdefault(s.system, {}).setdefault(s.setting, []).append(s)
    sets = dict.fromkeys(s.data for s in scores)
    groups = {data: [s for s in scores if s.data == data] for data in sets}
    first = {
        data: [s for s in its if s.system == its[0].system and s.setting == its[0].setting]
        for data, its in groups.items()
    }
    return {
        "model": "smollm2",
        "dtype": "bfloat16",
        "machine": {"python": "3.11", "cpu": "AMD EPYC", "cores": 2, "threads": 1, "gpu": None, "commit": "0123abc"},
        "complete": complete,
        "data": [
            {"name": data, "task": its[0].task, "n": len(its), "rows_mean": fmean(s.rows for s in its)}
            for data, its in first.items()
        ],
        "systems": {name: {key: _entry(its, systems) for key, its in by.items()} for name, by in found.items()},
        "by_data": {} if len(sets) == 1 and len(scores) == 1 else {
            data: make_summary_systems(its, systems) for data, its in groups.items()
        },
    }  # fmt: skip


def make_summary_systems(scores, systems):
    found: dict[str, dict[str, list[Score]]] = {}
    for s in scores:
        found.setdefault(s.system, {}).setdefault(s.setting, []).append(s)
    return {name: {key: _entry(its, systems) for key, its in by.items()} for name, by in found.items()}


def _entry(scores, systems):
    def known(read):
        return [value for value in map(read, scores) if value is not None]

    def mean(read):
        return fmean(known(read)) if known(read) else None

    reads = {
        "kl_mean": lambda s: s.kl, "kl_first_mean": lambda s: s.kl_first, "top1": lambda s: s.top1,
        "same_answer": lambda s: s.same_answer, "em": lambda s: s.metrics.get("em"),
        "f1": lambda s: s.metrics.get("f1"),
        "rouge_l": lambda s: s.metrics.get("rouge_l"), "headline": lambda s: next(iter(s.metrics.values()), None),
    }  # fmt: skip
    figures = {key: mean(read) for key, read in reads.items()}
    figures["kl_median"] = median(known(lambda s: s.kl)) if known(lambda s: s.kl) else None
    figures["speedup_median"] = median(known(lambda s: s.speedup)) if known(lambda s: s.speedup) else None
    reads |= {"kl_median": reads["kl_mean"], "speedup_median": lambda s: s.speedup}
    wide = {key: 1.96 * np.std(known(read)) / len(scores) ** 0.5 for key, read in reads.items() if known(read)}
    timed = known(lambda s: s.ttft_s)
    errors = known(lambda s: s.kv_error)
    stages = {stage: median(s.seconds[stage] for s in scores) for stage in scores[0].seconds}
    return {
        "title": systems[scores[0].system][0], "n": len(scores), "timed": bool(timed), **figures,
        "charged_mean": mean(lambda s: s.charged),
        "charged_share_mean": mean(lambda s: s.charged and s.charged / s.full_charged),
        "kl_first_median": figures["kl_first_mean"], "label": None, "held": None,
        "ttft_s_median": median(timed) if timed else None, "speedup_mean": figures["speedup_median"], "seconds": stages,
        "offline_s_mean": mean(lambda s: s.offline_s), "kv_error": np.mean(errors, axis=0).tolist() if errors else None,
        "recovery": None, "fallbacks": sum(s.fallback is not None for s in scores),
        "ci": {key: [max(0.0, figures[key] - by), figures[key] + by] for key, by in wide.items()},
    }  # fmt: skip


def write_run(folder, scores, summary=None, systems=SYSTEMS):
    folder.mkdir(parents=True, exist_ok=True)
    summary = summary or make_summary(scores, systems)
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    (folder / "run.json").write_text(json.dumps({**summary, "options": {"seed": 0, "limit": 24}}), encoding="utf-8")
    (folder / "scores.jsonl").write_text("".join(json.dumps(s.as_dict()) + "\n" for s in scores), encoding="utf-8")
    return folder


def few(names, **options):
    """A small run of some systems."""
    return make_scores({name: SYSTEMS[name] for name in names}, **{"sets": {"squad_en": "squad"}, "n": 8, **options})
