"""What a user can get wrong: each with its own error, a message with the way out, and nothing lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blend import (
    Blender,
    BudgetError,
    Chunk,
    FirstK,
    ForeignKV,
    FullRecompute,
    KVBlendError,
    KVDeviation,
    Prompt,
    PromptError,
    PromptTooLong,
    QueryAttention,
    UnsupportedModel,
    UnsupportedRotation,
)
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import BOS_TEMPLATE, CHATML, CONTROL, tiny_tokenizer
from blend.text import PromptText

TEMPLATES = {"chatml": CHATML, "with bos, no system role": BOS_TEMPLATE, "none": None}
every_tokenizer = pytest.mark.parametrize(
    ("kind", "bos", "template"),
    [(kind, bos, template) for kind in ("bpe", "unigram") for bos in (False, True) for template in TEMPLATES.values()],
    ids=[
        f"{kind}, {'bos' if bos else 'no bos'}, {name}"
        for kind in ("bpe", "unigram")
        for bos in (0, 1)
        for name in TEMPLATES
    ],
)


@pytest.fixture
def blender():
    return Blender(tiny_model("llama"), tiny_tokenizer(), check=False)


def is_helpful(error):
    """Says more than that something is wrong: what, and what to do."""
    return isinstance(error, KVBlendError) and len(str(error)) > 30


# --- budgets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FirstK, QueryAttention, KVDeviation])
@pytest.mark.parametrize("ratio", [-0.1, 1.5, 15, float("nan"), float("inf")])
def test_ratio(kind, ratio):
    with pytest.raises(BudgetError, match=rf"ratio is {ratio}: it must lie in \[0, 1\]"):
        kind(ratio)
    with pytest.raises(ValueError, match="ratio"):
        kind(ratio=ratio)


def test_rows():
    with pytest.raises(BudgetError, match="rows is -3: it must be a whole number, 0 or more"):
        FirstK(rows=-3)


def test_a_probe_layer_that_the_model_lacks(blender):
    with pytest.raises(BudgetError, match="probe layer 7 does not exist: the model has layers 0 to 3"):
        blender.fuse(tiny_prompt(1), selector=QueryAttention(layers=(7,)))
    with pytest.raises(BudgetError, match="probe layer 7"):
        Blender(tiny_model("llama"), selector=QueryAttention(layers=(7,)), check=False)


# --- parts of a prompt --------------------------------------------------------------------------------


def test_an_empty_chunk():
    with pytest.raises(PromptError, match="chunk 'notes' has no tokens: drop it, or give it some text"):
        Chunk((), "notes")


def test_a_negative_token_in_a_chunk():
    with pytest.raises(PromptError, match="negative token id -5"):
        Chunk((3, -5))


def test_an_empty_question():
    with pytest.raises(PromptError, match="question is empty"):
        Prompt((1, 2), (Chunk((3,)),), ())


@pytest.mark.parametrize("part", [(3, 4, 5), [3, 4], "text", None])
def test_a_part_that_is_no_chunk(part):
    with pytest.raises(PromptError, match=rf"chunks\[1\] is a {type(part).__name__}, not a Chunk: build it with"):
        Prompt((1,), (Chunk((3,)), part), (2,))


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_empty_text(blender, text):
    with pytest.raises(PromptError, match="the question is empty"):
        blender.prompt(text, ["a passage"])
    with pytest.raises(PromptError, match="chunk 'passage 2' is empty: drop it, or give it some text"):
        blender.prompt("a question", ["a passage", text])
    with pytest.raises(PromptError, match="is empty"):
        blender.chunk(text, "notes")
    with pytest.raises(PromptError, match="is empty"):
        blender.encode(["a passage", text])
    assert list(blender.store.keys()) == []
    answer = blender.generate(blender.prompt("a question", ["a passage"]), do_sample=False, max_new_tokens=2)
    with pytest.raises(PromptError, match="the question is empty"):
        blender.follow_up(answer, text)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 2)])
def test_an_order_that_is_none(order):
    with pytest.raises(PromptError, match="is no order of 3 chunks"):
        tiny_prompt(1).reordered(order)


def test_text_without_a_tokenizer():
    blender = Blender(tiny_model("llama"), check=False)
    for call in (lambda: blender.prompt("q"), lambda: blender.chunk("c"), lambda: blender.encode([Chunk((3,))])):
        with pytest.raises(
            PromptError, match="no tokenizer: build Prompt and Chunk from token ids, or pass tokenizer="
        ):
            call()


# --- length and vocabulary ----------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(blender):
    prompt = tiny_prompt(1, chunks=(200, 200, 100))
    for call in (blender.fuse, blender.prefill, blender.generate):
        with pytest.raises(PromptTooLong, match=r"the prompt has 521 tokens and the model holds 512: drop passages"):
            call(prompt)
    assert list(blender.store.keys()) == [], "nothing was encoded for it"


def test_a_prompt_as_long_as_the_context(blender):
    assert len(blender.fuse(tiny_prompt(1, chunks=(200, 200, 91))).prompt) == 512


@pytest.mark.parametrize("rows", [501, 700])
def test_a_chunk_longer_than_the_context(blender, rows):
    chunks = [Chunk(tiny_ids(20, seed=1)), Chunk(tiny_ids(rows, seed=2), "the long one"), Chunk(tiny_ids(30, seed=3))]
    message = (
        rf"chunk 'the long one' has {rows} tokens, {rows + 12} with its prelude, and the model holds 512: split it"
    )
    with pytest.raises(PromptTooLong, match=message):
        blender.encode(chunks, system=tiny_ids(12))
    assert list(blender.store.keys()) == [], "nothing was encoded"
    assert blender.encode([chunks[0], chunks[2]], system=tiny_ids(12)).encoded == 2


@pytest.mark.parametrize("part", ["system", "chunk", "question"])
@pytest.mark.parametrize("token", [256, 100_000])
def test_a_token_outside_the_vocabulary(blender, part, token):
    prompt = tiny_prompt(1)
    odd = {
        "system": replace(prompt, system=(1, token)),
        "chunk": replace(prompt, chunks=(*prompt.chunks, Chunk((5, token)))),
        "question": replace(prompt, question=(token, 4)),
    }[part]
    for call in (blender.fuse, blender.prefill):
        with pytest.raises(PromptError, match=rf"token id {token} is outside the model's vocabulary of 256"):
            call(odd)
    assert list(blender.store.keys()) == []


@pytest.mark.parametrize("part", ["system", "question"])
def test_a_negative_token_outside_chunks(blender, part):
    with pytest.raises(PromptError, match="-1"):
        blender.fuse(replace(tiny_prompt(1), **{part: (4, -1, 5)}))


def test_a_token_outside_the_vocabulary_in_encode(blender):
    with pytest.raises(PromptError, match="token id 999 is outside the model's vocabulary of 256"):
        blender.encode([Chunk((5, 6)), Chunk((5, 999))], system=(1, 2))
    assert list(blender.store.keys()) == []


def test_padding_inside_a_chunk(blender):
    padded = Chunk((*tiny_ids(7), 0, 0), "notes")
    with pytest.raises(PromptError, match=r"chunk 'notes' holds the padding token 0 at offset 7: .* take it out"):
        blender.fuse(replace(tiny_prompt(1), chunks=(padded,)))
    with pytest.raises(PromptError, match="padding token"):
        blender.encode([Chunk((5, 6)), padded], system=(1, 2))
    assert list(blender.store.keys()) == []


# --- models and options -------------------------------------------------------------------------------


@pytest.mark.parametrize("prelude", ["System", "", None, "chunk"])
def test_an_unknown_prelude(prelude):
    with pytest.raises(PromptError, match=r"prelude is .*: choose 'system', 'bos' or 'none'"):
        Blender(tiny_model("llama"), prelude=prelude)


def test_prelude_bos_needs_a_bos():
    for tokenizer in (tiny_tokenizer(bos=False), None):
        with pytest.raises(PromptError, match="prelude='bos', but the tokenizer puts no BOS before a text"):
            Blender(tiny_model("llama"), tokenizer, prelude="bos")
    assert Blender(tiny_model("llama"), tiny_tokenizer(bos=True), prelude="bos", check=False)


@pytest.mark.parametrize("name", ["falcon", "falcon_alibi", "doge", "bloom"])
def test_a_selector_that_needs_attention_that_cannot_be_read(name):
    with pytest.raises(UnsupportedModel, match="use KVDeviation or FirstK in place of query-attention"):
        Blender(tiny_model(name), selector=QueryAttention())
    blender, prompt = Blender(tiny_model(name)), tiny_prompt(1)
    with pytest.raises(UnsupportedModel, match="attention cannot be read"):
        blender.fuse(prompt, selector=QueryAttention())
    for selector in (KVDeviation(0.3), FirstK(0.3), FullRecompute()):
        assert blender.fuse(prompt, selector=selector).report.fallback is None


def test_training_mode():
    with pytest.raises(
        UnsupportedModel, match=r"LlamaForCausalLM is in training mode \(dropout\): call model.eval\(\)"
    ):
        Blender(tiny_model("llama").train())


def test_a_model_cast_after_loading():
    with pytest.raises(UnsupportedRotation, match=r"inv_freq is torch.bfloat16.*Reload it with from_pretrained"):
        Blender(tiny_model("llama").to(torch.bfloat16))


def test_a_model_cast_while_it_is_used(blender):
    blender.model.to(torch.bfloat16)
    for call in (blender.fuse, blender.prefill):
        with pytest.raises(UnsupportedModel, match=r"cast from torch.float32 to torch.bfloat16.*dtype="):
            call(tiny_prompt(1))
    with pytest.raises(UnsupportedModel, match="cast from"):
        blender.encode(tiny_prompt(1).chunks, system=(1,))
    assert list(blender.store.keys()) == []


def test_chat_without_a_template():
    with pytest.raises(PromptError, match="no chat template: use chat=False"):
        Blender(tiny_model("llama"), tiny_tokenizer(), chat=True)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message['role'] }} {% endfor %}",
        "{% for message in messages %}{{ message['content'] }}{{ message['content'] }}{% endfor %}",
    ],
    ids=["drops the text", "repeats it"],
)
def test_a_template_that_cannot_be_used(template):
    text = PromptText(tiny_tokenizer(template=template))
    with pytest.raises(PromptError, match="does not pass the user's message through once: use chat=False"):
        text.prompt("who?", ["a passage"])
    assert PromptText(text.tokenizer, chat=False).prompt("who?", ["a passage"])


# --- KV of another model ------------------------------------------------------------------------------


def foreign_entry(blender, prompt):
    """KV that another model computed, filed under our key: what a corrupted or confused store hands out."""
    other = Blender(tiny_model("llama", seed=9), check=False)
    other.encode(prompt.chunks[1:2], system=prompt.system)
    kv = other.store.get(next(other.store.keys()))
    return replace(kv, key=blender.setup.plan(prompt.system).key(prompt.chunks[1]))


def test_kv_of_another_model_is_a_miss_and_never_used(blender):
    prompt = tiny_prompt(1)
    truth = Blender(tiny_model("llama"), tiny_tokenizer(), check=False)
    truth.encode(prompt.chunks, system=prompt.system)
    blender.encode([prompt.chunks[0], prompt.chunks[2]], system=prompt.system)
    blender.store.put(foreign_entry(blender, prompt))
    fusion = blender.fuse(prompt, selector=FirstK(0.3))
    assert [c.source for c in fusion.report.chunks] == ["hit", "miss", "hit"]
    expected = truth.fuse(prompt, selector=FirstK(0.3)).logits
    assert float((fusion.logits - expected).abs().max() / expected.abs().max()) <= 2e-5
    assert [c.source for c in blender.fuse(prompt).report.chunks] == ["hit"] * 3, "it was replaced"


def test_kv_of_another_model_is_encoded_again(blender):
    """``encode`` promises that its chunks hit."""
    prompt = tiny_prompt(1)
    blender.store.put(foreign_entry(blender, prompt))
    assert blender.encode(prompt.chunks, system=prompt.system)[:2] == (3, 0)
    assert [c.source for c in blender.fuse(prompt).report.chunks] == ["hit"] * 3


def test_adding_kv_of_another_model(blender):
    prompt = tiny_prompt(1)
    own = Blender(tiny_model("llama"), tiny_tokenizer(), check=False)
    own.encode(prompt.chunks, system=prompt.system)
    entries = [own.store.get(key) for key in own.store.keys()]  # noqa: SIM118
    with pytest.raises(ForeignKV, match="model, dtype or tokenizer differ; encode the chunk here instead"):
        blender.add([entries[0], foreign_entry(blender, prompt)])
    assert list(blender.store.keys()) == [], "none is stored"
    blender.add(entries)
    assert [c.source for c in blender.fuse(prompt).report.chunks] == ["hit"] * 3


# --- text, templates and control tokens ---------------------------------------------------------------

SPELLED = "before " + " ".join(CONTROL) + " after"


@every_tokenizer
def test_control_tokens_in_passages_and_questions_stay_text(kind, bos, template):
    """A document cannot close the user's turn, or end the prompt."""
    text = PromptText(tiny_tokenizer(kind, bos=bos, template=template))
    control = set(text.tokenizer.all_special_ids) - {text.tokenizer.unk_token_id}
    chunk = text.chunk(SPELLED)
    assert not control & set(chunk.ids)
    assert not control & set(text.encode(SPELLED))
    clean, spelled = (text.prompt(question, [passage]) for question, passage in (("who?", "a b"), (SPELLED, SPELLED)))
    for one, other in ((clean.system, spelled.system), (clean.question, spelled.question)):
        assert [i for i in one if i in control] == [i for i in other if i in control]


