"""What a chunk may be read behind: passages that stand in for those which will precede it in prompts to come.

A chunk's KV depends on what stands before it, and when it is encoded nobody knows what that will be. Encoded alone, it
is the KV of a case that hardly ever comes up: nothing before it but the system part. The estimate with the least
expected squared error is the mean over what may come; a :class:`Background` is a sample of that, and chunks are
encoded once behind each of its contexts. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise

from blend.errors import PromptError

__all__ = ["NO_BACKGROUND", "Background", "bundled_passages"]


@dataclass(frozen=True)
class Background:
    """Contexts that chunks are encoded behind; their KV is the mean.

    Attributes:
        contexts: token ids of each context, to be put between the prelude and the chunk. None of them: chunks are
            encoded alone.

    Raises:
        PromptError: a context without tokens, or of text.
    """

    contexts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        texts = [ids for ids in self.contexts if isinstance(ids, str)]
        if texts:
            raise PromptError(
                f"contexts of a background are token ids, and {texts[0][:40]!r} is text: use Background.of, or give "
                "the texts to the Blender"
            )
        object.__setattr__(self, "contexts", tuple(tuple(int(i) for i in ids) for ids in self.contexts))
        if not all(self.contexts):
            raise PromptError(f"context {self.contexts.index(())} of the background has no tokens: drop it")

    @classmethod
    def of(cls, passages: Sequence[str], tokens: Callable[[str], Sequence[int]], contexts: int = 4) -> Background:
        """Passages as ``contexts`` contexts of about the same number of passages, in order.

        Args:
            passages: texts such as will stand in prompts, of different subjects.
            tokens: token ids of a passage, as it stands in a prompt.
            contexts: fewer where there are fewer passages.

        Raises:
            PromptError: no passages, or less than one context.
        """
        if not passages or contexts < 1:
            raise PromptError(f"{len(passages)} passages make no {contexts} contexts: give at least one of each")
        count = min(contexts, len(passages))
        cuts = [len(passages) * i // count for i in range(count + 1)]
        return cls(
            tuple(
                tuple(i for passage in passages[start:stop] for i in tokens(passage)) for start, stop in pairwise(cuts)
            )
        )

    def __len__(self) -> int:
        return len(self.contexts)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the contexts; "" for none."""
        if not self.contexts:
            return ""
        state = hashlib.sha256()
        for ids in self.contexts:
            state.update(len(ids).to_bytes(8, "little") + array("q", ids).tobytes())
        return state.hexdigest()


NO_BACKGROUND = Background()
"""Chunks are encoded alone behind their prelude."""


def bundled_passages() -> tuple[str, ...]:
    """Twelve passages on twelve subjects, in English, about people and places that do not exist."""
    text = files(__name__).joinpath("passages.txt").read_text(encoding="utf-8")
    return tuple(passage.strip() for passage in text.split("\n\n") if passage.strip())
