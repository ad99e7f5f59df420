"""Canvas, axes, SVG, colors."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from gate import installation
from gate.storage.safe_text import make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# One unit is one CSS pixel at a width of 360 pixels, so texts are legible on a phone. The colors of
# Okabe and Ito can be distinguished by color-blind readers, and each has its own marker. Text and
# lines have the page's text color, and colors are CSS variables, so the same drawing works on light
# and dark pages and on paper. The same input gives the same bytes.


WIDTH = 360

BLUE, ORANGE, GREEN, RED, PINK, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#888888",
)  # fmt: skip

SERIES = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (GREEN, "^", "-."), (PINK, "D", ":"),
          (GREY, "v", "-"))  # fmt: skip
"""Color, marker and line style of each runtime."""

TEXT = "#010203"
"""Placeholder for the text color of the page. Nothing else is drawn in it."""

SMALL, NORMAL = 9.5, 10.5

_VARIABLES = {BLUE: "blue", ORANGE: "orange", GREEN: "green", RED: "red", PINK: "pink",
              GREY: "grey"}  # fmt: skip

_SVG = "http://www.w3.org/2000/svg"

_HREF = "{http://www.w3.org/1999/xlink}href"

_FONT = "system-ui, 'DejaVu Sans', sans-serif"

_PIXELS_PER_INCH = 72.0

_LETTERS, _LINE, _MAX_LINES = 68, 14, 12
"""For a chart as text: characters per line, pixels per line, and number of lines."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "text.color": TEXT,
    "text.parse_math": False,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": TEXT,
    "grid.alpha": 0.16,
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
}


@dataclass(frozen=True)
class Chart:
    """A drawing and its description."""

    name: str
    """The name, unique on a page: prefix of all ids."""
    title: str
    alternative: str
    """Alternative text."""
    svg: str
    """The element to embed in a page."""

    def file(self) -> bytes:
        """Return the chart as a standalone file with a white background."""
        white = '<svg style="background: #fff; color: #1b1b1b" '
        return f"{self.svg.replace('<svg ', white, 1)}\n".encode()


def chart(
    name: str, paint: Callable[[Figure], None], *, title: str, alternative: str, height: float
) -> Chart:
    """Return the chart that `paint` draws on an empty figure of this height in pixels.

    Without matplotlib, the chart holds the description only.
    """
    texts = make_printable(title), make_printable(alternative)
    if installation.is_installed("matplotlib"):
        document = _figure_document(name, paint, height=height)
    else:
        document = _text_document(texts[1])
    return Chart(name, *texts, _inlined(document, name, texts))


def _text_document(alternative: str) -> str:
    """Return a document with the description, and how to install matplotlib for the drawing."""
    lines = textwrap.wrap(alternative, _LETTERS, max_lines=_MAX_LINES, placeholder=" …")
    lines.append(f"Drawn with matplotlib: {installation.remedy('charts').partition(': ')[2]}")
    root = ElementTree.Element(f"{{{_SVG}}}svg", viewBox=f"0 0 {WIDTH} {_LINE * len(lines) + 6}")
    style = f"font: {SMALL}px {_FONT}; fill: currentColor"
    for number, line in enumerate(lines, start=1):
        where = {"x": "0", "y": str(_LINE * number), "style": style}
        ElementTree.SubElement(root, f"{{{_SVG}}}text", where).text = line
    return ElementTree.tostring(root, encoding="unicode")


