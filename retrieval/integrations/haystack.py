"""Haystack: generators that take a retriever's documents as they are, with no prompt builder between.

::

    from haystack import Pipeline
    from haystack.components.retrievers import InMemoryBM25Retriever

    from retrieval.integrations.haystack import KVBlendGenerator

    pipeline = Pipeline()
    pipeline.add_component("retriever", InMemoryBM25Retriever(document_store))
    pipeline.add_component("generator", KVBlendGenerator("smollm2"))
    pipeline.connect("retriever.documents", "generator.documents")
    question = "Who steers the Otterbeck ferry?"
    result = pipeline.run({"retriever": {"query": question}, "generator": {"query": question}})
    print(result["generator"]["replies"][0], result["generator"]["meta"][0]["kvblend"]["hit_rate"])

A pipeline that was written down is read again with ``allowed_modules=["retrieval.integrations.haystack"]``, as Haystack
wants it for any module but its own. Needs ``haystack-ai``: ``pip install "kvblend[haystack]"``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from blend import Blender, PromptError
from retrieval.errors import ExtraMissing, SettingError
from retrieval.integrations.reply import Dialogue, Reply, Text, dialogue, from_thread, model_name

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.dataclasses import (
        ChatMessage,
        ComponentInfo,
        StreamingCallbackT,
        StreamingChunk,
        select_streaming_callback,
    )
    from haystack.utils import deserialize_callable, serialize_callable
except ImportError as missing:
    raise ExtraMissing('Haystack is not installed: pip install "kvblend[haystack]"') from missing

__all__ = ["KVBlendChatGenerator", "KVBlendGenerator"]


class _Generator:
    """What both generators are made of."""

    def __init__(
        self,
        blender: Blender | str = "smollm2",
        *,
        system: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        blender_options: dict[str, Any] | None = None,
    ) -> None:
        """Keeps the settings; nothing is loaded yet.

        Args:
            blender: answers; or a model's name, which is loaded when the pipeline warms up.
            system: instructions; None for the Blender's own.
            generation_kwargs: ``max_tokens``, ``temperature``, ``stop``, and other arguments of ``model.generate``.
            streaming_callback: called with each piece of an answer.
            blender_options: for a model's name, keyword arguments of ``Blender.from_pretrained``, such as ``store``.

        Raises:
            SettingError: ``blender_options`` with a Blender, which has its own.
        """
        if blender_options and isinstance(blender, Blender):
            raise SettingError(f"blender_options {sorted(blender_options)} are for a model's name: set them on yours")
        self.name = None if isinstance(blender, Blender) else blender
        self.blender = blender if isinstance(blender, Blender) else None
        self.system = system
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback
        self.blender_options = blender_options or {}

    def warm_up(self) -> None:
        """Loads the model if only its name was given."""
        if self.blender is None:
            self.blender = Blender.from_pretrained(str(self.name), **self.blender_options)

    def to_dict(self) -> dict[str, Any]:
        """The component as plain data.

        Raises:
            SettingError: it was given a Blender, which cannot be written down.
        """
        if self.name is None:
            raise SettingError(
                "a generator around a Blender cannot be written down: give it the model's name, and blender_options"
            )
        return default_to_dict(
            self,
            blender=self.name,
            system=self.system,
            generation_kwargs=self.generation_kwargs,
            streaming_callback=serialize_callable(self.streaming_callback) if self.streaming_callback else None,
            blender_options=self.blender_options,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """The component that :meth:`to_dict` wrote down."""
        callback = data["init_parameters"].get("streaming_callback")
        known = {"streaming_callback": deserialize_callable(callback) if callback else None}
        return default_from_dict(cls, {**data, "init_parameters": {**data["init_parameters"], **known}})

    def _reply(
        self, asked: Dialogue, documents: Sequence[Document] | None, generation_kwargs: Mapping[str, Any] | None
    ) -> Reply:
        self.warm_up()
        assert self.blender is not None
        texts = None if documents is None else [Text(d.content, str(d.meta.get("title") or "")) for d in documents]
        options = {**self.generation_kwargs, **(generation_kwargs or {})}
        return Reply(self.blender, asked._replace(system=asked.system or self.system or ""), texts, options)

    def _write(self, reply: Reply, callback: StreamingCallbackT | None) -> str:
        chosen = select_streaming_callback(self.streaming_callback, callback, requires_async=False)
        text = ""
        for chunk in self._chunks(reply):
            text += chunk.content
            if chosen:
                chosen(chunk)
        return text

    async def _write_async(self, reply: Reply, callback: StreamingCallbackT | None) -> str:
        chosen = select_streaming_callback(self.streaming_callback, callback, requires_async=True)
        text = ""
        async for chunk in from_thread(self._chunks(reply)):
            text += chunk.content
            if chosen and (waiting := chosen(chunk)) is not None:
                await waiting
        return text

    def _chunks(self, reply: Reply) -> Iterator[StreamingChunk]:
        generator: Any = self  # a component once @component has made one of it
        info = ComponentInfo.from_component(generator)
        start = True
        for piece in reply:
            yield StreamingChunk(piece, component_info=info, index=0, start=start)
            start = False
        meta = _meta(reply)
        yield StreamingChunk("", meta, info, index=0, start=start, finish_reason=meta["finish_reason"])


@component
class KVBlendGenerator(_Generator):
    """Answers a query from documents, each of which is a chunk of its own, wherever it ranks.

    A document's ``meta["title"]`` is shown above its text; one without text is left out, and ``meta`` says so. Without
    any documents the query is answered as it is.
    """

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    def run(
        self,
        query: str,
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """Answers.

        Args:
            query: the question.
            documents: in prompt order.
            generation_kwargs: in place of single ones of the component's.
            streaming_callback: in place of the component's.

        Returns:
            ``replies`` with one text, and ``meta`` with its finish reason, usage and, under ``kvblend``, the report.
        """
        reply = self._reply(Dialogue("", (), query), documents, generation_kwargs)
        return {"replies": [self._write(reply, streaming_callback)], "meta": [_meta(reply)]}

    @component.output_types(replies=list[str], meta=list[dict[str, Any]])
    async def run_async(
        self,
        query: str,
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """:meth:`run` in a worker thread; the callback may be a coroutine function."""
        reply = await asyncio.to_thread(self._reply, Dialogue("", (), query), documents, generation_kwargs)
        return {"replies": [await self._write_async(reply, streaming_callback)], "meta": [_meta(reply)]}


@component
class KVBlendChatGenerator(_Generator):
    """Answers the last of some messages, if there are any from documents.

    System messages are the instructions. Documents stand in front of the history, so that they keep their KV from turn
    to turn.
    """

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage],
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """Answers.

        Args:
            messages: the conversation; it ends with the user's question.
            documents: in prompt order.
            generation_kwargs: in place of single ones of the component's.
            streaming_callback: in place of the component's.

        Returns:
            ``replies`` with one message, whose ``meta`` holds finish reason, usage and, under ``kvblend``, the report.
        """
        reply = self._reply(_read(messages), documents, generation_kwargs)
        return {"replies": [_said(self._write(reply, streaming_callback), reply)]}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage],
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, Any]:
        """:meth:`run` in a worker thread; the callback may be a coroutine function."""
        reply = await asyncio.to_thread(self._reply, _read(messages), documents, generation_kwargs)
        return {"replies": [_said(await self._write_async(reply, streaming_callback), reply)]}


def _read(messages: Iterable[ChatMessage]) -> Dialogue:
    said = list[tuple[str, str]]()
    for message in messages:
        role, text = message.role.value, message.text
        if text is None:
            raise PromptError(f"a message of the role {role!r} has no text: only text can be read")
        if message.images or message.files:
            raise PromptError("a message holds more than text: only text can be read")
        said.append((role, text))
    return dialogue(said)


def _said(text: str, reply: Reply) -> ChatMessage:
    return ChatMessage.from_assistant(text, meta=_meta(reply))


def _meta(reply: Reply) -> dict[str, Any]:
    return {
        "model": model_name(reply.blender),
        "index": 0,
        "finish_reason": reply.finish_reason,
        "usage": reply.usage,
        "kvblend": reply.report,
    }