@every_tokenizer
def test_bos_exactly_once(kind, bos, template):
    tokenizer = tiny_tokenizer(kind, bos=bos, template=template)
    text = PromptText(tokenizer)
    ids = text.prompt("Who built the pier?", ["The old pier.", "The lamps."], "Answer.").ids
    wanted = template == BOS_TEMPLATE or (bos and template is None)
    assert ids.count(tokenizer.bos_token_id) == wanted
    assert ids[0] == tokenizer.bos_token_id or not wanted
    assert text.bos() == ((tokenizer.bos_token_id,) if bos else ())
    assert ids[: len(text.system_ids("Answer."))] == text.system_ids("Answer.")


@every_tokenizer
def test_a_chunk_is_the_same_wherever_it_stands(kind, bos, template):
    """No BOS, no template, no separator of its own in a chunk: its ids do not depend on the prompt."""
    text = PromptText(tiny_tokenizer(kind, bos=bos, template=template))
    alone = text.chunk("The old pier was built in 1911.")
    first = text.prompt("who?", ["The old pier was built in 1911.", "The lamps."], "Answer.")
    last = text.prompt("when?", ["The lamps.", "The old pier was built in 1911."], "")
    assert first.chunks[0] == last.chunks[1] == alone
    assert first.ids == (*first.system, *first.chunks[0].ids, *first.chunks[1].ids, *first.question)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_prompt_is_what_the_template_says(template):
    """Head, passages, question and tail, with nothing injected between the passages."""
    tokenizer = tiny_tokenizer(template=template)
    prompt = PromptText(tokenizer).prompt("Who lights the lamps?", ["The old pier.", "Its lamps."], "Be short.")
    body = "The old pier.\n\nIts lamps.\n\nQuestion: Who lights the lamps?"
    expected = {
        CHATML: f"<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n",
        BOS_TEMPLATE: f"<s><|im_start|>user\nBe short.\n\n{body}<|im_end|>\n<|im_start|>assistant\n",
        None: f"Be short.\n\n{body}\nAnswer:",
    }
    assert tokenizer.decode(prompt.ids) == expected[template]


def test_no_system_part():
    for template in (CHATML, None):
        prompt = PromptText(tiny_tokenizer(template=template)).prompt("who?", ["a b"], "")
        assert prompt.ids
        blender = Blender(tiny_model("llama"), tiny_tokenizer(template=template), check=False)
        assert blender.fuse(prompt).report.rows == len(prompt)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Chunk(()),
        lambda: Prompt((), (), ()),
        lambda: FirstK(2.0),
        lambda: FirstK(k=-1),
        lambda: Blender(tiny_model("llama"), prelude="x"),
        lambda: Blender(tiny_model("llama").train()),
        lambda: Blender(tiny_model("gpt2")),
        lambda: Blender(tiny_model("mamba")),
    ],
)
def test_every_error_is_ours_and_says_what_to_do(call):
    with pytest.raises(KVBlendError) as raised:
        call()
    assert is_helpful(raised.value)
