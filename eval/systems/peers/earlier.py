"""What the peers have seen before a prompt: the same passages in another order. Knows nothing of the peers."""

from __future__ import annotations

import importlib
import random
from typing import Any

from blend import Prompt
from retrieval.errors import ExtraMissing

__all__ = ["earlier_order", "require"]


def earlier_order(prompt: Prompt) -> tuple[int, ...]:
    """Ids of the system part and the passages in another order, as an earlier question may have found them.

    Shuffled, and the same for the same prompt. With fewer than two different passages there is no other order.
    """
    order = list(range(len(prompt.chunks)))
    draw = random.Random(repr(prompt.ids))
    while len(set(prompt.chunks)) > 1 and all(prompt.chunks[i] == c for i, c in zip(order, prompt.chunks, strict=True)):
        draw.shuffle(order)
    return (*prompt.system, *(i for place in order for i in prompt.chunks[place].ids))


def require(package: str, install: str) -> Any:
    """Imports a peer's package.

    Raises:
        ExtraMissing: it is not installed; the message says how to.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ExtraMissing(f"the system {install.split()[-1]} needs a package: {install} ({error})") from error
