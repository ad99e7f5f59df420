"""Charts of the metrics: a dot with its interval for each slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.decision.decide import Decision
from gate.records.evidence import Evidence
from gate.records.metrics import MetricEvidence, MetricValue
from gate.report.chart import BLUE, GREY, ORANGE, SMALL, Chart, chart, literal
from gate.summary.render import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GROUPS = 24
"""Slices that a chart shows; the records have all."""

_ROW, _FRAME = 24, 76
"""Pixels of a group, and of axis and legend."""

_SERVED = ("ort-cpu-optimized", "ort-cpu")

Side = tuple[str, str, str]
"""Name, color, marker."""

_SIDES: tuple[Side, ...] = (
    ("reference", GREY, "|"), ("this file", BLUE, "o"), ("champion", ORANGE, "D"),
)  # fmt: skip


def metric_charts(evidence: Evidence, decision: Decision | None) -> Iterator[Chart]:
    """Yield one chart for each metric that was measured.

    It has the value and interval of the model, of the file, and of the champion if there is one.
    """
    for metric in evidence.metrics:
        if metric.groups:
            yield _chart(metric, _champion(metric, decision))


def _champion(metric: MetricEvidence, decision: Decision | None) -> dict[str | None, MetricValue]:
    compared = None if decision is None else decision.incumbent
    found = (m for m in compared.metrics if m.name == metric.name) if compared else iter(())
    return {group.title: group.champion for each in found for group in each.groups}


def _chart(metric: MetricEvidence, champion: dict[str | None, MetricValue]) -> Chart:
    groups = metric.groups[:MOST_GROUPS]
    rows: list[tuple[str, list[MetricValue | None]]] = []
    for group in groups:
        names = [name for name in (*_SERVED, *group.runtimes) if name in group.runtimes]
        ours = group.runtimes[names[0]] if names else None
        label = f"{group.title or 'all samples'} ({group.samples})"
        rows.append((label, [group.reference, ours, champion.get(group.title)]))

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        for side, (name, color, marker) in enumerate(_SIDES):
            places, values = [], []
            for place, (_, sides) in enumerate(rows):
                value = sides[side]
                if value is not None:
                    places.append(place + 0.22 * (side - 1))
                    values.append(value)
            if values:
                apart = [
                    [max(v.value - v.low, 0.0) for v in values],
                    [max(v.high - v.value, 0.0) for v in values],
                ]
                axes.errorbar([v.value for v in values], places, xerr=apart, fmt=marker,
                              color=color, markersize=5, linewidth=1.2, label=name)  # fmt: skip
        axes.set_yticks(range(len(rows)), [literal(label, 30) for label, _ in rows])
        axes.invert_yaxis()
        axes.grid(visible=True, axis="x")
        axes.locator_params(axis="x", nbins=4)
        drawn.legend(loc="outside upper center", ncols=3, fontsize=SMALL)

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
