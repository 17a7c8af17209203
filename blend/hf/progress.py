"""What a person at a terminal sees while a model is fetched, converted and loaded."""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from rich.console import Console
from transformers.utils import logging

__all__ = ["interactive", "library_bars", "spinner"]


def interactive(progress: bool) -> bool:
    """Whether progress is both wanted and seen: stderr is a terminal."""
    return progress and Console(stderr=True).is_terminal


@contextlib.contextmanager
def spinner(progress: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr; call the yielded function to change its text. Silent off a terminal."""
    if not interactive(progress):
        yield lambda text: None
        return
    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(text)


@contextlib.contextmanager
def library_bars(shown: bool) -> Iterator[None]:
    """Switch the bars of transformers and the hub client off for the block unless ``shown``."""
    if shown:
        yield
        return
    before, hub_before = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()
    try:
        with _without_gguf_bar():
            yield
    finally:
        # enable_progress_bar() also switches the hub's bars on, so those are put back after it.
        if before:
            logging.enable_progress_bar()
        if not hub_before:
            disable_progress_bars()


@contextlib.contextmanager
def _without_gguf_bar() -> Iterator[None]:
    # transformers' GGUF reader draws a tqdm bar of its own, which its switch does not reach.
    try:
        reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        bar = reader.tqdm
    except (ImportError, AttributeError):  # it is due to be replaced, and the bar with it
        yield
        return
    reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
