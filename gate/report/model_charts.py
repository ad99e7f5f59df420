"""The error along the depth of the model: where the file leaves it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gate.records.localisation import LayerRow, Localisation
from gate.report.charts.drawing import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    SMALL,
    TEXT,
    Chart,
    chart,
    decimal,
    literal,
)
from gate.story.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {"ok": (BLUE, "o", 4.5), "propagated": (ORANGE, "s", 4.5), "source": (RED, "X", 9.0)}
_LABELS = {"ok": "as the model", "propagated": "follows from it", "source": "wrong here"}
_MOST_POINTS = 300
"""Of more layers the worst of each stretch is drawn: a chart has no more pixels."""
_LEAST, _MOST = 1e-3, 1e12
_LETTER, _ACROSS = 6.0, 290
"""Pixels of a letter of the name, and of the axis."""


def depth(found: Localisation, *, name: str = "localisation", height: float = 260) -> Chart | None:
    """Noise ratio of each layer in the order of execution; None: no layer was compared."""
    mapped = [row for row in found.layers if row.noise_ratio is not None]
    if not mapped:
        return None
    rows = _thinned(mapped)

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        _draw(axes, rows, samples=found.samples)
        drawn.legend(loc="outside lower center", ncols=4, handletextpad=0.3, columnspacing=1.0)

    sources = [row for row in mapped if row.verdict == "source"]
    named = sources or sorted(mapped, key=_height)[-1:]
    whole = f"the part {found.part}" if found.part else "the model"
    worst = ", ".join(f"{row.title} {number(row.noise_ratio or 0.0)}" for row in named[:5])
    return chart(
        name,
        paint,
        title=f"Error along the depth of {whole} ({found.runtime})",
        alternative=f"{len(mapped)} layers in the order of execution, error in units of PyTorch's "
        f"own rounding. {'Wrong' if sources else 'Largest'}: {worst}",
        height=height,
    )


def _draw(axes: Axes, rows: list[LayerRow], *, samples: int) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    heights = [_height(row) for row in rows]
    axes.set_yscale("log")
    axes.set_ylim(min(0.3, *heights) / 2, max(10.0, *heights) * 6)
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(decimal))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(visible=True, axis="y")
    axes.axhline(1.0, color=TEXT, linewidth=1.0, linestyle=":", label="rounding")
    axes.plot(range(len(rows)), heights, color=GREY, linewidth=0.8, zorder=1)
    for verdict, (color, marker, size) in _LOOKS.items():
        places = [place for place, row in enumerate(rows) if row.verdict == verdict]
        if places:
            at = [heights[place] for place in places]
            axes.plot(places, at, marker, color=color, markersize=size, label=_LABELS[verdict])
    # One name is read, forty are not; the table below the chart has all.
    first = next((place for place, row in enumerate(rows) if row.verdict == "source"), None)
    if first is not None:
        right = first > len(rows) / 2
        title = literal(rows[first].title, 34)
        axes.annotate(
            title,
            (first, _clear(heights, first, right=right, letters=len(title))),
            textcoords="offset points",
            xytext=(-2 if right else 2, 9),
            ha="right" if right else "left",
            fontsize=SMALL,
            fontweight="bold",
        )
    axes.set_xlabel(f"layers in the order of execution, n = {samples}")
    axes.set_ylabel("error ÷ rounding")


def _clear(heights: list[float], first: int, *, right: bool, letters: int) -> float:
    """Above all points that a name at `first` would lie on; `right`: it ends there."""
    reach = math.ceil(letters * _LETTER * len(heights) / _ACROSS)
    start, end = (first - reach, first) if right else (first, first + reach)
    return max(heights[max(start, 0) : end + 1])


def _thinned(rows: list[LayerRow]) -> list[LayerRow]:
    stretch = math.ceil(len(rows) / _MOST_POINTS)
    return [
        max(rows[start : start + stretch], key=lambda row: (row.verdict == "source", _height(row)))
        for start in range(0, len(rows), stretch)
    ]


def _height(row: LayerRow) -> float:
    value = row.noise_ratio or 0.0
    return _MOST if math.isnan(value) else min(max(value, _LEAST), _MOST)
