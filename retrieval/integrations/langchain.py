"""LangChain: a chat model that takes documents one by one, and a chain that gives them to it.

::

    from langchain_core.runnables import RunnablePassthrough

    from blend import Blender
    from retrieval.integrations.langchain import fused_documents_chain

    blender = Blender.from_pretrained("smollm2")
    answer = fused_documents_chain(blender)  # in place of create_stuff_documents_chain
    chain = {"context": retriever, "question": RunnablePassthrough()} | answer
    for piece in chain.stream("Who steers the Otterbeck ferry?"):
        print(piece, end="")

``retriever`` is any retriever. Needs ``langchain-core``: ``pip install "kvblend[langchain]"``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blend import Blender, PromptError
from retrieval.errors import ExtraMissing
from retrieval.integrations.reply import DEFAULTS, Dialogue, Reply, Text, dialogue, model_name

try:
    from langchain_core.callbacks import CallbackManagerForLLMRun
    from langchain_core.documents import Document
    from langchain_core.language_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
    from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder
    from langchain_core.runnables import Runnable, RunnableLambda
    from pydantic import Field
except ImportError as missing:
    raise ExtraMissing('LangChain is not installed: pip install "kvblend[langchain]"') from missing

__all__ = ["ChatKVBlend", "fused_documents_chain"]

_ROLES: Mapping[type[BaseMessage], str] = {SystemMessage: "system", HumanMessage: "user", AIMessage: "assistant"}
_SYNONYMS = {"question": "input", "input": "question"}
_ELSEWHERE = "(the passages)"
"""Stands where a prompt template wants the documents' text."""


class ChatKVBlend(BaseChatModel):
    """A chat model over a :class:`blend.Blender`.

    Documents are the content blocks of a human message: all of the type ``text-plain``, and all of the type ``text``
    but the last, which is what the user says. Or pass them: ``llm.invoke("Who?", documents=documents)``,
    ``llm.bind(documents=documents)``. Those of earlier turns stay in the prompt, each once, in front of the history;
    so they keep their KV through the whole conversation.

    System messages are the instructions; without one, documents bring the Blender's own. ``stop`` strings,
    ``max_tokens``, ``temperature`` and other arguments of ``model.generate`` may be given with each call.

    ``response_metadata["kvblend"]`` of the answer is the report: chunk hits, moves, rows recomputed, seconds.

    Args:
        blender: answers; several models may share it.
        max_tokens: tokens of an answer at most.
        temperature: 0.0 takes the likeliest token each time.
        generate_options: further arguments of ``model.generate`` for every call.

    Raises:
        PromptError: a message or block that is no text, or that the conversation cannot hold.
    """

    blender: Blender = Field(exclude=True, repr=False)
    max_tokens: int = DEFAULTS["max_tokens"]
    temperature: float = DEFAULTS["temperature"]
    generate_options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_pretrained(cls, name: str, **blender_options: Any) -> ChatKVBlend:
        """Loads the model too: ``ChatKVBlend.from_pretrained("smollm2", store="file:///kv")``."""
        return cls(blender=Blender.from_pretrained(name, **blender_options))

    @property
    def model_name(self) -> str:
        """As metadata and traces show it."""
        return model_name(self.blender)

    @property
    def _llm_type(self) -> str:
        return "kvblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            **self.generate_options,
        }

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        reply = self._reply(messages, stop, kwargs)
        message = AIMessage(content=reply.read(), **self._metadata(reply))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        reply = self._reply(messages, stop, kwargs)
        for piece in reply:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        last = AIMessageChunk(content="", chunk_position="last", **self._metadata(reply))
        yield ChatGenerationChunk(message=last)

    def _reply(self, messages: Sequence[BaseMessage], stop: list[str] | None, given: dict[str, Any]) -> Reply:
        options = {"max_tokens": self.max_tokens, "temperature": self.temperature, **self.generate_options, **given}
        passed = options.pop("documents", None)
        asked, found = _read(messages)
        documents = list(dict.fromkeys([*found, *map(_as_text, passed or ())]))
        wanted = None if passed is None and not found else documents
        return Reply(self.blender, asked, wanted, {**options, "stop": stop} if stop else options)

    def _metadata(self, reply: Reply) -> dict[str, Any]:
        told = {"kvblend": reply.report, "finish_reason": reply.finish_reason, "model_name": self.model_name}
        tokens = reply.usage
        usage = {
            "input_tokens": tokens["prompt_tokens"],
            "output_tokens": tokens["completion_tokens"],
            "total_tokens": tokens["total_tokens"],
        }
        return {"response_metadata": told, "usage_metadata": usage}


