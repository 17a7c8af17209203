"""``kvblend plan``: its counts against what a Blender really does, and its formulas worked out by hand."""

from __future__ import annotations

import io
import json
import math
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig
from typer.testing import CliRunner

from blend import Background, Blender, BudgetError, Chunk, FirstK, KVDeviation, Prompt, QueryAttention
from blend.hf.shape import model_shape
from blend.testing.prompts import tiny_ids
from blend.testing.tiny import tiny_config, tiny_model
from eval.cli import app
from eval.planning.plan import PlanOptions, Rate, make_plan, matmul_rate, run_plan
from eval.rag.flops import Ask, fused_flops

SELECTORS = {"epic": FirstK, "cacheblend": KVDeviation, "prophetkv": QueryAttention}
RATE = Rate(1e12, "as given")


def smollm2(**options):
    """SmolLM2-135M by its published config."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        **options,
    )
    return model_shape(config, name="smollm2")


@pytest.fixture(scope="module")
def shape():
    return smollm2()


@pytest.fixture
def folder(tmp_path):
    """A model folder with nothing but a config."""
    tiny_config("llama").save_pretrained(tmp_path)
    return tmp_path


def fused(blender, ask, selector):
    """The report of a prompt of these measures, everything but the question known."""
    ids = tiny_ids(ask.rows)
    starts = [ask.system + i * ask.passage for i in range(ask.k + 1)]
    chunks = tuple(Chunk(ids[start:stop]) for start, stop in pairwise(starts))
    prompt = Prompt(ids[: ask.system], chunks, ids[starts[-1] :])
    blender.encode(chunks, system=prompt.system)
    return blender.fuse(prompt, selector=selector).report


@pytest.fixture(scope="module", params=["llama", "gemma2", "gemma4_text"])
def family(request):
    """Shape and Blender of a family."""
    shape = model_shape(tiny_config(request.param))
    with Blender(tiny_model(request.param), check=False) as blender:
        yield shape, blender


@pytest.mark.parametrize("method", SELECTORS)
@pytest.mark.parametrize(("k", "ratio"), [(4, 0.25), (2, 0.1), (8, 1.0)])
def test_counting_rows_alone_is_what_a_report_calls_ideal(family, method, k, ratio):
    shape, blender = family
    options = PlanOptions("", 100, 40, k, ratio, size=40, overlap=0, system=20, question=10)
    gain = make_plan(shape, options, RATE).gains[method]
    rows, layers = options.ask.rows, len(shape.layers)
    alone = sum(layer.alone for layer in shape.layers)
    # A report counts every layer for all rows of a full prefill.
    ideal = gain.by_rows * rows * layers / (rows * (layers - alone) + alone)
    assert ideal == pytest.approx(fused(blender, options.ask, SELECTORS[method](ratio=ratio)).ideal_speedup, rel=0.01)


def test_one_passage_is_plain_prefix_caching(shape):
    ask = Ask(20, 100, 1, 10, 0.15)
    assert {fused_flops(shape, ask, method) for method in SELECTORS} == {shape.prefill_flops(10, behind=120)}


def test_the_published_ideals_of_4096_rows(shape):
    """The README's: eight chunks, the system part of 22 rows, a question of 24."""
    ask = PlanOptions("", 8, 506, 8, 0.15, size=506, overlap=0, system=22, question=24)
    gains = make_plan(shape, ask, RATE).gains
    assert {name: round(gain.by_rows, 1) for name, gain in gains.items()} == {
        "epic": 7.6,
        "cacheblend": 6.0,
        "prophetkv": 7.3,
    }
    assert all(gain.gain < gain.by_rows for gain in gains.values()), "late rows see more than early ones"


@pytest.mark.parametrize(("contexts", "entries"), [(0, 1), (1, 2), (4, 2)])
def test_sizes_by_hand(shape, contexts, entries):
    options = PlanOptions("smollm2", documents=10, tokens=1000, size=256, overlap=32, contexts=contexts)
    assert options.passages_each == math.ceil((1000 - 32) / 224) == 5
    assert options.rows == 10 * (1000 + 4 * 32)
    figures = make_plan(shape, options, RATE).as_dict()
    assert figures["bytes_per_row"] == 30 * 2 * 3 * 64 * 2
    assert figures["contexts"] == contexts
    assert figures["disk_bytes"] == entries * 11_280 * 23_040
    assert figures["prompt_rows"] == 32 + 6 * 256 + 32
    assert figures["memory_bytes"] == shape.params * 2 + 2 * 1600 * 23_040


def test_operations_by_hand(shape):
    weights = 30 * (576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536)
    pairs = 30 * 2 * 9 * (64 + 64)
    rows = 1600
    figures = make_plan(shape, PlanOptions("smollm2", 10, 1000), RATE).as_dict()
    assert figures["full_flops"] == rows * 2 * weights + rows * (rows + 1) / 2 * pairs + 2 * 576 * 49152
    assert figures["full_s"] == pytest.approx(figures["full_flops"] / 1e12)
    saved = figures["full_flops"] - figures["methods"]["prophetkv"]["flops"]
    assert figures["asks_per_passage"] == pytest.approx(figures["encode_flops"] / (saved / 6))
    assert figures["read_bytes_per_s"] == pytest.approx(6 * 256 * 23_040 / (saved / 1e12)), "one entry of a passage"


