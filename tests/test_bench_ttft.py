"""The benches of time to first token, of its growth, of decoding and of memory: their figures are there and plausible.

How large they are is the machine's affair.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from blend import Blender, BudgetError
from blend.errors import PromptTooLong
from blend.testing.tokenizers import CHATML, tiny_tokenizer
from eval.bench import growth
from eval.bench.cli import bench
from eval.bench.decode import compare_decoding
from eval.bench.growth import GrowthOptions, run_growth_bench
from eval.bench.growth_plot import draw_growth
from eval.bench.memory import peak_of
from eval.bench.squeeze import squeezed
from eval.bench.ttft import RECIPE, BenchOptions, bench_prompt, methods, run_ttft_bench
from eval.systems import UnknownSystem

CPU = torch.device("cpu")


@pytest.fixture
def screen():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def blender(smollm2):
    with Blender(*smollm2, background=None, check=False) as blender:
        yield blender


@pytest.mark.parametrize("change", [{"rows": 255}, {"pairs": 0}, {"chunk_rows": 15}, {"decode": -1}])
def test_options_out_of_range_are_refused(change):
    with pytest.raises(BudgetError, match=next(iter(change)).replace("_", "-")):
        BenchOptions(**change)


def test_an_unknown_system_is_refused_before_a_model_is_loaded(screen):
    with pytest.raises(UnknownSystem, match=r"'epik'.*kvblend, reuse, epic"):
        run_ttft_bench(BenchOptions(systems=("epik",)), screen)
    with pytest.raises(UnknownSystem, match="'kvblend'"):
        methods(0.15, (RECIPE,))  # it is no selector over chunks that were encoded alone


def test_a_prompt_beyond_the_context_is_refused_before_its_chunks_are_encoded(blender, screen):
    with pytest.raises(PromptTooLong):
        run_ttft_bench(BenchOptions(rows=8193, systems=(RECIPE,)), screen, blender)
    assert not list(blender.store.keys())


def test_a_short_run(blender, screen):
    options = BenchOptions(rows=256, chunk_rows=64, pairs=2, systems=(RECIPE, "epic"), decode=3)
    figures = run_ttft_bench(options, screen, blender)
    assert list(figures["systems"]) == ["full", RECIPE, "epic"]
    ours, epic = figures["systems"][RECIPE], figures["systems"]["epic"]
    assert len(ours["speedups"]) == 2
    assert min(ours["ttft_s"], ours["speedup"], ours["full_s"]) > 0
    assert "probe" in ours["seconds"]
    assert "probe" not in epic["seconds"]
    assert 1 < ours["ideal"] < epic["ideal"], "the recipe pays for its probe"
    assert ours["recomputed_rows"] == epic["recomputed_rows"]
    assert figures["decode"]["tokens"] == 3
    assert min(figures["decode"].values()) > 0
    json.dumps(figures)
    printed = screen.file.getvalue()
    for word in (RECIPE, "epic", "of ideal", "decoding 3 tokens", "ratio"):
        assert word in printed


def test_the_recipe_is_the_default_one(smollm2, blender, screen):
    figures = run_ttft_bench(BenchOptions(rows=256, chunk_rows=64, pairs=1, systems=(RECIPE,)), screen, blender)
    with Blender(*smollm2, check=False) as default:
        prompt = bench_prompt(default, BenchOptions(rows=256, chunk_rows=64))
        default.encode(prompt.chunks, system=prompt.system)
        report = default.fuse(prompt, selector=default.selector, corrector=default.corrector).report
    assert figures["systems"][RECIPE]["row_layers"] == report.row_layers
    assert (report.method, report.corrector) == ("expected-error", "mean-shift")


def test_both_sides_decode_over_the_same_rows(blender):
    prompt = bench_prompt(blender, BenchOptions(rows=256, chunk_rows=64))
    fusion = blender.prefill(prompt)
    before = [keys.clone() for keys, _ in fusion.layers]
    decoded = compare_decoding(fusion, 4)
    assert decoded.tokens == len(decoded.full) == 4
    assert decoded.ratio > 0
    assert all(torch.equal(a, b) for a, (b, _) in zip(before, fusion.layers, strict=True)), "the fusion was written to"


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_that_is_held_for_a_moment_counts():
    def call():
        torch.ones(32 << 20, dtype=torch.uint8)
        return torch.ones(16 << 20, dtype=torch.uint8)

    kept, peak = peak_of(call, CPU)
    if peak is None:
        pytest.skip("this system tells no peak")
    assert kept.numel() == 16 << 20
    assert 31 << 20 < peak < 80 << 20
    _, little = peak_of(lambda: None, CPU)
    assert little < 16 << 20, "an earlier peak was taken for this one's"


# --- growth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lengths": ()}, "at least one"),
        ({"lengths": (512, 256)}, "longer than the one before"),
        ({"lengths": (100,)}, "256 rows"),
        ({"plot": Path("growth.pdf")}, "growth.pdf"),
    ],
)
def test_growth_options_out_of_range_are_refused(change, word):
    with pytest.raises(BudgetError, match=word):
        GrowthOptions(**change)


def test_growth_over_two_lengths(smollm2, screen, tmp_path):
    pytest.importorskip("matplotlib")
    model, _ = smollm2
    options = GrowthOptions(BenchOptions(chunk_rows=64, pairs=1), (256, 320), tmp_path / "new" / "growth.png")
    figures = run_growth_bench(options, screen, smollm2)
    assert [line["rows"] for line in figures["lengths"]] == [256, 320]
    assert not any(line["beyond_context"] for line in figures["lengths"])
    assert [step["to"] for step in figures["exponents"]] == [320]
    for line in figures["lengths"]:
        assert min(line["full_s"], line["ttft_s"], line["speedup"], line["kv_bytes"]) > 0
    assert options.plot.read_bytes().startswith(b"\x89PNG")
    assert model.config.max_position_embeddings == figures["context"] == 8192
    json.dumps(figures)
    assert "256" in screen.file.getvalue()


def tiny_llama(**rope):
    config = LlamaConfig(
        vocab_size=600, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, rope_parameters={"rope_theta": 1e4, **rope},
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_a_squeezed_model_is_the_same_at_a_fraction_of_the_position():
    model = tiny_llama(rope_type="default")
    wide, ids, places = squeezed(model, 1536), torch.arange(3, 43)[None], torch.arange(40)[None]
    assert wide.config.max_position_embeddings == 1536
    assert model.config.max_position_embeddings == 512
    with torch.inference_mode():
        a = model(input_ids=ids, position_ids=7 * places).logits
        b = wide(input_ids=ids, position_ids=21 * places).logits
        c = wide(input_ids=ids, position_ids=7 * places).logits
    assert float((a - b).abs().max()) <= 1e-5
    assert float((a - c).abs().max()) > 1e-3
    with Blender(wide, check=True, background=None) as blender:
        assert blender.view.context == 1536


def test_scaled_positions_are_not_squeezed_again():
    with pytest.raises(BudgetError, match=r"2048 rows is longer than the 512 .* \(linear\)"):
        squeezed(tiny_llama(rope_type="linear", factor=2.0), 2048)


def test_growth_beyond_the_context(screen):
    tokenizer = tiny_tokenizer(template=CHATML)
    options = GrowthOptions(BenchOptions(chunk_rows=64, pairs=1), (300, 700))
    figures = run_growth_bench(options, screen, (tiny_llama(rope_type="default"), tokenizer))
    assert [line["beyond_context"] for line in figures["lengths"]] == [False, True]
    assert "positions squeezed" in screen.file.getvalue()


def test_ctrl_c_keeps_the_lengths_that_are_done(screen, monkeypatch):
    measured, measure = [], growth._measure

    def pressed(blender, options):
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(blender, options))
        return measured[0]

    monkeypatch.setattr(growth, "_measure", pressed)
    loaded = tiny_llama(rope_type="default"), tiny_tokenizer(template=CHATML)
    options = GrowthOptions(BenchOptions(chunk_rows=64, pairs=1), (300, 400))
    figures = run_growth_bench(options, screen, loaded)
    assert not figures["complete"]
    assert [line["rows"] for line in figures["lengths"]] == [300]
    with pytest.raises(KeyboardInterrupt):
        run_growth_bench(options, screen, loaded)


def test_the_picture_does_without_unknown_memory():
    pytest.importorskip("matplotlib")
    line = {"full_s": 2.0, "ttft_s": 0.4, "full_peak_bytes": 9**9, "peak_bytes": 8**9}
    known = {"context": 1500, "lengths": [{**line, "rows": 1024}, {**line, "rows": 2048, "full_s": 5.0}]}
    unknown = {
        "context": 4096,
        "lengths": [{**line, "peak_bytes": None, "full_peak_bytes": None} for line in known["lengths"]],
    }
    for n, of in enumerate(unknown["lengths"]):
        of["rows"] = 1024 << n
    assert b"Memory" not in draw_growth(unknown, "svg")
    assert len(draw_growth(known, "svg")) > len(draw_growth(unknown, "svg"))


def test_lengths_that_are_no_numbers_are_refused():
    result = CliRunner().invoke(bench, ["growth", "--rows", "1k,2k"])
    assert isinstance(result.exception, BudgetError)
    assert "1k,2k" in str(result.exception)
