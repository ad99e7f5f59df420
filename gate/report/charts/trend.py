"""A few numbers over the versions of a model: MLflow shows none of them across versions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gate.report.charts.drawing import BLUE, SMALL, Chart, chart, literal
from gate.story.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Trend = Sequence[tuple[str, Mapping[str, float]]]
"""Version and its numbers by name, the oldest first."""
_MOST_VERSIONS = 12
_HEIGHT = 120


def trend_charts(trend: Trend) -> tuple[Chart, ...]:
    """A chart for each number that at least two versions have, in the order of the newest."""
    recent = trend[-_MOST_VERSIONS:]
    names = dict.fromkeys(name for _, numbers in reversed(recent) for name in numbers)
    made = []
    for place, name in enumerate(names):
        points = [(version, numbers[name]) for version, numbers in recent if name in numbers]
        finite = [(version, value) for version, value in points if math.isfinite(value)]
        if len(finite) > 1:
            made.append(_chart(f"trend{place}", name, finite))
    return tuple(made)


def _chart(ident: str, name: str, points: list[tuple[str, float]]) -> Chart:
    values = [value for _, value in points]

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        axes.plot(range(len(points)), values, "o-", color=BLUE, linewidth=1.5, markersize=5)
        axes.set_xticks(range(len(points)), [literal(version, 8) for version, _ in points])
        axes.locator_params(axis="y", nbins=3)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.margins(x=0.06, y=0.3)
        axes.grid(visible=True, axis="y")
        axes.annotate(number(values[-1]), (len(points) - 1, values[-1]), ha="right",
                      textcoords="offset points", xytext=(3, 7), fontsize=SMALL)  # fmt: skip
        axes.set_xlabel("version")

    shown = ", ".join(f"version {version}: {number(value)}" for version, value in points)
    return chart(ident, paint, title=f"{name} over versions", alternative=shown, height=_HEIGHT)
