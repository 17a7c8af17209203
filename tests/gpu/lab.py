"""Models of random weights, prompts of random tokens, and what is measured with them."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import blend
from blend.hf.attention import SETTING
from blend.hf.transfer import Transfer

DECODED = 32  # tokens
RECIPES = ("default", "kv-deviation")


@dataclass(frozen=True)
class Sizes:
    """What is measured, large or small."""

    rows: tuple[int, ...] = (4096, 16384, 32768)
    ratios: tuple[float, ...] = (0.05, 0.15, 0.30)
    chunk: int = 512
    context: int = 1024
    repeats: int = 3

    def models(self) -> dict[str, Any]:
        return {
            "Llama-3-8B": LlamaConfig(
                vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=65536, rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            ),
            "Qwen2.5-0.5B": Qwen2Config(
                vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=65536, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            ),
        }  # fmt: skip


class Small(Sizes):
    """Tiny ones, with the same code."""

    def __init__(self) -> None:
        super().__init__((192, 320), (0.15,), 48, 32, 1)

    def models(self) -> dict[str, Any]:
        shape = {
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        }  # fmt: skip
        return {"tiny Llama": LlamaConfig(**shape), "tiny Qwen": Qwen2Config(**shape)}


@dataclass
class Lab:
    """A model of random weights, its Blender, and chunks that are encoded once for all prompt lengths."""

    name: str
    blender: blend.Blender
    device: torch.device
    sizes: Sizes
    system: tuple[int, ...]
    question: tuple[int, ...]
    chunks: list[blend.Chunk] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, config: Any, device: torch.device, sizes: Sizes) -> Lab:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        model.eval()
        draw = _tokens(config.vocab_size, seed=1)
        background = blend.Background((draw(sizes.context), draw(sizes.context)))
        store = blend.MemoryStore(limit=64 << 30)
        blender = blend.Blender(model, None, background=background, store=store, check=False)
        return cls(name, blender, device, sizes, draw(32), draw(48))

    def prompt(self, rows: int) -> blend.Prompt:
        """A prompt of that many rows; chunks that are not there yet are drawn and encoded."""
        rest = rows - len(self.system) - len(self.question)
        draw = _tokens(self.blender.view.vocabulary, seed=2 + len(self.chunks))
        while sum(map(len, self.chunks)) < rest:
            self.chunks.append(blend.Chunk(draw(self.sizes.chunk)))
        count = -(-rest // self.sizes.chunk)
        chunks = [
            *self.chunks[: count - 1],
            blend.Chunk(self.chunks[count - 1].ids[: rest - (count - 1) * self.sizes.chunk]),
        ]
        prompt = blend.Prompt(self.system, tuple(chunks), self.question)
        self.blender.encode(prompt.chunks, system=self.system)
        return prompt.reordered(range(count - 1, -1, -1))

    def full(self, prompt: blend.Prompt) -> Callable[[], int]:
        ids_1T = torch.tensor([prompt.ids], device=self.device)
        return lambda: int(self.blender.view.prefill(ids_1T)[0].argmax())

    def fused(self, prompt: blend.Prompt, recipe: str, ratio: float) -> Callable[[], blend.Fusion]:
        if recipe == RECIPES[0]:
            selector, corrector = blend.ExpectedError(ratio), blend.MeanShift(weight=0.25)
            return lambda: self.blender.fuse(prompt, selector=selector, corrector=corrector)
        return lambda: self.blender.fuse(prompt, selector=blend.KVDeviation(ratio))


def _tokens(vocabulary: int, seed: int) -> Callable[[int], tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return lambda count: tuple(torch.randint(3, vocabulary, (count,), generator=generator).tolist())


@torch.inference_mode()
def compare(lab: Lab, rows: int) -> dict[str, Any]:
    """Fusing with every row computed again against full prefill, and decoding after each."""
    prompt = lab.prompt(rows)
    fusion = lab.blender.fuse(prompt, selector=blend.FullRecompute())
    logits, layers = lab.blender.view.prefill(torch.tensor([prompt.ids], device=lab.device))
    pairs = [
        (a, b[0]) for ours, full in zip(fusion.layers, layers, strict=True) for a, b in zip(ours, full, strict=True)
    ]
    own = blend.Fusion(prompt, logits[0], fusion.report, True, tuple((k[0], v[0]) for k, v in layers), lab.blender.view)
    steps = {name: _decode_seconds(lab, f) for name, f in (("fused", fusion), ("full", own))}
    return {
        "model": lab.name,
        "rows": rows,
        "kv_off": max(map(_off, *zip(*pairs, strict=True))),
        "logits_off": _off(fusion.logits, logits[0]),
        "next_logits_off": _off(_next_logits(fusion), _next_logits(own)),
        "decode_ratio": steps["fused"] / steps["full"],
        "decode_ms": 1e3 * steps["fused"] / DECODED,
    }


def _off(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Length of the difference over the length of the truth."""
    return float((got.float() - truth.float()).norm() / truth.float().norm())


