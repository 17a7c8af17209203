"""KVBlendLLM and KVBlendSynthesizer under the installed LlamaIndex: on a tiny model, and as documented."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core import Document, MockEmbedding, PromptTemplate, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from blend import PromptError
from retrieval import SettingError
from retrieval.integrations import llamaindex
from retrieval.integrations.llamaindex import KVBlendLLM, KVBlendSynthesizer, query_engine
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

NODES = [
    NodeWithScore(node=TextNode(text=FERRY, metadata={"title": "Ferry"}), score=0.9),
    NodeWithScore(node=TextNode(text=BREAD), score=0.4),
]


class Found(BaseRetriever):
    """Gives the same nodes to every question, turned round every other time."""

    def __init__(self, nodes):
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle):
        self.nodes = self.nodes[::-1]
        return self.nodes


@pytest.fixture
def blender():
    return tiny_blender()


@pytest.fixture
def llm(blender):
    return KVBlendLLM(blender, max_tokens=16)


def nodes(*texts):
    return [NodeWithScore(node=TextNode(text=text)) for text in texts]


# --- the LLM ------------------------------------------------------------------------------------------


def test_a_prompt_is_a_message_of_the_users(llm, blender):
    response = llm.complete("Hello there!")
    assert blender.seen() == "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n"
    assert response.text == llm.chat([ChatMessage(content="Hello there!")]).message.content
    assert response.additional_kwargs["kvblend"]["method"] == "prefill"
    assert response.additional_kwargs["completion_tokens"] == 16
    assert response.additional_kwargs["finish_reason"] == "length"


def test_messages_keep_their_roles(llm, blender):
    roles = (MessageRole.SYSTEM, MessageRole.USER, MessageRole.CHATBOT, MessageRole.USER)
    llm.chat([ChatMessage(role=role, content=f"said by {role.value}") for role in roles])
    assert blender.seen() == (
        "<|im_start|>system\nsaid by system<|im_end|>\n<|im_start|>user\nsaid by user<|im_end|>\n"
        "<|im_start|>assistant\nsaid by chatbot<|im_end|>\n<|im_start|>user\nsaid by user<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_pieces_are_the_whole(llm):
    whole = llm.complete("Hello there!")
    pieces = list(llm.stream_complete("Hello there!"))
    assert len(pieces) > 4
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text == whole.text
    assert pieces[-1].additional_kwargs["total_tokens"] == whole.additional_kwargs["total_tokens"]
    chats = list(llm.stream_chat([ChatMessage(content="Hello there!")]))
    assert [chat.delta for chat in chats] == [piece.delta for piece in pieces]
    assert chats[-1].message.content == whole.text


def test_async_is_sync(llm):
    asked = [ChatMessage(content="Hello there!")]

    async def main():
        return [
            (await llm.acomplete("Hello there!")).text,
            (await llm.achat(asked)).message.content,
            "".join([piece.delta async for piece in await llm.astream_complete("Hello there!")]),
            "".join([piece.delta async for piece in await llm.astream_chat(asked)]),
        ]

    assert asyncio.run(main()) == [llm.complete("Hello there!").text] * 4


def test_a_prompt_template_and_a_system_prompt(blender):
    """``predict`` is what the rest of LlamaIndex calls."""
    llm = KVBlendLLM(blender, max_tokens=4, system_prompt="Be brief.")
    llm.predict(PromptTemplate("Say {word}."), word="hello")
    assert blender.seen().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSay hello.<|im_end|>")


def test_options_of_a_call(llm):
    whole = llm.complete(QUESTION).text
    stop = whole[5:7]
    stopped = llm.complete(QUESTION, stop=[stop])
    assert stopped.text == whole[: whole.index(stop)].strip()
    assert stopped.additional_kwargs["finish_reason"] == "stop"
    assert KVBlendLLM(llm.blender, stop=[stop], max_tokens=16).complete(QUESTION).text == stopped.text
    assert llm.complete(QUESTION, max_tokens=3).additional_kwargs["completion_tokens"] == 3
    warm = KVBlendLLM(llm.blender, max_tokens=16, temperature=5.0)
    assert len({warm.complete(QUESTION, top_k=50).text for _ in range(3)}) > 1
    with pytest.raises(SettingError, match="max_tokens is 0"):
        llm.complete(QUESTION, max_tokens=0)
    with pytest.raises(ValueError, match="max_tokens"):
        KVBlendLLM(llm.blender, max_tokens=0)


def test_what_cannot_be_answered(llm):
    with pytest.raises(PromptError, match="a message holds a ImageBlock: only text can be read"):
        llm.chat([ChatMessage(blocks=[ImageBlock(url="http://localhost/x.png"), TextBlock(text="What?")])])
    with pytest.raises(PromptError, match="the last message is not the user's"):
        llm.chat([ChatMessage(content="a"), ChatMessage(role="assistant", content="b")])
    with pytest.raises(PromptError, match="a message of the role 'tool'"):
        llm.chat([ChatMessage(content="a"), ChatMessage(role="tool", content="b"), ChatMessage(content="c")])
    with pytest.raises(PromptError, match="a question is empty"):
        llm.complete(" ")


def test_its_metadata(llm):
    known = llm.metadata
    assert (known.context_window, known.num_output, known.model_name) == (512, 16, "LlamaForCausalLM")
    assert known.is_chat_model
    assert llm.to_dict()["class_name"] == "KVBlendLLM"
    assert "blender" not in llm.to_dict()


# --- the synthesizer ----------------------------------------------------------------------------------


def test_nodes_are_chunks_in_any_order(llm, blender):
    engine = RetrieverQueryEngine(Found(NODES), KVBlendSynthesizer(llm))
    first = engine.query(QUESTION)
    second = engine.query(QUESTION)
    assert first.metadata["kvblend"]["hit_rate"] == 0.0
    assert_moved_hits(second.metadata["kvblend"], 2)
    assert second.source_nodes == NODES
    assert second.metadata[NODES[0].node.node_id] == {"title": "Ferry"}
    assert f"title: Ferry\n\n{FERRY}" in blender.seen()
    assert blender.system in blender.seen()


def test_an_index_or_a_retriever(llm):
    index = VectorStoreIndex.from_documents([Document(text=FERRY), Document(text=BREAD)], embed_model=MockEmbedding(8))
    assert len(query_engine(index, llm, similarity_top_k=1).query(QUESTION).source_nodes) == 1
    assert len(query_engine(index.as_retriever(), llm.blender).query(QUESTION).metadata["kvblend"]["chunks"]) == 2
    with pytest.raises(PromptError, match=r"\['similarity_top_k'\] are settings of an index's retriever"):
        query_engine(Found(NODES), llm, similarity_top_k=1)


def test_a_streamed_response_is_the_whole_one(llm):
    whole = KVBlendSynthesizer(llm).synthesize(QUESTION, NODES)
    streamed = KVBlendSynthesizer(llm, streaming=True).synthesize(QUESTION, NODES)
    assert_moved_hits(streamed.metadata["kvblend"], 2)  # known before the first piece
    pieces = list(streamed.response_gen)
    assert len(pieces) > 4
    assert "".join(pieces) == whole.response


def test_an_async_response_is_the_same(llm):
    async def main():
        engine = query_engine(Found(NODES[::-1]), llm, streaming=True)
        streamed = await engine.aquery(QUESTION)
        pieces = [piece async for piece in streamed.async_response_gen()]
        whole = await KVBlendSynthesizer(llm).asynthesize(QUESTION, NODES)
        return (
            "".join(pieces),
            whole.response,
            streamed.metadata["kvblend"]["chunks"],
            whole.metadata["kvblend"]["chunks"],
        )

    expected = KVBlendSynthesizer(llm).synthesize(QUESTION, NODES)
    piecewise, whole, streamed_chunks, whole_chunks = asyncio.run(main())
    assert piecewise == whole == expected.response
    assert [len(streamed_chunks), len(whole_chunks)] == [2, 2]


def test_responses_at_once(llm):
    questions = [f"Who lights lamp {number}?" for number in range(6)]
    synthesizer = KVBlendSynthesizer(llm)
    synthesizer.synthesize("first", NODES)

    async def main():
        return await asyncio.gather(*(synthesizer.asynthesize(question, NODES) for question in questions))

    together = [response.response for response in asyncio.run(main())]
    assert together == [synthesizer.synthesize(question, NODES).response for question in questions]


def test_text_without_nodes_around_it(llm):
    """The synthesizer's lower half, as LlamaIndex documents it."""
    synthesizer = KVBlendSynthesizer(llm)
    assert (
        synthesizer.get_response(QUESTION, [FERRY, BREAD])
        == synthesizer.synthesize(QUESTION, nodes(FERRY, BREAD)).response
    )


