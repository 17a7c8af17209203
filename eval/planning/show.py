"""What ``kvblend plan`` prints: the figures, and every formula with its numbers put in. Computes nothing of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from blend.hf.shape import ModelShape
from eval.planning.plan import DEFAULT, Plan, PlanOptions
from eval.rag.flops import METHODS

__all__ = ["formulas", "notes", "tables"]


def tables(plan: Plan) -> Iterator[Table]:
    """What it takes, and what it gains."""
    shape, options, ask = plan.shape, plan.options, plan.options.ask
    title = (
        f"{shape.name} ({shape.family}, {_name(shape)}, {shape.params / 1e6:,.0f} M parameters): "
        f"{options.documents:,} documents of {options.tokens:,} tokens"
    )
    takes = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    takes.add_row("passages", f"{options.passages:,} of at most {options.size:,} tokens")
    takes.add_row("KV of a token", _bytes(shape.row_bytes))
    takes.add_row("disk", f"{_bytes(plan.kv_bytes)} for the KV of all passages{_kept(options)}")
    takes.add_row("memory", f"{_bytes(plan.memory)}: the weights, and one prompt's KV twice")
    takes.add_row("a question", f"{ask.rows:,} rows: {ask.k} passages, the system part, the question")
    seconds = _time(options.passages * plan.encode_flops / plan.rate.flops)
    takes.add_row("encoding", f"{seconds} for all, once{_encoded(options)}")
    takes.add_row("break-even", _break_even(plan))
    takes.add_row("reading", f"pays if the store reads more than {_rate(plan.read_rate)}")
    yield takes
    gains = Table(title="expected time to the first token", box=SIMPLE_HEAD, pad_edge=False)
    gains.add_column("")
    for name in ("operations", "TTFT gain", "counting rows alone", f"at {plan.rate.flops / 1e12:.3g} TFLOP/s"):
        gains.add_column(name, justify="right")
    gains.add_row("full prefill", _si(plan.full_flops), "1.00x", "1.00x", _time(plan.full_flops / plan.rate.flops))
    for method, title in METHODS.items():
        gain = plan.gains[method]
        seconds = _time(gain.flops / plan.rate.flops)
        title += " and the default" if method == DEFAULT else ""
        gains.add_row(title, _si(gain.flops), f"{gain.gain:.2f}x", f"{gain.by_rows:.2f}x", seconds)
    yield gains


def formulas(plan: Plan) -> Table:
    """Each formula, in words and in numbers."""
    out = Table.grid(padding=(0, 2))
    for name, words, numbers in (*_sizes(plan), *_operations(plan), *_worth(plan)):
        out.add_row(Text(name, style="bold"), Text(f"= {words}\n= {numbers}"))
    return out


def notes(plan: Plan) -> Text:
    """What the figures are not."""
    lines = [
        "This is arithmetic on the config, not a measurement: memory traffic, norms, look-up and moving keys cost too. "
        "`kvblend bench ttft` measures, and `kvblend check` proves whether the model can be fused.",
        f"Operations per second: {plan.rate.flops / 1e12:.3g} T, {plan.rate.source}; a forward pass reaches less.",
        "Codecs make the stored KV smaller (`kvblend bench codecs`); headers add some kilobytes per entry.",
    ]
    context = plan.shape.context
    if context is not None and plan.options.ask.rows > context:
        lines.append(
            f"The prompt of {plan.options.ask.rows:,} rows is longer than the model's context of {context:,}: "
            "ask with fewer or smaller passages (--k, --size)."
        )
    return Text("\n".join(lines), style="dim")


# --- formulas ---------------------------------------------------------------------------------------------------------


def _sizes(plan: Plan) -> Iterator[tuple[str, str, str]]:
    shape, options = plan.shape, plan.options
    size, each, overlap = shape.dtype.itemsize, options.passages_each, options.overlap
    kinds = Counter((layer.keys, layer.values) for layer in shape.layers if layer.numbers)
    sums = " + ".join(f"{count} × ({kh} × {kd} + {vh} × {vd})" for ((kh, kd), (vh, vd)), count in kinds.items())
    yield (
        "KV of a token",
        "layers × (key heads × size + value heads × size) × bytes of a number",
        f"({sums}) × {size} B = {shape.row_bytes:,} B",
    )
    yield (
        "passages",
        "documents × ⌈(tokens − overlap) / (size − overlap)⌉",
        f"{options.documents:,} × ⌈({options.tokens:,} − {overlap}) / ({options.size} − {overlap})⌉ "
        f"= {options.passages:,}",
    )
    third = ", and behind itself" if options.rereads else ""
    kept = f"entries (alone, and the mean{third}; a question reads one) × " if options.contexts else ""
    entries = f"{options.entries} × " if options.contexts else ""
    yield (
        "disk",
        f"{kept}documents × (tokens + (passages of one − 1) × overlap) × KV of a token",
        f"{entries}{options.documents:,} × ({options.tokens:,} + {each - 1} × {overlap}) × {shape.row_bytes:,} B "
        f"= {_bytes(plan.kv_bytes)}",
    )
    yield (
        "memory",
        "parameters × bytes of a number + 2 × rows of a prompt × KV of a token",
        f"{_si(shape.params)} × {size} B + 2 × {options.ask.rows:,} × {shape.row_bytes:,} B = {_bytes(plan.memory)}",
    )


def _operations(plan: Plan) -> Iterator[tuple[str, str, str]]:
    shape, ask = plan.shape, plan.options.ask
    yield (
        "a row",
        "Σ layers: matrix products of one row, its attention apart (2 operations per weight used)",
        f"{_per_layer(shape)} = {_si(shape.row_flops)}",
    )
    yield (
        "full prefill",
        "rows × a row + Σ layers: pairs of rows, one seeing the other × operations of a pair + the last row's logits",
        f"{ask.rows:,} × {_si(shape.row_flops)} + {_pairs(plan)} + {_si(shape.last_flops)} = {_si(plan.full_flops)}",
    )
    stale, chosen = ask.stale.rows, ask.ratio * ask.stale.rows
    yield (
        "rows computed again",
        "ratio × rows of all passages but the first, which stands where it was encoded",
        f"{ask.ratio:g} × {stale:,.0f} = {chosen:,.0f}, and {ask.question} of the question",
    )
    rows, last = f"{chosen + ask.question:,.0f} rows", len(shape.layers)
    cost = {name: _si(gain.flops) for name, gain in plan.gains.items()}
    tail = f"{rows} through {last - 1} layers + their K/V and the last row in layer {last}"
    yield "EPIC", "chosen rows and question, in the last layer only what the logits need", f"{tail} = {cost['epic']}"
    yield (
        "CacheBlend",
        "rows not exact through the first layer and to the K/V of the second, then as EPIC",
        f"{ask.up_to_check[0].rows:,.0f} rows there, {rows} beyond = {cost['cacheblend']}",
    )
    yield (
        "ProphetKV",
        "the question alone through all layers, then as EPIC; the default chooses other rows, as many",
        f"{ask.question} rows through {last} layers + as EPIC = {cost['prophetkv']}",
    )
    yield (
        "TTFT gain",
        "full prefill / the default, which takes what ProphetKV takes",
        f"{_si(plan.full_flops)} / {cost[DEFAULT]} = {plan.gains[DEFAULT].gain:.2f}",
    )


def _worth(plan: Plan) -> Iterator[tuple[str, str, str]]:
    options, ask, row_bytes = plan.options, plan.options.ask, plan.shape.row_bytes
    saved, encode = plan.saved_flops, plan.encode_flops
    words, numbers = "a prefill of its rows behind the system part", f"{ask.passage} rows behind {ask.system}"
    if options.contexts:
        words += " + contexts × one behind a context too (whose own KV, computed once for all, is left out)"
        behind = ask.system + options.context_rows
        numbers = f"({numbers}) + {options.contexts} × ({ask.passage} rows behind {behind})"
    if options.rereads:
        words += " + one of the passage twice"
        numbers += f" + ({2 * ask.passage} rows behind {ask.system})"
    yield "encoding a passage", words, f"{numbers} = {_si(encode)}"
    yield (
        "break-even",
        "encoding a passage / (saved per question / k), in questions that find the passage",
        f"{_si(encode)} / ({_si(saved)} / {ask.k}) = {plan.asks_per_passage:.2f}",
    )
    if options.asks_per_day:
        yield (
            "days",
            "passages × break-even / k / questions a day, if all passages are found alike",
            f"{options.passages:,} × {plan.asks_per_passage:.2f} / {ask.k} / {options.asks_per_day:g} "
            f"= {plan.asks / options.asks_per_day:,.1f}",
        )
    yield (
        "reading pays above",
        "k × rows of a passage × KV of a token / (saved per question / operations per second)",
        f"{ask.k} × {ask.passage} × {row_bytes:,} B / ({_si(saved)} / {_si(plan.rate.flops)}/s) "
        f"= {_rate(plan.read_rate)}",
    )


def _per_layer(shape: ModelShape) -> str:
    kinds = Counter(layer.row_flops + layer.key_flops for layer in shape.layers if not layer.alone)
    parts = [f"{count} × {_si(flops)}" for flops, count in kinds.items()]
    return " + ".join([*parts, *([_si(shape.rest_flops)] if shape.rest_flops else [])])


def _pairs(plan: Plan) -> str:
    rows = plan.options.ask.rows
    kinds = Counter((x.seen(rows - 1 if x.alone else 0, rows), x.pair_flops) for x in plan.shape.layers)
    return " + ".join(f"{count} × {_si(pairs)} × {_si(flops)}" for (pairs, flops), count in kinds.items())


def _kept(options: PlanOptions) -> str:
    return f", kept alone and as the mean over {_contexts(options)}{_again(options)}" if options.contexts else ""


def _encoded(options: PlanOptions) -> str:
    return f", each alone and behind {_contexts(options)}{_again(options)}" if options.contexts else ""


def _again(options: PlanOptions) -> str:
    return ", and behind itself, since neighbours share so much" if options.rereads else ""


def _contexts(options: PlanOptions) -> str:
    count = options.contexts
    return f"{count:,} context{'s' if count > 1 else ''} of {options.context_rows:,} rows"


def _break_even(plan: Plan) -> str:
    if math.isinf(plan.asks_per_passage):
        return "never: fusing such a prompt costs more than computing it"
    times = math.ceil(plan.asks_per_passage)
    days = f", {plan.asks / plan.options.asks_per_day:,.1f} days" if plan.options.asks_per_day else ""
    return f"when a passage is found {_times(times)}; {math.ceil(plan.asks):,} questions for all{days}"


# --- units ------------------------------------------------------------------------------------------------------------


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _name(shape: ModelShape) -> str:
    return str(shape.dtype).removeprefix("torch.")


def _si(value: float) -> str:
    if value < 0:
        return f"−{_si(-value)}"
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:,.0f} {unit}"
    return f"{value:.3g}"


def _bytes(value: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:,.2f} {unit}"
    return f"{value:,.0f} B"


def _rate(value: float) -> str:
    return "no rate at all" if math.isinf(value) else f"{_bytes(value)}/s"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:,.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
