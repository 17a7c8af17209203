"""``kvblend index``, ``ask`` and ``chat``: from a folder of documents to answers. Knows how to read options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eval.cli_options import DtypeOption, JsonOption, ThreadsOption, dtype_of, set_threads, write

__all__ = ["ask", "chat", "index"]

RagArgument = Annotated[Path, typer.Argument(help="Folder that `kvblend index` has made.")]
RagModelOption = Annotated[str | None, typer.Option(help="Model; that of the folder if not given.")]
KOption = Annotated[int | None, typer.Option(help="Passages; as the folder is set if not given.")]
TokensOption = Annotated[int | None, typer.Option("--max-new-tokens", help="Tokens of an answer, at most.")]


def index(
    folder: Annotated[Path, typer.Argument(help="Documents: txt, md, html, pdf, jsonl.")],
    to: Annotated[Path, typer.Option(help="Where documents, indexes and KV are kept.")],
    model: Annotated[str | None, typer.Option(help="Hub id, folder, .gguf file or alias; smollm2 at first.")] = None,
    size: Annotated[int | None, typer.Option(help="Tokens of a passage, at most; 256 at first.")] = None,
    overlap: Annotated[int | None, typer.Option(help="Tokens that neighbouring passages share; 32 at first.")] = None,
    retriever: Annotated[str | None, typer.Option(help="dense, sparse or hybrid; hybrid at first.")] = None,
    dense: Annotated[str | None, typer.Option(help="Dense index: flat, ivf or hnsw; flat at first.")] = None,
    embedder: Annotated[str | None, typer.Option(help="Embedding model; the packaged one at first.")] = None,
    store: Annotated[str | None, typer.Option(help="Address of the KV; its folder kv at first.")] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove documents that are not in the folder.")] = False,
    dtype: DtypeOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Split, embed and encode a folder of documents; run again, it does what is new, changed or was left."""
    from eval.rag.index import IndexOptions, run_index

    set_threads(threads)
    given = {"size": size, "overlap": overlap, "retriever": retriever, "dense": dense}
    settings = {name: value for name, value in given.items() if value is not None}
    options = IndexOptions(folder, to, model, embedder, dtype_of(dtype), store, prune, settings)
    figures = run_index(options, Console())
    write(json_file, figures)
    if not figures["complete"]:
        raise typer.Exit(130)


def ask(
    rag: RagArgument,
    question: Annotated[str, typer.Argument(help="What to answer from the documents.")],
    k: KOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the report and the coloured prompt.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Answer by full prefill too, side by side.")] = False,
    max_new_tokens: TokensOption = None,
    model: RagModelOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Answer a question from indexed documents, and say where the answer comes from."""
    from eval.rag.ask import AskOptions, run_ask

    set_threads(threads)
    figures = run_ask(AskOptions(rag, model, k, max_new_tokens, explain, compare), question, Console())
    write(json_file, figures)
    if not figures["complete"]:
        raise typer.Exit(130)


def chat(
    rag: RagArgument,
    k: KOption = None,
    max_new_tokens: TokensOption = None,
    model: RagModelOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Talk about indexed documents; each turn goes on from what earlier ones have fused."""
    from eval.rag.ask import AskOptions, run_chat

    set_threads(threads)
    run_chat(AskOptions(rag, model, k, max_new_tokens), Console())
