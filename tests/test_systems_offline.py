"""Chunk KV encoded in context, and the systems that answer from it, against full prefill and figures by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from blend import (
    Blender,
    BudgetError,
    Chunk,
    DiskStore,
    FullRecompute,
    FullReuse,
    MemoryStore,
    Prompt,
    PromptTooLong,
    UnsupportedModel,
)
from blend.layout import Layout, Piece
from blend.readings import Wanted, means
from blend.selectors import Candidates
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.selectors import SelectorTests
from blend.testing.tiny import tiny_model
from eval.demo import load_passages
from eval.fidelity import kl_divergence
from eval.inside import kv_deviation, question_attention
from eval.systems import SYSTEMS, Case, make_systems
from eval.systems.cachecraft import EARLIER, CacheCraft, Note, need, take_note
from eval.systems.corpus import EmbeddedCorpus, UnknownPassage
from eval.systems.exact import full_prefill
from eval.systems.offline import InContext, NotPrepared

PROMPT = tiny_prompt()  # 12 rows, chunks of 30, 41 and 25, 9 rows
A, B, C = PROMPT.chunks
D, E, F = (Chunk(tiny_ids(rows, 70 + rows), name) for rows, name in ((28, "d"), (33, "e"), (22, "f")))
OFFLINE = ("fusionrag", "prophetkv-offline", "cachecraft")
OWN = (*OFFLINE, "fusionrag-online", "a3", "oracle-kv", "oracle-attention")


class Compass:
    """Embeds a text that is an angle in degrees and a length; keeps how many texts each call was given."""

    name, identity, dimension = "compass", "compass", 2

    def __init__(self):
        self.calls = []

    def encode(self, texts):
        self.calls.append(len(texts))
        angles, lengths = np.array([[float(part) for part in text.split()] for text in texts]).T
        turns = np.deg2rad(angles)
        return (lengths[:, None] * np.stack([np.cos(turns), np.sin(turns)], axis=1)).astype(np.float32)

    def encode_query(self, query):
        return self.encode([query])[0]


def corpus(**angles):
    """The six passages, some of them turned elsewhere. Of A the nearest are B, D, E; of B they are A, D, E."""
    places = {"a": 0, "b": 10, "c": 100, "d": 25, "e": 45, "f": 70} | angles
    passages = zip((A, B, C, D, E, F), places.values(), strict=True)
    return EmbeddedCorpus([(chunk, f"{angle} {len(chunk)}") for chunk, angle in passages], Compass())


def open_blender(family="llama", **options):
    return Blender(tiny_model(family, torch.float32), check=False, **options)


@pytest.fixture(scope="module")
def blender():
    with open_blender() as blender:
        yield blender


@pytest.fixture
def fresh():
    with open_blender() as blender:
        yield blender


def case_of(blender, prompt=PROMPT, **angles):
    return Case(prompt, full_prefill(blender, prompt), corpus(**angles))


def answered(blender, name, ratio, case):
    """The fusion that a system comes to, prepared."""
    (system,) = make_systems([name], ratio)
    system.prepare(blender, case)
    return system.run(blender, case).fusion


def kl(fusion, truth):
    return float(kl_divergence(truth.logits, fusion.logits))


def stored(blender, kv, chunk, system=PROMPT.system):
    return kv.tenant(blender).setup.fetch(means([chunk]), system).get(Wanted(chunk, "mean"))


# --- the corpus ---------------------------------------------------------------------------------------


def test_neighbours_come_nearest_first_whatever_the_vectors_lengths():
    assert corpus().neighbours(A, 3) == [B, D, E]
    assert corpus().neighbours(E, 4) == [D, F, B, A]
    assert corpus(f=46).neighbours(E, 1) == [F]


def test_a_small_corpus_gives_what_it_has_and_a_tie_goes_to_the_earlier():
    assert corpus().neighbours(A, 10) == [B, D, E, F, C]
    assert corpus(b=40, c=40, d=40, e=40, f=40).neighbours(A, 3) == [B, C, D]


def test_a_passage_is_not_its_own_neighbour_even_where_another_is_as_near():
    assert corpus(b=0, c=0).neighbours(C, 2) == [A, B]


def test_vectors_are_computed_once_in_batches_and_only_when_asked_for():
    compass = Compass()
    chunks = [Chunk((number + 3,)) for number in range(300)]
    many = EmbeddedCorpus([(chunk, f"{number / 2} 1") for number, chunk in enumerate(chunks)], compass)
    assert compass.calls == []
    assert many.neighbours(chunks[299], 2) == [chunks[298], chunks[297]]
    assert many.neighbours(chunks[0], 2) == [chunks[1], chunks[2]]
    assert compass.calls == [256, 44]


def test_of_passages_with_the_same_tokens_the_first_counts():
    twice = EmbeddedCorpus([(A, "0 1"), (B, "50 1"), (Chunk(A.ids, "again"), "90 1"), (C, "89 1")], Compass())
    assert len(twice) == 3
    assert twice.neighbours(A, 5) == [B, C]


def test_an_unknown_passage_is_named():
    with pytest.raises(UnknownPassage, match="'x' of 4 tokens is none of the corpus's 6"):
        corpus().neighbours(Chunk((3, 4, 5, 6), "x"), 1)


# --- KV in context ------------------------------------------------------------------------------------


def test_behind_one_neighbour_kv_is_full_prefills(blender):
    kv = InContext(1)
    kv.prepare(blender, case_of(blender))
    entry = stored(blender, kv, A)
    full = full_prefill(blender, Prompt(PROMPT.system, (B,), A.ids))
    assert entry.prelude == (*PROMPT.system, *B.ids)
    assert (entry.base, entry.length) == (12 + 41, 12 + 41 + 30)
    for pair, whole in zip(entry.layers, full.layers, strict=True):
        for rows, all_rows in zip(pair, whole, strict=True):
            assert rows.shape[1] == len(A)
            assert (rows - all_rows[:, entry.base :]).abs().max() < 1e-5


def test_right_behind_its_neighbour_it_is_exact(blender):
    prompt = Prompt(PROMPT.system, (B, A), PROMPT.question)
    kv, case = InContext(1), case_of(blender, prompt)
    kv.prepare(blender, case)
    reused = kv.tenant(blender).fuse(prompt, selector=FullReuse())
    told = [(chunk.source, chunk.moved, chunk.exact) for chunk in reused.report.chunks]
    assert told == [("hit", -len(A), False), ("hit", 0, True)], "B was encoded behind A, and A behind B"
    assert kl(reused, case.truth) > 1e-6
    assert kl(kv.tenant(blender).fuse(prompt, selector=FullRecompute()), case.truth) < 1e-9


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_elsewhere_keys_are_turned_and_values_are_as_they_were(family):
    prompt = Prompt(PROMPT.system, (C, A, B), PROMPT.question)
    kv = InContext(1)
    with open_blender(family) as blender:
        kv.prepare(blender, case_of(blender, prompt))
        fusion = kv.tenant(blender).fuse(prompt, selector=FullReuse())
        plain = blender.fuse(prompt, selector=FullReuse())
        full = full_prefill(blender, prompt)
        context = full_prefill(blender, Prompt(PROMPT.system, (B,), A.ids))
    assert fusion.report.chunks[1].moved == len(C) - len(B)
    here, there = slice(37, 37 + 30), slice(53, 53 + 30)
    assert (fusion.layers[0][0][:, here] - full.layers[0][0][:, here]).abs().max() < 1e-5, "layer 0 sees positions only"
    for layer, ((keys, values), (own_keys, own_values)) in enumerate(zip(fusion.layers, context.layers, strict=True)):
        assert (values[:, here] - own_values[:, there]).abs().max() < 1e-5
        products, own = (k @ k.transpose(1, 2) for k in (keys[:, here], own_keys[:, there]))
        assert (products - own).abs().max() < 1e-3, "turned alike, keys have the same products with each other"
        if layer > 1:
            assert (values[:, here] - plain.layers[layer][1][:, here]).abs().max() > 1e-3, "plain KV saw no neighbour"


def test_several_neighbours_stand_as_plain_kv(blender):
    kv = InContext(3)
    kv.prepare(blender, case_of(blender))
    context = Prompt(PROMPT.system, (B, D, E), A.ids)
    by_hand = blender.fuse(context, selector=FullReuse())
    for pair, whole in zip(stored(blender, kv, A).layers, by_hand.layers, strict=True):
        assert all(
            (rows - all_rows[:, -len(A) :]).abs().max() < 1e-5 for rows, all_rows in zip(pair, whole, strict=True)
        )


def test_a_chunk_behind_the_very_passages_of_its_context_is_not_taken_for_exact(blender):
    """The context was fused, not prefilled: its KV is not what full prefill computes behind the same tokens."""
    prompt = Prompt(PROMPT.system, (B, D, A), PROMPT.question)
    kv, case = InContext(2), case_of(blender, prompt)
    kv.prepare(blender, case)
    assert len(stored(blender, kv, A).prelude) == 12 + 41 + 28
    reused = kv.tenant(blender).fuse(prompt, selector=FullReuse())
    assert [chunk.exact for chunk in reused.report.chunks] == [False] * 3
    assert reused.report.chunks[2].moved == 0
    assert kl(reused, case.truth) > 1e-6
    assert kl(kv.tenant(blender).fuse(prompt, selector=FullRecompute()), case.truth) < 1e-9


def test_preparing_again_does_nothing(fresh):
    kv, case = InContext(2), case_of(fresh)
    kv.prepare(fresh, case)
    entries = [stored(fresh, kv, chunk) for chunk in PROMPT.chunks]
    held = fresh.setup.store.nbytes
    kv.prepare(fresh, case)
    assert all(stored(fresh, kv, chunk) is entry for chunk, entry in zip(PROMPT.chunks, entries, strict=True))
    assert fresh.setup.store.nbytes == held


def test_what_an_interruption_leaves_is_kept(fresh):
    class Interrupted:
        left = 2

        def neighbours(self, chunk, count):
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return corpus().neighbours(chunk, count)

    kv, case = InContext(2), case_of(fresh)
    with pytest.raises(KeyboardInterrupt):
        kv.prepare(fresh, replace(case, corpus=Interrupted()))
    before = [stored(fresh, kv, chunk) for chunk in PROMPT.chunks]
    assert [entry is None for entry in before] == [False, False, True]
    kv.prepare(fresh, case)
    assert [stored(fresh, kv, chunk) is entry for chunk, entry in zip(PROMPT.chunks, before, strict=True)] == [
        True,
        True,
        False,
    ]


def test_another_corpus_is_another_context(fresh):
    kv = InContext(1)
    kv.prepare(fresh, case_of(fresh))
    assert stored(fresh, kv, A).prelude[12:] == B.ids
    kv.prepare(fresh, case_of(fresh, e=1))
    assert stored(fresh, kv, A).prelude[12:] == E.ids


def test_no_more_neighbours_than_the_model_holds(fresh):
    long = [Chunk(tiny_ids(200, seed)) for seed in (90, 91, 92)]
    passages = [(A, "0 1"), *((chunk, f"{place} 1") for place, chunk in enumerate(long, 1))]
    case = Case(Prompt(PROMPT.system, (A,), PROMPT.question), None, EmbeddedCorpus(passages, Compass()))
    InContext(3).prepare(fresh, case)
    assert len(stored(fresh, InContext(3), A).prelude) == 12 + 2 * 200, "a third one makes more than 512 rows"


def test_alone_in_its_corpus_a_chunk_has_its_plain_kv(fresh):
    case = Case(Prompt(PROMPT.system, (A,), PROMPT.question), None, EmbeddedCorpus([(A, "0 1")], Compass()))
    fusion = answered(fresh, "fusionrag", 0.0, case)
    assert fusion.exact
    assert kl(fusion, full_prefill(fresh, case.prompt)) < 1e-9
    assert answered(fresh, "cachecraft", 0.0, case).exact


def test_plain_kv_and_kv_in_context_are_never_mixed_up(fresh):
    kv, case = InContext(2), case_of(fresh)
    fresh.encode(PROMPT.chunks, system=PROMPT.system)
    plain = fresh.setup.fetch(means(PROMPT.chunks), PROMPT.system)
    kv.prepare(fresh, case)
    assert not InContext(3).tenant(fresh).setup.fetch(means(PROMPT.chunks), PROMPT.system)
    assert fresh.setup.fetch(means(PROMPT.chunks), PROMPT.system) == plain
    assert stored(fresh, kv, A).key != plain[Wanted(A, "mean")].key
    with open_blender(salt="other", store=fresh.setup.store) as other:
        assert stored(other, kv, A) is None


@pytest.mark.parametrize("options", [{}, {"on_miss": "prefill"}, {"loading": "adapt"}])
@pytest.mark.parametrize("name", OFFLINE)
def test_what_is_not_prepared_is_never_encoded_plainly(name, options):
    with open_blender(**options) as blender:
        case = case_of(blender)
        (system,) = make_systems([name], 0.2)
        with pytest.raises(NotPrepared, match=r"3 .*prepare"):
            system.run(blender, case)
        blender.drain()
        assert stored(blender, InContext(10), A) is None
        assert stored(blender, EARLIER, A) is None
        system.prepare(blender, case)
        assert system.run(blender, case).fusion.report.fallback is None


def test_an_entry_that_is_lost_or_damaged_is_an_error_and_can_be_made_again(tmp_path):
    kv = InContext(2)
    with open_blender(store=DiskStore(tmp_path)) as blender:
        case = case_of(blender)
        kv.prepare(blender, case)
        key = kv.tenant(blender).setup.plan(PROMPT.system).key(B)
        (file,) = tmp_path.rglob(f"{key}*")
        data = bytearray(file.read_bytes())
        data[-200] ^= 255
        file.write_bytes(bytes(data))
        with pytest.raises(NotPrepared, match=r"1 of .*41 tokens"):
            kv.tenant(blender).fuse(PROMPT, selector=FullReuse())
        assert stored(blender, kv, B) is None
        kv.prepare(blender, case)
        assert len(kv.tenant(blender).fuse(PROMPT, selector=FullReuse()).prompt) == len(PROMPT)


def test_another_process_finds_it_in_the_store(tmp_path):
    with open_blender(store=DiskStore(tmp_path)) as blender:
        case = case_of(blender)
        first = answered(blender, "fusionrag", 0.2, case)
    with open_blender(store=DiskStore(tmp_path)) as blender:
        (system,) = make_systems(["fusionrag"], 0.2)
        assert kl(system.run(blender, case).fusion, first) < 1e-9


def test_what_the_offline_stage_needs_is_said(fresh):
    with pytest.raises(NotPrepared, match="corpus="):
        InContext(2).prepare(fresh, Case(PROMPT))
    with pytest.raises(UnknownPassage):
        InContext(2).prepare(fresh, replace(case_of(fresh), prompt=tiny_prompt(7)))
    with open_blender(store=MemoryStore(100)) as full, pytest.raises(NotPrepared, match="did not take"):
        InContext(2).prepare(full, case_of(full))
    long = Chunk(tiny_ids(505))
    case = Case(Prompt(PROMPT.system, (long,), (3,)), None, EmbeddedCorpus([(long, "0 1")], Compass()))
    with pytest.raises(PromptTooLong):
        InContext(2).prepare(fresh, case)


# --- the systems --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3n_text"])
@pytest.mark.parametrize("name", OWN)
def test_ratio_1_is_full_prefill(name, family):
    with open_blender(family) as blender:
        case = case_of(blender)
        fusion = answered(blender, name, 1.0, case)
        assert kl(fusion, case.truth) < 1e-9
        assert kl(answered(blender, name, 0.0, case), case.truth) > 1e-6


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.4])
def test_the_budget_is_kept(blender, name, ratio):
    fusion = answered(blender, name, ratio, case_of(blender))
    stale = 96 if name in OFFLINE else 66  # with plain KV the first chunk is exact
    assert fusion.report.states.count("recomputed") == round(ratio * stale)


@pytest.mark.parametrize("name", OWN)
def test_a_ratio_out_of_range_is_told_when_the_system_is_made(name):
    with pytest.raises(BudgetError, match=r"1\.5"):
        SYSTEMS[name](1.5)


def test_a_probe_is_charged_and_a_choice_made_offline_needs_none(blender):
    case = case_of(blender)
    reports = {name: answered(blender, name, 0.2, case).report for name in OWN}
    for name in ("fusionrag", "fusionrag-online", "prophetkv-offline", "a3"):
        assert reports[name].probe_per_layer == (9,) * 4, "the question, through every layer"
        repaired = sum(reports[name].rows_per_layer)
        assert reports[name].row_layers >= repaired + 4 * 9
    for name in ("cachecraft", "oracle-kv", "oracle-attention"):
        assert reports[name].probe_per_layer == ()
    assert {report.prefix_rows for report in reports.values()} == {12}, "the system part is known to all"


def test_fusionrag_online_ranks_by_the_final_layer(blender):
    case = case_of(blender)
    fusion = answered(blender, "fusionrag-online", 0.2, case)
    final_T = question_attention(blender.fuse(PROMPT, selector=FullReuse()))[-1]
    assert recomputed(fusion) == top(final_T, range(42, 108), 13)


def test_fusionrag_ranks_over_its_own_kv(blender):
    case = case_of(blender)
    fusion = answered(blender, "fusionrag", 0.2, case)
    reused = answered(blender, "fusionrag", 0.0, case)
    assert recomputed(fusion) == top(question_attention(reused)[-1], range(12, 108), 19)
    both = answered(blender, "prophetkv-offline", 0.2, case)
    assert recomputed(both) == top(question_attention(reused).mean(0), range(12, 108), 19)


def recomputed(fusion):
    return [row for row, state in enumerate(fusion.report.states) if state == "recomputed"]


def top(score_T, rows, count):
    return sorted(sorted(rows, key=lambda row: -score_T[row].item())[:count])


def test_fusionrag_without_repair_is_not_plain_reuse(blender):
    case = case_of(blender)
    offline, plain = answered(blender, "fusionrag", 0.0, case), answered(blender, "reuse", 0.0, case)
    assert kl(offline, plain) > 1e-6


@pytest.mark.slow
def test_neighbours_bring_kv_nearer_to_full_prefills(smollm2, embedder):
    passages = load_passages()
    with Blender(*smollm2, check=False, background=None) as blender:
        chunks = [blender.chunk(passage.text) for passage in passages]
        found = EmbeddedCorpus(zip(chunks, (passage.text for passage in passages), strict=True), embedder)
        prompt = blender.prompt("Who steers the ferry?", [chunks[place] for place in (11, 3, 20, 8)])
        case = Case(prompt, full_prefill(blender, prompt), found)
        errors = {}
        for name in ("reuse", "fusionrag"):
            deviation = kv_deviation(answered(blender, name, 0.0, case), case.truth)
            rows = slice(prompt.starts[1], len(prompt) - len(prompt.question))  # stale for both
            errors[name] = float((deviation.keys_LT + deviation.values_LT)[:, rows].mean())
        a3, final = (answered(blender, name, 0.15, case) for name in ("a3", "fusionrag-online"))
        looked_at_T = question_attention(blender.fuse(prompt, selector=FullReuse()))[22:].mean(0)
    assert errors["fusionrag"] < errors["reuse"]
    stale = range(prompt.starts[1], len(prompt) - len(prompt.question))
    last_quarter = top(looked_at_T, stale, len(recomputed(a3)))
    assert len(set(recomputed(a3)) & set(last_quarter)) > 0.97 * len(last_quarter)
    assert recomputed(a3) != recomputed(final)


# --- Cache-Craft --------------------------------------------------------------------------------------


def test_notes_are_the_models_own_attention(blender):
    context = Prompt(PROMPT.system, (B,), A.ids)  # exact
    note = take_note(InContext(1).encode(blender, context))
    model = tiny_model("llama", torch.float32)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = model(torch.tensor([context.ids]), output_attentions=True).attentions
    own_TT = torch.stack([layer[0].mean(0) for layer in weights]).mean(0)
    assert note.context == (B,)
    assert (note.inter_tJ[:, 0] - own_TT[53:, 12:53].sum(1)).abs().max() < 1e-5
    assert note.intra == pytest.approx(float(own_TT[53:, 53:].sum()), rel=1e-4)


def test_notes_tell_the_chunks_of_the_context_apart(blender):
    context = Prompt(PROMPT.system, (B, D), A.ids)
    note = take_note(InContext(2).encode(blender, context))
    assert note.inter_tJ.shape == (30, 2)
    assert note.inter_tJ.min() > 0
    assert (note.inter_tJ.sum(1) < 1).all()
    assert float(note.inter_tJ.sum()) + note.intra < 30, "the rest goes to the system part"


def test_attention_that_cannot_be_watched_is_refused():
    with open_blender("bloom") as blender, pytest.raises(UnsupportedModel, match="attention cannot be read"):
        answered(blender, "cachecraft", 0.2, Case(PROMPT, None, corpus()))


def note_of(*chunks, mass, intra=8.0, rows=16):
    """On a chunk of ``rows`` rows, whose attention to each of ``chunks`` is ``mass`` in all."""
    inter_tJ = torch.tensor(mass).expand(rows, -1) / rows
    return Note(chunks, inter_tJ, intra)


def test_need_by_hand():
    note = note_of(A, B, D, mass=[3.0, 4.1, 1.4])
    ratio = (3.0 / (16 * 30) + 4.1 / (16 * 41) + 1.4 / (16 * 28)) / (8.0 / 16**2)
    index = 1 / (1 + math.exp(-ratio))
    assert need(note, []) == pytest.approx(index)
    assert need(note, [C, E]) == pytest.approx(index), "nothing of the context is there"
    assert need(note, [C, B]) == pytest.approx(index * (1 - 4.1 / 8.5))
    assert need(note, [A, C, B]) == pytest.approx(index * (1 - 7.1 / 8.5))
    assert need(note, [B, A]) == pytest.approx(index), "turned round, the one pair is all wrong"
    assert need(note, [A, D, B]) == pytest.approx(index * (1 - 2 / 3)), "one pair of three is turned"
    assert need(note, [A, B, B, D]) == pytest.approx(0.0)
    assert need(note_of(mass=[]), [A]) == 0.5, "encoded behind nothing"


def choice(ratio, notes, chunks, sizes):
    """The number of rows that each chunk is given."""
    starts = [4 + sum(sizes[:place]) for place in range(len(sizes))]
    pieces = [Piece(0, 4, "prefix", True)]
    pieces += [Piece(s, s + n, "chunk", False, i) for i, (s, n) in enumerate(zip(starts, sizes, strict=True))]
    layout = Layout((*pieces, Piece(4 + sum(sizes), 6 + sum(sizes), "fresh", True)), 6 + sum(sizes))
    rows = CacheCraft(ratio, chunks=tuple(chunks), notes=tuple(notes)).choose(Candidates(layout.stale, layout))
    return [int(((rows >= s) & (rows < s + n)).sum()) for s, n in zip(starts, sizes, strict=True)], rows


def test_rows_are_dealt_by_need_and_length():
    alike = note_of(E, mass=[2.0], rows=40)
    assert choice(0.2, [alike] * 2, [A, B], [40, 40])[0] == [8, 8]
    assert choice(0.25, [alike._replace(context=(A,)), alike], [C, D], [40, 40])[0] == [10, 10]
    longer = note_of(E, mass=[2.0 * 80 / 40], intra=16.0, rows=80)
    counts = choice(0.2, [alike, longer], [A, B], [40, 80])[0]
    assert sum(counts) == 24
    assert counts[1] == pytest.approx(16, abs=1)


def test_a_chunk_whose_context_is_there_again_gets_rows_last():
    known, other = note_of(A, mass=[2.0], rows=40), note_of(E, mass=[2.0], rows=40)
    assert choice(0.5, [other, known], [A, B], [40, 40])[0] == [40, 0]
    assert choice(0.75, [other, known], [A, B], [40, 40])[0] == [40, 20]
    assert choice(1.0, [known, known], [A, B], [40, 40])[0] == [40, 40]


def test_rows_are_those_that_looked_at_other_chunks_most():
    inter_tJ = torch.rand(40, 2, generator=torch.Generator().manual_seed(0))
    counts, rows = choice(0.25, [Note((E, F), inter_tJ, 9.0)], [A], [40])
    assert counts == [10]
    assert rows.tolist() == [4 + row for row in top(inter_tJ.sum(1), range(40), 10)]


class TestCacheCraft(SelectorTests):
    def make(self, ratio):
        generator = torch.Generator().manual_seed(1)
        chunks = tuple(Chunk(tiny_ids(20, seed)) for seed in range(12))
        notes = tuple(Note(chunks[:3], torch.rand(70, 3, generator=generator), 5.0) for _ in chunks)
        return CacheCraft(ratio, chunks=chunks, notes=notes)


def test_ratios_of_cachecraft_share_what_is_prepared(fresh, monkeypatch):
    case, encoded = case_of(fresh), []
    encode = InContext.encode
    monkeypatch.setattr(InContext, "encode", lambda *given: encoded.append(1) or encode(*given))
    for ratio in (0.1, 0.3, 0.1):
        answered(fresh, "cachecraft", ratio, case)
    assert len(encoded) == 3
    entry = stored(fresh, EARLIER, A)
    assert EARLIER.tenant(fresh).forget([A], system=PROMPT.system) == 1
    answered(fresh, "cachecraft", 0.1, case)
    assert len(encoded) == 4, "a note without KV is of no use"
    assert stored(fresh, EARLIER, A) is not entry


def test_stored_kv_without_notes_is_prepared_again(tmp_path):
    with open_blender(store=DiskStore(tmp_path)) as blender:
        case = case_of(blender)
        first = answered(blender, "cachecraft", 0.2, case)
    with open_blender(store=DiskStore(tmp_path)) as blender:
        (system,) = make_systems(["cachecraft"], 0.2)
        with pytest.raises(NotPrepared, match="noted down on 3"):
            system.run(blender, case)
        assert kl(answered(blender, "cachecraft", 0.2, case), first) < 1e-9
