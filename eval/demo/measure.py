"""One question under every system: time to the first token, distance from full prefill, answer.

Knows neither how the figures are summed up nor how they are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blend import Blender, Fusion
from eval.demo.cases import DemoCase
from eval.fidelity import Fidelity, Reference, compare, known_answer, make_reference
from eval.systems import Case, Outcome, System

__all__ = ["Measured", "Run", "measure"]


@dataclass(frozen=True)
class Run:
    """One question under one system.

    Attributes:
        ttft_s: seconds from token ids to the first token's logits.
        speedup: full prefill's seconds over these.
        kl_first: nats from full prefill's first token.
        kl: nats per token along full prefill's answer.
        same_first_token: as full prefill.
        same_answer: at every place of full prefill's answer both find the same token likeliest.
        answer: its own greedy answer; None where it was not asked for.
        row_layers: rows computed, times layers.
        ideal: row-layers of full prefill over these.
    """

    ttft_s: float
    speedup: float
    kl_first: float
    kl: float
    same_first_token: bool
    same_answer: bool
    answer: str | None
    row_layers: float
    ideal: float


@dataclass(frozen=True)
class Measured:
    """One question: its passages, the rows of its prompt, and a run per system name."""

    case: DemoCase
    rows: int
    runs: dict[str, Run]


def measure(
    blender: Blender, asked: DemoCase, systems: Sequence[System], tokens: int, answers: bool = True
) -> Measured:
    """Runs ``systems`` (``full`` among them) one behind the other in the order given, then judges them.

    Args:
        tokens: the longest answer.
        answers: decode the answer of each system too. Judging needs full prefill's alone, and decoding takes long.
    """
    prompt = asked.prompt(blender)
    case = Case(prompt)
    for system in systems:
        system.prepare(blender, case)
    outcomes = {system.name: system.run(blender, case) for system in systems}
    reference = make_reference(blender, _fusion(outcomes["full"]), tokens)
    runs = {}
    for name, outcome in outcomes.items():
        fusion = _fusion(outcome)
        fidelity = compare(reference, fusion)
        ids = outcome.decode(known_answer(reference, fidelity), tokens) if answers else None
        text = None if ids is None else blender.tokenizer.decode(ids, skip_special_tokens=True).strip()
        runs[name] = _run(reference, fusion, fidelity, text)
    return Measured(asked, len(prompt), runs)


def _run(reference: Reference, fusion: Fusion, fidelity: Fidelity, answer: str | None) -> Run:
    return Run(
        ttft_s=fusion.report.ttft,
        speedup=reference.fusion.report.ttft / fusion.report.ttft,
        kl_first=fidelity.kl_first,
        kl=fidelity.kl,
        same_first_token=fidelity.same_first_token,
        same_answer=fidelity.agrees == len(reference.answer),
        answer=answer,
        row_layers=fusion.report.row_layers,
        ideal=fusion.report.ideal_speedup,
    )


def _fusion(outcome: Outcome) -> Fusion:
    assert outcome.fusion is not None, "the demo's systems are all ours"
    return outcome.fusion
