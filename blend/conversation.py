"""A conversation as a prompt: passages stand before its first question, where they were encoded. Knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blend.chunk import Chunk
from blend.errors import PromptError
from blend.prompt import Prompt
from blend.text import DEFAULT_ASK, PromptText

__all__ = ["Turn", "asked", "conversation"]


class Turn(NamedTuple):
    """A question that was asked, and the answer it got."""

    question: str
    answer: str


def conversation(
    text: PromptText,
    turns: Sequence[Turn],
    question: str,
    passages: Sequence[str | Chunk] = (),
    system: str = "",
) -> Prompt:
    """The prompt of a question behind earlier turns.

    ::

        | system | passages, of whichever turn | question 1 | answer 1 | ... | question |

    Chunk KV depends on what the chunk was encoded behind. Passages that stood behind the history would have to be
    encoded anew in every turn; in front of it they are hits in all of them.

    Without passages the prompt is what the chat template, if there is one, makes of the messages. Neither history nor
    question can spell a control token; ``system`` is trusted, as in :meth:`PromptText.prompt`.

    Args:
        text: tokenizer and chat template.
        turns: earlier ones, oldest first.
        question: the one to answer, not empty.
        passages: texts, or chunks made before.
        system: instructions; may be empty.

    Raises:
        PromptError: an empty question or passage, or a chat template that drops or repeats a message.
    """
    if not all(words.strip() for words in (question, *(turn.question for turn in turns))):
        raise PromptError("a question is empty: leave out that turn, or ask something")
    if text.chat and not passages:
        return Prompt((), (), _by_template(text, turns, question, system))
    first = text.prompt(question, passages, system)
    return Prompt(first.system, first.chunks, asked(text, turns, question, system))


def asked(
    text: PromptText, turns: Sequence[Turn], question: str, system: str = "", ask: str = DEFAULT_ASK
) -> tuple[int, ...]:
    """Ids of earlier turns and a question, as they stand behind the passages.

    Args:
        ask: how questions are put, with ``{question}`` where they go.
    """
    questions = [*(turn.question for turn in turns), question]
    ids = list(text.prompt(questions[0], (), system, ask).question)
    for turn, following in zip(turns, questions[1:], strict=True):
        ids += text.turn(_said(text, turn.answer), following, ask)
    return tuple(ids)


def _said(text: PromptText, answer: str) -> list[int]:
    # Without a template an answer goes on behind "Answer:", with a blank; a template ends in a line of its own.
    return text.encode(answer.strip() if text.chat else f" {answer.strip()}")


def _by_template(text: PromptText, turns: Sequence[Turn], question: str, system: str) -> tuple[int, ...]:
    """Ids of the rendered template, with the messages' own ids where they go."""
    contents = [*(words.strip() for turn in turns for words in turn), question.strip()]
    marks = [f"<<kvblend:message {place}>>" for place in range(len(contents))]
    rest, ids = _render(text, marks, system.strip()), list[int]()
    for mark, content in zip(marks, contents, strict=True):
        if rest.count(mark) != 1:
            raise PromptError("the chat template does not pass every message through once: use chat=False")
        before, rest = rest.split(mark)
        ids += [*text._template_ids(before), *text.encode(content)]
    return (*ids, *text._template_ids(rest))


def _render(text: PromptText, contents: Sequence[str], system: str) -> str:
    def rendered(system: Sequence[str], contents: Sequence[str]) -> str:
        messages = [{"role": "system", "content": words} for words in system]
        messages += [{"role": ("user", "assistant")[i % 2], "content": words} for i, words in enumerate(contents)]
        return str(text.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    if not system:
        return rendered((), contents)
    try:
        return rendered((system,), contents)
    except Exception:
        # Some templates (Gemma 2) have no system role: the instructions open the user's turn instead.
        return rendered((), [f"{system}\n\n{contents[0]}", *contents[1:]])
