"""The front door: :class:`Blender` answers prompts from fused chunk KV."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from blend.adapting import Adapting
from blend.admission import accept, admit, admit_ids, default_corrector, default_selector, one_of, targets
from blend.answering import Answering
from blend.background import NO_BACKGROUND, Background, bundled_passages
from blend.check import quick_check
from blend.chunk import Chunk
from blend.correctors import Corrector
from blend.errors import PromptError, UnsupportedRotation
from blend.fuse import fuse, prefill
from blend.fusion import Fusion
from blend.hf.load import load
from blend.hf.view import ModelView
from blend.leads import Leads
from blend.library import Encoded
from blend.loading import Loading
from blend.naming import Prelude
from blend.prefix import PrefixCache, RadixPrefixCache
from blend.progress import track
from blend.prompt import Prompt
from blend.selectors import Selector
from blend.setup import OnMiss, Setup
from blend.stores import MemoryStore, Store, open_store
from blend.text import DEFAULT_SYSTEM, PromptText, tokenizer_digest

__all__ = ["Blender", "Encoded"]


class Blender(Answering, Adapting):
    """A model that reuses the KV of passages wherever they stand in a prompt.

    ::

        blender = Blender.from_pretrained("smollm2")
        prompt = blender.prompt("Who built the pier?", passages)
        answer = blender.generate(prompt, max_new_tokens=32)
        print(answer.text, answer.report)

    Args:
        model: a decoder-only model of transformers in eval mode, on one device. Its forward is not changed; hooks and
            an attention function are attached until :meth:`close`.
        tokenizer: its tokenizer; None if prompts are built from ids.
        selector: which reused rows are computed again; by default the 15 % with the largest expected error
            (:class:`ExpectedError`), or, where a model's attention cannot be watched, the first rows of each chunk.
        ratio: in place of a selector: the share of reused rows that the default one computes again, or ``auto`` for as
            many as it takes; see :meth:`adaptive`.
        max_kl: ``auto`` with a target: nats from full prefill, the mean along an answer.
        ttft_budget: ``auto`` with a target: seconds to the first token.
        corrector: what is done to the reused rows that are not computed again. By default nothing beside a selector
            that is named, or beside chunks that are encoded alone; else a quarter of the mean residual is added.
        store: where chunk KV is kept: a store, or what :func:`blend.open_store` opens (``"file:///kv?limit=100GiB"``);
            memory by default.
        prefix: the exact prefix cache.
        prelude: what chunks are encoded behind: ``system`` (the prompt's system part), ``bos``, or ``none``.
        background: what chunk KV is averaged over: passages, of different subjects, such as stand in prompts, or their
            tokens; by default bundled ones (a Blender without a tokenizer has none), and None to encode chunks alone.
        system: default instructions of :meth:`prompt` and :meth:`encode`.
        chat: use the chat template; None where there is one.
        salt: separates tenants that share a store; set by the server, never from a prompt.
        adapter: id of the adapter (LoRA) that the model runs with.
        on_miss: ``encode`` missing chunks and fuse; or ``prefill`` the prompt at once and encode them when no request
            is under way.
        loading: ``adapt`` raises the recompute ratio to what hides reading chunks from a slow store, and encodes those
            that are slower to read than to encode; ``plain`` only reports both.
        bypass: prefill in full where fusing with the default selector has turned out to be slower, or where an adaptive
            one foresees it; chunks that are missing are encoded when no request is under way.
        jitter: up to so many seconds, at random, are added to each answer's first token, against tenants that tell
            each other's hits by their timing.
        check: prove a short fusion against full prefill now.

    Raises:
        UnsupportedModel, UnsupportedRotation: the model cannot be fused; the message says why and what to use.
        SelfCheckFailed: the short proof failed.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        selector: Selector | None = None,
        ratio: float | Literal["auto"] | None = None,
        max_kl: float | None = None,
        ttft_budget: float | None = None,
        corrector: Corrector | None = None,
        store: Store | str | os.PathLike[str] | Sequence[str] | None = None,
        prefix: PrefixCache | None = None,
        prelude: Prelude = "system",
        background: Background | Sequence[str] | None = (),
        system: str = DEFAULT_SYSTEM,
        chat: bool | None = None,
        salt: str = "",
        adapter: str = "",
        on_miss: OnMiss = "encode",
        loading: Loading = "plain",
        bypass: bool = True,
        jitter: float = 0.0,
        check: bool = True,
    ) -> None:
        one_of("prelude", prelude, ("system", "bos", "none"))
        one_of("on_miss", on_miss, ("encode", "prefill"))
        one_of("loading", loading, ("plain", "adapt"))
        if jitter < 0:
            raise PromptError(f"jitter is {jitter} seconds: it must be 0 or more")
        self._auto = targets(selector, ratio, max_kl, ttft_budget)
        self.tokenizer = tokenizer
        self.text = PromptText(tokenizer, chat) if tokenizer is not None else None
        bos = self.text.bos() if self.text else ()
        if prelude == "bos" and not bos:
            raise PromptError("prelude='bos', but the tokenizer puts no BOS before a text: use 'system' or 'none'")
        self.view = ModelView(model)
        self.system = system
        try:
            averaged_over = self._background(background)
            if selector is None:
                corrector = corrector or default_corrector(averaged_over)
            self.selector = selector or default_selector(self.view, None if isinstance(ratio, str) else ratio)
            self.corrector = corrector
            accept(self.view, self.selector, corrector)
            if check:
                quick_check(self.view)
            opened = MemoryStore() if store is None else open_store(store)
        except BaseException:
            self.view.close()  # a refused model goes back as it came
            raise
        identity = hashlib.sha256(f"{self.view.fingerprint}{tokenizer_digest(tokenizer)}".encode()).hexdigest()
        self.setup = Setup(
            view=self.view,
            store=opened,
            prefix=RadixPrefixCache() if prefix is None else prefix,
            fingerprint=identity,
            prelude=prelude,
            bos=bos,
            salt=salt,
            adapter=adapter,
            background=averaged_over,
            on_miss=on_miss,
            loading=loading,
        )
        self._bypass, self._jitter = bypass, jitter
        self._owns, self._opened = True, not isinstance(store, Store)
        if self._auto is not None:
            try:
                self.selector = self._own_adaptive(self._auto)
            except BaseException:
                self.close()
                raise

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        progress: bool = True,
        **options: Any,
    ) -> Blender:
        """Loads a model by hub id, folder, ``.gguf`` file or alias (``smollm2``).

        Args:
            dtype: None for the checkpoint's own (bf16 for GGUF and aliases).
            device: None for the CPU.
            options: keyword arguments of :class:`Blender`.

        Raises:
            ModelNotFound: the name leads to no weights; the message lists what was tried.
        """
        model, tokenizer = load(name, dtype=dtype, device=device, progress=progress)
        return cls(model, tokenizer, **options)

    @property
    def model(self) -> Any:
        """The model itself."""
        return self.view.model

    @property
    def store(self) -> Store:
        """Where chunk KV is kept."""
        return self.setup.store

    # --- building ---------------------------------------------------------------------------------

    def prompt(self, question: str, passages: Sequence[str | Chunk] = (), system: str | None = None) -> Prompt:
        """A prompt from text: chat template, instructions, passages in order, question.

        Raises:
            PromptError: no tokenizer, an empty question or passage.
        """
        return self._text().prompt(question, passages, self.system if system is None else system)

    # --- answering --------------------------------------------------------------------------------

    def fuse(
        self,
        prompt: Prompt,
        *,
        selector: Selector | None = None,
        corrector: Corrector | None = None,
        past: Fusion | None = None,
    ) -> Fusion:
        """KV of every row of the prompt, repaired, and the logits of its last row.

        Chunks that are not in the store are encoded and kept. A prompt that cannot be fused (no chunks, or a length
        that its rotation does not allow) is prefilled in full, and the report says why.

        Args:
            selector: in place of the Blender's own, and of its corrector: who names a selector names its corrector too,
                unless it is one of :meth:`adaptive`.
            corrector: in place of the Blender's own.
            past: an earlier fusion whose prompt starts the same way (a follow-up question, another turn); its KV is
                taken over as it is, and the result is approximate if it was.

        Raises:
            PromptTooLong: more rows than the model holds.
            PromptError: padding inside a chunk.
            UnsupportedModel: the selector needs what this model cannot show.
            BudgetError: the corrector needs what the selector does not find out.
        """
        admit(self.view, self.tokenizer, prompt)
        # Who names one of them wants to see its work; to weigh a prefill is an adaptive selector's.
        bypass = self._bypass and corrector is None and (selector is None or selector.adapts)
        if selector is None or selector.adapts:  # it spends on the Blender's own recipe
            selector, corrector = selector or self.selector, corrector or self.corrector
        accept(self.view, selector, corrector)
        with self.setup.afterwards.request():
            fusion = self._fuse(prompt, selector, corrector, past, bypass)
        if self._jitter:
            time.sleep(random.SystemRandom().uniform(0.0, self._jitter))
        return fusion

    def _fuse(
        self, prompt: Prompt, selector: Selector, corrector: Corrector | None, past: Fusion | None, bypass: bool
    ) -> Fusion:
        if not prompt.chunks and past is None:
            return prefill(self.setup, prompt, "the prompt has no chunks", self._decode)
        try:
            return fuse(self.setup, prompt, selector, past, self._decode, bypass, corrector)
        except UnsupportedRotation as error:
            return prefill(self.setup, prompt, str(error), self._decode)

    def prefill(self, prompt: Prompt, *, remember: bool = True) -> Fusion:
        """The plain path: exact, with the longest known prefix reused, and kept for later prompts.

        Args:
            remember: keep the KV of this prompt in the prefix cache.
        """
        admit(self.view, self.tokenizer, prompt)
        with self.setup.afterwards.request():
            return prefill(self.setup, prompt, "asked for", self._decode, remember)

    # --- life -------------------------------------------------------------------------------------

    def tenant(self, salt: str, *, jitter: float | None = None) -> Blender:
        """The same model and stores for another tenant: nothing that one encodes is ever a hit for the other.

        Args:
            salt: names the tenant; set by the server, never from a prompt.
            jitter: in place of this Blender's.
        """
        other = copy.copy(self)
        other.setup = replace(self.setup, salt=salt)
        other._jitter = self._jitter if jitter is None else jitter
        other._owns = False
        return other

    def averaged(self, background: Background | Sequence[str] | None) -> Blender:
        """The same model and stores, with chunk KV averaged over something else; see the ``background`` of the class.

        What is in the store under one background is not found under another.
        """
        other = copy.copy(self)
        other.setup = replace(self.setup, background=self._background(background), leads=Leads())
        other._owns = False
        if self._auto is not None:
            other.selector = other._own_adaptive(self._auto)
        return other

    def drain(self, *, progress: bool = False) -> None:
        """Returns when the chunks that are to be encoded in the background are encoded.

        Args:
            progress: show a bar.
        """
        jobs = self.setup.afterwards
        for _ in track(jobs.draining(), total=len(jobs), label="encoding", show=progress):
            pass

    def close(self) -> None:
        """Encodes what is left to encode afterwards, and takes hooks and attention off the model again.

        A store that the Blender has opened is closed too. A tenant's Blender leaves all this to the one it came from.
        """
        if self._owns:
            self.setup.afterwards.close()
            self.view.close()
            if self._opened:
                self.setup.store.close()

    def __enter__(self) -> Blender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- helpers ----------------------------------------------------------------------------------

    def _background(self, given: Background | Sequence[str] | None) -> Background:
        if isinstance(given, str):
            raise PromptError(f"the background is one text, {given[:40]!r}: give a list of passages, or None for none")
        if given is None or (self.text is None and not given):
            return NO_BACKGROUND
        if not isinstance(given, Background):
            given = Background.of(given or bundled_passages(), lambda passage: self._text().chunk(passage).ids)
        for ids in given.contexts:
            admit_ids(self.view, ids)
        return given

    def _decode(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        return str(self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
