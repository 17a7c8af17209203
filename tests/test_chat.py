"""Conversations: what a turn takes over from the one before, and what is left out when it no longer fits."""

from __future__ import annotations

import asyncio

import pytest

from blend import PromptError, PromptTooLong
from retrieval import Document, RagPipeline, RagSettings
from tests.test_rag import PIER, blender, documents, names

SETTINGS = RagSettings(retriever="sparse", size=48, overlap=0, k=1)


@pytest.fixture
def chat():
    with blender() as own, RagPipeline(own, settings=SETTINGS) as rag:
        rag.add(PIER, encode="now")
        yield rag.chat()


def test_a_turn_about_the_same_passage_takes_all_of_it_over(chat):
    first = chat.ask("Who lit the lamps by hand?", max_new_tokens=4)
    second = chat.ask("lamps keeper?", max_new_tokens=4)
    assert second.hits == first.hits
    # The last row is never taken over: its logits are the answer's first token.
    assert second.report.prefix_rows + second.report.context_rows == len(first.context.prompt)
    assert second.report.recomputed_rows == 0
    assert chat.turns == (first, second)


def test_a_turn_about_another_passage_puts_it_behind_those_there(chat):
    first = chat.ask("Who lit the lamps by hand?", max_new_tokens=4)
    second = chat.ask("When was the pier built?", max_new_tokens=4)
    assert names(second.hits) == ["lamps", "pier"]
    kept = len(first.context.prompt.system) + len(first.context.prompt.chunks[0])
    assert second.report.prefix_rows + second.report.context_rows >= kept
    assert second.report.chunks[1].source == "hit"
    assert second.report.chunks[1].moved == kept - len(first.context.prompt.system)
    third = chat.ask("And the lamps?", max_new_tokens=2)
    assert names(third.hits) == ["lamps", "pier"]


def test_history_stands_in_the_prompt_as_turns(chat):
    tokenizer = chat.turns or chat._pipeline.blender.tokenizer
    first = chat.ask("Who lit the lamps <|im_end|> by hand?", max_new_tokens=4)
    second = chat.ask("When was the pier built?", max_new_tokens=4)
    written = tokenizer.decode(second.context.prompt.question)
    at = [written.index(part) for part in ("Who lit", first.text, "When was the pier built?")]
    assert at == sorted(at)
    (im_end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    assert second.context.prompt.question.count(im_end) == 3, "user, assistant, user; the one in the question is text"


def test_a_streamed_turn_counts_as_one(chat):
    stream = chat.stream("Who lit the lamps by hand?", max_new_tokens=6)
    assert chat.turns == ()
    text = "".join(stream).strip()
    assert [turn.text for turn in chat.turns] == [text]
    with chat.stream("When was the pier built?", max_new_tokens=200) as stream:
        next(stream)
    assert len(chat.turns) == 2, "a stream that is left early leaves what has come"
    third = chat.ask("lamps?", max_new_tokens=2)
    assert third.report.context_rows > 0


def test_async_turns(chat):
    async def talk():
        first = await chat.aask("Who lit the lamps by hand?", max_new_tokens=4)
        return first, "".join([piece async for piece in chat.astream("lamps keeper?", max_new_tokens=4)])

    first, second = asyncio.run(talk())
    assert [turn.text for turn in chat.turns] == [first.text, second.strip()]


def test_what_no_longer_fits_is_left_out_and_said():
    settings = RagSettings(retriever="sparse", size=120, overlap=0, k=2)
    texts = {f"d{i}": f"topic{i} " + f"gull {i} sits on lamp {i}. " * 6 for i in range(8)}
    with blender() as own, RagPipeline(own, settings=settings) as rag:
        rag.add(documents(**texts), encode="now")
        chat = rag.chat()
        answers = [chat.ask(f"topic{i} gull", max_new_tokens=10) for i in range(6)]
        said = [note for answer in answers for note in answer.notes]
        assert any("passages of earlier turns are left out" in note for note in said)
        assert all(len(answer.context.prompt) + 10 <= own.view.context for answer in answers)
        assert all(f"d{i}" in names(answer.hits) for i, answer in enumerate(answers))
        with pytest.raises(PromptTooLong):
            chat.ask("gull " * 400)
        assert len(chat.turns) == 6


def test_old_turns_go_when_they_do_not_fit_beside_the_passages():
    settings = RagSettings(retriever="sparse", size=60, overlap=0, k=1)
    with blender() as own, RagPipeline(own, settings=settings) as rag:
        rag.add(documents(a="gull lamp bread", b="pier bay"), encode="now")
        chat = rag.chat()
        chat.ask("gull " * 60, max_new_tokens=100)
        chat.ask("pier " * 30, max_new_tokens=100)
        last = chat.ask("bay", max_new_tokens=200)
        assert any("turns are left out" in note for note in last.notes)
        assert len(last.context.prompt) + 200 <= own.view.context


def test_a_removed_passage_is_not_answered_from_any_more(chat):
    rag = chat._pipeline
    chat.ask("Who lit the lamps by hand?", max_new_tokens=4)
    rag.remove(["lamps"])
    second = chat.ask("When was the pier built?", max_new_tokens=4)
    assert names(second.hits) == ["pier"]
    assert "were removed" in second.notes[0]
    assert second.report.context_rows == 0
    assert "lit by hand by the keeper" not in rag.blender.tokenizer.decode(second.context.prompt.ids)


def test_an_empty_question_leaves_the_conversation_as_it_was(chat):
    first = chat.ask("Who lit the lamps by hand?", max_new_tokens=4)
    with pytest.raises(PromptError, match="empty"):
        chat.ask(" ")
    assert chat.turns == (first,)


def test_each_chat_is_its_own(chat):
    rag = chat._pipeline
    rag.update([Document("The lamps are lit by a machine.", id="lamps")], encode="now")
    assert rag.chat(k=2).turns == ()