def encode_by_hand(*behind, count=256):
    """Operations of some rows of SmolLM2-135M behind each of these: weights, pairs of rows, the last row's logits."""
    weights = 30 * (576 * 576 * 2 + 2 * 576 * 192 + 3 * 576 * 1536)
    pairs = 30 * 2 * 9 * (64 + 64)
    return sum(
        count * 2 * weights + (count * rows + count * (count + 1) / 2) * pairs + 2 * 576 * 49152 for rows in behind
    )


@pytest.mark.parametrize(
    ("options", "behind"),
    [
        ({"contexts": 0}, (32,)),
        ({}, (32, 432, 432, 432, 432)),
        ({"contexts": 2, "context_rows": 100, "system": 0}, (0, 100, 100)),
    ],
)
def test_encoding_by_hand(shape, options, behind):
    """Alone, and behind the system part and each context; what it costs is what must be saved."""
    asked = PlanOptions("smollm2", 10, 1000, asks_per_day=7, **options)
    figures = make_plan(shape, asked, RATE).as_dict()
    cost = encode_by_hand(*behind)
    saved = figures["full_flops"] - figures["methods"]["prophetkv"]["flops"]
    assert figures["encode_flops"] == cost
    assert figures["encode_all_s"] == pytest.approx(50 * cost / 1e12)
    assert figures["asks_per_passage"] == pytest.approx(cost / (saved / 6))
    assert figures["asks_for_all"] == pytest.approx(50 * cost / saved)
    assert figures["days"] == pytest.approx(50 * cost / saved / 7)


def test_passages_that_share_much_are_read_behind_themselves(shape):
    """64 of 256 tokens with each neighbour: half of a passage."""
    some, much, few = (
        make_plan(shape, PlanOptions("smollm2", 10, tokens, overlap=overlap), RATE)
        for tokens, overlap in ((1000, 63), (1000, 64), (256, 64))
    )
    assert [plan.options.entries for plan in (some, much, few)] == [2, 3, 2]
    assert much.encode_flops == encode_by_hand(32, 432, 432, 432, 432) + encode_by_hand(32, count=512)
    assert some.encode_flops == few.encode_flops == encode_by_hand(32, 432, 432, 432, 432)
    assert PlanOptions("smollm2", 10, 1000, overlap=64, contexts=0).entries == 1


def test_contexts_change_what_is_kept_and_encoded_and_nothing_else(shape):
    alone, mean = (make_plan(shape, PlanOptions("smollm2", 10, 1000, contexts=n), RATE).as_dict() for n in (0, 4))
    changed = {"contexts", "disk_bytes", "encode_flops", "encode_all_s", "asks_per_passage", "asks_for_all"}
    assert {key for key in mean if mean[key] != alone[key]} == changed


@pytest.mark.parametrize("overlap", [0, 20])
@pytest.mark.parametrize("contexts", [0, 3])
def test_disk_bytes_are_those_of_what_a_blender_keeps(contexts, overlap):
    """All entries that encoding leaves in the store, as many bytes as are planned."""
    config = tiny_config("llama")
    background = Background(tuple(tuple(tiny_ids(30 + i)) for i in range(contexts)))
    options = PlanOptions("", documents=2, tokens=120, size=40, overlap=overlap, contexts=contexts)
    with Blender(tiny_model("llama"), check=False, background=background) as blender:
        starts = range(0, 120 - overlap, 40 - overlap)
        texts = (tiny_ids(120, seed=seed) for seed in range(2))
        chunks = [Chunk(ids[start : start + 40]) for ids in texts for start in starts]
        assert len(chunks) == options.passages
        blender.encode(chunks, system=(1, 2))
        stored = [blender.store.get(key) for key in list(blender.store.keys())]
        planned = make_plan(model_shape(config, blender.view.dtype), options, RATE)
    assert sum(kv.nbytes for kv in stored) == planned.kv_bytes


def test_short_documents_are_one_passage(shape):
    options = PlanOptions("smollm2", documents=3, tokens=20, k=6)
    assert (options.passages, options.rows, options.ask.k, options.ask.passage) == (3, 60, 3, 20)


def test_days(shape):
    figures = make_plan(shape, PlanOptions("smollm2", 10, 1000, asks_per_day=2), RATE).as_dict()
    assert figures["days"] == pytest.approx(figures["asks_for_all"] / 2)
    assert make_plan(shape, PlanOptions("smollm2", 10, 1000), RATE).as_dict()["days"] is None


