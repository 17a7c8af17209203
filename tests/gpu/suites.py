"""The backends of a device, each tested in a process of its own: a kernel that crashes takes nothing else with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from blend.check import Proof, prove
from blend.hf.attention import BACKENDS, REFUSES, SETTING, choose_backend
from blend.hf.view import ModelView
from blend.testing.attention import AttentionTests, failures
from blend.testing.tiny import tiny_model

FAMILIES = ("llama", "qwen2", "gemma2", "gpt_oss", "llama4_text")  # plain, biases, softcap and windows, sinks, chunks
LIMITS = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SECONDS = 100
CHOICE = "choice"  # not a backend: which of them is taken


def installed(device: torch.device) -> dict[str, str | None]:
    """Backends of the device, fastest first as the choice has them, and why one cannot run here."""
    if device.type == "cpu":
        return {"sdpa": None, "blocked": None}
    query = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16, device=device)
    return {**{name: refuses(query, query) for name, refuses in REFUSES.items()}, "sdpa": None}


def suite_process(name: str, device: torch.device, small: bool) -> subprocess.Popen[str]:
    """Starts the suite of one backend."""
    script = Path(__file__).with_name("run.py")
    command = [sys.executable, str(script), "--suite", name, "--device", str(device), *(["--small"] if small else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def suite_results(running: dict[str, subprocess.Popen[str]], limit: float) -> dict[str, dict[str, Any]]:
    """What each process found; one that crashed or took too long is itself a finding."""
    results, until = {}, time.monotonic() + limit
    for name, process in running.items():
        try:
            out, err = process.communicate(timeout=max(until - time.monotonic(), 0.0))
            crash = {"crashed": f"exit status {process.returncode}: {err.strip()[-400:]}"}
            results[name] = crash if process.returncode else json.loads(out.splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            results[name] = {"crashed": f"did not end within {limit:.0f} s"}
    return results


def run_suite(name: str, device: torch.device, families: Sequence[str]) -> dict[str, Any]:
    """The AttentionTests and the proofs with one backend: what is wrong, and how far off each proof is."""
    os.environ[SETTING] = name
    half_only = name in ("flash", "fa4")
    limits = {dtype: limit for dtype, limit in LIMITS.items() if not (half_only and dtype == torch.float32)}
    if name == "flex":  # every head layout, dtype and extra is compiled, and two dtypes say enough
        del limits[torch.float16]
    made = {"attend": staticmethod(BACKENDS[name]), "limits": limits, "device": str(device)}
    wrong, proofs = failures(type("OnDevice", (AttentionTests,), made)), {}
    for family in families:
        try:
            for proof in _proofs(family, torch.bfloat16 if half_only else torch.float32, device):
                proofs[f"{family}: {proof.name}"] = proof.value
                if not proof.passed:
                    wrong[f"{family}: {proof.name}"] = f"off by {proof.value:.1e}, limit {proof.limit:.0e}"
        except Exception as error:  # the other families are to be tried all the same
            wrong[family] = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"failures": wrong, "proofs": proofs}


def run_choice(device: torch.device) -> dict[str, Any]:
    """What is chosen where nobody names a backend, and what was left out on the way, for the shapes of both models."""
    os.environ[SETTING] = ""
    chosen = {}
    with warnings.catch_warnings(record=True) as left_out:
        warnings.simplefilter("always", RuntimeWarning)
        for heads, kv_heads, dim in ((32, 8, 128), (14, 2, 64)):
            query, value = (torch.zeros(1, h, 4, dim, dtype=torch.bfloat16, device=device) for h in (heads, kv_heads))
            for softcap, sinks in ((False, False), (True, True)):
                extras = " with softcap and sinks" if sinks else ""
                chosen[f"{heads}/{kv_heads} x {dim}{extras}"] = choose_backend(query, value, softcap, sinks)
    return {"chosen": chosen, "left_out": [str(w.message) for w in left_out]}


def _proofs(family: str, dtype: torch.dtype, device: torch.device) -> Iterator[Proof]:
    view = ModelView(tiny_model(family, dtype).to(device))
    try:
        yield from prove(view)
    finally:
        view.close()
