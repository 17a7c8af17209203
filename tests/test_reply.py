"""Answers on their way: pieces and wholes, stop strings, options, documents without text, readers that leave."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blend import PromptError, PromptTooLong
from blend.conversation import Turn
from retrieval import SettingError
from retrieval.integrations.reply import Dialogue, Reply, Text, _until, dialogue, from_thread
from tests.integrations import BREAD, FERRY, QUESTION, tiny_blender

ASKED = Dialogue("", (), QUESTION)


@pytest.fixture(scope="module")
def blender():
    return tiny_blender()


# --- messages -----------------------------------------------------------------------------------------


def test_messages_in_order():
    read = dialogue([("system", "S"), ("user", "a"), ("assistant", "b"), ("system", "T"), ("user", "c"), ("user", "d")])
    assert read == Dialogue("S\n\nT", (Turn("a", "b"),), "c\n\nd")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "the last message is not the user's"),
        ([("user", "a"), ("assistant", "b")], "the last message is not the user's"),
        ([("assistant", "b"), ("user", "a")], "the first message is the assistant's"),
        ([("user", "a"), ("tool", "b"), ("user", "c")], "a message of the role 'tool'"),
    ],
)
def test_messages_that_are_no_conversation(messages, message):
    with pytest.raises(PromptError, match=message):
        dialogue(messages)


# --- pieces -------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(
    st.lists(st.text("ab \n", max_size=4), max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3)
)
def test_pieces_up_to_a_stop_string(pieces, stops):
    """However the text is cut into pieces: it ends before the stop string that is complete first, and is stripped."""
    text = "".join(pieces)
    places = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(places)[1]] if places else text
    written = list(_until(pieces, stops))
    assert "".join(piece for piece, _ in written) == expected.strip()
    assert written[-1][1] == bool(places)


def test_the_pieces_are_those_of_the_blender(blender):
    reply = Reply(blender, ASKED, [Text(FERRY)], {"max_tokens": 12})
    plain = blender.generate(blender.prompt(QUESTION, [FERRY]), do_sample=False, max_new_tokens=12)
    assert reply.read() == plain.text
    assert (reply.ids, reply.finish_reason) == (plain.ids, "length")
    assert reply.usage == {"prompt_tokens": len(reply.fusion.prompt), "completion_tokens": 12} | {
        "total_tokens": len(reply.fusion.prompt) + 12
    }
    assert reply.read() == plain.text  # any number of times


def test_a_stop_string_ends_the_generation(blender):
    whole = Reply(blender, ASKED, [Text(FERRY)], {"max_tokens": 40}).read()
    stop = whole[8:10]
    reply = Reply(blender, ASKED, [Text(FERRY)], {"max_tokens": 40, "stop": [stop, "never"]})
    assert reply.read() == whole[: whole.index(stop)].strip()
    assert reply.finish_reason == "stop"
    assert len(reply.ids) < 40
    assert Reply(blender, ASKED, [Text(FERRY)], {"max_tokens": 40, "stop": stop}).read() == reply.read()


def test_leaving_stops_the_generation(blender):
    reply = Reply(blender, ASKED, options={"max_tokens": 400})
    for _ in zip(range(2), reply, strict=False):
        pass
    assert len(reply.ids) < 400
    assert not [thread for thread in threading.enumerate() if "_run" in thread.name]


def test_a_criterion_of_the_users_own(blender):
    def after_three(input_ids, scores, **_):
        return (input_ids[:, -1] >= 0) & (input_ids.shape[1] >= rows + 3)

    rows = len(Reply(blender, ASKED).fusion.prompt)
    reply = Reply(blender, ASKED, options={"stopping_criteria": [after_three]})
    reply.read()
    assert len(reply.ids) == 3
    assert reply.finish_reason == "stop"


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: it must be a whole number, 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"temperature": -1}, "temperature is -1: it must be 0"),
        ({"stop": ["", "b"]}, "an empty stop string"),
        ({"num_beams": 4}, "num_beams is 4: one answer is written"),
    ],
)
def test_options_outside_their_range(blender, options, message):
    with pytest.raises(SettingError, match=message):
        Reply(blender, ASKED, options=options)


def test_an_option_that_generate_does_not_know(blender):
    with pytest.raises(ValueError, match="max_tokns"):
        Reply(blender, ASKED, options={"max_tokns": 3}).read()


def test_sampling_and_the_names_of_generate(blender):
    options = {"max_new_tokens": 30, "temperature": 5.0}
    answers = {Reply(blender, ASKED, options=options).read() for _ in range(4)}
    assert len(answers) > 1
    assert len({Reply(blender, ASKED, options={"max_tokens": 30}).read() for _ in range(2)}) == 1
    assert len({Reply(blender, ASKED, options={**options, "do_sample": False}).read() for _ in range(2)}) == 1


# --- documents ----------------------------------------------------------------------------------------


def test_documents_without_text_are_left_out_and_said(blender):
    reply = Reply(blender, ASKED, [Text(""), Text(FERRY, "Ferry"), Text(None, "Picture"), Text(BREAD)])
    assert [chunk.name for chunk in reply.fusion.report.chunks] == ["Ferry", "document 4"]
    assert reply.report["left_out"] == ["document 1 has no text", "Picture has no text"]
    assert f"Ferry\n{FERRY}" in blender.seen()


def test_the_report_is_plain_data(blender):
    report = Reply(blender, ASKED, [Text(FERRY)]).report
    assert json.loads(json.dumps(report)) == report


def test_no_documents(blender):
    """None were found: the instructions stay. None were wanted: it is plain chat."""
    Reply(blender, ASKED, [])
    assert blender.system in blender.seen()
    reply = Reply(blender, ASKED, None)
    assert blender.seen() == f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert reply.report["method"] == "prefill"
    Reply(blender, Dialogue("Be brief.", (), QUESTION), [Text(FERRY)])
    assert "Be brief." in blender.seen()
    assert blender.system not in blender.seen()


def test_a_document_that_does_not_fit(blender):
    with pytest.raises(PromptTooLong, match="drop passages or take smaller"):
        Reply(blender, ASKED, [Text("lamps " * 900)])


def test_a_blender_without_a_tokenizer(blender):
    from blend import Blender
    from blend.testing.tiny import tiny_model

    with pytest.raises(PromptError, match="this Blender has no tokenizer: pass tokenizer="):
        Reply(Blender(tiny_model("llama"), check=False), ASKED)


# --- event loops --------------------------------------------------------------------------------------


def test_items_are_made_beside_the_event_loop():
    async def main():
        release = threading.Event()

        def slow():
            yield 1
            release.wait()
            yield 2

        items = from_thread(slow())
        assert await anext(items) == 1
        second = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)  # the loop goes on while the thread waits
        release.set()
        assert await second == 2
        with pytest.raises(StopAsyncIteration):
            await anext(items)

    asyncio.run(main())


def test_a_cancelled_reader_closes_the_generator_when_its_thread_is_out_of_it():
    async def main():
        inside, release, closed = threading.Event(), threading.Event(), threading.Event()

        def slow():
            try:
                inside.set()
                release.wait()
                yield 1
            finally:
                closed.set()

        items = from_thread(slow())
        reading = asyncio.ensure_future(anext(items))
        await asyncio.to_thread(inside.wait)
        reading.cancel()
        await asyncio.sleep(0)
        release.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert closed.is_set()

    asyncio.run(main())


def test_an_error_reaches_the_reader():
    def broken():
        yield 1
        raise KeyError("two")

    async def main():
        return [item async for item in from_thread(broken())]

    with pytest.raises(KeyError, match="two"):
        asyncio.run(main())


# --- imports ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_retrieval_needs_none_of_the_libraries():
    code = "import sys, retrieval; print({'langchain_core', 'llama_index', 'haystack'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
