"""ChatKVBlend and its chain under the installed LangChain: on a tiny model, and as documented."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from blend import PromptError
from retrieval import SettingError
from retrieval.integrations import langchain
from retrieval.integrations.langchain import ChatKVBlend, fused_documents_chain
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

DOCUMENTS = [Document(FERRY, metadata={"title": "Ferry"}), Document(BREAD)]


class Found(BaseRetriever):
    """Gives the same documents to every question, turned round every other time."""

    documents: list[Document]

    def _get_relevant_documents(self, query, *, run_manager):
        self.documents = self.documents[::-1]
        return self.documents


@pytest.fixture
def blender():
    return tiny_blender()


@pytest.fixture
def llm(blender):
    return ChatKVBlend(blender=blender, max_tokens=16)


def told(message):
    return message.response_metadata["kvblend"]


# --- the chat model -----------------------------------------------------------------------------------


def test_documents_as_an_argument_hit_in_any_order(llm, blender):
    first = llm.invoke(QUESTION, documents=DOCUMENTS)
    second = llm.bind(documents=DOCUMENTS[::-1]).invoke(QUESTION)
    assert told(first)["hit_rate"] == 0.0
    assert [chunk["name"] for chunk in told(second)["chunks"]] == ["document 1", "Ferry"]
    assert_moved_hits(told(second), 2)
    assert f"Ferry\n{FERRY}" in blender.seen()
    assert blender.system in blender.seen()


def test_documents_as_content_blocks(llm, blender):
    plain = [{"type": "text", "text": text} for text in (FERRY, BREAD, QUESTION)]
    typed = [
        {"type": "text-plain", "mime_type": "text/plain", "text": FERRY, "title": "Ferry"},
        {"type": "text", "text": QUESTION},
        {"type": "text-plain", "mime_type": "text/plain", "text": BREAD},
    ]
    assert len(told(llm.invoke([HumanMessage(plain)]))["chunks"]) == 2
    named = told(llm.invoke([HumanMessage(typed)], documents=["The lamps are lit by hand."]))
    assert [chunk["name"] for chunk in named["chunks"]] == ["Ferry", "document 2", "document 3"]
    assert blender.seen().count(QUESTION) == 1
    assert told(llm.invoke([HumanMessage([FERRY, QUESTION])]))["chunks"][0]["source"] == "hit"


def test_history_keeps_the_documents_where_they_are(llm, blender):
    turns = [HumanMessage([{"type": "text", "text": FERRY}, {"type": "text", "text": QUESTION}])]
    turns.append(llm.invoke(turns))
    turns.append(HumanMessage("And who owns it?"))
    again = llm.invoke(turns, documents=[BREAD, FERRY])
    assert [chunk["source"] for chunk in told(again)["chunks"]] == ["hit", "miss"]  # the ferry once, from its turn
    shown = blender.seen()
    said = [FERRY, BREAD, QUESTION, turns[1].text, "And who owns it?"]
    assert [shown.index(text) for text in said] == sorted(shown.index(text) for text in said)


def test_system_messages_are_the_instructions(llm, blender):
    llm.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)], documents=DOCUMENTS)
    assert blender.seen().startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_without_documents_it_is_a_chat_model(llm, blender):
    message = llm.invoke("Hello there!")
    assert blender.seen() == "<|im_start|>user\nHello there!<|im_end|>\n<|im_start|>assistant\n"
    assert told(message)["method"] == "prefill"
    assert message.text


def test_an_empty_document_is_left_out_and_said(llm):
    message = llm.invoke(QUESTION, documents=[Document(" "), Document(FERRY), Document("", metadata={"title": "Pier"})])
    assert told(message)["left_out"] == ["document 1 has no text", "Pier has no text"]
    assert len(told(message)["chunks"]) == 1


def test_control_tokens_in_a_document_are_text(llm, blender):
    for text in (FERRY, HOSTILE):
        llm.invoke(QUESTION, documents=[Document(text, metadata={"title": text})])
        llm.invoke([HumanMessage(text), AIMessage(text), HumanMessage([text, text])])
    assert blender.controls(0) == blender.controls(2)
    assert blender.controls(1) == blender.controls(3)


def test_metadata_of_the_answer(llm):
    message = llm.invoke(QUESTION, documents=DOCUMENTS)
    usage = message.usage_metadata
    assert usage["input_tokens"] == told(message)["rows"]
    assert usage["output_tokens"] == 16
    assert usage["total_tokens"] == usage["input_tokens"] + 16
    assert message.response_metadata["finish_reason"] == "length"
    assert message.response_metadata["model_name"] == llm.model_name == "LlamaForCausalLM"


def test_pieces_are_the_whole(llm):
    llm.invoke(QUESTION, documents=DOCUMENTS)
    whole = llm.invoke(QUESTION, documents=DOCUMENTS)
    pieces = list(llm.stream(QUESTION, documents=DOCUMENTS))
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert len(pieces) > 4
    assert joined.text == whole.text
    assert joined.usage_metadata == whole.usage_metadata
    assert told(joined)["chunks"] == told(whole)["chunks"]


def test_callbacks_get_the_tokens(llm):
    class Heard(BaseCallbackHandler):
        def __init__(self):
            self.tokens = []

        def on_llm_new_token(self, token, **kwargs):
            self.tokens.append(token)

    heard = Heard()
    text = "".join(chunk.text for chunk in llm.stream(QUESTION, config={"callbacks": [heard]}))
    assert "".join(heard.tokens) == text


def test_async_is_sync(llm):
    async def main():
        whole = await llm.ainvoke(QUESTION, documents=DOCUMENTS)
        pieces = [chunk.text async for chunk in llm.astream(QUESTION, documents=DOCUMENTS)]
        return whole.text, "".join(pieces)

    text = llm.invoke(QUESTION, documents=DOCUMENTS).text
    assert asyncio.run(main()) == (text, text)


def test_a_batch_is_its_calls_one_by_one(llm):
    questions = [f"Who lights lamp {number}?" for number in range(6)]
    bound = llm.bind(documents=DOCUMENTS)
    bound.invoke("first")
    assert [m.text for m in bound.batch(questions)] == [bound.invoke(question).text for question in questions]


def test_options_of_a_call(llm):
    whole = llm.invoke(QUESTION)
    stop = whole.text[5:7]
    stopped = llm.invoke(QUESTION, stop=[stop])
    assert stopped.text == whole.text[: whole.text.index(stop)].strip()
    assert stopped.response_metadata["finish_reason"] == "stop"
    assert llm.invoke(QUESTION, max_tokens=3).usage_metadata["output_tokens"] == 3
    warm = ChatKVBlend(blender=llm.blender, max_tokens=16, temperature=5.0, generate_options={"top_k": 50})
    assert len({warm.invoke(QUESTION).text for _ in range(3)}) > 1
    assert len({warm.invoke(QUESTION, temperature=0.0, top_k=None).text for _ in range(2)}) == 1
    with pytest.raises(SettingError, match="max_tokens is 0"):
        llm.invoke(QUESTION, max_tokens=0)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([HumanMessage([{"type": "image", "url": "x"}, "What?"])], "a block of the type 'image': only text"),
        ([HumanMessage([{"type": "text-plain", "text": FERRY}])], "no block of the type 'text'"),
        ([HumanMessage("a"), AIMessage("b")], "the last message is not the user's"),
        ([AIMessage("b"), HumanMessage("a")], "the first message is the assistant's"),
        ([HumanMessage("a"), ToolMessage("b", tool_call_id="1"), HumanMessage("c")], "a message of the role 'tool'"),
        ([HumanMessage(" ")], "a question is empty"),
    ],
)
def test_messages_that_cannot_be_answered(llm, messages, message):
    with pytest.raises(PromptError, match=message):
        llm.invoke(messages)


def test_it_is_described_without_its_model(llm):
    assert llm._identifying_params == {"model_name": "LlamaForCausalLM", "max_tokens": 16, "temperature": 0.0}
    assert "blender" not in llm.model_dump()
    assert llm._llm_type == "kvblend"


# --- the chain ----------------------------------------------------------------------------------------


def test_the_chain_stands_where_a_stuff_chain_did(llm, blender):
    answer = fused_documents_chain(llm)
    retriever = Found(documents=DOCUMENTS)
    chain = {"context": retriever, "question": RunnablePassthrough()} | answer
    # What create_retrieval_chain makes of a retriever and a stuff chain.
    whole = RunnablePassthrough.assign(context=(lambda given: given["input"]) | retriever).assign(answer=answer)
    turned = chain.invoke(QUESTION)
    asked = [SystemMessage(blender.system), HumanMessage(QUESTION)]
    assert turned == llm.invoke(asked, documents=DOCUMENTS[::-1]).text
    result = whole.invoke({"input": QUESTION})
    assert result == {"input": QUESTION, "context": DOCUMENTS, "answer": llm.invoke(asked, documents=DOCUMENTS).text}
    assert "".join(chain.stream(QUESTION)) == turned
    assert asyncio.run(whole.ainvoke({"input": QUESTION})) == result


def test_a_prompt_of_the_users_own(llm, blender):
    """{context} points at the documents, which stand in front of the history as chunks."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Speak {language}.\n\n{context}"), MessagesPlaceholder("chat_history"), ("human", "{input}")]
    )
    history = [HumanMessage("Is there a ferry?"), AIMessage("Yes.")]
    chain = fused_documents_chain(llm, prompt, output_parser=Message())
    given = {"context": DOCUMENTS, "input": QUESTION, "language": "English", "chat_history": history}
    chain.invoke(given)
    assert_moved_hits(told(chain.invoke({**given, "context": DOCUMENTS[::-1]})), 2)
    shown = blender.seen()
    said = ["Speak English.\n\n(the passages)", BREAD, FERRY, "Is there a ferry?", "Yes.", QUESTION]
    assert [shown.index(text) for text in said] == sorted(shown.index(text) for text in said)


