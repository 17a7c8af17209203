"""A prompt as an ordered list of parts, built from token ids once. Knows nothing of models or tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from blend.chunk import Chunk
from blend.errors import PromptError

__all__ = ["Prompt"]


@dataclass(frozen=True)
class Prompt:
    """System part, chunks in order, question: the rows of the fused prompt, left to right.

    ::

        | system           | chunk 0 | chunk 1 | ... | question                     |
        | BOS, template    |  passages, each cached   | question text, template end  |

    Joined text is never tokenised again: :attr:`ids` is the parts' ids, one after the other.

    Attributes:
        system: ids before the first chunk (BOS, template head, instructions); may be empty.
        chunks: the passages, in prompt order; may be empty (plain prefill).
        question: ids behind the last chunk, up to the first answer token.

    Raises:
        PromptError: no question, or a part that is no chunk.
    """

    system: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    question: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "system", tuple(int(i) for i in self.system))
        object.__setattr__(self, "chunks", tuple(_as_chunk(c, i) for i, c in enumerate(self.chunks)))
        object.__setattr__(self, "question", tuple(int(i) for i in self.question))
        if not self.question:
            raise PromptError("the question is empty: at least one token must follow the chunks to answer from")

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """All token ids in order."""
        return (*self.system, *(i for chunk in self.chunks for i in chunk.ids), *self.question)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Row of the first token of each chunk."""
        starts, row = [], len(self.system)
        for chunk in self.chunks:
            starts.append(row)
            row += len(chunk)
        return tuple(starts)

    def __len__(self) -> int:
        return len(self.ids)

    def reordered(self, order: Iterable[int]) -> Prompt:
        """The same prompt with its chunks in another order.

        Raises:
            PromptError: ``order`` is no permutation of the chunks.
        """
        order = list(order)
        if sorted(order) != list(range(len(self.chunks))):
            raise PromptError(f"{order} is no order of {len(self.chunks)} chunks")
        return Prompt(self.system, tuple(self.chunks[i] for i in order), self.question)


def _as_chunk(part: object, index: int) -> Chunk:
    if isinstance(part, Chunk):
        return part
    raise PromptError(
        f"chunks[{index}] is a {type(part).__name__}, not a Chunk: build it with Chunk(ids) or Blender.prompt"
    )
