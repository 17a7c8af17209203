"""A Background: contexts of tokens, their digest, and the passages that come with the package."""

from __future__ import annotations

import itertools

import pytest
import torch

from blend import Background, Blender, PromptError
from blend.background import NO_BACKGROUND, bundled_passages
from blend.keys import chunk_key
from blend.testing.tiny import tiny_model
from blend.testing.tokenizers import CHATML, tiny_tokenizer

LETTERS = [chr(ord("a") + i) for i in range(12)]


def codes(text):
    return [ord(letter) for letter in text]


def make(background=(), tokenizer=None, **options):
    return Blender(tiny_model("llama"), tokenizer, background=background, check=False, **options)


# --- contexts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contexts", [1, 2, 3, 4, 5, 12])
def test_passages_are_shared_out_in_order(contexts):
    background = Background.of(LETTERS, codes, contexts)
    assert len(background) == contexts
    assert [chr(i) for ids in background.contexts for i in ids] == LETTERS
    sizes = [len(ids) for ids in background.contexts]
    assert max(sizes) - min(sizes) <= 1


def test_there_are_no_more_contexts_than_passages():
    assert Background.of(LETTERS[:3], codes, 4).contexts == ((97,), (98,), (99,))


def test_four_contexts_of_three_passages_are_what_is_made_of_the_bundled_ones():
    background = Background.of(bundled_passages(), codes)
    texts = ["".join(map(chr, ids)) for ids in background.contexts]
    assert texts == ["".join(bundled_passages()[i : i + 3]) for i in range(0, 12, 3)]


def test_ids_become_plain_numbers():
    background = Background([torch.tensor([3, 4]), [5]])
    assert background == Background(((3, 4), (5,)))
    assert hash(background) == hash(Background(((3, 4), (5,))))
    assert all(type(i) is int for ids in background.contexts for i in ids)


def test_nothing_is_no_background():
    assert not NO_BACKGROUND
    assert Background([]) == NO_BACKGROUND
    assert NO_BACKGROUND.digest == ""


# --- its digest -------------------------------------------------------------------------------------------


def test_digests_differ_with_every_token_cut_and_order():
    backgrounds = [((1, 2), (3,)), ((1,), (2, 3)), ((1, 2, 3),), ((3,), (1, 2)), ((1, 2), (4,)), ((1, 2),), ((1, 256),)]
    digests = [Background(contexts).digest for contexts in backgrounds]
    assert all(len(digest) == 64 for digest in digests)
    assert all(a != b for a, b in itertools.combinations(digests, 2))
    assert Background(([1, 2], [3])).digest == digests[0]


def test_digests_stay_the_same_over_versions():
    """They are part of keys, and stores outlive processes."""
    assert Background(((1, 2), (70_000,))).digest == (
        "c74c0c12874c4f967a83d2200aeaeaccad04d7d8239278f87846dd89d51bfc51"
    )
    parts = "model", (1, 2), (3, 4, 70_000), "tenant"
    assert chunk_key(*parts, background="") == chunk_key(*parts)
    assert len({chunk_key(*parts), chunk_key(*parts, background="a"), chunk_key(*parts, background="b")}) == 3


# --- the bundled passages ---------------------------------------------------------------------------------


def test_twelve_passages_on_twelve_subjects():
    passages = bundled_passages()
    assert len(set(passages)) == 12
    assert all(300 < len(passage) < 800 for passage in passages)
    assert all(passage == passage.strip() and "\n" not in passage for passage in passages)


def test_a_blender_with_a_tokenizer_has_them_as_its_own_chunks():
    with make(tokenizer=tiny_tokenizer(template=CHATML)) as blender:
        background = blender.setup.background
        assert len(background) == 4
        ids = [i for context in background.contexts for i in context]
        assert ids == [i for passage in bundled_passages() for i in blender.chunk(passage).ids]


def test_a_blender_without_a_tokenizer_has_none():
    with make() as blender:
        assert blender.setup.background == NO_BACKGROUND


def test_passages_of_ones_own():
    with make(LETTERS[:2], tiny_tokenizer()) as blender:
        assert blender.setup.background.contexts == tuple(blender.chunk(letter).ids for letter in LETTERS[:2])


def test_none_turns_it_off():
    with make(None, tiny_tokenizer()) as blender:
        assert blender.setup.background == NO_BACKGROUND


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contexts", "says"),
    [
        (((1,), ()), "context 1 of the background has no tokens: drop it"),
        (("a passage",), "token ids, and 'a passage' is text: use Background.of, or give the texts to the Blender"),
    ],
)
def test_contexts_that_are_none(contexts, says):
    with pytest.raises(PromptError, match=says):
        Background(contexts)


@pytest.mark.parametrize(("passages", "contexts"), [([], 4), (["a"], 0)])
def test_too_little_for_a_context(passages, contexts):
    with pytest.raises(PromptError, match=rf"{len(passages)} passages make no {contexts} contexts"):
        Background.of(passages, codes, contexts)


@pytest.mark.parametrize(
    ("background", "tokenizer", "says"),
    [
        ("one text", tiny_tokenizer(), "the background is one text, 'one text': give a list of passages"),
        (["a passage"], None, "no tokenizer"),
        (["a passage", " "], tiny_tokenizer(), "is empty: drop it"),
        (Background(((3, 999),)), None, "token id 999 is outside the model's vocabulary of 256"),
        (Background(((3, -1),)), None, "token id -1 is outside"),
    ],
)
def test_a_background_that_a_blender_cannot_use(background, tokenizer, says):
    """And the model goes back as it came."""
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(PromptError, match=says):
        Blender(model, tokenizer, background=background, check=False)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == before
    with Blender(model, tokenizer, background=None, check=False) as blender, pytest.raises(PromptError, match=says):
        blender.averaged(background)