def test_what_never_pays(shape):
    """All rows computed again, and the question before that."""
    plan = make_plan(shape, PlanOptions("smollm2", 10, 1000, k=2, ratio=1.0, question=600), RATE)
    assert plan.gains["prophetkv"].gain < 1
    figures = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert (figures["asks_per_passage"], figures["read_bytes_per_s"]) == (None, None)


def test_the_rate_is_measured_and_said_so():
    rate = matmul_rate(torch.float32, size=64, runs=2)
    assert rate.flops > 0
    assert "measured here: a float32 matrix product of 64 x 64" in rate.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": 0}, "documents is 0"),
        ({"tokens": 0}, "tokens is 0"),
        ({"k": 0}, "k is 0"),
        ({"question": 0}, "question is 0"),
        ({"contexts": -1}, "contexts is -1"),
        ({"context_rows": 0}, "context-rows is 0"),
        ({"system": -1}, "system is -1"),
        ({"overlap": 256}, "overlap is 256"),
        ({"overlap": -1}, "overlap is -1"),
        ({"ratio": 1.5}, "ratio is 1.5"),
        ({"tflops": 0.0}, "tflops is 0.0"),
        ({"asks_per_day": float("inf")}, "asks-per-day is inf"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises(BudgetError, match=message):
        PlanOptions(**{"model": "smollm2", "documents": 1, "tokens": 1, **change})


# --- what is shown ----------------------------------------------------------------------------------------------------


def shown(folder, **options):
    console = Console(file=io.StringIO(), width=200)
    run_plan(PlanOptions(str(folder), **{"documents": 10, "tokens": 100, "size": 32, "overlap": 4, **options}), console)
    return console.file.getvalue()


def test_formulas_are_shown_with_their_numbers(folder):
    text = shown(folder, k=3, tflops=2.0, asks_per_day=5)
    assert "(4 × (2 × 16 + 2 × 16)) × 2 B = 512 B" in text
    assert "10 × ⌈(100 − 4) / (32 − 4)⌉ = 40" in text
    assert "entries (alone, and the mean; a question reads one) × documents" in text
    assert "2 × 10 × (100 + 3 × 4) × 512 B = 1.15 MB" in text
    assert "1.15 MB for the KV of all passages, kept alone and as the mean over 4 contexts of 400 rows" in text
    assert "for all, once, each alone and behind 4 contexts of 400 rows" in text
    assert "(32 rows behind 32) + 4 × (32 rows behind 432) = " in text
    assert "ProphetKV and the default" in text
    assert "4 × 61.4 k = 246 k" in text
    assert "Operations per second: 2 T, as given" in text
    assert "days" in text
    assert "arithmetic on the config, not a measurement" in text
    assert "longer than the model's context" not in text


def test_passages_alone_are_shown_as_such(folder):
    text = shown(folder, k=3, tflops=2.0, contexts=0)
    assert "= 10 × (100 + 3 × 4) × 512 B = 573.44 kB" in text
    assert "= 32 rows behind 32 = " in text
    assert "entries (alone" not in text
    assert "contexts" not in text


def test_one_context_is_one(folder):
    assert "the mean over 1 context of 400 rows" in shown(folder, tflops=2.0, contexts=1)


def test_a_prompt_beyond_the_context(folder):
    assert "longer than the model's context of 512" in shown(folder, tokens=5000, size=256, tflops=1.0)


def test_windows_and_shared_layers_are_shown(tmp_path):
    tiny_config("gemma4_text").save_pretrained(tmp_path)
    text = shown(tmp_path, tflops=1.0)
    assert "(2 × (2 × 16 + 2 × 16) + 2 × (2 × 32 + 2 × 32)) × 2 B = 768 B" in text


def test_the_command(folder, tmp_path):
    target = tmp_path / "out" / "plan.json"
    command = ["plan", str(folder), "--documents", "10", "--tokens", "100", "--dtype", "fp32", "--json", str(target)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    figures = json.loads(target.read_text())
    assert (figures["bytes_per_row"], figures["dtype"]) == (1024, "float32")
    assert (figures["contexts"], figures["disk_bytes"]) == (4, 2 * 10 * 100 * 1024)
    assert set(figures["methods"]) == set(SELECTORS)
    assert "measured here" in figures["rate"]["source"]


def test_the_command_with_passages_alone(folder, tmp_path):
    target = tmp_path / "plan.json"
    command = ["plan", str(folder), "--documents", "10", "--tokens", "100", "--contexts", "0", "--tflops", "1"]
    result = CliRunner().invoke(app, [*command, "--json", str(target)])
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text())["disk_bytes"] == 10 * 100 * 512


def test_the_command_refuses_bad_contexts(folder):
    command = ["plan", str(folder), "--documents", "10", "--tokens", "100", "--contexts", "-1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "contexts is -1: it must be 0 or more" in str(result.exception)


def test_a_model_that_is_not_there():
    result = CliRunner().invoke(app, ["plan", "./nowhere", "--documents", "10", "--tokens", "100"])
    assert result.exit_code == 1
    assert "nowhere is no folder with a config.json" in str(result.exception)
