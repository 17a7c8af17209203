"""From documents to answers: :class:`RagPipeline` splits, indexes and encodes, then finds, fuses and generates."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

from blend import Blender, PromptError
from blend.selectors import Selector
from retrieval.embed import Embeds
from retrieval.rag.answer import RagAnswer
from retrieval.rag.catalogue import Catalogue
from retrieval.rag.chat import Chat
from retrieval.rag.compose import Composer
from retrieval.rag.finder import Finder
from retrieval.rag.folder import open_blender, save
from retrieval.rag.intake import Intake
from retrieval.rag.record import FILE, Record, embedder_of
from retrieval.rag.settings import RagSettings
from retrieval.rag.shelf import Shelf
from retrieval.rag.steps import Steps
from retrieval.rag.stream import AsyncRagStream, RagStream, awaited
from retrieval.rerank import Reranker

__all__ = ["RagPipeline"]


class RagPipeline(Shelf, Steps):
    """Answers questions from documents, whose passages are encoded once and reused in any order.

    ::

        with RagPipeline.from_pretrained("smollm2", folder="rag") as rag:
            rag.add(load_folder("notes"))
            answer = rag.ask("Who steers the ferry?")
            print(answer, answer.citations, answer.report)

    Safe to share by threads. Processes may share a folder: what one changes, the others find at their next question.

    Args:
        blender: the model. It is left open by :meth:`close`.
        embedder: makes vectors, by default the packaged model; not loaded where ``settings.retriever`` is ``sparse``.
        folder: where documents and indexes are kept; made if need be. None keeps them in memory until :meth:`save`.
        settings: by default those that the folder was made with, or :class:`RagSettings`.
        reranker: chooses among four times as many passages as are asked for.
        model: name that :meth:`load` loads the model by.
        store: address that :meth:`load` opens the store of chunk KV at; a path without scheme lies in ``folder``.
        workers: questions of :meth:`aask` and :meth:`astream` that are computed at the same time.

    Raises:
        PromptError: the Blender has no tokenizer.
        SettingError: passages of ``settings.size`` tokens do not fit the model.
        IndexMismatch: the folder was made with another model, embedder or setting.
        EmbedderMissing: the packaged embedder is not installed.
    """

    def __init__(
        self,
        blender: Blender,
        embedder: Embeds | str | os.PathLike[str] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        settings: RagSettings | None = None,
        reranker: Reranker | None = None,
        model: str = "",
        store: str = "kv",
        workers: int = 4,
    ) -> None:
        if blender.text is None:
            raise PromptError("a pipeline needs text: make the Blender with a tokenizer")
        there = Record.read(folder) if folder is not None and (Path(folder) / FILE).exists() else None
        self.settings = settings or (there.settings if there else RagSettings())
        self.blender, self.folder = blender, None if folder is None else Path(folder)
        self.embedder = embedder_of(embedder, self.settings)
        self._reranker, self._workers, self._owns = reranker, workers, False
        self.record = Record.of(blender, self.embedder, self.settings, model, store)
        self.compose = Composer(blender, self.settings)
        self.compose.require(self.settings.size)
        if there:
            there.require(self.record)
        elif self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record.write(self.folder)
        self._catalogue = Catalogue(self.folder / "catalogue.sqlite" if self.folder else None)
        index = self.folder / "index" if self.folder else None
        self._finder = Finder(self._catalogue, self.settings, self.embedder, index)
        self._intake = Intake(self._catalogue, blender, self.settings, self.embedder)

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str] = "smollm2",
        embedder: Embeds | str | os.PathLike[str] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        settings: RagSettings | None = None,
        reranker: Reranker | None = None,
        store: str = "",
        workers: int = 4,
        **options: Any,
    ) -> RagPipeline:
        """Loads the model, and opens or makes the folder.

        Args:
            model: hub id, folder, ``.gguf`` file or alias (``smollm2``).
            store: address of the chunk KV (see :func:`blend.open_store`); by default ``kv`` in the folder, or memory.
            options: of :meth:`Blender.from_pretrained`. ``bypass`` is False unless given: the same question gets the
                same answer, whatever else the machine is doing.

        Raises:
            What :class:`RagPipeline` and :meth:`Blender.from_pretrained` raise.
        """
        blender = open_blender(model, folder, store, options)
        try:
            own = cls(
                blender,
                embedder,
                folder=folder,
                settings=settings,
                reranker=reranker,
                model=os.fspath(model),
                store=store or "kv",
                workers=workers,
            )
        except BaseException:
            blender.close()
            raise
        own._owns = True
        return own

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        model: Blender | str | os.PathLike[str] | None = None,
        embedder: Embeds | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> RagPipeline:
        """Opens a folder that :meth:`save`, or a pipeline with ``folder=``, has made; nothing is encoded again.

        Args:
            model: a name, by default that of the folder; or a Blender, whose own store is used.
            embedder: by default that of the folder.
            options: of :meth:`from_pretrained`.

        Raises:
            IndexMismatch: no such folder, or another model, embedder or setting than it was made with.
            DamagedIndex: its files cannot be read.
        """
        record = Record.read(folder)
        given = embedder if embedder is not None else record.embedder or None
        if isinstance(model, Blender):
            return cls(model, given, folder=folder, model=record.model, store=record.store, **options)
        name = model if model is not None else record.named_model()
        options = {"dtype": record.torch_dtype, "prelude": record.prelude, "store": record.store, **options}
        return cls.from_pretrained(name, given, folder=folder, **options)

    # --- asking -----------------------------------------------------------------------------------

    def ask(
        self,
        question: str,
        k: int | None = None,
        *,
        full: bool = False,
        selector: Selector | None = None,
        max_new_tokens: int | None = None,
        stop: Event | None = None,
        **options: Any,
    ) -> RagAnswer:
        """Answers a question from the passages that match it best.

        Args:
            k: passages; ``settings.k`` if not given. The lowest ranked are left out where not all fit the model, and
                the answer's notes say so.
            full: a plain full prefill in place of fusing, to compare with; nothing of it is kept.
            selector: in place of the Blender's own.
            max_new_tokens: of the answer, 128 if not given; the prompt leaves room for them.
            stop: ends the answer with the token under way, once another thread sets it.
            options: of ``model.generate``; greedy unless ``do_sample`` is given.

        Raises:
            PromptError: an empty question.
            PromptTooLong: not even the question fits the model.
            SettingError: ``k`` below 1, or no documents.
        """
        rows = self.answer_rows(max_new_tokens)
        context = self.context(question, k, rows)
        fusion = self.fuse(context, full=full, selector=selector)
        return RagAnswer(self.generate(fusion, rows, stop=stop, **options), context, fusion)

    def stream(
        self,
        question: str,
        k: int | None = None,
        *,
        full: bool = False,
        selector: Selector | None = None,
        max_new_tokens: int | None = None,
        stop: Event | None = None,
        **options: Any,
    ) -> RagStream:
        """The same piece by piece; passages and report are there before the first."""
        rows = self.answer_rows(max_new_tokens)
        context = self.context(question, k, rows)
        fusion = self.fuse(context, full=full, selector=selector)
        return RagStream(context, fusion, self.pieces(fusion, rows, stop=stop, **options))

    async def aask(self, question: str, k: int | None = None, **options: Any) -> RagAnswer:
        """:meth:`ask` on another thread; cancelling it stops the generation."""
        stop = Event()
        return await awaited(self.executor, partial(self.ask, question, k, stop=stop, **options), stop)

    def astream(self, question: str, k: int | None = None, **options: Any) -> AsyncRagStream:
        """:meth:`stream` for ``async for``; cancelling it stops the generation."""
        return AsyncRagStream(lambda stop: self.stream(question, k, stop=stop, **options), self.executor)

    def chat(self, k: int | None = None) -> Chat:
        """A conversation: each turn goes on from the passages, questions and answers before it."""
        return Chat(self, k)

    # --- life -------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Writes everything into a folder that :meth:`load` opens: documents, indexes, chunk KV, settings.

        A pipeline that was made with ``folder`` is kept there at every change; saved elsewhere it is copied.

        Args:
            folder: a new one; None for the pipeline's own.

        Raises:
            SettingError: no folder, or one in which another pipeline lies.
        """
        save(self.record, self._catalogue, self._finder, self.blender, self.folder, folder)

    def close(self) -> None:
        """Lets go of files. A Blender made here finishes encoding and is closed; one handed over goes on."""
        if "executor" in vars(self):
            self.executor.shutdown()
        if self._owns:
            self.blender.close()
        self._catalogue.close()

    def __enter__(self) -> RagPipeline:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None and self._owns:
            # Who leaves by an error, or by Ctrl-C, does not want to wait; what is left is found missing next time.
            self.blender.setup.afterwards.close(finish=False)
        self.close()

    @cached_property
    def executor(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._workers, "kvblend-ask")
