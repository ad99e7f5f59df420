"""Bound usage, differences, confidence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision
from gate.records.evidence import Evidence
from gate.records.outputs import PER_OCTAVE, ConfidenceOfClass, Histogram, OutputParity
from gate.report.chart import (
    BLUE,
    GREY,
    ORANGE,
    PINK,
    RED,
    SERIES,
    SMALL,
    TEXT,
    Chart,
    chart,
    clamped,
    list_rows,
    literal,
    logarithmic,
)
from gate.summary.render import (
    format_bound_usage,
    format_number,
    nan_as_infinite,
    outputs_of,
    short_name,
)
from gate.summary.summary import CheckRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MAX_CLASSES = 20

_CONFIDENCE_PITCH, _CONFIDENCE_REST = 15, 58


def confidence_chart(evidence: Evidence) -> Chart | None:
    """Draw the classes that changed most, in the runtime with the largest changes. None without an
    output of classes."""
    outputs = (
        (runtime, parity)
        for runtime, output in outputs_of(evidence)
        if (parity := output.classification) and parity.confidence.per_class
    )
    runtime, parity = max(
        outputs, key=lambda row: nan_as_infinite(row[1].confidence.max), default=(None, None)
    )
    if runtime is None or parity is None:
        return None
    classes = sorted(parity.confidence.per_class, key=lambda entry: -abs(_moved(entry)))
    shown = classes[:MAX_CLASSES]
    changes = [_moved(entry) for entry in shown]

    def paint(axes: Axes) -> None:
        colors = [BLUE if change >= 0.0 else ORANGE for change in changes]
        axes.barh(range(len(shown)), changes, color=colors, height=0.7)
        axes.axvline(0.0, color=TEXT, linewidth=0.8)
        widest = 1.15 * max(map(abs, changes)) or 1.0
        axes.set_xlim(-widest, widest)
        axes.locator_params(axis="x", nbins=4)
        list_rows(axes, [str(entry.label) for entry in shown])
        axes.set_ylabel("class")
        axes.set_xlabel("mean confidence, file - reference")

    rest = len(classes) - len(shown)
    most = f", the {len(shown)} of {len(classes)} that changed most" if rest else ""
    listed = "; ".join(f"class {entry.label} {_moved(entry):+.2g}" for entry in shown[:5])
    return chart(
        "confidence",
        paint,
        title=f"Confidence by class{most} ({runtime})",
        alternative=f"Mean change of the confidence: {listed}. Largest of a single sample: "
        f"{format_number(parity.confidence.max)}",
        height=_CONFIDENCE_REST + _CONFIDENCE_PITCH * max(len(shown), 4),
    )


def _moved(entry: ConfidenceOfClass) -> float:
    """Return the mean change of confidence, signed if the sign was recorded."""
    value = entry.mean if entry.signed_mean is None else entry.signed_mean
    return min(max(value, -1.0), 1.0) if value is not None and math.isfinite(value) else 0.0


_DIFFERENCES_HEIGHT = 230

_SMALLEST, _LARGEST = 1e-30, 1e30
"""The range of an axis of differences."""


def differences_chart(evidence: Evidence, decision: Decision | None = None) -> Chart | None:
    """Draw |file - reference| of the output with the largest error, by runtime.

    Includes the bounds of the decision. None if no histogram was recorded, or nothing differs.
    """
    rows = [
        (runtime, output, output.differences)
        for runtime, output in outputs_of(evidence)
        if output.differences is not None and any(output.differences.counts)
    ]
    if not rows:
        return None
    worst = max(
        (output for _, output, _ in rows),
        key=lambda output: nan_as_infinite(
            output.noise.ratio if output.noise else output.scaled_diff
        ),
    )
    spreads = [(name, spread) for name, output, spread in rows if output.name == worst.name]
    spreads = spreads[: len(SERIES)]
    lines = list(_lines(worst, decision))

    def paint(axes: Axes) -> None:
        edges = [_edges(spread) for _, spread in spreads]
        marks = [at for _, at in lines]
        low, high = min(map(min, edges)), max(map(max, edges))
        logarithmic(axes, "x", min([low, *marks]) / 3, max([high, *marks]) * 3)
        for (name, spread), bin_edges, (color, style) in zip(spreads, edges, SERIES, strict=False):
            shares = [100 * count / _elements(spread) for count in spread.counts]
            axes.stairs(shares, bin_edges, color=color, linestyle=style, linewidth=1.6,
                        label=literal(name))  # fmt: skip
        top = axes.get_ylim()[1]
        axes.set_ylim(0, 1.45 * top)
        for number, (label, at) in enumerate(lines):
            axes.axvline(at, color=TEXT, linewidth=1.2, linestyle="-" if number else ":")
            right = math.log(at) > math.log(low) + 0.6 * math.log(high / low)
            axes.text(at, (1.36 - 0.11 * number) * top, f" {literal(label)} ", va="center",
                      ha="right" if right else "left", fontsize=SMALL)  # fmt: skip
        axes.set_xlabel("|file - reference|")
        axes.set_ylabel("share of elements, %")

    equal = ", ".join(f"{name}: {_equal(spread)}" for name, spread in spreads)
    marks = ", ".join(f"{label} {format_number(at)}" for label, at in lines)
    return chart(
        "differences",
        paint,
        title=f"Distribution of the differences of elements ({worst.name})",
        alternative=f"Largest difference {format_number(worst.max_abs_diff)}, mean "
        f"{format_number(worst.mean_abs_diff)}; {marks or 'no floor was measured'}. "
        f"Equal: {equal}",
        height=_DIFFERENCES_HEIGHT,
        columns=2,
    )


def _lines(output: OutputParity, decision: Decision | None) -> Iterator[tuple[str, float]]:
    """Yield the vertical lines, in the units of the output: the rounding floor, and the bounds."""
    floor = output.noise.floor_rms if output.noise is not None else math.nan
    lines = [("rounding", floor)]
    for name, unit, label in (
        ("noise_diff", floor, "allowed"),
        ("max_abs_diff", 1.0, "max_abs_diff"),
    ):
        bounds = [
            check.bound
            for check in (decision.checks if decision else ())
            if check.name == name and check.output == output.name and isinstance(check.bound, float)
        ]
        lines.append((label, min(bounds, default=math.nan) * unit))
    yield from (line for line in lines if _SMALLEST < line[1] < _LARGEST)


def _edges(spread: Histogram) -> list[float]:
    powers = range(spread.first, spread.first + len(spread.counts) + 1)
    return [clamped(2.0 ** clamped(power / PER_OCTAVE, -1000.0, 1000.0), _SMALLEST, _LARGEST)
            for power in powers]  # fmt: skip


def _elements(spread: Histogram) -> int:
    return sum(spread.counts) + spread.zeros + spread.nonfinite


def _equal(spread: Histogram) -> str:
    nonfinite = f", {spread.nonfinite} not finite" if spread.nonfinite else ""
    return f"{spread.zeros} of {_elements(spread)} elements{nonfinite}"


MAX_ROWS = 25
"""Most rows of a chart. The table has all."""

_USAGE_PITCH, _AXIS, _LEGEND_PITCH = 27, 50, 15

_MAX_LETTERS = 32
"""Longest label at the left of the axis, which leaves half of the width for the marks."""

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Markers of runtimes, in the order of the checks."""

