"""The generators in pipelines of the installed Haystack: on a tiny model, and as documented."""

from __future__ import annotations

import asyncio
import os

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # read when Haystack is imported

import pytest
from haystack import Document, Pipeline, component
from haystack.components.builders import AnswerBuilder
from haystack.components.retrievers import InMemoryBM25Retriever
from haystack.core.errors import PipelineRuntimeError
from haystack.dataclasses import ChatMessage, ImageContent
from haystack.document_stores.in_memory import InMemoryDocumentStore

from blend import PromptError
from retrieval import SettingError
from retrieval.integrations import haystack
from retrieval.integrations.haystack import KVBlendChatGenerator, KVBlendGenerator
from tests.integrations import (
    BREAD,
    FERRY,
    HOSTILE,
    QUESTION,
    assert_moved_hits,
    assert_needs,
    example,
    snippet,
    tiny_blender,
)

DOCUMENTS = [Document(content=FERRY, meta={"title": "Ferry"}), Document(content=BREAD)]
OPTIONS = {"max_tokens": 16}


@component
class Found:
    """Gives the same documents to every query, turned round every other time."""

    def __init__(self):
        self.documents = DOCUMENTS

    @component.output_types(documents=list[Document])
    def run(self, query: str):
        self.documents = self.documents[::-1]
        return {"documents": self.documents}


@pytest.fixture
def blender():
    return tiny_blender()


@pytest.fixture
def generator(blender):
    return KVBlendGenerator(blender, generation_kwargs=OPTIONS)


@pytest.fixture
def chat(blender):
    return KVBlendChatGenerator(blender, generation_kwargs=OPTIONS)


def pipeline_of(retriever, generator):
    pipeline = Pipeline()
    pipeline.add_component("retriever", retriever)
    pipeline.add_component("generator", generator)
    pipeline.connect("retriever.documents", "generator.documents")
    return pipeline


def asks(question, **inputs):
    return {"retriever": {"query": question}, "generator": {"query": question, **inputs}}


def told(result):
    return result["meta"][0]["kvblend"]


# --- in a pipeline ------------------------------------------------------------------------------------


def test_documents_are_chunks_in_any_order(generator, blender):
    pipeline = pipeline_of(Found(), generator)
    first = pipeline.run(asks(QUESTION))["generator"]
    second = pipeline.run(asks(QUESTION))["generator"]
    assert told(first)["hit_rate"] == 0.0
    assert [chunk["name"] for chunk in told(second)["chunks"]] == ["Ferry", "document 2"]
    assert_moved_hits(told(second), 2)
    assert f"Ferry\n{FERRY}" in blender.seen()
    assert blender.system in blender.seen()


def test_between_a_bm25_retriever_and_an_answer_builder(generator):
    store = InMemoryDocumentStore()
    store.write_documents(DOCUMENTS)
    pipeline = pipeline_of(InMemoryBM25Retriever(store), generator)
    pipeline.add_component("answers", AnswerBuilder())
    pipeline.connect("generator.replies", "answers.replies")
    pipeline.connect("generator.meta", "answers.meta")
    pipeline.connect("retriever.documents", "answers.documents")
    both = f"{QUESTION} What is baked?"
    (answer,) = pipeline.run({**asks(both), "answers": {"query": both}})["answers"]["answers"]
    assert {document.content for document in answer.documents} == {FERRY, BREAD}
    assert answer.meta["kvblend"]["chunks"][0]["name"] == "Ferry"


def test_pieces_are_the_whole(generator):
    pieces = []
    streamed = generator.run(QUESTION, DOCUMENTS, streaming_callback=pieces.append)
    whole = generator.run(QUESTION, DOCUMENTS)
    assert len(pieces) > 4
    assert "".join(piece.content for piece in pieces) == streamed["replies"][0] == whole["replies"][0]
    assert [piece.start for piece in pieces] == [True, *[False] * (len(pieces) - 1)]
    assert [piece.finish_reason for piece in pieces] == [*[None] * (len(pieces) - 1), "length"]
    assert pieces[-1].meta["usage"] == whole["meta"][0]["usage"]


