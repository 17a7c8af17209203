"""From text to the parts of a prompt: a chat template around the parts, never inside a chunk.

Every part is tokenised once and on its own. Control tokens that a passage or question spells out are tokenised as
ordinary text, so a document cannot open or close a chat turn. Knows tokenizers, not models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from threading import Lock
from typing import Any

from blend.chunk import Chunk
from blend.errors import PromptError
from blend.prompt import Prompt

__all__ = ["DEFAULT_ASK", "DEFAULT_SYSTEM", "PromptText", "tokenizer_digest"]

DEFAULT_SYSTEM = "Answer the question from the passages below. Answer in a few words."

DEFAULT_ASK = "Question: {question}"

_MARK = "<<kvblend:passages>>"
_ASK = "<<kvblend:question>>"
_TOKENIZING = Lock()
"""A fast tokenizer keeps ``split_special_tokens`` of its last call: threads would spoil each other's control tokens."""


class PromptText:
    """Builds prompts with one tokenizer.

    The layout is ``template head, system text, [passages], question, template tail``. Without a chat template it is
    ``BOS, system text, [passages], "Question: ... Answer:"``.

    Args:
        tokenizer: a transformers tokenizer.
        chat: use the tokenizer's chat template; None uses it where there is one.

    Raises:
        PromptError: ``chat=True`` and the tokenizer has no template, or the template drops or repeats the user's text.
    """

    def __init__(self, tokenizer: Any, chat: bool | None = None) -> None:
        self.tokenizer = tokenizer
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise PromptError("chat=True, but the tokenizer has no chat template: use chat=False, or set one")
        self.chat = has_template if chat is None else chat

    def prompt(
        self, question: str, passages: Sequence[str | Chunk], system: str = DEFAULT_SYSTEM, ask: str = DEFAULT_ASK
    ) -> Prompt:
        """The prompt of one question over passages.

        Args:
            question: its text, not empty.
            passages: texts, or chunks made before.
            system: instructions; may be empty.
            ask: how the question is put, with ``{question}`` where it goes.

        Raises:
            PromptError: an empty question or passage, or an ``ask`` without ``{question}``.
        """
        if not question.strip():
            raise PromptError("the question is empty: ask something, or use generate() of the model itself")
        head, middle, tail = self._frame(system)
        body = self._asked(middle, ask, question, tail)
        return Prompt(
            tuple(self._head_ids(head)),
            tuple(p if isinstance(p, Chunk) else self.chunk(p, f"passage {i}") for i, p in enumerate(passages, 1)),
            tuple(body),
        )

    def turn(self, answer: Sequence[int], question: str, ask: str = DEFAULT_ASK) -> tuple[int, ...]:
        """Ids that go on from an answer to the next question: the answer, the end of its turn, the user's next turn.

        Args:
            answer: generated ids; control tokens at the end are dropped, the template writes its own.
            ask: how the question is put, with ``{question}`` where it goes.

        Raises:
            PromptError: an empty question, or an ``ask`` without ``{question}``.
        """
        if not question.strip():
            raise PromptError("the question is empty: ask something")
        said = list(answer)
        while said and said[-1] in self.tokenizer.all_special_ids:
            said.pop()
        between, tail = self._between_turns()
        return (*said, *self._asked(between, ask, question, tail))

    def system_ids(self, system: str = DEFAULT_SYSTEM) -> tuple[int, ...]:
        """The ids that stand before the first chunk: what chunks are encoded behind."""
        return tuple(self._head_ids(self._frame(system)[0]))

    def chunk(self, text: str, name: str = "") -> Chunk:
        """A passage as a chunk: its text and an empty line.

        Raises:
            PromptError: no text.
        """
        if not text.strip():
            raise PromptError(f"chunk {name!r} is empty: drop it, or give it some text")
        return Chunk(tuple(self.encode(text.strip() + "\n\n")), name)

    def encode(self, text: str) -> list[int]:
        """Ordinary text to ids: no BOS, control tokens spelled out."""
        ids = self._plain(text)
        if self._control.isdisjoint(ids):
            return ids
        # Some vocabularies hold control tokens as ordinary pieces too; cut through the middle of each spelling, they
        # cannot come back whole.
        cuts = [0, *(sum(m.span()) // 2 for m in self._spellings.finditer(text)), len(text)]
        return [i for start, stop in pairwise(cuts) for i in self._plain(text[start:stop])]

    def count(self, text: str) -> int:
        """``len(encode(text))``, sooner: for splitters, which ask for it again and again."""
        if self._counter is None:
            return len(self.encode(text))
        (encoding,) = self._counter.encode_batch_fast([text], add_special_tokens=False)
        ids = encoding.ids
        return len(ids) if self._control.isdisjoint(ids) else len(self.encode(text))

    @cached_property
    def _counter(self) -> Any:
        """A copy of a fast tokenizer's core, which no other call changes; None where there is none."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        if core is None:
            return None
        copy = type(core).from_str(core.to_str())
        copy.encode_special_tokens = True
        copy.no_truncation()
        copy.no_padding()
        return copy

    def _plain(self, text: str) -> list[int]:
        with _TOKENIZING:
            ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        return [int(i) for i in ids]

    @cached_property
    def _control(self) -> frozenset[int]:
        """Ids of control tokens; the unknown token is none, ordinary text may hold it."""
        return frozenset(self.tokenizer.all_special_ids) - {getattr(self.tokenizer, "unk_token_id", None)}

    @cached_property
    def _spellings(self) -> re.Pattern[str]:
        tokens = sorted(self.tokenizer.convert_ids_to_tokens(sorted(self._control)), key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in tokens))

    def bos(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before a text by itself (BOS), possibly none."""
        with _TOKENIZING:
            bare = list(self.tokenizer("a", add_special_tokens=False).input_ids)
            full = list(self.tokenizer("a").input_ids)
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return tuple(full[:at])

    def _asked(self, before: str, ask: str, question: str, behind: str) -> list[int]:
        """A question between template texts; only those may hold control tokens."""
        label, found, rest = ask.partition("{question}")
        if not found:
            raise PromptError(f"the question's template {ask!r} has no {{question}}: say where the question goes")
        # A space belongs to the word behind it.
        space = label[len(label.rstrip(" ")) :]
        head, tail = self._template_ids(before + label.rstrip(" ")), self._template_ids(rest + behind)
        return [*head, *self.encode(space + question.strip()), *tail]

    # --- template ---------------------------------------------------------------------------------

    def _frame(self, system: str) -> tuple[str, str, str]:
        """Text before the passages, between passages and question, and behind the question."""
        if not self.chat:
            return f"{system.strip()}\n\n" if system.strip() else "", "", "\nAnswer:"
        user = f"{_MARK}{_ASK}"
        messages = [{"role": "user", "content": user}]
        if system.strip():
            messages.insert(0, {"role": "system", "content": system.strip()})
        text = self._render(messages, system.strip(), user)
        if text.count(_MARK) != 1 or text.count(_ASK) != 1:
            raise PromptError("the chat template does not pass the user's message through once: use chat=False")
        head, rest = text.split(_MARK)
        middle, tail = rest.split(_ASK)
        return head, middle, tail

    def _between_turns(self) -> tuple[str, str]:
        """Template text between an answer and the next question, and behind that question."""
        if not self.chat:
            return "\n\n", "\nAnswer:"
        turns = [("user", "Hello"), ("assistant", _MARK), ("user", _ASK)]
        text = self._render([{"role": role, "content": content} for role, content in turns], "", "")
        if text.count(_MARK) != 1 or text.count(_ASK) != 1:
            raise PromptError("the chat template does not pass turns through once: use chat=False")
        between, tail = text.split(_MARK)[1].split(_ASK)
        return between, tail

    def _render(self, messages: list[dict[str, str]], system: str, user: str) -> str:
        template = self.tokenizer.apply_chat_template
        try:
            return str(template(messages, tokenize=False, add_generation_prompt=True))
        except Exception:
            # Some templates (Gemma 2) have no system role: the instructions open the user's turn instead.
            merged = [{"role": "user", "content": f"{system}\n\n{user}" if system else user}]
            return str(template(merged, tokenize=False, add_generation_prompt=True))

    def _head_ids(self, head: str) -> list[int]:
        # A template writes its own BOS; only bare text gets the tokenizer's.
        return self._template_ids(head) if self.chat else [*self.bos(), *self.encode(head)]

    def _template_ids(self, text: str) -> list[int]:
        with _TOKENIZING:
            return [int(i) for i in self.tokenizer(text, add_special_tokens=False).input_ids] if text else []


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 over vocabulary and class; a tokenizer that numbers tokens otherwise gives another digest."""
    if tokenizer is None:
        return "none"
    vocab = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=False)
    return hashlib.sha256(f"{type(tokenizer).__name__}{vocab}".encode()).hexdigest()
