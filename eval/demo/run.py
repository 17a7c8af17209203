"""``kvblend demo``: seven ways to the first token of the same questions, side by side.

The passages of each question come from dense retrieval, in shuffled order. All passages are encoded beforehand, alone
and averaged. Then every system answers every question, one system behind the other, each question starting with
another one, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from blend import Blender, BudgetError
from blend.hf.progress import library_bars, spinner
from blend.progress import track
from eval.demo import Passage, load_passages, load_questions
from eval.demo.cases import DemoCase, make_cases
from eval.demo.measure import Measured, measure
from eval.demo.result import DemoOptions, DemoResult, EncodeCost
from eval.demo.show import answers, encode_line, table, verdict
from eval.machine import machine_record
from eval.systems import DEMO, System, make_systems
from retrieval import DenseIndex, Embedder

__all__ = ["DemoOptions", "DemoResult", "demo_cases", "run_demo"]


def run_demo(options: DemoOptions, console: Console, blender: Blender | None = None) -> DemoResult:
    """Runs the demo, prints what it finds, and returns the figures.

    Ctrl-C ends it early: the questions finished by then are shown and returned, with ``complete`` False.

    Args:
        blender: in place of loading ``options.model``; it is left open.

    Raises:
        BudgetError: options out of range.
        EmbedderMissing: the packaged embedder is not installed.
        ModelNotFound, UnsupportedModel: the model.
    """
    started = time.perf_counter()
    result = DemoResult(options, make_systems(DEMO, options.ratio))
    own = blender is None
    try:
        cases = demo_cases(options.k, options.seed, options.limit)
        blender = blender or Blender.from_pretrained(options.model)
        plain = blender.averaged(None)  # what published methods work on
        result.machine = machine_record(blender.view.dtype)
        result.encoded = _encode(plain, load_passages())
        console.print(encode_line(result.encoded))
        for measured in track(_measured(plain, cases, result), total=len(cases), label="answering"):
            result.questions.append(measured)
        result.complete = True
    except KeyboardInterrupt:
        console.print(f"[yellow]interrupted[/] after {len(result.questions)} finished question(s)")
    finally:
        if own and blender is not None:
            blender.close()
    result.seconds = time.perf_counter() - started
    _show(result, console)
    return result


def demo_cases(k: int, seed: int, limit: int | None = None) -> list[DemoCase]:
    """The demo's questions with their passages.

    Args:
        k: passages per question.
        seed: of their order.
        limit: only the first questions.

    Raises:
        BudgetError: ``k`` out of range.
        EmbedderMissing: the packaged embedder is not installed.
    """
    passages, questions = load_passages(), load_questions()[:limit]
    if k > len(passages):
        raise BudgetError(f"k is {k}: the demo has {len(passages)} passages")
    with library_bars(False), spinner(True) as tell:
        tell("loading the embedder")
        index = DenseIndex(Embedder())
        index.add([passage.text for passage in passages])
    cases = make_cases(index, passages, questions, k=k, seed=seed)
    return list(track(cases, total=len(questions), label="finding passages"))


def _encode(blender: Blender, passages: tuple[Passage, ...]) -> EncodeCost:
    """Encodes every passage, before anything is asked."""
    started = time.perf_counter()
    chunks = [blender.chunk(passage.text, passage.title) for passage in passages]
    done = blender.encode(chunks, progress=True)
    means = blender.averaged(()).encode(chunks, progress=True)
    rows, nbytes = done.rows + means.rows, done.nbytes + means.nbytes
    return EncodeCost(len(passages), rows, nbytes, time.perf_counter() - started)


def _measured(blender: Blender, cases: list[DemoCase], result: DemoResult) -> Iterator[Measured]:
    """Every question, after a short one that does not count, under systems that have seen nothing yet."""
    options = result.options
    warm_up = replace(cases[0], passages=cases[0].passages[:2])
    measure(blender, warm_up, make_systems(DEMO, options.ratio), tokens=1, answers=False)
    for number, case in enumerate(cases):
        yield measure(blender, case, _rotated(result.systems, number), options.tokens, answers=number < options.samples)


def _rotated(systems: tuple[System, ...], by: int) -> tuple[System, ...]:
    first = by % len(systems)
    return systems[first:] + systems[:first]


def _show(result: DemoResult, console: Console) -> None:
    if not result.questions:
        console.print("no question was finished: nothing to show")
        return
    if result.options.samples:
        console.print(answers(result))
    console.print(table(result))
    console.print(verdict(result), highlight=False)
    console.print(f"{result.seconds:.0f} s in all")