def fused_documents_chain(
    llm: ChatKVBlend | Blender,
    prompt: BasePromptTemplate[Any] | None = None,
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """A chain from documents and a question to an answer, in place of ``create_stuff_documents_chain``.

    Its input is a dict with the documents under ``context``, the question under ``input`` or ``question``, earlier
    messages under ``chat_history`` if there are any, and whatever else the prompt asks for.

    Args:
        llm: a chat model, or the Blender for one with default settings.
        prompt: as for ``create_stuff_documents_chain``; the documents go to the model as they are, and ``{context}``
            becomes a few words that point at them. None for the Blender's instructions, history and question.
        output_parser: in place of ``StrOutputParser``; the answer's metadata is on the message that it gets.
        document_variable_name: the key of the documents.

    Returns:
        A Runnable that gives, and streams, the answer's text.
    """
    model = llm if isinstance(llm, ChatKVBlend) else ChatKVBlend(blender=llm)
    template = prompt or _default_prompt(model.blender)

    def ask(given: dict[str, Any]) -> list[BaseMessage]:
        if document_variable_name not in given:
            raise PromptError(f"no {document_variable_name!r} among {sorted(given)}: it must hold the documents")
        named = {other: given[name] for name, other in _SYNONYMS.items() if name in given}
        messages = template.invoke({**named, **given, document_variable_name: _ELSEWHERE}).to_messages()
        return _with_documents(messages, given[document_variable_name])

    return RunnableLambda(ask) | model | (output_parser or StrOutputParser())


def _default_prompt(blender: Blender) -> ChatPromptTemplate:
    history = MessagesPlaceholder("chat_history", optional=True)
    return ChatPromptTemplate([SystemMessage(blender.system), history, ("human", "{input}")])


def _with_documents(messages: list[BaseMessage], documents: Sequence[Document]) -> list[BaseMessage]:
    *before, last = messages
    blocks = [_as_block(document) for document in documents]
    if not isinstance(last, HumanMessage):
        raise PromptError(f"the prompt ends with a {type(last).__name__}: it must end with the human's question")
    return [*before, HumanMessage([*blocks, {"type": "text", "text": str(last.text)}])]


def _as_block(document: Document) -> dict[str, Any]:
    text, title = _as_text(document)
    return {"type": "text-plain", "mime_type": "text/plain", "text": text, "title": title}


def _as_text(document: Document | str) -> Text:
    if isinstance(document, str):
        return Text(document)
    return Text(document.page_content, str(document.metadata.get("title") or ""))


def _read(messages: Sequence[BaseMessage]) -> tuple[Dialogue, list[Text]]:
    """The conversation, and the documents of all of its messages."""
    said, documents = list[tuple[str, str]](), list[Text]()
    for message in messages:
        role = next((role for kind, role in _ROLES.items() if isinstance(message, kind)), message.type)
        if role == "user":
            *found, asked = _blocks(message)
            documents += found
            said.append((role, asked.text or ""))
        else:
            said.append((role, str(message.text)))
    return dialogue(said), documents


def _blocks(message: BaseMessage) -> list[Text]:
    """Documents of a human message, and last what the human says."""
    if isinstance(message.content, str):
        return [Text(message.content)]
    blocks = [{"type": "text", "text": b} if isinstance(b, str) else b for b in message.content]
    for block in blocks:
        if block.get("type") not in ("text", "text-plain"):
            raise PromptError(f"a message holds a block of the type {block.get('type')!r}: only text can be read")
    last = max((place for place, block in enumerate(blocks) if block["type"] == "text"), default=None)
    if last is None:
        raise PromptError("a human message holds documents, but no block of the type 'text' that asks something")
    question = blocks.pop(last)
    return [Text(b.get("text"), b.get("title") or "") for b in [*blocks, question]]