def test_async_is_sync(generator):
    pieces = []

    async def hear(piece):
        pieces.append(piece.content)

    async def main():
        pipeline = pipeline_of(Found(), generator)
        whole = await pipeline.run_async(asks(QUESTION, streaming_callback=hear))
        streamed = [piece.content async for piece in pipeline.stream(asks(QUESTION))]
        return whole["generator"]["replies"][0], "".join(streamed)

    turned, same = asyncio.run(main())
    assert turned == "".join(pieces) == generator.run(QUESTION, DOCUMENTS[::-1])["replies"][0]
    assert same == generator.run(QUESTION, DOCUMENTS)["replies"][0]


def test_an_async_callback_needs_an_async_run(generator):
    async def hear(piece):
        raise AssertionError

    with pytest.raises(ValueError, match="callback cannot be a coroutine"):
        generator.run(QUESTION, streaming_callback=hear)


def test_a_callback_of_the_component(blender):
    pieces = []
    generator = KVBlendGenerator(blender, generation_kwargs=OPTIONS, streaming_callback=pieces.append)
    assert generator.run(QUESTION)["replies"][0] == "".join(piece.content for piece in pieces)


# --- one component ------------------------------------------------------------------------------------


def test_without_documents(generator, blender):
    """None were found: the instructions stay. None were wanted: the query is a message of its own."""
    assert told(generator.run(QUESTION, []))["method"] == "prefill"
    assert blender.system in blender.seen()
    assert generator.run(QUESTION)["replies"][0]
    assert blender.seen() == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def test_an_empty_document_is_left_out_and_said(generator):
    result = generator.run(QUESTION, [Document(content=""), *DOCUMENTS, Document(meta={"title": "Picture"})])
    assert told(result)["left_out"] == ["document 1 has no text", "Picture has no text"]
    assert len(told(result)["chunks"]) == 2


def test_control_tokens_in_a_document_are_text(generator, chat, blender):
    for text in (FERRY, HOSTILE):
        generator.run(text, [Document(content=text, meta={"title": text})])
        said = [ChatMessage.from_user(text), ChatMessage.from_assistant(text), ChatMessage.from_user(text)]
        chat.run(said)
    assert blender.controls(0) == blender.controls(2)
    assert blender.controls(1) == blender.controls(3)


def test_options_of_a_call(generator):
    whole = generator.run(QUESTION)["replies"][0]
    stop = whole[5:7]
    stopped = generator.run(QUESTION, generation_kwargs={"stop": [stop]})
    assert stopped["replies"][0] == whole[: whole.index(stop)].strip()
    assert stopped["meta"][0]["finish_reason"] == "stop"
    short = generator.run(QUESTION, generation_kwargs={"max_new_tokens": 3})
    assert short["meta"][0]["usage"]["completion_tokens"] == 3
    with pytest.raises(SettingError, match="max_tokens is 0"):
        generator.run(QUESTION, generation_kwargs={"max_tokens": 0})


def test_an_error_comes_through_the_pipeline(generator):
    with pytest.raises(PipelineRuntimeError, match="a question is empty: leave out that turn, or ask something"):
        pipeline_of(Found(), generator).run(asks(" "))


# --- written down -------------------------------------------------------------------------------------


def test_a_pipeline_is_written_and_read():
    settings = {"system": "Be brief.", "generation_kwargs": OPTIONS, "blender_options": {"store": "memory://1GiB"}}
    store = InMemoryDocumentStore()
    pipeline = pipeline_of(InMemoryBM25Retriever(store), KVBlendGenerator("smollm2", **settings))
    trusted = ["retrieval.integrations.haystack"]
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=trusted)
    assert again.dumps() == pipeline.dumps()
    generator = again.get_component("generator")
    assert generator.to_dict()["init_parameters"] == {"blender": "smollm2", "streaming_callback": None, **settings}
    assert generator.blender is None  # loaded when the pipeline warms up


