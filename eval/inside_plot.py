"""Draws what :mod:`eval.inside` measures into matplotlib axes: layers by rows, and who picked which rows.

Measures nothing. The axes are the caller's, so matplotlib is imported by whoever makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from blend import Fusion, Prompt, PromptError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

__all__ = ["STATE_COLOURS", "draw_rows", "draw_states", "name_tokens"]

# The hues of the report's coloured prompt, but strong enough for lines one pixel wide.
STATE_COLOURS = {"exact": "#9fc9ea", "moved": "#d6e9f8", "recomputed": "#d55e00", "fresh": "#5fb27a"}
"""Colour of a row by where its KV came from."""


def draw_rows(axes: Axes, values_LT: Tensor, prompt: Prompt, title: str = "", **image: Any) -> AxesImage:
    """A heat map: rows of the prompt to the right, layers upwards, a line where a chunk begins.

    Args:
        values_LT: ``[L, T]``.
        prompt: whose rows they are.
        image: arguments of ``imshow``, such as ``vmax`` or ``norm="log"``.

    Returns:
        The image, for a colour bar.

    Raises:
        PromptError: not one column per row of the prompt.
    """
    if values_LT.ndim != 2 or values_LT.shape[1] != len(prompt):
        raise PromptError(f"the values have shape {tuple(values_LT.shape)}: give [layers, {len(prompt)}]")
    shown = axes.imshow(
        values_LT.numpy(), aspect="auto", origin="lower", interpolation="nearest", **{"cmap": "magma", **image}
    )
    axes.set(ylabel="layer")
    axes.set_title(title, loc="left", fontsize="medium")
    _name_chunks(axes, prompt)
    for row in _edges(prompt):
        axes.axvline(row - 0.5, color="#4fc3f7", linewidth=0.8)
    return shown


def draw_states(axes: Axes, fusions: Mapping[str, Fusion]) -> None:
    """A strip per fusion of one prompt: each row in the colour of where its KV came from.

    Raises:
        PromptError: no fusions, or fusions of two prompts.
    """
    if len({fusion.prompt.ids for fusion in fusions.values()}) != 1:
        raise PromptError(f"{len(fusions)} fusions: give at least one, all of the same prompt")
    colours = {state: _rgb(colour) for state, colour in STATE_COLOURS.items()}
    strips = np.array([[colours[state] for state in fusion.report.states] for fusion in fusions.values()])
    axes.imshow(strips, aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(fusions)), list(fusions))
    axes.tick_params(axis="y", length=0)
    for line in range(1, len(fusions)):
        axes.axhline(line - 0.5, color="white", linewidth=4)
    prompt = next(iter(fusions.values())).prompt
    _name_chunks(axes, prompt)
    for row in _edges(prompt):
        axes.axvline(row - 0.5, color="0.2", linewidth=0.6)


def name_tokens(axes: Axes, prompt: Prompt, decode: Callable[[int], str], start: int, stop: int) -> None:
    """Zooms in on rows ``start`` to ``stop`` and writes each row's token under it.

    Args:
        decode: token id to text.

    Raises:
        PromptError: rows that the prompt has not.
    """
    if not 0 <= start < stop <= len(prompt):
        raise PromptError(f"rows {start} to {stop} are not of the prompt: it has rows 0 to {len(prompt)}")
    axes.set_xlim(start - 0.5, stop - 0.5)
    texts = [decode(token).replace("\n", "⏎").replace("$", r"\$") for token in prompt.ids[start:stop]]
    axes.set_xticks(range(start, stop), texts, rotation=90, fontsize="x-small")


def _edges(prompt: Prompt) -> tuple[int, ...]:
    """First row of every chunk and of the question."""
    return (*prompt.starts, len(prompt) - len(prompt.question))


def _name_chunks(axes: Axes, prompt: Prompt) -> None:
    """Writes the parts' names under the rows, each below its middle."""
    edges = (0, *_edges(prompt), len(prompt))
    names = ("system", *(chunk.name or f"chunk {i}" for i, chunk in enumerate(prompt.chunks, 1)), "question")
    middles = [(start + stop - 1) / 2 for start, stop in pairwise(edges)]
    axes.set_xticks(middles, names, fontsize="small")
    axes.tick_params(axis="x", length=0)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