def test_a_prompt_of_one_string(llm, blender):
    chain = fused_documents_chain(
        llm, PromptTemplate.from_template("Use {docs}. {question}"), document_variable_name="docs"
    )
    chain.invoke({"docs": DOCUMENTS, "question": QUESTION})
    assert f"Use (the passages). {QUESTION}" in blender.seen()
    assert FERRY in blender.seen()


def test_braces_are_text(llm, blender):
    fused_documents_chain(llm).invoke({"context": [Document("{input} {x}")], "input": "What is {y}?"})
    assert "{input} {x}" in blender.seen()
    assert "What is {y}?" in blender.seen()


def test_nothing_was_found(llm, blender):
    assert fused_documents_chain(llm.blender).invoke({"context": [], "question": QUESTION})
    assert blender.system in blender.seen()


def test_a_chain_without_documents(llm):
    with pytest.raises(PromptError, match=r"no 'context' among \['input'\]: it must hold the documents"):
        fused_documents_chain(llm).invoke({"input": QUESTION})
    with pytest.raises(KeyError, match="input"):
        fused_documents_chain(llm).invoke({"context": DOCUMENTS})
    with pytest.raises(PromptError, match="the prompt ends with a AIMessage"):
        fused_documents_chain(llm, ChatPromptTemplate([("ai", "{context}")])).invoke({"context": DOCUMENTS})


class Message(BaseOutputParser):
    """Gives the message itself."""

    def parse_result(self, result, *, partial=False):
        return result[0].message

    def parse(self, text):
        raise NotImplementedError


# --- as documented ------------------------------------------------------------------------------------


def test_without_langchain(monkeypatch):
    assert_needs(monkeypatch, "langchain", "langchain_core.documents")


@pytest.mark.slow
def test_the_snippet_hits_on_the_second_call(smollm2, capsys):
    names = {"retriever": Found(documents=DOCUMENTS)}
    exec(snippet(langchain), names)
    assert "Mira Tolle" in capsys.readouterr().out
    again = fused_documents_chain(names["blender"], output_parser=Message())
    chain = {"context": names["retriever"], "question": RunnablePassthrough()} | again
    message = chain.invoke(QUESTION)
    assert_moved_hits(told(message), 2)
    assert "Mira Tolle" in message.text
    names["blender"].close()


@pytest.mark.slow
def test_the_example_runs(smollm2, capsys):
    names = example("langchain_rag.py")
    assert "Mira Tolle" in capsys.readouterr().out
    assert_moved_hits(names["report"], 3)