def test_a_callback_is_written_by_its_name():
    from haystack.components.generators.utils import print_streaming_chunk

    written = KVBlendChatGenerator("smollm2", streaming_callback=print_streaming_chunk).to_dict()
    assert KVBlendChatGenerator.from_dict(written).streaming_callback is print_streaming_chunk


def test_what_cannot_be_written_down(generator, blender):
    with pytest.raises(SettingError, match="a generator around a Blender cannot be written down: give it the model's"):
        generator.to_dict()
    with pytest.raises(SettingError, match=r"blender_options \['store'\] are for a model's name"):
        KVBlendGenerator(blender, blender_options={"store": "memory://1GiB"})


# --- chat ---------------------------------------------------------------------------------------------


def test_history_keeps_the_documents_where_they_are(chat, blender):
    messages = [ChatMessage.from_system("Be brief."), ChatMessage.from_user(QUESTION)]
    reply = chat.run(messages, DOCUMENTS)["replies"][0]
    messages += [reply, ChatMessage.from_user("And who owns it?")]
    again = chat.run(messages, DOCUMENTS[::-1])["replies"][0]
    assert_moved_hits(again.meta["kvblend"], 2)
    shown = blender.seen()
    said = ["Be brief.", BREAD, FERRY, QUESTION, reply.text, "And who owns it?"]
    assert [shown.index(text) for text in said] == sorted(shown.index(text) for text in said)


def test_chat_async_and_streamed(chat):
    pieces = []
    messages = [ChatMessage.from_user(QUESTION)]
    reply = chat.run(messages, DOCUMENTS)["replies"][0]
    again = asyncio.run(chat.run_async(messages, DOCUMENTS, streaming_callback=pieces.append))["replies"][0]
    assert again.text == reply.text == "".join(piece.content for piece in pieces)
    assert again.meta["usage"] == reply.meta["usage"]


def test_messages_that_cannot_be_answered(chat):
    image = ImageContent(base64_image="aGk=", mime_type="image/png", validation=False)
    with pytest.raises(PromptError, match="a message of the role 'user' has no text"):
        chat.run([ChatMessage.from_user(content_parts=[image])])
    with pytest.raises(PromptError, match="a message holds more than text: only text can be read"):
        chat.run([ChatMessage.from_user(content_parts=["What is it?", image])])
    with pytest.raises(PromptError, match="the last message is not the user's"):
        chat.run([])


# --- as documented ------------------------------------------------------------------------------------


def test_without_haystack(monkeypatch):
    assert_needs(monkeypatch, "haystack", "haystack.dataclasses")


@pytest.mark.slow
def test_the_snippet_hits_on_the_second_call(smollm2, capsys):
    store = InMemoryDocumentStore()
    store.write_documents(DOCUMENTS)
    names = {"document_store": store}
    exec(snippet(haystack), names)
    shown = capsys.readouterr().out
    assert "Mira Tolle" in shown
    assert shown.endswith(" 0.0\n")
    question = "What is the bread of Drenn baked with?"  # it finds the ferry too, behind the bread
    first, again = (told(names["pipeline"].run(asks(question))["generator"]) for _ in range(2))
    assert [chunk["name"] for chunk in first["chunks"]] == ["document 1", "Ferry"]
    assert_moved_hits(again, 2)
    names["pipeline"].get_component("generator").blender.close()


@pytest.mark.slow
def test_the_example_runs(smollm2, capsys):
    names = example("haystack_rag.py")
    assert "Mira Tolle" in capsys.readouterr().out
    assert_moved_hits(names["report"], 3)
    names["pipeline"].get_component("generator").blender.close()
