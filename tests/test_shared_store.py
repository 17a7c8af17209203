"""Stores under real use: two processes, a server that goes and comes back, a thousand requests under a small limit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blend import Blender, FirstK, Prompt
from blend.prefix import RadixPrefixCache
from blend.stores import DiskStore, MemoryStore, open_store
from blend.testing.prompts import tiny_ids, tiny_prompt
from blend.testing.tiny import tiny_model
from tests.servers import RedisServer

ROOT = Path(__file__).resolve().parent.parent

WORKER = """
import hashlib, json, sys
import torch
from blend import Blender
from blend.hf.load import load
from blend.prompt import Prompt
from blend.testing.prompts import tiny_prompt
from blend.testing.tiny import tiny_model

torch.set_num_threads(1)
task, url, name = sys.argv[1:]
if name == "tiny":
    blender = Blender(tiny_model("llama", torch.float32), None, check=False, store=url)
    prompt = tiny_prompt(7)
else:
    blender = Blender.from_pretrained(name, store=url, progress=False)
    passages = ["The pier was built by Ada Moor in 1871.", "The lamp burns whale oil.", "Ships come on Mondays."]
    prompt = blender.prompt("Who built the pier?", passages)
if task == "encode":
    print(json.dumps({"encoded": blender.encode(prompt.chunks, system=prompt.system).encoded}))
else:
    answer = blender.generate(prompt.reordered([2, 0, 1]), max_new_tokens=8, do_sample=False)
    bits = answer.fusion.logits.numpy().tobytes()
    sources = [chunk.source for chunk in answer.report.chunks]
    print(json.dumps({"ids": answer.ids, "bits": hashlib.sha256(bits).hexdigest(), "sources": sources}))
blender.close()
"""


def run(*arguments):
    """One worker process, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WORKER, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def sources(fusion):
    return [chunk.source for chunk in fusion.report.chunks]


def make(store, **options):
    return Blender(tiny_model("llama", torch.float32), None, check=False, store=store, **options)


# --- one process encodes, another fuses ------------------------------------------------------------------


def split_over_two_processes(url, name):
    assert run("encode", url, name) == {"encoded": 3}
    apart = run("answer", url, name)
    assert apart["sources"] == ["hit"] * 3
    alone = run("answer", url, name)
    assert alone == apart
    return apart


