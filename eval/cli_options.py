"""Options that several commands share, and how their text becomes values. Knows no command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "DtypeOption",
    "JsonOption",
    "LimitOption",
    "ModelOption",
    "OverlapOption",
    "PassagesOption",
    "RatioOption",
    "SeedOption",
    "SizeOption",
    "ThreadsOption",
    "dtype_of",
    "names_of",
    "ratios_of",
    "set_threads",
    "write",
]

ModelOption = Annotated[str, typer.Option(help="Hub id, folder, .gguf file, or the alias smollm2.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads for torch; as many as idle cores if not given.")]
DtypeOption = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; the model's own if not given.")]
LimitOption = Annotated[int | None, typer.Option(help="Only the first questions.")]
PassagesOption = Annotated[int, typer.Option(help="Passages per question.")]
SeedOption = Annotated[int, typer.Option(help="Of the order of the passages.")]
SizeOption = Annotated[int, typer.Option(help="Tokens of a passage, at most.")]
OverlapOption = Annotated[int, typer.Option(help="Tokens that neighbouring passages share.")]
RatioOption = Annotated[float, typer.Option(help="Share of reused rows computed again, 0 to 1.")]


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Writes figures to a file, if one was named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def set_threads(threads: int | None) -> None:
    """Holds torch to so many threads.

    Raises:
        BudgetError: less than one.
    """
    import torch  # loaded once a command needs it

    from blend.errors import BudgetError
    from eval.machine import idle_cores

    if threads is not None and threads < 1:
        raise BudgetError(f"threads is {threads}: it must be 1 or more")
    torch.set_num_threads(threads or idle_cores())


def ratios_of(text: str) -> tuple[float, ...]:
    """``0,0.15`` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        from blend.errors import BudgetError

        raise BudgetError(f"ratios is {text!r}: give numbers with commas between, such as 0,0.15,1") from error


def dtype_of(name: str | None) -> Any:
    """``bf16`` and its like as a torch dtype; None where nothing was given."""
    import torch

    from blend.errors import BudgetError

    known = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}
    if name not in known:
        raise BudgetError(f"dtype is {name!r}: choose bf16, fp16 or fp32")
    return known[name]


def names_of(text: str | None) -> tuple[str, ...] | None:
    """``a,b`` as names; None where nothing was given."""
    return tuple(part.strip() for part in text.split(",")) if text is not None else None
