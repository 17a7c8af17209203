"""Who stands where: prompts, layouts and content keys, without a model."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blend import Chunk, ChunkKV, Prompt
from blend.keys import FORMAT_VERSION, chunk_key
from blend.layout import lay_out

ids = st.lists(st.integers(0, 50), max_size=8).map(tuple)
some_ids = st.lists(st.integers(0, 50), min_size=1, max_size=8).map(tuple)
prompts = st.builds(Prompt, ids, st.lists(some_ids.map(Chunk), max_size=5).map(tuple), some_ids)
quickly = settings(max_examples=150, deadline=None, derandomize=True)


def kv_of(chunk, prelude=(), length=100):
    rows = len(chunk)
    return ChunkKV("key", "model", chunk.ids, prelude, length, ((torch.zeros(1, rows, 2), torch.zeros(1, rows, 2)),))


@quickly
@given(prompt=prompts)
def test_a_prompt_is_its_parts_one_after_the_other(prompt):
    assert len(prompt) == len(prompt.ids) == len(prompt.system) + sum(map(len, prompt.chunks)) + len(prompt.question)
    for start, chunk in zip(prompt.starts, prompt.chunks, strict=True):
        assert prompt.ids[start : start + len(chunk)] == chunk.ids
    assert prompt.ids[: len(prompt.system)] == prompt.system
    assert prompt.ids[-len(prompt.question) :] == prompt.question


@quickly
@given(prompt=prompts, data=st.data())
def test_another_order_is_the_same_parts(prompt, data):
    order = data.draw(st.permutations(range(len(prompt.chunks))))
    other = prompt.reordered(order)
    assert other.chunks == tuple(prompt.chunks[i] for i in order)
    assert sorted(other.ids) == sorted(prompt.ids)
    assert (other.system, other.question) == (prompt.system, prompt.question)


@quickly
@given(
    prompt=prompts,
    prefix=st.integers(0, 60),
    fused=st.integers(0, 60),
    own_prelude=st.booleans(),
    same_angles=st.booleans(),
)
def test_pieces_cover_every_row_once(prompt, prefix, fused, own_prelude, same_angles):
    prefix, fused = min(prefix, len(prompt)), min(fused, len(prompt))
    prelude = prompt.system if own_prelude else (99,)
    kvs = [kv_of(chunk, prelude) for chunk in prompt.chunks]
    layout = lay_out(prompt, prefix, fused, kvs, lambda length, other: same_angles)
    assert layout.rows == len(prompt)
    assert layout.pieces[0].start == 0
    assert layout.pieces[-1].stop == layout.rows
    assert all(a.stop == b.start for a, b in itertools.pairwise(layout.pieces))
    assert all(piece.start < piece.stop for piece in layout.pieces)
    # The last row always runs, and every row of the question that is not there already.
    assert layout.pieces[-1].origin == "fresh"
    stale, forced = set(layout.stale.tolist()), set(layout.forced.tolist())
    assert not stale & forced
    assert layout.rows - 1 in forced
    covered = max(min(prefix, layout.rows - 1), min(fused, layout.rows - 1))
    assert not (stale | forced) & set(range(covered))
    for piece in layout.pieces:
        rows = set(range(piece.start, piece.stop))
        if piece.origin == "chunk":
            assert prompt.ids[piece.start : piece.stop] == prompt.chunks[piece.chunk].ids[piece.skip :]
            assert piece.start == prompt.starts[piece.chunk] + piece.skip
            assert rows.isdisjoint(stale) if piece.exact else rows <= stale
            assert piece.exact == (same_angles and prompt.ids[: prompt.starts[piece.chunk]] == prelude)
        else:
            assert rows.isdisjoint(stale)
    assert stale == {row for start, stop in layout.stale_spans for row in range(start, stop)}


def test_a_chunk_is_its_tokens():
    assert Chunk((1, 2), "a") == Chunk([1, 2], "b")
    assert len({Chunk((1, 2), "a"), Chunk((1, 2), "b"), Chunk((2, 1))}) == 2
    assert Chunk(torch.tensor([1, 2])).ids == (1, 2)


@quickly
@given(
    a=st.tuples(st.text(max_size=5), ids, ids, st.text(max_size=5)),
    b=st.tuples(st.text(max_size=5), ids, ids, st.text(max_size=5)),
)
def test_keys_are_equal_only_for_equal_parts(a, b):
    assert (chunk_key(*a) == chunk_key(*b)) == (a == b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("m", (1, 2), (3,), ""), ("m", (1,), (2, 3), "")),  # a row moved from the prelude to the chunk
        (("m", (), (3,), ""), ("m", (3,), (3,), "")),
        (("ma", (), (3,), ""), ("m", (), (3,), "a")),  # a letter moved from the model to the salt
        (("m", (), (3, 0), ""), ("m", (), (3,), "")),
        (("m", (), (256,), ""), ("m", (), (0, 1), "")),
    ],
)
def test_parts_do_not_run_into_each_other(a, b):
    assert chunk_key(*a) != chunk_key(*b)


def test_keys_stay_the_same_over_versions():
    """Stores outlive processes. Raise FORMAT_VERSION when this must change."""
    assert FORMAT_VERSION == 2
    assert (
        chunk_key("model", (1, 2), (3, 4, 70_000), "tenant", codec="int8", adapter="lora-1")
        == "c5cef4818f923f808959a7c7a3b1074588b80b2161148267ebdc113508303700"
    )