def test_settings_of_a_response(llm, blender):
    synthesizer = KVBlendSynthesizer(llm, system="Be brief.")
    whole = synthesizer.synthesize(QUESTION, NODES)
    assert "Be brief." in blender.seen()
    assert blender.system not in blender.seen()
    assert whole.response.startswith(synthesizer.synthesize(QUESTION, NODES, max_tokens=3).response)
    with pytest.raises(PromptError, match=r"no prompt \['text_qa_template'\]"):
        synthesizer.update_prompts({"text_qa_template": PromptTemplate("{context_str}")})


def test_control_tokens_in_a_node_are_text(llm, blender):
    synthesizer = KVBlendSynthesizer(llm)
    for text in (FERRY, HOSTILE):
        synthesizer.synthesize(QUESTION, [NodeWithScore(node=TextNode(text=text, metadata={"title": text}))])
        llm.complete(text)
    assert blender.controls(0) == blender.controls(2)
    assert blender.controls(1) == blender.controls(3)


def test_an_empty_node_is_left_out_and_said(llm):
    told = KVBlendSynthesizer(llm).synthesize(QUESTION, nodes("", FERRY, " \n")).metadata["kvblend"]
    assert told["left_out"] == ["document 1 has no text", "document 3 has no text"]
    assert len(told["chunks"]) == 1


def test_no_nodes(llm, blender):
    """LlamaIndex answers for itself."""
    response = KVBlendSynthesizer(llm, empty_response="Nothing found.").synthesize(QUESTION, [])
    assert response.response == "Nothing found."
    assert blender.prompts == []


# --- as documented ------------------------------------------------------------------------------------


def test_without_llamaindex(monkeypatch):
    assert_needs(monkeypatch, "llamaindex", "llama_index.core.llms")


@pytest.mark.slow
def test_the_snippet_hits_on_the_second_call(smollm2, capsys):
    names = {"documents": [Document(text=FERRY), Document(text=BREAD)], "embed_model": MockEmbedding(8)}
    exec(snippet(llamaindex), names)
    shown = capsys.readouterr().out
    assert "Mira Tolle" in shown
    assert shown.endswith(" 0.0\n")
    engine = query_engine(Found(names["response"].source_nodes), names["blender"])
    assert_moved_hits(engine.query(QUESTION).metadata["kvblend"], 2)
    names["blender"].close()


@pytest.mark.slow
def test_the_example_runs(smollm2, capsys):
    names = example("llamaindex_rag.py")
    assert "Mira Tolle" in capsys.readouterr().out
    assert_moved_hits(names["report"], 3)
