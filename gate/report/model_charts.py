"""Error by depth, and metrics of the task."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.decision.decide import Decision
from gate.records.evidence import Evidence
from gate.records.localization import LayerRow, Localization
from gate.records.metrics import MetricEvidence, MetricValue
from gate.report.chart import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    TEXT,
    Chart,
    chart,
    clamped,
    list_rows,
    literal,
    logarithmic,
)
from gate.summary.render import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MARKS = (
    ("ok", "ok", BLUE, "o", 4.5),
    ("propagated", "propagated", ORANGE, "s", 4.5),
    ("source", "source of the error", RED, "X", 9.0),
)
"""Verdict of a layer, its label, color, marker and size."""

_MAX_POINTS = 300
"""Most drawn layers: of more, the chart shows the worst layer of each range."""

_AXIS_MIN, _AXIS_MAX = 1e-3, 1e12


def depth_chart(
    localization: Localization, *, name: str = "localisation", height: float = 260
) -> Chart | None:
    """Draw the noise ratio of each layer in the order of execution. None without compared
    layers."""
    mapped = [row for row in localization.layers if row.noise_ratio is not None]
    if not mapped:
        return None
    stretch = math.ceil(len(mapped) / _MAX_POINTS)
    rows = [
        max(
            mapped[start : start + stretch], key=lambda row: (row.verdict == "source", _height(row))
        )
        for start in range(0, len(mapped), stretch)
    ]

    def paint(axes: Axes) -> None:
        heights = list(map(_height, rows))
        logarithmic(axes, "y", min(0.3, *heights) / 2, max(10.0, *heights) * 6)
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.axhline(1.0, color=TEXT, linewidth=1.0, linestyle=":", label="rounding")
        axes.plot(range(len(rows)), heights, color=GREY, linewidth=0.8, zorder=1)
        for verdict, label, color, marker, size in _MARKS:
            indices = [index for index, row in enumerate(rows) if row.verdict == verdict]
            if indices:
                values = [heights[index] for index in indices]
                axes.plot(indices, values, marker, color=color, markersize=size, label=label)
        axes.set_xlabel(f"layers in the order of execution, n = {localization.samples}")
        axes.set_ylabel("error ÷ rounding")

    sources = [row for row in mapped if row.verdict == "source"]
    named = sources or [max(mapped, key=_height)]
    model = f"the part {localization.part}" if localization.part else "the model"
    first = f", source: {literal(sources[0].title)}" if sources else ""
    worst = ", ".join(f"{row.title} {format_number(row.noise_ratio)}" for row in named[:5])
    return chart(
        name,
        paint,
        title=f"Error along the depth of {model} ({localization.runtime}){first}",
        alternative=f"{len(mapped)} layers in the order of execution, error in units of the "
        f"reference's own rounding. {'Wrong' if sources else 'Largest'}: {worst}",
        height=height,
        columns=4,
    )


def _height(row: LayerRow) -> float:
    return clamped(row.noise_ratio, _AXIS_MIN, _AXIS_MAX)


MAX_GROUPS = 24
"""Most slices of a chart. The records have all."""

_ROW, _FRAME = 24, 76
"""Height of a group, and of axis and legend, in pixels."""

_SERVED = ("ort-cpu-optimized", "ort-cpu")

_SIDES = (("reference", GREY, "|"), ("this file", BLUE, "o"), ("champion", ORANGE, "D"))
"""Name, color, marker."""


def metric_charts(evidence: Evidence, decision: Decision | None) -> Iterator[Chart]:
    """Yield one chart for each metric that was measured.

    It has the value and interval of the model, of the file, and of the champion if there is one.
    """
    compared = decision.incumbent if decision else None
    for metric in evidence.metrics:
        if metric.groups:
            champion = {
                group.title: group.champion
                for each in (compared.metrics if compared else ())
                if each.name == metric.name
                for group in each.groups
            }
            yield _metric_chart(metric, champion)


def _metric_chart(metric: MetricEvidence, champion: dict[str | None, MetricValue]) -> Chart:
    rows: list[tuple[str, list[MetricValue | None]]] = []
    for group in metric.groups[:MAX_GROUPS]:
        served = next(
            (name for name in (*_SERVED, *group.runtimes) if name in group.runtimes), None
        )
        label = f"{group.title or 'all samples'} ({group.samples})"
        file = group.runtimes[served] if served else None
        rows.append((label, [group.reference, file, champion.get(group.title)]))

    def paint(axes: Axes) -> None:
        list_rows(axes, [literal(label, 30) for label, _ in rows])
        axes.locator_params(axis="x", nbins=4)
        for side, (name, color, marker) in enumerate(_SIDES):
            values = [(y, sides[side]) for y, (_, sides) in enumerate(rows)]
            points = [
                (
                    y + 0.22 * (side - 1),
                    v.value,
                    max(v.value - v.low, 0.0),
                    max(v.high - v.value, 0.0),
                )
                for y, v in values
                if v is not None
            ]
            if points:
                y, x, below, above = zip(*points, strict=True)
                axes.errorbar(x, y, xerr=[below, above], fmt=marker, color=color, markersize=5,
                              linewidth=1.2, label=name)  # fmt: skip

    better = "higher" if metric.higher_is_better else "lower"
    return chart(
        f"metric-{metric.name}",
        paint,
        title=f"{metric.name}, {better} is better",
        alternative="; ".join(_side_texts(label, sides) for label, sides in rows),
        height=_FRAME + _ROW * len(rows),
    )


def _side_texts(label: str, sides: list[MetricValue | None]) -> str:
    texts = [
        f"{name} {format_number(side.value)} ({format_number(side.low)} to "
        f"{format_number(side.high)})"
        for (name, _, _), side in zip(_SIDES, sides, strict=True)
        if side is not None
    ]
    return f"{label}: {', '.join(texts)}"
