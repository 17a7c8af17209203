"""One request on its way: what was asked, what it wants of each chunk, and what is known so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from blend.account import Decode
from blend.chunk import Chunk
from blend.clock import Clock
from blend.correctors import Corrector
from blend.fusion import Fusion
from blend.prefix import PrefixHit
from blend.prompt import Prompt
from blend.readings import Run, Wanted
from blend.selectors import Selector
from blend.setup import Found, Setup

__all__ = ["Request"]


@dataclass
class Request:
    """One request on its way: what was asked, and what is known so far."""

    setup: Setup
    prompt: Prompt
    selector: Selector
    past: Fusion | None
    decode: Decode | None
    clock: Clock
    corrector: Corrector | None = None
    unusable: dict[Wanted, str] = field(default_factory=dict)  # what is stored and not to be read, and why
    prefix: PrefixHit | None = None
    found: dict[Wanted, Found] = field(default_factory=dict)
    wanted: tuple[Wanted, ...] = ()

    @property
    def covered(self) -> tuple[int, int]:
        """Rows of the longest exact prefix, and of the earlier fused context."""
        context = _common(self.prompt.ids, self.past.prompt.ids) if self.past else 0
        return self.prefix.rows if self.prefix else 0, context

    @property
    def missing(self) -> list[Wanted]:
        """What is wanted and not there."""
        return [want for want in self.wanted if want not in self.found]

    @property
    def missing_chunks(self) -> list[Chunk]:
        """Chunks of which something is missing."""
        return list(dict.fromkeys(want.chunk for want in self.missing))

    @property
    def reused_rows(self) -> int:
        """Rows of the distinct chunks that no prefix and no earlier context covers."""
        return sum(map(len, {want.chunk for want in self.wanted}))

    @cached_property
    def repeats(self) -> dict[int, tuple[Run, ...]]:
        """Rows whose text an earlier chunk has said already, by the index of their chunk."""
        return self.setup.repeats(self.prompt)

    def first_of(self, index: int) -> Wanted:
        """What the rows of a chunk are taken from: alone where that is exact, right behind the prelude."""
        system, exact = self.prompt.system, index == 0 and bool(self.setup.background)
        alone = exact and self.setup.plan(system, "alone").prelude == system
        return Wanted(self.prompt.chunks[index], "alone" if alone else "mean")

    def again_of(self, index: int) -> Wanted | None:
        """What those rows of it are taken from that an earlier chunk has said already; None without such rows."""
        return Wanted(self.prompt.chunks[index], "again") if index in self.repeats else None

    def items_of(self, index: int) -> list[Found]:
        """What a chunk's rows are taken from; nothing where a prefix or context covers it."""
        both = self.first_of(index), self.again_of(index)
        return [self.found[want] for want in both if want in self.found]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
