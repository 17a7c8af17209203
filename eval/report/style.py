"""How the pictures look: colour-blind safe colours (Okabe and Ito 2008), one look per system, axes, and saving.

A system has the same colour, marker and line in every picture. Needs matplotlib, and no display.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from retrieval.errors import ExtraMissing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "BLUE", "GREEN", "GREY", "GRID", "INK", "LOOKS", "MUTED", "ORANGE", "PAPER", "PINK", "RED", "SKY", "SMALL_PT",
    "Look", "inline_svg", "look", "marks", "new_figure", "page_colours", "save", "style", "text_inches",
]  # fmt: skip

INK, MUTED, GRID, PAPER = "#1f2328", "#656d76", "#d8dee4", "#ffffff"
"""Text, quiet text, lines of the grid, ground. On the page they follow the reader's light or dark mode."""

BLUE, ORANGE, SKY, GREEN, RED, PINK, GREY = (
    "#0072b2", "#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#8c8c8c",
)  # fmt: skip
_WRITTEN = {
    BLUE: "#005a8c", ORANGE: "#8a5f00", SKY: "#1f6a96", GREEN: "#00684c", RED: "#a34700", PINK: "#96476f",
    GREY: "#5c5c5c", INK: INK,
}  # fmt: skip
"""The same hues, dark enough for small letters on white (contrast of at least 5)."""

SMALL_PT = 8.5
"""The smallest letters, in points."""


@dataclass(frozen=True)
class Look:
    """A system's colour, marker and line; ``hollow``: the marker is an outline."""

    colour: str
    marker: str
    line: str = "-"
    hollow: bool = False

    @property
    def letters(self) -> str:
        """The colour for its name."""
        return _WRITTEN[self.colour]


# A hue per family of ideas, markers and lines within it.
LOOKS: dict[str, Look] = {
    "full": Look(INK, "*"),
    "prefix": Look(INK, "s", "--"),
    "prefix-warm": Look(INK, "D", ":"),
    "oracle-kv": Look(INK, "v", "--", hollow=True),
    "oracle-attention": Look(INK, "^", "-", hollow=True),
    "reuse": Look(GREY, "o"),
    "reuse-unrotated": Look(GREY, "X", "--"),
    "random": Look(GREY, "P", ":"),
    "cacheblend": Look(ORANGE, "o"),
    "cacheblend-paper": Look(ORANGE, "s", "--"),
    "agentkvshift": Look(ORANGE, "^", ":"),
    "epic": Look(SKY, "o"),
    "epic-16": Look(SKY, "s", "--"),
    "prophetkv": Look(BLUE, "o"),
    "prophetkv-offline": Look(BLUE, "s", "--"),
    "a3": Look(BLUE, "D", ":"),
    "kvshare": Look(GREEN, "s", "--"),
    "cachecraft": Look(GREEN, "o"),
    "ape": Look(GREEN, "^", ":"),
    "fusionrag": Look(PINK, "o"),
    "fusionrag-online": Look(PINK, "D", "--"),
    "kvblend": Look(RED, "*"),
    "kvboost": Look(SKY, "<", ":", hollow=True),
    "llamacpp": Look(ORANGE, ">", ":", hollow=True),
}
_OTHERS = [Look(*look, hollow=True) for look in product((RED, BLUE, GREEN, PINK), "pHhd", ("-.",))]

_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters, and so the same sizes, everywhere
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": SMALL_PT,
    "ytick.labelsize": SMALL_PT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "svg.fonttype": "path",  # labels were placed by these letters' sizes
    "text.parse_math": False,  # a name is not a formula
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), PAPER),
    **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 0),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 3),
}


def look(name: str) -> Look:
    """How a system looks; one that is not known by name gets the same spare look every time."""
    return LOOKS.get(name) or _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]


def marks(name: str, size: float = 6.5) -> dict[str, Any]:
    """The system's marker and line, as arguments of ``Axes.plot``."""
    its = look(name)
    return {
        "color": its.colour,
        "linestyle": its.line,
        "marker": its.marker,
        "markersize": size * (1.5 if its.marker == "*" else 1),
        "markerfacecolor": PAPER if its.hollow else its.colour,
        "markeredgecolor": its.colour if its.hollow else PAPER,
        "markeredgewidth": 1.3 if its.hollow else 0.7,
    }


@contextmanager
def style() -> Iterator[None]:
    """Our settings of matplotlib while a picture is drawn; the caller's own are back afterwards.

    Raises:
        ExtraMissing: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ExtraMissing('pictures need matplotlib: pip install "kvblend[plot]"') from error
    with rc_context(_STYLE):
        yield


def new_figure(
    width: float, height: float, panels: int = 1, *, left: float = 0.75, right: float = 0.15, **margins: float
) -> tuple[Figure, Sequence[Axes]]:
    """A figure of panels above each other, with margins that no label can move.

    Args:
        width, height, left, right: in inches; also ``top``, ``bottom`` and ``gap`` between panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top, bottom, gap = margins.get("top", 0.35), margins.get("bottom", 0.55), margins.get("gap", 0.5)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)  # draws without a display, and without pyplot's global state
    high = (height - top - bottom - gap * (panels - 1)) / panels
    axes = []
    for panel in range(panels):
        floor = height - top - high - panel * (high + gap)
        box = (left / width, floor / height, (width - left - right) / width, high / height)
        axes.append(figure.add_axes(box))
    return figure, axes


def text_inches(texts: Iterable[str]) -> float:
    """Width of the widest of some small labels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    letters = FontProperties(family="DejaVu Sans")
    ends = (TextPath((0, 0), text, SMALL_PT, prop=letters).get_extents().x1 for text in texts if text.strip())
    return float(max(ends, default=0.0)) / 72


def save(figure: Figure, kind: str) -> bytes:
    """The file's bytes, ``png`` or ``svg``; the same figure gives the same bytes."""
    from matplotlib import rc_context

    out = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "kvblend", "svg.fonttype": "path"}):
        figure.savefig(out, format=kind, dpi=200, metadata=metadata)
    return out.getvalue()


def inline_svg(svg: bytes, name: str) -> str:
    """An SVG for the middle of a page: no head, ids of its own, and colours that follow the page's."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for colour, variable, _ in _ON_PAGE:
        text = text.replace(colour, f"var(--{variable})")
    return text


def page_colours() -> tuple[str, str]:
    """The style sheet's variables that :func:`inline_svg` draws with, in light and in dark mode."""
    light = " ".join(f"--{variable}: {colour};" for colour, variable, _ in _ON_PAGE)
    dark = " ".join(f"--{variable}: {colour};" for _, variable, colour in _ON_PAGE)
    return light, dark


# Colour in the file, the page's variable, and what it is in dark mode. There, letters have the bright hue itself.
_ON_PAGE = (
    (INK, "ink", "#e6edf3"),
    (MUTED, "muted", "#9198a1"),
    (GRID, "grid", "#30363d"),
    (PAPER, "paper", "#0d1117"),
    *((dark, f"text-{bright[1:]}", bright) for bright, dark in _WRITTEN.items() if bright != INK),
)