@pytest.mark.parametrize("name", ["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_one_process_encodes_and_another_fuses(name, tmp_path, request):
    if name == "smollm2":
        request.getfixturevalue("smollm2")
    apart = split_over_two_processes(f"file://{tmp_path}/kv", name)
    both = run("encode", f"file://{tmp_path}/own", name), run("answer", f"file://{tmp_path}/own", name)
    assert both[1] == apart, "another folder, encoded by another process: the same bits"


def test_one_process_encodes_and_another_fuses_over_redis(redis_server):
    apart = split_over_two_processes(f"{redis_server.url}?namespace=two-processes", "tiny")
    prompt = tiny_prompt(7)
    blender = make(MemoryStore())
    blender.encode(prompt.chunks, system=prompt.system)
    answer = blender.generate(prompt.reordered([2, 0, 1]), max_new_tokens=8, do_sample=False)
    assert list(answer.ids) == apart["ids"], "nothing in between changes the answer"


def test_what_lies_below_is_read_beside_computing_and_promoted(tmp_path):
    prompt = tiny_prompt(7)
    with make(f"file://{tmp_path}") as blender:
        blender.encode(prompt.chunks, system=prompt.system)
    blender = make(f"memory://1GiB | file://{tmp_path}")
    first, second = (blender.fuse(prompt, selector=FirstK(0.3)) for _ in range(2))
    assert sources(first) == sources(second) == ["hit"] * 3
    assert first.report.load.nbytes > 0, "from disk"
    assert second.report.load.nbytes == 0, "from memory"
    assert torch.equal(first.logits, second.logits)
    blender.close()


# --- a server that goes and comes back -------------------------------------------------------------------


def test_requests_go_on_without_redis_and_hits_come_back(tmp_path):
    now = [0.0]
    prompt = tiny_prompt(7)
    with RedisServer(tmp_path) as server:
        store = open_store(server.url)
        store._breaker._clock = lambda: now[0]
        blender = make(store)
        truth = blender.fuse(prompt, selector=FirstK(0.3))
        assert sources(blender.fuse(prompt)) == ["hit"] * 3
        server.stop(signal.SIGKILL)
        for _ in range(3):
            gone = blender.fuse(prompt, selector=FirstK(0.3))
            assert sources(gone) == ["miss"] * 3
            assert torch.allclose(gone.logits, truth.logits, atol=1e-5)
        assert "did not take it" in gone.report.chunks[0].why
        assert store.stats.failures > 0
        server.start()
        now[0] += 3600.0
        assert sources(blender.fuse(prompt)) == ["miss"] * 3, "the server came back empty"
        assert sources(blender.fuse(prompt)) == ["hit"] * 3
        store.close()


def test_a_restart_of_everything_finds_the_disk_as_it_was(tmp_path):
    prompt = tiny_prompt(7)
    with make(f"file://{tmp_path}") as blender:
        truth = blender.fuse(prompt, selector=FirstK(0.3))
    with make(tmp_path) as again:
        hit = again.fuse(prompt, selector=FirstK(0.3))
    assert sources(hit) == ["hit"] * 3
    assert torch.allclose(hit.logits, truth.logits, atol=1e-5)


def test_lossy_entries_answer_the_same_every_time(tmp_path):
    """A miss goes through the codec as a hit does, and nothing that lost digits is called exact."""
    prompt = tiny_prompt(7)
    blender = make(DiskStore(tmp_path, codec="int8"))
    first, *later = [blender.fuse(prompt, selector=FirstK(0.3)) for _ in range(4)]
    assert sources(first) == ["miss"] * 3
    assert all(sources(fusion) == ["hit"] * 3 for fusion in later)
    assert all(torch.allclose(fusion.logits, first.logits, atol=1e-5) for fusion in later)
    assert not any(chunk.exact for chunk in later[0].report.chunks), "the first stands behind its prelude, but rounded"
    plain = make(MemoryStore()).fuse(prompt, selector=FirstK(0.3))
    assert plain.report.chunks[0].exact
    assert not torch.equal(plain.logits, first.logits)


# --- a thousand requests ---------------------------------------------------------------------------------


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_thousand_requests_in_random_order_under_a_small_limit():
    """Novel questions over popular passages: memory stays flat, reuse does not decay, repeated prompts repeat."""
    draw = random.Random(0)
    chunks = [tiny_prompt(0, chunks=[24 + i for i in range(20)]).chunks[i] for i in range(20)]
    system = tiny_ids(12, 5)
    probe = make(MemoryStore())
    probe.encode(chunks, system=system)
    limit = sum(probe.store.get(key).nbytes for key in probe.store.keys()) * 6 // 10  # noqa: SIM118  # no dict
    blender = make(MemoryStore(limit), prefix=RadixPrefixCache(1 << 20))
    repeated = Prompt(system, tuple(chunks[i] for i in (0, 1, 2)), tiny_ids(9, 1))
    truth, hits, memory = None, [], []
    for number in range(1000):
        if number % 50 == 0:
            answer = blender.generate(repeated, selector=FirstK(0.3), max_new_tokens=4, do_sample=False)
            truth = truth or answer
            assert answer.ids == truth.ids
            assert torch.allclose(answer.fusion.logits, truth.fusion.logits, atol=1e-5)
        popular = sorted(range(20), key=lambda i: draw.random() ** (1.0 / (1 + 8 / (1 + i))), reverse=True)[:3]
        # Exact prefills stand behind another system part: else the repeated prompt would come to start with one of
        # them, and get better.
        before = system if number % 10 else tiny_ids(12, 6)
        prompt = Prompt(before, tuple(chunks[i] for i in popular), tiny_ids(9, 100 + number))
        fusion = blender.fuse(prompt, selector=FirstK(0.3)) if number % 10 else blender.prefill(prompt)
        if number % 10:
            hits.append(sum(chunk.source == "hit" for chunk in fusion.report.chunks))
        if number >= 300:
            memory.append(resident())
        assert blender.store.nbytes <= limit
    early, late = sum(hits[100:450]) / 350, sum(hits[-350:]) / 350
    assert late > 0.9 * early > 0.0, f"{late:.2f} hits per request at the end, {early:.2f} before"
    x = torch.arange(len(memory), dtype=torch.float64)
    y = torch.tensor(memory, dtype=torch.float64)
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    assert slope < 4096, f"memory grows by {slope:.0f} bytes per request"
    blender.setup.prefix.check()
