"""What the integrations share: a conversation's messages in order, and an answer on its way. Knows no framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from blend import Blender, Chunk, PromptError
from blend.conversation import Turn, conversation
from retrieval.errors import SettingError

__all__ = ["DEFAULTS", "Dialogue", "Reply", "Text", "dialogue", "from_thread", "model_name"]

DEFAULTS: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.0}
"""Options of an answer where none are given: short, and the same one each time."""

_Item = TypeVar("_Item")


class Text(NamedTuple):
    """A document as its framework gave it; either may be empty."""

    text: str | None
    title: str = ""


class Dialogue(NamedTuple):
    """A list of messages, read: instructions, earlier turns, and what is asked now."""

    system: str
    turns: tuple[Turn, ...]
    question: str


def dialogue(messages: Iterable[tuple[str, str]]) -> Dialogue:
    """Reads messages ``(role, text)``, with the roles ``system``, ``user`` and ``assistant``.

    Several messages of one role in a row are one message of several paragraphs: chat templates want turns to alternate.

    Raises:
        PromptError: another role, or a conversation that does not begin and end with the user.
    """
    system, said = list[str](), list[tuple[str, str]]()
    for role, text in messages:
        if role == "system":
            system.append(text)
        elif role not in ("user", "assistant"):
            raise PromptError(f"a message of the role {role!r}: a conversation has system, user and assistant only")
        elif said and said[-1][0] == role:
            said[-1] = (role, f"{said[-1][1]}\n\n{text}")
        else:
            said.append((role, text))
    if not said or said[-1][0] != "user":
        raise PromptError("the last message is not the user's: end with the question that is to be answered")
    if said[0][0] != "user":
        raise PromptError("the first message is the assistant's: leave it out, or put it into the system message")
    texts = [text for _, text in said]
    return Dialogue("\n\n".join(system), tuple(map(Turn, texts[:-1:2], texts[1::2])), texts[-1])


class Reply:
    """An answer on its way: the prompt is fused now, and the text is written while it is iterated over.

    Args:
        blender: answers.
        asked: the conversation.
        documents: retrieved ones, in prompt order; None for a plain conversation, in which the Blender's own
            instructions ("answer from the passages") would make no sense. One without text is left out, and
            :attr:`report` says so.
        options: ``max_tokens``, ``temperature`` (0.0: the likeliest token each time), ``stop`` (strings that end the
            answer and are no part of it), and anything else that ``model.generate`` takes.

    Attributes:
        fusion: the prompt's KV and report.
        left_out: one sentence for each document without text.

    Raises:
        PromptError: an empty question, or a Blender without a tokenizer.
        PromptTooLong: more rows than the model holds.
        SettingError: an option outside its range.
    """

    def __init__(
        self,
        blender: Blender,
        asked: Dialogue,
        documents: Sequence[Text] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if blender.text is None:
            raise PromptError("this Blender has no tokenizer: pass tokenizer= to Blender")
        self._options, self._stop = _options({**DEFAULTS, **(options or {})})
        chunks, self.left_out = _chunks(blender, documents or ())
        system = asked.system or ("" if documents is None else blender.system)
        self.fusion = blender.fuse(conversation(blender.text, asked.turns, asked.question, chunks, system))
        self.blender = blender
        self._sequence: Any = ()
        self._stopped = False

    def __iter__(self) -> Iterator[str]:
        """Pieces of the answer as they come; leaving the loop stops the generation."""
        watched = [*self._options.get("stopping_criteria", ()), self._watch]
        pieces: Any = self.blender.stream(self.fusion, **{**self._options, "stopping_criteria": watched})
        with closing(pieces):
            for piece, stopped in _until(pieces, self._stop):
                self._stopped = stopped
                if piece:
                    yield piece

    def read(self) -> str:
        """All of the answer."""
        return "".join(self)

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids that were generated so far."""
        return tuple(int(i) for i in self._sequence[len(self.fusion.prompt) :])

    @property
    def finish_reason(self) -> str:
        """``stop``, or ``length`` for an answer that ``max_tokens`` cut off."""
        ids = self.ids
        ended = self._stopped or not ids or ids[-1] in self.blender.tokenizer.all_special_ids
        return "stop" if ended or len(ids) < self._options["max_new_tokens"] else "length"

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt, reused ones included, and of the answer."""
        prompt, completion = len(self.fusion.prompt), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def report(self) -> dict[str, Any]:
        """The report as plain data for JSON; known before the first piece."""
        report = self.fusion.report
        return {**report.as_dict(), "left_out": self.left_out}

    def _watch(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self._sequence = input_ids[0]
        return input_ids[:, -1] < 0  # one False a sequence: it looks on, and stops nothing


def model_name(blender: Blender) -> str:
    """How metadata calls the model: the last part of its hub id or folder."""
    return Path(getattr(blender.model, "name_or_path", "")).name or type(blender.model).__name__


async def from_thread(items: Iterable[_Item]) -> AsyncGenerator[_Item, None]:
    """Items of a generator whose making blocks, each made in a worker thread, so that the event loop goes on."""
    generator: Any = iter(items)
    end = object()
    step = None
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, generator, end))
            item: Any = await asyncio.shield(step)
            if item is end:
                return
            yield item
    finally:
        if step is not None:
            await asyncio.wait([step])  # a reader that was cancelled must not close what a thread is still inside of
        await asyncio.to_thread(generator.close)


def _chunks(blender: Blender, documents: Iterable[Text]) -> tuple[list[Chunk], list[str]]:
    """Documents as chunks that begin with their title, and a sentence on each that has no text."""
    chunks, left_out = list[Chunk](), list[str]()
    for place, (text, title) in enumerate(documents, 1):
        name = title or f"document {place}"
        if text and text.strip():
            chunks.append(blender.chunk(f"{title}\n{text}" if title else text, name))
        else:
            left_out.append(f"{name} has no text")
    return chunks, left_out


def _options(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments of ``model.generate``, and stop strings."""
    options = dict(given)
    tokens, temperature, stop = (options.pop(name, None) for name in ("max_tokens", "temperature", "stop"))
    options.setdefault("max_new_tokens", tokens)
    if not isinstance(options["max_new_tokens"], int) or options["max_new_tokens"] < 1:
        raise SettingError(f"max_tokens is {options['max_new_tokens']!r}: it must be a whole number, 1 or more")
    if temperature is not None and temperature < 0:
        raise SettingError(f"temperature is {temperature}: it must be 0 (no sampling) or more")
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or 1) > 1:
            raise SettingError(
                f"{name} is {options[name]}: one answer is written, piece by piece; call Blender.generate"
            )
    sampling = {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(stops):
        raise SettingError("an empty stop string would end every answer before it begins: leave it out")
    return {**sampling, **options}, stops


def _until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Pieces up to the stop string that is complete first, without blanks around the whole, and whether there was one.

    What may still turn out to be part of a stop string, or the blanks at the end, is held back.
    """
    held, begun = "", False
    for piece in pieces:
        held += piece
        found = [(at + len(stop), at) for stop in stops if (at := held.find(stop)) >= 0]
        if found:
            _, cut = min(found)
            yield (held[:cut] if begun else held[:cut].lstrip()).rstrip(), True
            return
        safe = len(held[: len(held) - _open_end(held, stops)].rstrip())
        out = held[:safe] if begun else held[:safe].lstrip()
        held, begun = held[safe:], begun or bool(out)
        yield out, False
    yield (held if begun else held.lstrip()).rstrip(), False


def _open_end(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text with which a stop string may begin."""
    beginnings = (stop[:length] for stop in stops for length in range(1, len(stop)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
