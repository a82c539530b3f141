"""Matplotlib figures as small SVG images for web pages, readable on a light and on a dark page.

Figures are drawn in the colours of `LIGHT`. In the SVG, these colours become CSS variables, which
the image sets by `prefers-color-scheme`, so one image serves both kinds of page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

from fedlgm.errors import RunError
from fedlgm.files import explain_failure

# Tableau's ten colour-blind-safe colours begin with these; the dark values are lighter.
LIGHT = {
    "ink": "#1f2329",
    "muted": "#5b6470",
    "rule": "#d5dae1",
    "c0": "#0b5fa5",
    "c1": "#b8480a",
    "c2": "#2b7a3d",
    "c3": "#8a3a9c",
    "c4": "#8a6100",
    "c5": "#0f7a85",
    "c6": "#b0305c",
    "c7": "#575f6b",
}
_DARK = {
    "ink": "#e6e9ee",
    "muted": "#a3adba",
    "rule": "#3a424d",
    "c0": "#6cb2f2",
    "c1": "#f59a5b",
    "c2": "#78c98a",
    "c3": "#d193e0",
    "c4": "#e0b84c",
    "c5": "#5fc7d3",
    "c6": "#f183a6",
    "c7": "#aab3bf",
}
SERIES = tuple(LIGHT[f"c{i}"] for i in range(8))
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedlgm",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.edgecolor": LIGHT["muted"],
    "axes.formatter.useoffset": False,
    "axes.labelcolor": LIGHT["muted"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(color=SERIES),
    "grid.color": LIGHT["rule"],
    "grid.linewidth": 0.8,
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "path.simplify_threshold": 0.3,
}


@contextmanager
def drawing(width: float = 4.8, height: float = 3.0) -> Iterator[Figure]:
    """Yield a figure in the page's style, of `width` x `height` inches, with 72 CSS pixels per inch
    at its natural size.
    """
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        yield Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Write a picture in the format that the file's suffix names, and return `path`.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RunError(explain_failure(f"cannot write the picture {path}", error)) from error
    return path


def to_svg(figure: Figure, *, dark: bool = True) -> str:
    """Convert a figure to an SVG document without a background.

    Args:
        figure: made by `drawing`.
        dark: whether the image changes with the reader's colour scheme.
    """
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(
        r"font: ([\d.]+px) [^;\"]*", rf"font-size: \1; font-family: {_FONT}".replace("'", ""), text
    )
    # Hundredths of a pixel are enough. The text between tags is not changed.
    text = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r"(?<![\w.])(-?\d+\.\d{2})\d+", r"\1", tag[0]), text
    )
    text = re.sub(r"\s*\n\s*", "\n", text)
    if not dark:
        return text
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    sheet = f":root{{{_variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    head, _, rest = text.partition(">")
    return f"{head}><style>{sheet}</style>{rest}"


def to_uri(svg: str) -> str:
    """Convert an SVG document to a data URI with percent-encoding, which is shorter than base64 and
    readable.
    """
    return "data:image/svg+xml," + quote(svg, safe=" !$&()*+,-./:;=?@_~{}[]|^'<>")


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())
