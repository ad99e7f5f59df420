"""A few numbers over the versions of a model: MLflow shows none of them across versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gate.records.trend import TrendRow
from gate.report.charts.drawing import BLUE, SMALL, Chart, chart
from gate.story.wording import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_TITLES = {
    "noise_ratio": "Noise ratio",
    "agreement": "Agreement with its own model",
    "accuracy": "Accuracy",
    "latency_ms": "Milliseconds of a batch",
}
_MOST_RELEASES = 12
_HEIGHT = 120


def trend_charts(trend: Sequence[TrendRow]) -> tuple[Chart, ...]:
    """A chart for each number that at least two releases have; the oldest first."""
    made = []
    for name in _TITLES:
        values = [(one.sha256.hex[:6], getattr(one, name)) for one in trend[-_MOST_RELEASES:]]
        points = [(label, value) for label, value in values if value is not None]
        finite = [(label, value) for label, value in points if math.isfinite(value)]
        if len(finite) > 1:
            made.append(_chart(name, finite))
    return tuple(made)


def _chart(name: str, points: list[tuple[str, float]]) -> Chart:
    values = [value for _, value in points]

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        axes.plot(range(len(points)), values, "o-", color=BLUE, linewidth=1.5, markersize=5)
        axes.set_xticks(range(len(points)), [label for label, _ in points])
        axes.locator_params(axis="y", nbins=3)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.margins(x=0.06, y=0.3)
        axes.grid(visible=True, axis="y")
        axes.annotate(number(values[-1]), (len(points) - 1, values[-1]), ha="right",
                      textcoords="offset points", xytext=(3, 7), fontsize=SMALL)  # fmt: skip
        axes.set_xlabel("file, the newest last")

    shown = ", ".join(f"{label}: {number(value)}" for label, value in points)
    return chart(
        f"trend-{name}",
        paint,
        title=f"{_TITLES[name]} over versions",
        alternative=shown,
        height=_HEIGHT,
    )
