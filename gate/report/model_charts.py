"""Error by depth, trend, latency, memory, and metrics of the task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gate.decision.decide import Decision
from gate.records.champion_comparison import TrendRow
from gate.records.evidence import Evidence
from gate.records.localization import LayerRow, Localization
from gate.records.metrics import MetricEvidence, MetricValue
from gate.report.chart import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    SMALL,
    TEXT,
    Chart,
    chart,
    clamped,
    decimal,
    label_row,
    list_rows,
    literal,
)
from gate.summary.render import format_number, reference_runtime

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MARKS = {"ok": (BLUE, "o", 4.5), "propagated": (ORANGE, "s", 4.5), "source": (RED, "X", 9.0)}

_LABELS = {"ok": "ok", "propagated": "propagated", "source": "source of the error"}

_MAX_POINTS = 300
"""Most drawn layers: of more, the chart shows the worst layer of each range."""

_AXIS_MIN, _AXIS_MAX = 1e-3, 1e12

_LETTER, _ACROSS = 6.0, 290
"""Width of a letter and of the axis, in pixels."""


def depth_chart(
    localization: Localization, *, name: str = "localisation", height: float = 260
) -> Chart | None:
    """Draw the noise ratio of each layer in the order of execution. None without compared
    layers."""
    mapped = [row for row in localization.layers if row.noise_ratio is not None]
    if not mapped:
        return None
    rows = _sample_layers(mapped)

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        _draw(axes, rows, samples=localization.samples)
        figure.legend(loc="outside lower center", ncols=4, handletextpad=0.3, columnspacing=1.0)

    sources = [row for row in mapped if row.verdict == "source"]
    named = sources or sorted(mapped, key=_height)[-1:]
    model = f"the part {localization.part}" if localization.part else "the model"
    worst = ", ".join(f"{row.title} {format_number(row.noise_ratio or 0.0)}" for row in named[:5])
    return chart(
        name,
        paint,
        title=f"Error along the depth of {model} ({localization.runtime})",
        alternative=f"{len(mapped)} layers in the order of execution, error in units of the "
        f"reference's own rounding. {'Wrong' if sources else 'Largest'}: {worst}",
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
    for verdict, (color, marker, size) in _MARKS.items():
        indices = [index for index, row in enumerate(rows) if row.verdict == verdict]
        if indices:
            values = [heights[index] for index in indices]
            axes.plot(indices, values, marker, color=color, markersize=size, label=_LABELS[verdict])
    # Only a few names are legible; the table below the chart has all.
    first = next((index for index, row in enumerate(rows) if row.verdict == "source"), None)
    if first is not None:
        right = first > len(rows) / 2
        title = literal(rows[first].title, 34)
        axes.annotate(
            title,
            (first, _clear_height(heights, first, right=right, letters=len(title))),
            textcoords="offset points",
            xytext=(-2 if right else 2, 9),
            ha="right" if right else "left",
            fontsize=SMALL,
            fontweight="bold",
        )
    axes.set_xlabel(f"layers in the order of execution, n = {samples}")
    axes.set_ylabel("error ÷ rounding")


def _clear_height(heights: list[float], first: int, *, right: bool, letters: int) -> float:
    """Return the height above all points under a name that starts (`right`: ends) at `first`."""
    reach = math.ceil(letters * _LETTER * len(heights) / _ACROSS)
    start, end = (first - reach, first) if right else (first, first + reach)
    return max(heights[max(start, 0) : end + 1])


def _sample_layers(rows: list[LayerRow]) -> list[LayerRow]:
    stretch = math.ceil(len(rows) / _MAX_POINTS)
    return [
        max(rows[start : start + stretch], key=lambda row: (row.verdict == "source", _height(row)))
        for start in range(0, len(rows), stretch)
    ]


def _height(row: LayerRow) -> float:
    return clamped(row.noise_ratio, _AXIS_MIN, _AXIS_MAX)


_LATENCY_PITCH, _LATENCY_REST = 34, 66


def latency(evidence: Evidence) -> Chart | None:
    """Draw median and 95th percentile of one batch. None if not measured."""
    measured = [(reference_runtime(evidence), evidence.reference_latency)]
    measured += [(runtime.runtime, runtime.latency) for runtime in evidence.runtimes]
    rows = [(name, time) for name, time in measured if time is not None]
    rows = [row for row in rows if math.isfinite(row[1].median_ms + row[1].p95_ms)]
    if not rows:
        return None

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        positions = [number + 0.18 for number in range(len(rows))]
        medians, highs = [time.median_ms for _, time in rows], [time.p95_ms for _, time in rows]
        axes.barh(positions, medians, color=BLUE, height=0.34, label="median")
        axes.hlines(positions, medians, highs, color=ORANGE, linewidth=1.5)
        axes.plot(highs, positions, "D", color=ORANGE, markersize=5, label="95th percentile")
        for number, (name, time) in enumerate(rows):
            times = f"{time.median_ms:.3g} / {time.p95_ms:.3g} ms"
            named = literal(f"{name}, batch {time.batch_size}")
            label_row(axes, number - 0.27, name=named, value=times)
        axes.set_xlim(0, 1.05 * max(highs) or 1.0)
        list_rows(axes, len(rows), xlabel="ms per batch, transfers included")
        figure.legend(loc="outside lower center", ncols=2)

    return chart(
        "latency",
        paint,
        title="Time of a batch",
        alternative="; ".join(
            f"{name}: median {time.median_ms:.3g} ms, 95th percentile {time.p95_ms:.3g} ms "
            f"of a batch of {time.batch_size}"
            for name, time in rows
        ),
        height=_LATENCY_REST + _LATENCY_PITCH * len(rows),
    )


_MEMORY_PITCH, _MEMORY_REST = 30, 50

_MB = 1e6


def memory(evidence: Evidence) -> Chart | None:
    """Draw the peak growth of the process by runtime. None if not measured."""
    measured = [(runtime.runtime, runtime.memory_bytes) for runtime in evidence.runtimes]
    grown = [(str(name), size / _MB) for name, size in measured if size is not None]
    if not grown:
        return None
    rows = [("the file", evidence.subject.size_bytes / _MB), *grown]

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        positions = [number + 0.18 for number in range(len(rows))]
        axes.barh(positions, [size for _, size in rows], color=BLUE, height=0.34)
        for number, (name, size) in enumerate(rows):
            label_row(axes, number - 0.27, name=literal(name), value=f"{size:.3g} MB")
        axes.set_xlim(0, 1.05 * max(size for _, size in rows) or 1.0)
        growth = "growth of the process at its peak, MB (approximate)"
        list_rows(axes, len(rows), xlabel=growth)

    return chart(
        "memory",
        paint,
        title="Memory by runtime",
        alternative="; ".join(f"{name}: {size:.3g} MB" for name, size in rows),
        height=_MEMORY_REST + _MEMORY_PITCH * len(rows),
    )


_TITLES = {
    "noise_ratio": "Noise ratio",
    "agreement": "Agreement with its own model",
    "accuracy": "Accuracy",
    "latency_ms": "Milliseconds of a batch",
}

_MAX_RELEASES = 12

_HEIGHT = 120


def trend_charts(trend: Sequence[TrendRow]) -> tuple[Chart, ...]:
    """Yield a chart for each number of at least two versions, the oldest first."""
    charts = []
    for name in _TITLES:
        values = [(row.sha256.hex[:6], getattr(row, name)) for row in trend[-_MAX_RELEASES:]]
        points = [(label, value) for label, value in values if value is not None]
        finite = [(label, value) for label, value in points if math.isfinite(value)]
        if len(finite) > 1:
            charts.append(_trend_chart(name, finite))
    return tuple(charts)


def _trend_chart(name: str, points: list[tuple[str, float]]) -> Chart:
    values = [value for _, value in points]

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        axes.plot(range(len(points)), values, "o-", color=BLUE, linewidth=1.5, markersize=5)
        axes.set_xticks(range(len(points)), [label for label, _ in points])
        axes.locator_params(axis="y", nbins=3)
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.margins(x=0.06, y=0.3)
        axes.grid(visible=True, axis="y")
        axes.annotate(format_number(values[-1]), (len(points) - 1, values[-1]), ha="right",
                      textcoords="offset points", xytext=(3, 7), fontsize=SMALL)  # fmt: skip
        axes.set_xlabel("file, the newest last")

    shown = ", ".join(f"{label}: {format_number(value)}" for label, value in points)
    return chart(
        f"trend-{name}",
        paint,
        title=f"{_TITLES[name]} over versions",
        alternative=shown,
        height=_HEIGHT,
    )


MAX_GROUPS = 24
"""Most slices of a chart. The records have all."""

_ROW, _FRAME = 24, 76
"""Height of a group, and of axis and legend, in pixels."""

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
            yield _metric_chart(metric, _champion(metric, decision))


def _champion(metric: MetricEvidence, decision: Decision | None) -> dict[str | None, MetricValue]:
    compared = None if decision is None else decision.incumbent
    metrics = (m for m in compared.metrics if m.name == metric.name) if compared else iter(())
    return {group.title: group.champion for each in metrics for group in each.groups}


def _metric_chart(metric: MetricEvidence, champion: dict[str | None, MetricValue]) -> Chart:
    groups = metric.groups[:MAX_GROUPS]
    rows: list[tuple[str, list[MetricValue | None]]] = []
    for group in groups:
        names = [name for name in (*_SERVED, *group.runtimes) if name in group.runtimes]
        served = group.runtimes[names[0]] if names else None
        label = f"{group.title or 'all samples'} ({group.samples})"
        rows.append((label, [group.reference, served, champion.get(group.title)]))

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        for side, (name, color, marker) in enumerate(_SIDES):
            positions, values = [], []
            for number, (_, sides) in enumerate(rows):
                value = sides[side]
                if value is not None:
                    positions.append(number + 0.22 * (side - 1))
                    values.append(value)
            if values:
                errors = [
                    [max(v.value - v.low, 0.0) for v in values],
                    [max(v.high - v.value, 0.0) for v in values],
                ]
                axes.errorbar([v.value for v in values], positions, xerr=errors, fmt=marker,
                              color=color, markersize=5, linewidth=1.2, label=name)  # fmt: skip
        axes.set_yticks(range(len(rows)), [literal(label, 30) for label, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(visible=True, axis="x")
        axes.locator_params(axis="x", nbins=4)
        figure.legend(loc="outside upper center", ncols=3, fontsize=SMALL)

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
