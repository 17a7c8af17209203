"""The front door: :class:`Blender` answers prompts from fused chunk KV."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from blend.admission import accept, admit, admit_chunk, admit_ids, default_selector
from blend.check import quick_check
from blend.chunk import Chunk, ChunkKV
from blend.errors import ForeignKV, PromptError, UnsupportedRotation
from blend.fuse import fuse, prefill
from blend.fusion import Answer, Fusion
from blend.hf.generate import generate, stream
from blend.hf.load import load
from blend.hf.view import ModelView
from blend.prefix import LinearPrefixCache, PrefixCache
from blend.progress import track
from blend.prompt import Prompt
from blend.selectors import Selector
from blend.setup import Prelude, Setup
from blend.stores import MemoryStore, Store
from blend.text import DEFAULT_SYSTEM, PromptText, tokenizer_digest

__all__ = ["Blender", "Encoded"]


class Encoded(NamedTuple):
    """What :meth:`Blender.encode` did: chunks encoded now, chunks that were there, rows and bytes added."""

    encoded: int
    reused: int
    rows: int
    nbytes: int


class Blender:
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
        selector: which reused rows are computed again; by default the 15 % that the question attends to most, or,
            where a model's attention cannot be watched, the first rows of each chunk.
        store: where chunk KV is kept; memory by default.
        prefix: the exact prefix cache.
        prelude: what chunks are encoded behind: ``system`` (the prompt's system part), ``bos``, or ``none``.
        system: default instructions of :meth:`prompt` and :meth:`encode`.
        chat: use the chat template; None where there is one.
        salt: separates tenants that share a store; set by the server, never from a prompt.
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
        store: Store | None = None,
        prefix: PrefixCache | None = None,
        prelude: Prelude = "system",
        system: str = DEFAULT_SYSTEM,
        chat: bool | None = None,
        salt: str = "",
        check: bool = True,
    ) -> None:
        if prelude not in ("none", "bos", "system"):
            raise PromptError(f"prelude is {prelude!r}: choose 'system', 'bos' or 'none'")
        self.tokenizer = tokenizer
        self.text = PromptText(tokenizer, chat) if tokenizer is not None else None
        bos = self.text.bos() if self.text else ()
        if prelude == "bos" and not bos:
            raise PromptError("prelude='bos', but the tokenizer puts no BOS before a text: use 'system' or 'none'")
        self.view = ModelView(model)
        self.system = system
        self.selector = selector or default_selector(self.view)
        try:
            accept(self.view, self.selector)
            if check:
                quick_check(self.view)
        except BaseException:
            self.view.close()  # a refused model goes back as it came
            raise
        identity = hashlib.sha256(f"{self.view.fingerprint}{tokenizer_digest(tokenizer)}".encode()).hexdigest()
        self.setup = Setup(
            self.view, store or MemoryStore(), prefix or LinearPrefixCache(), identity, prelude, bos, salt
        )

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

    def chunk(self, text: str, name: str = "") -> Chunk:
        """A passage as a chunk."""
        return self._text().chunk(text, name)

    # --- encoding ---------------------------------------------------------------------------------

    def encode(
        self, chunks: Iterable[Chunk | str], *, system: str | tuple[int, ...] | None = None, progress: bool = False
    ) -> Encoded:
        """Computes and stores the KV of chunks that are not in the store yet.

        Every finished batch is in the store; after an interruption a second call does the rest only.

        Args:
            chunks: chunks or texts; duplicates are encoded once.
            system: the system part that they will stand behind, as text or ids; None for the default.
            progress: show a bar.

        Raises:
            PromptTooLong: a chunk that does not fit the model, before anything is encoded.
        """
        self.view.require_ready()
        wanted = list(dict.fromkeys(c if isinstance(c, Chunk) else self.chunk(c) for c in chunks))
        ids = system if isinstance(system, tuple) else self._system_ids(system)
        admit_ids(self.view, ids)
        for chunk in wanted:
            admit_chunk(self.view, self.tokenizer, chunk)
        known = self.setup.fetch(wanted, ids)
        missing = [chunk for chunk in wanted if chunk not in known]
        rows = nbytes = 0
        done = self.setup.encode(missing, ids) if missing else iter(())
        for kv in track(done, total=len(missing), label="encoding", show=progress):
            rows += len(kv.ids)
            nbytes += kv.nbytes
        return Encoded(len(missing), len(wanted) - len(missing), rows, nbytes)

    def add(self, kvs: Iterable[ChunkKV]) -> None:
        """Puts chunk KV that was computed elsewhere into the store.

        Raises:
            ForeignKV: one of them comes from another model, dtype or tokenizer; then none is stored.
        """
        kvs = list(kvs)
        for kv in kvs:
            if kv.fingerprint != self.setup.fingerprint:
                raise ForeignKV(
                    f"the KV of a chunk of {len(kv.ids)} tokens was made by {kv.fingerprint[:12]}, and this Blender is "
                    f"{self.setup.fingerprint[:12]}: model, dtype or tokenizer differ; encode the chunk here instead"
                )
        for kv in kvs:
            self.store.put(kv)

    # --- answering --------------------------------------------------------------------------------

    def fuse(self, prompt: Prompt, *, selector: Selector | None = None, past: Fusion | None = None) -> Fusion:
        """KV of every row of the prompt, repaired, and the logits of its last row.

        Chunks that are not in the store are encoded and kept. A prompt that cannot be fused (no chunks, or a length
        that its rotation does not allow) is prefilled in full, and the report says why.

        Args:
            selector: in place of the Blender's own.
            past: an earlier fusion whose prompt starts the same way (a follow-up question, another turn); its KV is
                taken over as it is, and the result is approximate if it was.

        Raises:
            PromptTooLong: more rows than the model holds.
            PromptError: padding inside a chunk.
            UnsupportedModel: the selector needs what this model cannot show.
        """
        admit(self.view, self.tokenizer, prompt)
        chosen = selector or self.selector
        accept(self.view, chosen)
        if not prompt.chunks and past is None:
            return prefill(self.setup, prompt, "the prompt has no chunks", self._decode)
        try:
            return fuse(self.setup, prompt, chosen, past, self._decode)
        except UnsupportedRotation as error:
            return prefill(self.setup, prompt, str(error), self._decode)

    def prefill(self, prompt: Prompt, *, remember: bool = True) -> Fusion:
        """The plain path: exact, with the longest known prefix reused, and kept for later prompts.

        Args:
            remember: keep the KV of this prompt in the prefix cache.
        """
        admit(self.view, self.tokenizer, prompt)
        return prefill(self.setup, prompt, "asked for", self._decode, remember)

    def generate(
        self, prompt: Prompt | Fusion, *, selector: Selector | None = None, past: Fusion | None = None, **options: Any
    ) -> Answer:
        """Fuses and answers.

        Args:
            prompt: a prompt, or a fusion made before.
            options: keyword arguments of ``model.generate``.
        """
        fusion = prompt if isinstance(prompt, Fusion) else self.fuse(prompt, selector=selector, past=past)
        output = generate(self.view, self.tokenizer, fusion.prompt.ids, fusion.layers, options)
        sequences = getattr(output, "sequences", output)
        new = sequences[:, len(fusion.prompt) :]
        texts = tuple(self.tokenizer.batch_decode(new, skip_special_tokens=True)) if self.tokenizer else ()
        return Answer(texts[0].strip() if texts else "", texts, tuple(new[0].tolist()), fusion, output)

    def stream(
        self, prompt: Prompt | Fusion, *, selector: Selector | None = None, past: Fusion | None = None, **options: Any
    ) -> Iterator[str]:
        """Fuses and yields the answer piece by piece; leaving the loop stops the generation.

        Raises:
            PromptError: the Blender has no tokenizer.
        """
        self._text()
        fusion = prompt if isinstance(prompt, Fusion) else self.fuse(prompt, selector=selector, past=past)
        return stream(self.view, self.tokenizer, fusion.prompt.ids, fusion.layers, options)

    def follow_up(self, answer: Answer, question: str, **options: Any) -> Answer:
        """Another turn on the same fused context, whose KV is taken over as it is.

        Args:
            answer: the turn before.
            question: what to ask now.
            options: keyword arguments of :meth:`generate`.
        """
        ids = self._text().turn(answer.ids, question)
        before = answer.fusion.prompt
        longer = Prompt(before.system, before.chunks, (*before.question, *ids))
        return self.generate(longer, past=answer.fusion, **options)

    # --- life -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Takes hooks and attention off the model again."""
        self.view.close()

    def __enter__(self) -> Blender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- helpers ----------------------------------------------------------------------------------

    def _text(self) -> PromptText:
        if self.text is None:
            raise PromptError(
                "this Blender has no tokenizer: build Prompt and Chunk from token ids, or pass tokenizer="
            )
        return self.text

    def _system_ids(self, system: str | None) -> tuple[int, ...]:
        return self._text().system_ids(self.system if system is None else system)

    def _decode(self, token: int) -> str:
        return str(self.tokenizer.decode([token])) if self.tokenizer is not None else f"{token} "
