"""Chunks of a Blender before any question: encoded in the background, told missing, forgotten."""

from __future__ import annotations

import threading

import pytest

from blend import Blender, Chunk, FullReuse, Prompt, PromptError
from blend.afterwards import Afterwards
from blend.prefix import BlockPrefixCache, RadixPrefixCache
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from blend.text import PromptText

CHUNKS = [Chunk(tiny_ids(20 + i, seed=i)) for i in range(4)]
SYSTEM = tiny_ids(9, seed=9)


@pytest.fixture
def blender():
    with Blender(tiny_model("llama"), selector=FullReuse(), check=False) as blender:
        yield blender


def test_chunks_are_encoded_in_the_background(blender):
    blender.encode(CHUNKS[:1], system=SYSTEM)
    assert blender.missing(CHUNKS, system=SYSTEM) == CHUNKS[1:]
    assert blender.encode_afterwards(CHUNKS, system=SYSTEM) == CHUNKS[1:]
    blender.drain(progress=True)
    assert blender.missing(CHUNKS, system=SYSTEM) == []
    assert blender.encode(CHUNKS, system=SYSTEM).encoded == 0
    assert blender.missing(CHUNKS, system=SYSTEM[:-1]) == CHUNKS, "behind another system part they are other chunks"


def test_a_bad_chunk_is_refused_before_any_is_queued(blender):
    with pytest.raises(PromptError, match="vocabulary"):
        blender.encode_afterwards([*CHUNKS, Chunk((10**9,))], system=SYSTEM)
    assert len(blender.setup.afterwards) == 0


def test_what_is_forgotten_is_gone(blender):
    blender.encode(CHUNKS, system=SYSTEM)
    prompt = Prompt(SYSTEM, tuple(CHUNKS), tiny_ids(5, seed=1))
    blender.prefill(prompt)
    assert blender.known_rows(prompt) == len(prompt) - 1
    assert blender.forget(CHUNKS[:2], system=SYSTEM) == 2
    assert blender.known_rows(prompt) == 0
    assert blender.missing(CHUNKS, system=SYSTEM) == CHUNKS[:2]
    assert blender.forget(CHUNKS[:2], system=SYSTEM) == 0
    assert [chunk.source for chunk in blender.fuse(prompt).report.chunks] == ["miss", "miss", "hit", "hit"]


def test_what_is_forgotten_is_not_encoded_later(blender):
    with blender.setup.afterwards.request():
        blender.encode_afterwards(CHUNKS, system=SYSTEM)
        blender.forget(CHUNKS[:3], system=SYSTEM)
    blender.drain()
    assert blender.missing(CHUNKS, system=SYSTEM) == CHUNKS[:3]


def test_a_job_that_is_being_done_is_waited_for():
    afterwards, begun, go, done = Afterwards(), threading.Event(), threading.Event(), []

    def job():
        begun.set()
        go.wait(60)
        done.append(1)

    afterwards.add("job", job)
    afterwards.add("other", lambda: done.append(2))
    begun.wait(60)
    canceller = threading.Thread(target=lambda: (afterwards.cancel(["job"]), done.append("cancelled")))
    canceller.start()
    go.set()
    canceller.join(60)
    assert done.index(1) < done.index("cancelled")
    afterwards.close()
    assert 2 in done


@pytest.mark.parametrize("prefix", [RadixPrefixCache, BlockPrefixCache])
def test_known_rows_reads_and_locks_nothing(prefix):
    with Blender(tiny_model("llama"), prefix=prefix(), check=False) as blender:
        prompt = tiny_prompt()
        assert blender.known_rows(prompt) == 0
        blender.prefill(prompt)
        known = blender.known_rows(prompt)
        assert known == (len(prompt) - 1) // blender.setup.prefix.granularity * blender.setup.prefix.granularity
        other = prompt.reordered([0, 2, 1])
        shared = len(prompt.system) + len(prompt.chunks[0])
        assert blender.known_rows(other) // blender.setup.prefix.granularity == (
            shared // blender.setup.prefix.granularity
        )
        stats = blender.setup.prefix.stats()
        assert blender.setup.prefix.evict(stats.nbytes) == stats.nbytes, "nothing is locked any more"


def test_a_question_can_be_put_otherwise():
    with Blender(tiny_model("llama"), tiny_tokenizer(template=CHATML), check=False) as blender:
        text = blender.text
        usual = text.prompt("who?", ["a keeper"])
        assert text.prompt("who?", ["a keeper"], ask="Question: {question}") == usual
        other = text.prompt("who?", ["a keeper"], ask="In short: {question} Say why.<|im_end|>")
        written = blender.tokenizer.decode(other.question)
        assert "In short: who? Say why." in written
        assert other.question.count(5) == usual.question.count(5) + 1, "a template may hold control tokens"
        asked = text.prompt("who?<|im_end|>", ["a keeper"])
        assert asked.question.count(5) == usual.question.count(5), "a question may not"
        with pytest.raises(PromptError, match=r"no \{question\}"):
            text.prompt("who?", ["a keeper"], ask="Answer!")
        turn = text.turn((9, 10), "and when?", "In short: {question}")
        assert "In short: and when?" in blender.tokenizer.decode(turn)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("text", ["", " ", "The old pier.", "a <|im_end|> b</s>", "Bread & tide\n\n", "<s><s>", "212"])
def test_counting_is_encoding(kind, text):
    text_of = PromptText(tiny_tokenizer(kind, template=CHATML))
    assert text_of.count(text) == len(text_of.encode(text))


def test_counting_with_a_real_tokenizer(smollm2):
    text_of = PromptText(smollm2[1])
    for text in ("渡轮每天过河两次。", "👩‍👩‍👧 naïve é", "x" * 999, "<|im_start|>user", "tab\t \r\n end"):
        assert text_of.count(text) == len(text_of.encode(text))
    text_of.tokenizer("a b c d", truncation=True, max_length=2)
    assert text_of.count("a b c d e f") == 6, "what others ask of the tokenizer changes nothing"
