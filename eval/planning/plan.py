"""``kvblend plan``: what a model would take and gain on so many documents, by arithmetic on its config alone.

Every number is a formula of :class:`blend.hf.shape.ModelShape`, and :mod:`eval.planning.show` prints them with their
numbers put in. Nothing is measured but, if no rate is given, one matrix product of this machine.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from rich.console import Console

from blend.errors import BudgetError
from blend.hf.shape import ModelShape, read_shape
from blend.readings import SHARE
from eval.rag.flops import METHODS, Ask, alike, fused_flops

__all__ = ["DEFAULT", "Gain", "Plan", "PlanOptions", "Rate", "make_plan", "matmul_rate", "run_plan"]

DEFAULT = "prophetkv"
"""The method that break-even goes by. A Blender's default takes the same operations: a probe of the question, then the
chosen rows, and which rows are chosen does not change how many operations they take."""


@dataclass(frozen=True)
class PlanOptions:
    """What is planned for.

    Attributes:
        model: name of the model.
        documents: how many.
        tokens: of each document.
        k: passages per question.
        ratio: share of the stale rows computed again.
        size: tokens of a passage, at most.
        overlap: tokens that neighbours share.
        system: rows of the system part, which passages are encoded behind.
        question: rows of the question.
        contexts: that each passage is encoded behind, once each, for the mean that is stored beside its KV alone; 0
            for passages that are encoded alone.
        context_rows: of each context; counted whole, also where a small model would cut them.
        dtype: of weights and KV; None for the checkpoint's own.
        tflops: 10**12 operations per second; None measures a matrix product here.
        asks_per_day: for break-even in days.

    Raises:
        BudgetError: out of range.
    """

    model: str
    documents: int
    tokens: int
    k: int = 6
    ratio: float = 0.15
    size: int = 256
    overlap: int = 32
    system: int = 32
    question: int = 32
    contexts: int = 4
    context_rows: int = 400
    dtype: torch.dtype | None = None
    tflops: float | None = None
    asks_per_day: float | None = None

    def __post_init__(self) -> None:
        for name in ("documents", "tokens", "k", "size", "question", "context_rows"):
            if getattr(self, name) < 1:
                raise BudgetError(f"{name.replace('_', '-')} is {getattr(self, name)}: it must be 1 or more")
        if self.system < 0:
            raise BudgetError(f"system is {self.system} rows: it must be 0 or more")
        if self.contexts < 0:
            raise BudgetError(f"contexts is {self.contexts}: it must be 0 or more; 0 encodes passages alone")
        if not 0 <= self.overlap < self.size:
            raise BudgetError(f"overlap is {self.overlap}: it must be 0 or more, and less than the size {self.size}")
        if not 0.0 <= self.ratio <= 1.0:
            raise BudgetError(f"ratio is {self.ratio}: it must lie in [0, 1], the share of reused rows computed again")
        for name in ("tflops", "asks_per_day"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise BudgetError(f"{name.replace('_', '-')} is {value}: it must be more than 0")

    @property
    def passages_each(self) -> int:
        """Passages of a document."""
        return max(1, math.ceil((self.tokens - self.overlap) / (self.size - self.overlap)))

    @property
    def passages(self) -> int:
        """Passages of all documents."""
        return self.documents * self.passages_each

    @property
    def rows(self) -> int:
        """Rows of all passages: the tokens, those in an overlap twice."""
        return self.documents * (self.tokens + (self.passages_each - 1) * self.overlap)

    @property
    def rereads(self) -> bool:
        """Whether passages share so much with their neighbours that they are read behind themselves too."""
        return self.contexts > 0 and self.passages_each > 2 and 2 * self.overlap >= SHARE * self.size

    @property
    def entries(self) -> int:
        """What is stored of a passage: its KV alone and, with contexts, the mean over them, and perhaps a third.

        A question reads one, or two where an earlier passage of the prompt has said some of its text.
        """
        return 2 + self.rereads if self.contexts else 1

    @property
    def ask(self) -> Ask:
        """The prompt of a question."""
        return Ask(self.system, min(self.size, self.tokens), min(self.k, self.passages), self.question, self.ratio)


class Gain(NamedTuple):
    """One method: its operations, those of a full prefill over them, and the same if every row cost alike."""

    flops: float
    gain: float
    by_rows: float


class Rate(NamedTuple):
    """Operations per second, and where the number comes from."""

    flops: float
    source: str


@dataclass(frozen=True)
class Plan:
    """The figures.

    Attributes:
        options: what was planned for.
        shape: of the model.
        rate: of the machine.
        full_flops: operations of a full prefill of the prompt.
        encode_flops: operations of encoding a passage, alone, behind each context and perhaps behind itself. The
            contexts' own KV is left out: it is computed once for all passages.
        gains: per method.
    """

    options: PlanOptions
    shape: ModelShape
    rate: Rate
    full_flops: float
    encode_flops: float
    gains: dict[str, Gain]

    @property
    def kv_bytes(self) -> int:
        """KV of all passages, as computed, in all of their entries."""
        return self.options.entries * self.options.rows * self.shape.row_bytes

    @property
    def prompt_bytes(self) -> int:
        """KV of one prompt."""
        return self.options.ask.rows * self.shape.row_bytes

    @property
    def memory(self) -> int:
        """Weights, and a prompt's KV twice: as it was stored, and moved."""
        return self.shape.weight_bytes + 2 * self.prompt_bytes

    @property
    def saved_flops(self) -> float:
        """Operations that the default method saves per question; less than 0 where it costs more."""
        return self.full_flops - self.gains[DEFAULT].flops

    @property
    def asks_per_passage(self) -> float:
        """Questions that must find a passage before encoding it has paid for itself; infinite if none ever does."""
        saved = self.saved_flops / self.options.ask.k
        return self.encode_flops / saved if saved > 0 else math.inf

    @property
    def asks(self) -> float:
        """Questions that pay for encoding all passages."""
        return self.options.passages * self.asks_per_passage / self.options.ask.k

    @property
    def read_rate(self) -> float:
        """Bytes per second above which reading a prompt's passages takes less time than using them saves."""
        ask = self.options.ask
        seconds = self.saved_flops / self.rate.flops
        return ask.k * ask.passage * self.shape.row_bytes / seconds if seconds > 0 else math.inf

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what would be infinite is None."""
        ask, options = self.options.ask, self.options
        plain = {**vars(options), "dtype": str(self.shape.dtype).removeprefix("torch."), "family": self.shape.family}
        full_s = self.full_flops / self.rate.flops
        return {
            **plain,
            "params": self.shape.params,
            "context": self.shape.context,
            "bytes_per_row": self.shape.row_bytes,
            "passages": options.passages,
            "rows": options.rows,
            "disk_bytes": self.kv_bytes,
            "memory_bytes": self.memory,
            "prompt_rows": ask.rows,
            "prompt_bytes": self.prompt_bytes,
            "flops_per_row": self.shape.row_flops,
            "full_flops": self.full_flops,
            "encode_flops": self.encode_flops,
            "rate": self.rate._asdict(),
            "full_s": full_s,
            "encode_all_s": options.passages * self.encode_flops / self.rate.flops,
            "methods": {name: {**gain._asdict(), "ttft_s": full_s / gain.gain} for name, gain in self.gains.items()},
            "asks_per_passage": _finite(self.asks_per_passage),
            "asks_for_all": _finite(self.asks),
            "days": _finite(self.asks / options.asks_per_day) if options.asks_per_day else None,
            "read_bytes_per_s": _finite(self.read_rate),
        }


def run_plan(options: PlanOptions, console: Console) -> dict[str, Any]:
    """Plans, prints the tables and the formulas, and returns the figures as plain data.

    Raises:
        ModelNotFound, UnsupportedModel, UnsupportedRotation: as :func:`blend.hf.shape.read_shape`.
    """
    from eval.planning.show import formulas, notes, tables

    shape = read_shape(options.model, options.dtype)
    given = options.tflops
    rate = matmul_rate(shape.dtype) if given is None else Rate(given * 1e12, "as given")
    plan = make_plan(shape, options, rate)
    for part in (*tables(plan), formulas(plan), notes(plan)):
        console.print(part, highlight=False)
    return plan.as_dict()


def make_plan(shape: ModelShape, options: PlanOptions, rate: Rate) -> Plan:
    """The figures for a model, a workload and a machine."""
    ask = options.ask
    full = shape.prefill_flops(ask.rows)
    encode = shape.prefill_flops(ask.passage, behind=ask.system)
    encode += options.contexts * shape.prefill_flops(ask.passage, behind=ask.system + options.context_rows)
    if options.rereads:
        encode += shape.prefill_flops(2 * ask.passage, behind=ask.system)
    rows_only = alike(shape)
    gains = {}
    for method in METHODS:
        flops = fused_flops(shape, ask, method)
        by_rows = rows_only.prefill_flops(ask.rows) / fused_flops(rows_only, ask, method)
        gains[method] = Gain(flops, full / flops, by_rows)
    return Plan(options, shape, rate, full, encode, gains)


def matmul_rate(dtype: torch.dtype, size: int = 1024, runs: int = 8) -> Rate:
    """Operations per second of this machine: the quickest of some square matrix products."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a = torch.ones(size, size, dtype=dtype, device=device)
    float((a @ a)[0, 0])  # warm-up; reading a number waits for the device
    best = math.inf
    for _ in range(runs):
        began = time.perf_counter()
        float((a @ a)[0, 0])
        best = min(best, time.perf_counter() - began)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} thread(s)"
    name = str(dtype).removeprefix("torch.")
    return Rate(2 * size**3 / best, f"measured here: a {name} matrix product of {size} x {size} on {where}")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