_AXIS_MIN, _AXIS_MAX = 1e-4, 1e7
"""Ends of the axis. Values beyond are drawn at the end with an arrow."""

_COLORS = {Verdict.PASS: BLUE, Verdict.FAIL: RED, Verdict.ERROR: PINK, Verdict.WAIVED: GREY}

_FILE = "the file"
"""Label of checks without a runtime."""


def worst_first(entries: Iterable[CheckRow]) -> list[CheckRow]:
    """Sort the rows with a bound: failures by their excess, failures of the graph, those within
    their bounds, waived ones. NaN is the worst.

    Counts of graph findings have the bound 0, so their excess is infinite.
    """

    def key(entry: CheckRow) -> tuple[int, float]:
        check, used = entry.check, nan_as_infinite(entry.bound_usage)
        if check.verdict is Verdict.WAIVED:
            return 3, -used
        if check.verdict is Verdict.FAIL and check.name.startswith("graph_"):
            return 1, -used
        return 0 if used > 1.0 else 2, -used

    return sorted((entry for entry in entries if entry.bound_usage is not None), key=key)


def bound_usage_chart(
    entries: Iterable[CheckRow],
    *,
    name: str = "bound_usage",
    limit: int = MAX_ROWS,
    several_outputs: bool = False,
) -> Chart | None:
    """Draw the worst `limit` checks, one row each with a mark per runtime. None without bounds.
    Filled marks failed, hollow ones did not."""
    entries, by_check = list(entries), dict[str, list[CheckRow]]()
    for entry in worst_first(entries):
        label = short_name(entry.check, several_outputs=several_outputs)
        by_check.setdefault(label, []).append(entry)
    rows = list(by_check.items())[:limit]
    if not rows:
        return None
    shown = [entry for entry in entries if any(entry in row for _, row in rows)]
    runtimes = list(dict.fromkeys(entry.check.runtime or _FILE for entry in shown))
    columns = 2 if max(map(len, runtimes)) > 16 else 3

    def paint(axes: Axes) -> None:
        ends = [position for position in map(_position, shown) if position < _AXIS_MAX]
        low, high = min([0.1, *ends]) / 2.5, max([10.0, *ends]) * 2.5
        logarithmic(axes, "x", low, high)
        axes.axvspan(1.0, high, color=RED, alpha=0.07, linewidth=0)
        axes.axvline(1.0, color=TEXT, linewidth=1.2)
        # the name of the check, with its worst number and the bound below
        labels = [(label, format_bound_usage(row[0].check, unit=False)) for label, row in rows]
        list_rows(
            axes, ["\n".join(literal(part, _MAX_LETTERS) for part in parts) for parts in labels]
        )
        for y, (_, row) in enumerate(rows):
            for entry in row:
                _mark(axes, y, entry, runtimes)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("observed ÷ bound")
        for runtime, marker in zip(runtimes, itertools.cycle(_MARKERS), strict=False):
            axes.plot([], [], marker, color=TEXT, fillstyle="none", label=literal(runtime, 24))

    beyond = sum(any(entry.check.verdict is Verdict.FAIL for entry in row) for _, row in rows)
    more = f"; {len(by_check) - len(rows)} more in the table" if len(by_check) > len(rows) else ""
    worst = "; ".join(f"{label} {format_bound_usage(row[0].check)}" for label, row in rows[:5])
    return chart(
        name,
        paint,
        title=f"Used share of each bound{more}",
        alternative=f"{len(rows)} checks, {beyond} beyond their bound. The worst: {worst}",
        height=_AXIS + _USAGE_PITCH * len(rows) + _LEGEND_PITCH * -(-len(runtimes) // columns),
        columns=columns,
    )


def _mark(axes: Axes, row: int, entry: CheckRow, runtimes: list[str]) -> None:
    """Draw one mark of a row below the others, so that equal ones can be distinguished."""
    color, (low, high) = _COLORS[entry.check.verdict], axes.get_xlim()
    series = runtimes.index(entry.check.runtime or _FILE)
    y = row + 0.6 * ((series + 0.5) / len(runtimes) - 0.5)
    x = min(_position(entry), high)
    axes.hlines(y, low, x, color=color, linewidth=1.2, alpha=0.6)
    marker = ">" if x >= high else _MARKERS[series % len(_MARKERS)]
    axes.plot(x, y, marker, color=color, markersize=5.5, clip_on=False,
              fillstyle="full" if entry.check.verdict is Verdict.FAIL else "none")  # fmt: skip


def _position(entry: CheckRow) -> float:
    return clamped(entry.bound_usage, _AXIS_MIN, _AXIS_MAX)