def _next_logits(fusion: blend.Fusion) -> torch.Tensor:
    """Logits of the prompt's last row, computed by the stock forward behind the fusion's KV."""
    inputs = fusion.inputs()
    inputs["input_ids"] = inputs["input_ids"][:, -1:]
    logits: torch.Tensor = fusion.view.model(**inputs).logits[0, -1]
    return logits


def _decode_seconds(lab: Lab, fusion: blend.Fusion) -> float:
    options = {"max_new_tokens": DECODED, "min_new_tokens": DECODED, "do_sample": False, "pad_token_id": 0}
    model: Any = fusion.view.model
    return timed(lambda: model.generate(**fusion.inputs(), **options), lab.device, 2)


def timed(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds, the device having caught up before and after; one run more to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        _caught_up(device)
        began = time.perf_counter()
        call()
        _caught_up(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _caught_up(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def full_prefill(lab: Lab, rows: int) -> dict[str, Any]:
    """Full prefill by every implementation that HF has here; the fastest counts."""
    prompt = lab.prompt(rows)
    _forget_peak(lab.device)
    seconds = {"sdpa": timed(lab.full(prompt), lab.device, lab.sizes.repeats)}
    peak = _peak(lab.device)
    if lab.device.type == "cuda" and transformers.utils.is_flash_attn_2_available():
        model: Any = lab.blender.model
        ours = model.config._attn_implementation
        try:
            model.set_attn_implementation("flash_attention_2")
            seconds["flash_attention_2"] = timed(lab.full(prompt), lab.device, lab.sizes.repeats)
        finally:
            model.set_attn_implementation(ours)
    best = min(seconds, key=seconds.__getitem__)
    return {"model": lab.name, "rows": rows, "method": f"full ({best})", "ttft_s": seconds[best], "all": seconds,
            "speedup": 1.0, "ideal": 1.0, "of_ideal": 1.0, "peak_gib": peak}  # fmt: skip


def fused_case(lab: Lab, rows: int, recipe: str, ratio: float, full_s: float, backend: str) -> dict[str, Any]:
    os.environ[SETTING] = backend
    prompt = lab.prompt(rows)
    call = lab.fused(prompt, recipe, ratio)
    _forget_peak(lab.device)
    seconds = timed(lambda: int(call().logits.argmax()), lab.device, lab.sizes.repeats)
    peak, report = _peak(lab.device), call().report
    speedup = full_s / seconds
    return {"model": lab.name, "rows": rows, "method": recipe, "ratio": ratio, "backend": backend, "ttft_s": seconds,
            "speedup": speedup, "ideal": report.ideal_speedup, "of_ideal": speedup / report.ideal_speedup,
            "row_layers": report.row_layers, "first_logits_s": report.ttft, "stages_s": report.seconds,
            "peak_gib": peak}  # fmt: skip


def layers_arrive(device: torch.device, layers: int = 16) -> dict[str, Any]:
    """Layers brought over on a thread while the device computes: each must be whole when it is waited for."""
    sources = [torch.full((8, 1024, 128), float(index), dtype=torch.bfloat16) for index in range(layers)]
    targets = [torch.zeros(8, 1024, 128, dtype=torch.bfloat16, device=device) for _ in sources]
    filled, busy = [threading.Event() for _ in sources], torch.randn(1024, 1024, device=device)
    transfer = Transfer(device)

    def fill() -> None:
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            with transfer.filling(index):
                transfer.copy_(target, source)
            filled[index].set()

    thread = threading.Thread(target=fill)
    thread.start()
    sums = []
    for index, target in enumerate(targets):
        busy = (busy @ busy).tanh()
        filled[index].wait()
        transfer.wait(index)
        sums.append(target.float().mean())
    thread.join()
    transfer.close()
    wrong = [index for index, mean in enumerate(sums) if float(mean) != index]
    assert not wrong, f"layers {wrong} were used before they were there"
    return {"layers": layers}


def host_waits(lab: Lab, rows: int, recipe: str) -> dict[str, Any]:
    """Where the host waits for the device while a prompt is fused, by place in the code and how often."""
    call = lab.fused(lab.prompt(rows), recipe, 0.15)
    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{Path(w.filename).name}:{w.lineno}" for w in waits if "synchronizing" in str(w.message))
    return {"model": lab.name, "rows": rows, "method": recipe, "waits": places.total(), "places": dict(places)}


def _forget_peak(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
