"""A model with the systems under test: measures one example after another. The same here and on a cluster.

For each example full prefill runs first: its logits and its own greedy answer are what every system is held against,
its seconds what their speed is. Then the systems run one behind the other, each example beginning with another one, so
that a machine that slows down slows all of them. ``full`` among the systems is a second full prefill: how far its
speed-up is from 1 is the noise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch

from blend import Blender, PromptTooLong
from blend.admission import admit
from eval.fidelity import Fidelity, Reference, judge, kl_divergence, known_answer, make_reference
from eval.kv_error import kv_error
from eval.machine import machine_record
from eval.metrics import METRICS
from eval.runner.jobs import Job, make_prompt
from eval.systems import Case, Corpus, Outcome, System, make_systems
from eval.systems.corpus import EmbeddedCorpus
from eval.systems.exact import full_prefill
from eval.vocabulary import Score

__all__ = ["Lab"]


class Lab:
    """Everything that measuring takes, in one process.

    Args:
        model: hub id, folder, file or alias.
        passages: of each set, for offline stages.
        dtype: of weights and KV; None for the model's own.
        store: for chunk KV; memory if None.
        blender: in place of loading a model; it is left open. Its chunk KV is plain: that is what published systems
            work on, and those that average keep theirs beside it.
    """

    def __init__(
        self,
        model: str,
        passages: Mapping[str, tuple[str, ...]],
        *,
        dtype: torch.dtype | None = None,
        store: str | None = None,
        blender: Blender | None = None,
    ) -> None:
        self._owns = blender is None
        self.blender = blender or Blender.from_pretrained(model, dtype=dtype, store=store, background=None)
        if self.blender.setup.background:
            self.blender = self.blender.averaged(None)
        self._passages = passages
        self._systems: dict[tuple[str, float], System] = {}
        self._embedder: Any = None
        self._corpus = lru_cache(maxsize=None)(self._make_corpus)
        self._warm = False

    def record(self) -> dict[str, Any]:
        """Model, dtype and machine, for ``run.json``."""
        dtype = self.blender.view.dtype
        return {"dtype": str(dtype).removeprefix("torch."), "machine": machine_record(dtype)}

    def admit(self, job: Job) -> None:
        """Raises ``PromptTooLong`` or ``PromptError`` for an example that cannot run."""
        assert self.blender.text is not None
        view, prompt = self.blender.view, make_prompt(self.blender.text, job.task, job.example)
        rows = len(prompt) + job.task.tokens
        if view.context is not None and rows > view.context:
            raise PromptTooLong(
                f"example {job.example.id!r} of {job.data} has {len(prompt)} tokens and may be answered with "
                f"{job.task.tokens}, and the model holds {view.context}: give fewer passages (--k)"
            )
        admit(view, self.blender.tokenizer, prompt)

    def measure(self, job: Job) -> list[Score]:
        """What is still to be done of one example."""
        if not self._warm:
            self._warm = True
            self._warm_up(job)
        return self._measure(job)

    def close(self) -> None:
        """Lets the model go."""
        if self._owns:
            self.blender.close()

    def _measure(self, job: Job) -> list[Score]:
        assert self.blender.text is not None
        prompt = make_prompt(self.blender.text, job.task, job.example)
        if prompt.chunks:
            self.blender.encode(prompt.chunks, system=prompt.system)
        truth = full_prefill(self.blender, prompt)
        reference = make_reference(self.blender, truth, job.task.tokens)
        case = Case(prompt, truth, self._corpus(job.data))
        offline = self._prepare(job, case)
        by = crc32(job.example.id.encode()) % len(job.todo)
        scores = []
        for name, ratio, _ in (*job.todo[by:], *job.todo[:by]):
            system = self._system(name, ratio)
            outcome = system.run(self.blender, case)
            scores.append(self._score(job, system, outcome, reference, offline[name]))
        order = {(name, setting): place for place, (name, _, setting) in enumerate(job.todo)}
        return sorted(scores, key=lambda score: order[score.system, score.setting])

    def _prepare(self, job: Job, case: Case) -> dict[str, float]:
        """The offline stages; seconds by system. Ratios of one system share what is prepared."""
        seconds: dict[str, float] = {}
        for name, ratio, _ in job.todo:
            began = time.perf_counter()
            self._system(name, ratio).prepare(self.blender, case)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
        return seconds

    def _score(self, job: Job, system: System, outcome: Outcome, reference: Reference, offline: float) -> Score:
        judged = _judge(outcome, reference, job.task.tokens)
        truth, fusion = reference.fusion, outcome.fusion
        answer = str(self.blender.tokenizer.decode(judged.answer, skip_special_tokens=True)).strip()
        full_s = truth.report.ttft if outcome.own_full_s is None else outcome.own_full_s
        return Score(
            data=job.data,
            task=job.task.name,
            example=job.example.id,
            system=system.name,
            setting=system.setting,
            rows=len(truth.prompt),
            chunks=len(truth.prompt.chunks),
            charged=outcome.row_layers,
            full_charged=truth.report.row_layers,
            ttft_s=outcome.ttft if system.timed else None,
            full_ttft_s=full_s,
            seconds=dict(outcome.seconds) if system.timed else {},
            offline_s=offline,
            kl_first=judged.kl_first,
            kl=judged.fidelity and judged.fidelity.kl,
            top1=judged.fidelity and judged.fidelity.top1,
            same_answer=None if judged.fidelity is None else judged.fidelity.agrees == len(reference.answer),
            answer=answer,
            metrics={name: METRICS[name](answer, job.example.answers) for name in job.task.metrics},
            kv_error=kv_error(fusion, truth) if fusion and system.in_place and not system.exact else None,
            kv_bytes=fusion.report.kv_bytes if fusion else None,
            recomputed=fusion.report.recomputed_rows if fusion else None,
            fallback=None if fusion is None or system.exact else fusion.report.fallback,
        )

    def _system(self, name: str, ratio: float) -> System:
        """One for the whole run: some keep what they have learnt offline."""
        if (name, ratio) not in self._systems:
            (self._systems[name, ratio],) = make_systems([name], ratio)
        return self._systems[name, ratio]

    def _make_corpus(self, data: str) -> Corpus:
        from retrieval import Embedder

        assert self.blender.text is not None
        self._embedder = self._embedder or _Late(Embedder)
        return EmbeddedCorpus([(self.blender.text.chunk(t), t) for t in self._passages[data]], self._embedder)

    def _warm_up(self, job: Job) -> None:
        """The first passes are slower than all that follow; these do not count."""
        contexts = job.example.contexts[:2]
        short = Job(job.data, job.task, replace(job.example, contexts=contexts), job.todo)
        self._measure(short)


@dataclass(frozen=True)
class _Judged:
    fidelity: Fidelity | None
    kl_first: float | None
    answer: tuple[int, ...]


def _judge(outcome: Outcome, reference: Reference, tokens: int) -> _Judged:
    forced_nV = outcome.forced(reference.answer)
    if outcome.logits is None or forced_nV is None:
        shown = outcome.logits
        first = None if shown is None else float(kl_divergence(reference.fusion.logits, shown))
        return _Judged(None, first, outcome.decode((), tokens))
    fidelity = judge(reference, outcome.logits, forced_nV)
    return _Judged(fidelity, fidelity.kl_first, outcome.decode(known_answer(reference, fidelity), tokens))


class _Late:
    """An embedder that is loaded by its first text: most runs need none."""

    def __init__(self, load: Any) -> None:
        self._load = lru_cache(maxsize=1)(load)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)