def _figure_document(name: str, paint: Callable[[Figure], None], *, height: float) -> str:
    """Return the figure as an SVG document."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stream = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        # The fonts of the browser differ from the one that matplotlib measures with.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        size = (WIDTH / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
        layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03)
        figure = Figure(figsize=size, dpi=_PIXELS_PER_INCH, layout=layout)
        paint(figure)
        # Figure.savefig would draw it twice.
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    return stream.getvalue()


def literal(text: str, limit: int = 46) -> str:
    """Return `text` truncated to what fits."""
    clean = make_printable(text)
    head = max(limit - 15, 1)
    return clean if len(clean) <= limit else f"{clean[:head]}…{clean[-14:]}"


def decimal(value: float, _position: int | None = None) -> str:
    """Return the label of a number at an axis: 0.01, 1, 100, 10⁶."""
    if value <= 0.0 or 1e-3 < value < 1e5:
        return f"{value:g}"
    power = round(math.log10(value))
    return f"10{str(power).translate(_SUPERSCRIPTS)}"


def label_row(axes: Axes, y: float, *, name: str, value: str) -> None:
    """Write a row's name at the left and its value at the right edge. Untrusted texts must pass
    through `literal`."""
    across = axes.get_yaxis_transform()
    for x, text, side in ((0.0, name, "left"), (1.0, value, "right")):
        axes.text(x, y, text, ha=side, va="center", transform=across, fontsize=SMALL)


def list_rows(axes: Axes, count: int, *, xlabel: str, bottom: float = -0.7) -> None:
    """Lay out a chart of `count` rows, the first at the top, each with its label above it."""
    axes.set_ylim(count - 0.4, bottom)
    axes.set_yticks([])
    axes.grid(visible=True, axis="x")
    axes.set_xlabel(xlabel)


def clamped(value: float | None, low: float, high: float) -> float:
    """Return where a logarithmic axis from `low` to `high` shows a number: NaN at its end."""
    if value is None or math.isnan(value):
        return low if value is None else high
    return min(max(value, low), high)


def logarithmic(axes: Axes, low: float, high: float) -> None:
    """Set a logarithmic x axis with few plain ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(LogLocator(numticks=7))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(decimal))
    axes.grid(visible=True, axis="x")


def _inlined(text: str, name: str, texts: tuple[str, str]) -> str:
    """Return the `svg` element of a document with its texts and unique ids, and without references
    to anything outside."""
    ElementTree.register_namespace("", _SVG)
    root = ElementTree.fromstring(text)
    used = {value for e in root.iter() for key, value in e.attrib.items() if key == _HREF}
    used = {value.removeprefix("#") for value in used}
    for element in root.iter():
        for child in list(element):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                element.remove(child)
        _tidy(element, name, used)
    title, description = ElementTree.Element("title"), ElementTree.Element("desc")
    title.text, description.text = texts
    root[:0] = [title, description]
    size = {"width": str(WIDTH), "height": root.attrib["viewBox"].split()[3]}
    root.attrib = {"viewBox": root.attrib["viewBox"], **size}
    root.attrib |= {"role": "img", "aria-label": f"{texts[0]}. {texts[1]}"}
    return ElementTree.tostring(root, encoding="unicode")


def _tidy(element: ElementTree.Element, name: str, used: set[str]) -> None:
    kept = {}
    for key, value in element.attrib.items():
        if key == "id":
            if value in used or element.tag.endswith("clipPath"):
                kept[key] = f"{name}-{value}"
        elif key == _HREF:
            kept["href"] = f"#{name}-{value.removeprefix('#')}"
        elif key == "clip-path":
            kept[key] = value.replace("url(#", f"url(#{name}-")
        elif key == "style":
            kept[key] = _themed(value)
        else:
            kept[key] = value
    element.attrib = kept
    if element.tag not in (f"{{{_SVG}}}text", f"{{{_SVG}}}tspan"):
        element.text = None
    element.tail = None


def _themed(style: str) -> str:
    """Return CSS declarations with the colors of the page and the fonts of the reader."""
    declarations = []
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":
            value = f"{value.split('px')[0]}px {_FONT}"
        elif key == "font-family":
            value = _FONT
        elif value == TEXT:
            value = "currentColor"
        elif value in _VARIABLES:
            value = f"var(--{_VARIABLES[value]}, {value})"
        if key:
            declarations.append(f"{key}: {value}")
    return "; ".join(declarations)
