"""The base of all charts: canvas, axes, SVG, colors."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from gate import installation
from gate.storage.safe_text import make_printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# One unit is one CSS pixel at a width of 360 pixels, so texts are legible on a phone. The colors of
# Okabe and Ito can be distinguished by color-blind readers, and each has its own marker. Text and
# lines have the page's text color, and colors are CSS variables, so the same drawing works on light
# and dark pages and on paper. The same input gives the same bytes.


WIDTH = 360

BLUE, ORANGE, GREEN, RED, PINK, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#888888",
)  # fmt: skip

SERIES = ((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (PINK, ":"), (GREY, "-"))
"""Color and line style of each runtime."""

TEXT = "#010203"
"""Placeholder for the text color of the page. Nothing else is drawn in it."""

SMALL, NORMAL = 9.5, 10.5

_CSS_COLORS = {
    TEXT: "currentColor",
    BLUE: f"var(--blue, {BLUE})",
    ORANGE: f"var(--orange, {ORANGE})",
    GREEN: f"var(--green, {GREEN})",
    RED: f"var(--red, {RED})",
    PINK: f"var(--pink, {PINK})",
    GREY: f"var(--grey, {GREY})",
}

_SVG = "{http://www.w3.org/2000/svg}"

_HREF = "{http://www.w3.org/1999/xlink}href"

_PIXELS_PER_INCH = 72.0

_LETTERS, _LINE, _MAX_LINES = 68, 14, 12
"""For a chart as text: characters per line, pixels per line, and number of lines."""

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": NORMAL,
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
    "legend.handletextpad": 0.3,
    "legend.columnspacing": 1.0,
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
    name: str,
    paint: Callable[[Axes], None],
    *,
    title: str,
    alternative: str,
    height: float,
    columns: int = 3,
) -> Chart:
    """Return the chart that `paint` draws on empty axes, with its legend below in `columns`.

    `height`: in pixels. Without matplotlib, the chart holds the description only.
    """
    title, alternative = make_printable(title), make_printable(alternative)
    if installation.is_installed("matplotlib"):
        document = _figure_document(name, paint, height=height, columns=columns)
    else:
        document = _text_document(alternative)
    root = _embedded(ElementTree.fromstring(document), name)
    view_box = root.attrib["viewBox"]
    root.attrib = {
        "viewBox": view_box,
        "width": str(WIDTH),
        "height": view_box.split()[3],
        "role": "img",
        "aria-label": f"{title}. {alternative}",
    }
    ElementTree.register_namespace("", _SVG.strip("{}"))
    return Chart(name, title, alternative, ElementTree.tostring(root, encoding="unicode"))


def _text_document(alternative: str) -> str:
    """Return a document with the description, and how to install matplotlib for the drawing."""
    lines = textwrap.wrap(alternative, _LETTERS, max_lines=_MAX_LINES, placeholder=" …")
    lines.append(f"Drawn with matplotlib: {installation.remedy('charts').partition(': ')[2]}")
    root = ElementTree.Element(f"{_SVG}svg", viewBox=f"0 0 {WIDTH} {_LINE * len(lines) + 6}")
    style = f"font-size: {SMALL}px; fill: {TEXT}"
    for number, line in enumerate(lines, start=1):
        where = {"x": "0", "y": str(_LINE * number), "style": style}
        ElementTree.SubElement(root, f"{_SVG}text", where).text = line
    return ElementTree.tostring(root, encoding="unicode")


def _figure_document(
    name: str, paint: Callable[[Axes], None], *, height: float, columns: int
) -> str:
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
        axes = figure.add_subplot()
        paint(axes)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=columns)
        # Figure.savefig would draw it twice.
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    return stream.getvalue()


def _embedded(root: ElementTree.Element, name: str) -> ElementTree.Element:
    """Make ids unique on a page and colors those of the page, and drop what a page has itself."""
    for element in root.iter():
        for child in [*element.iterfind(f"{_SVG}metadata"), *element.iterfind(f"{_SVG}style")]:
            element.remove(child)
        attributes = element.attrib
        if "id" in attributes:
            attributes["id"] = f"{name}-{attributes['id']}"
        if _HREF in attributes:
            attributes["href"] = attributes.pop(_HREF).replace("#", f"#{name}-")
        if "clip-path" in attributes:
            attributes["clip-path"] = attributes["clip-path"].replace("#", f"#{name}-")
        for color, css in _CSS_COLORS.items():
            if "style" in attributes:
                attributes["style"] = attributes["style"].replace(color, css)
        if element.tag not in (f"{_SVG}text", f"{_SVG}tspan"):
            element.text = None
        element.tail = None
    return root


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


def list_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Lay out a chart of rows, the first at the top, each with its label at the left. Untrusted
    texts must pass through `literal`."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")


def clamped(value: float | None, low: float, high: float) -> float:
    """Return where a logarithmic axis from `low` to `high` shows a number: NaN at its end."""
    if value is None or math.isnan(value):
        return low if value is None else high
    return min(max(value, low), high)


def logarithmic(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    """Set a logarithmic axis with few plain ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(numticks=7))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(decimal))
    axes.grid(visible=True, axis=which)
