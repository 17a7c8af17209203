"""LlamaIndex: an LLM, and a response synthesizer that gives retrieved nodes to it one by one.

::

    from llama_index.core import VectorStoreIndex

    from blend import Blender
    from retrieval.integrations.llamaindex import query_engine

    index = VectorStoreIndex.from_documents(documents, embed_model=embed_model)
    blender = Blender.from_pretrained("smollm2")
    engine = query_engine(index, blender, similarity_top_k=4)
    response = engine.query("Who steers the Otterbeck ferry?")
    print(response, response.metadata["kvblend"]["hit_rate"])

Any retriever will do in place of the index. Needs ``llama-index-core``: ``pip install "kvblend[llamaindex]"``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from blend import Blender, PromptError
from retrieval.errors import ExtraMissing
from retrieval.integrations.reply import DEFAULTS, Dialogue, Reply, Text, dialogue, from_thread, model_name

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
        TextBlock,
    )
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.llms import CustomLLM
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.response_synthesizers import BaseSynthesizer
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.types import RESPONSE_TEXT_TYPE
except ImportError as missing:
    raise ExtraMissing('LlamaIndex is not installed: pip install "kvblend[llamaindex]"') from missing

__all__ = ["KVBlendLLM", "KVBlendSynthesizer", "query_engine"]

_Response = TypeVar("_Response", CompletionResponse, ChatResponse)
_ROLES = {MessageRole.DEVELOPER: "system", MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}


class KVBlendLLM(CustomLLM):
    """An LLM over a :class:`blend.Blender`, for whatever LlamaIndex wants one for.

    A prompt is one message of the user's. The options of a call are ``max_tokens``, ``temperature``, ``stop`` and any
    other argument of ``model.generate``. ``additional_kwargs`` of a response hold the report under ``kvblend``, and
    the counts of tokens.

    Args:
        blender: answers.
        max_tokens: tokens of an answer at most.
        temperature: 0.0 takes the likeliest token each time.
        stop: strings that end an answer and are no part of it.
    """

    max_tokens: int = Field(default=DEFAULTS["max_tokens"], gt=0)
    temperature: float = Field(default=DEFAULTS["temperature"], ge=0.0)
    stop: list[str] = Field(default_factory=list)
    _blender: Blender = PrivateAttr()

    def __init__(self, blender: Blender, **settings: Any) -> None:
        super().__init__(**settings)
        self._blender = blender

    @classmethod
    def from_pretrained(cls, name: str, **blender_options: Any) -> KVBlendLLM:
        """Loads the model too: ``KVBlendLLM.from_pretrained("smollm2", store="file:///kv")``."""
        return cls(Blender.from_pretrained(name, **blender_options))

    @classmethod
    def class_name(cls) -> str:
        """As LlamaIndex calls it in serialised settings."""
        return "KVBlendLLM"

    @property
    def blender(self) -> Blender:
        """What answers."""
        return self._blender

    @property
    def metadata(self) -> LLMMetadata:
        """Sizes of the context window and of an answer, name, and whether the model has a chat template."""
        known: dict[str, Any] = {"model_name": model_name(self.blender), "num_output": self.max_tokens}
        if self.blender.view.context is not None:
            known["context_window"] = self.blender.view.context
        return LLMMetadata(is_chat_model=bool(self.blender.text and self.blender.text.chat), **known)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answers one prompt."""
        return _last(_completions(self.reply(Dialogue("", (), prompt), **kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answers one prompt, piece by piece."""
        return _completions(self.reply(Dialogue("", (), prompt), **kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """:meth:`complete` in a worker thread."""
        return await asyncio.to_thread(lambda: _last(_completions(self.reply(Dialogue("", (), prompt), **kwargs))))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """:meth:`stream_complete` in a worker thread."""
        reply = await asyncio.to_thread(self.reply, Dialogue("", (), prompt), **kwargs)
        return from_thread(_completions(reply))

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers the last message."""
        return _last(_chats(self.reply(_read(messages), **kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answers the last message, piece by piece."""
        return _chats(self.reply(_read(messages), **kwargs))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """:meth:`chat` in a worker thread."""
        return await asyncio.to_thread(lambda: _last(_chats(self.reply(_read(messages), **kwargs))))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """:meth:`stream_chat` in a worker thread."""
        reply = await asyncio.to_thread(self.reply, _read(messages), **kwargs)
        return from_thread(_chats(reply))

    def reply(self, asked: Dialogue, documents: Sequence[Text] | None = None, **options: Any) -> Reply:
        """An answer on its way, with the LLM's settings where ``options`` have none."""
        settings = {"max_tokens": self.max_tokens, "temperature": self.temperature, "stop": self.stop}
        return Reply(self.blender, asked, documents, {**settings, **options})


class KVBlendSynthesizer(BaseSynthesizer):
    """Answers from nodes, each of which is a chunk of its own, wherever it ranks.

    A node's text is what LlamaIndex shows to an LLM, metadata such as a title in front; what is in a node's
    ``excluded_llm_metadata_keys`` stays out. ``response.metadata["kvblend"]`` is the report. Without nodes the
    response is LlamaIndex's empty one.

    Args:
        llm: an LLM, or the Blender for one with default settings.
        system: instructions; None for the Blender's own.
        streaming: give a ``StreamingResponse``.
        options: further arguments of ``BaseSynthesizer``.
    """

    def __init__(
        self, llm: KVBlendLLM | Blender, *, system: str | None = None, streaming: bool = False, **options: Any
    ) -> None:
        self._answers = KVBlendLLM(llm) if isinstance(llm, Blender) else llm
        self._system = system or ""
        super().__init__(llm=self._answers, streaming=streaming, **options)

    def synthesize(self, *args: Any, **kwargs: Any) -> Any:
        """The base's, with the report in the response's metadata."""
        told: dict[str, Any] = {}
        return _explained(super().synthesize(*args, told=told, **kwargs), told)

    async def asynthesize(self, *args: Any, **kwargs: Any) -> Any:
        """The base's, with the report in the response's metadata."""
        told: dict[str, Any] = {}
        return _explained(await super().asynthesize(*args, told=told, **kwargs), told)

    def get_response(
        self, query_str: str, text_chunks: Sequence[str], told: dict[str, Any] | None = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """The answer's text, or its pieces.

        Args:
            text_chunks: texts of the nodes.
            told: filled with the report.
            response_kwargs: options of the answer.
        """
        reply = self._reply(query_str, text_chunks, told, response_kwargs)
        return (piece for piece in reply) if self._streaming else reply.read()

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], told: dict[str, Any] | None = None, **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """:meth:`get_response` in a worker thread."""
        reply = await asyncio.to_thread(self._reply, query_str, text_chunks, told, response_kwargs)
        return from_thread(reply) if self._streaming else await asyncio.to_thread(reply.read)

    def _reply(
        self, question: str, texts: Sequence[str], told: dict[str, Any] | None, options: Mapping[str, Any]
    ) -> Reply:
        reply = self._answers.reply(Dialogue(self._system, (), question), [Text(text) for text in texts], **options)
        if told is not None:
            told.update(reply.report)
        return reply

    def _get_prompts(self) -> dict[str, Any]:
        return {}

    def _update_prompts(self, prompts: Mapping[str, Any]) -> None:
        if prompts:
            raise PromptError(
                f"no prompt {sorted(prompts)}: nodes are not poured into a template; give system= instead"
            )


def query_engine(
    source: BaseIndex[Any] | BaseRetriever,
    llm: KVBlendLLM | Blender,
    *,
    system: str | None = None,
    streaming: bool = False,
    **retriever_options: Any,
) -> RetrieverQueryEngine:
    """A query engine over an index or a retriever.

    Args:
        source: where nodes come from.
        llm: an LLM, or the Blender for one with default settings.
        system: instructions; None for the Blender's own.
        streaming: give a ``StreamingResponse``.
        retriever_options: arguments of ``index.as_retriever``, such as ``similarity_top_k``.
    """
    if isinstance(source, BaseIndex):
        source = source.as_retriever(**retriever_options)
    elif retriever_options:
        raise PromptError(f"{sorted(retriever_options)} are settings of an index's retriever: set them on yours")
    synthesizer = KVBlendSynthesizer(llm, system=system, streaming=streaming)
    return RetrieverQueryEngine(retriever=source, response_synthesizer=synthesizer)


def _read(messages: Sequence[ChatMessage]) -> Dialogue:
    for block in (block for message in messages for block in message.blocks):
        if not isinstance(block, TextBlock):
            raise PromptError(f"a message holds a {type(block).__name__}: only text can be read")
    return dialogue((_ROLES.get(message.role, message.role.value), message.content or "") for message in messages)


def _completions(reply: Reply) -> Generator[CompletionResponse, None, None]:
    """The growing answer; behind its last piece once more, with the counts that are then known."""
    text = ""
    told: dict[str, Any] = {"kvblend": reply.report}
    for piece in reply:
        text += piece
        yield CompletionResponse(text=text, delta=piece, additional_kwargs=told)
    told = {**told, "finish_reason": reply.finish_reason, **reply.usage}
    yield CompletionResponse(text=text, delta="", additional_kwargs=told)


def _chats(reply: Reply) -> Generator[ChatResponse, None, None]:
    for said in _completions(reply):
        message = ChatMessage(role=MessageRole.ASSISTANT, content=said.text)
        yield ChatResponse(message=message, delta=said.delta, additional_kwargs=said.additional_kwargs)


def _last(responses: Iterator[_Response]) -> _Response:
    *_, last = responses
    return last.model_copy(update={"delta": None})


def _explained(response: Any, told: dict[str, Any]) -> Any:
    if told:
        response.metadata = {**(response.metadata or {}), "kvblend": told}
    return response
