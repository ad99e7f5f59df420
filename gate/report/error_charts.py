"""Bound usage, differences, agreement, confidence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision
from gate.metrics.intervals import share_limits
from gate.records.evidence import Evidence
from gate.records.outputs import PER_OCTAVE, ConfidenceOfClass, Histogram, OutputParity
from gate.records.runtime import RuntimeName
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
    decimal,
    label_row,
    list_rows,
    literal,
    logarithmic,
)
from gate.storage.safe_text import make_printable
from gate.summary.render import format_bound_usage, format_number, nan_as_infinite, short_name
from gate.summary.summary import CheckRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LEVEL = 0.95

_AGREEMENT_PITCH, _AGREEMENT_REST, _MAX_ROWS = 30, 50, 12

_CHECKS = ("top1_agreement", "top1_lower_bound")


class _Row(NamedTuple):
    name: str
    agreement: float
    low: float
    high: float
    bound: float | None
    failed: bool
    counted: str


def agreement_chart(evidence: Evidence, decision: Decision | None = None) -> Chart | None:
    """Draw top-1 agreement of each runtime and output with its Clopper-Pearson interval, and the
    bounds of the decision. None without an output of classes."""
    rows = list(_rows(evidence, decision))[:_MAX_ROWS]
    if not rows:
        return None

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        for y, row in enumerate(rows):
            _draw_agreement(axes, y, row)
        lowest = min([row.low for row in rows] + [row.bound for row in rows if row.bound])
        axes.set_xlim(lowest - 0.12 * (1.0 - lowest) - 1e-4, 1.0 + 0.04 * (1.0 - lowest) + 1e-5)
        answers = "share of samples with the same top-1 class; | its bound"
        list_rows(axes, len(rows), xlabel=answers, bottom=-0.8)
        axes.spines["left"].set_visible(False)
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=5)

    return chart(
        "agreement",
        paint,
        title="Top-1 agreement with the reference, and what the samples prove",
        alternative="; ".join(
            f"{row.name}: {row.counted}, with 95 % confidence at least {row.low:.4f}"
            + (f", allowed from {row.bound:g}" if row.bound is not None else "")
            for row in rows
        ),
        height=_AGREEMENT_REST + _AGREEMENT_PITCH * len(rows),
    )


def _draw_agreement(axes: Axes, y: int, row: _Row) -> None:
    color, marker = (RED, "X") if row.failed else (BLUE, "o")
    at = y + 0.2
    axes.plot([row.low, row.high], [at, at], color=color, linewidth=2.5, solid_capstyle="butt")
    axes.plot(row.agreement, at, marker=marker, color=color, markersize=7)
    if row.bound is not None:
        axes.plot([row.bound] * 2, [at - 0.22, at + 0.22], color=TEXT, linewidth=2)
    label_row(axes, y - 0.25, name=literal(row.name, 36), value=row.counted)


def _outputs(evidence: Evidence) -> Iterator[tuple[str, RuntimeName, OutputParity]]:
    """Yield each output of each runtime, with a name for both and the runtime."""
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            several = f" / {output.name}" if len(runtime.outputs) > 1 else ""
            yield make_printable(f"{runtime.runtime}{several}"), runtime.runtime, output


def _rows(evidence: Evidence, decision: Decision | None) -> Iterator[_Row]:
    for name, runtime, output in _outputs(evidence):
        parity = output.classification
        if parity is None:
            continue
        answered = output.samples - parity.nan_rows - parity.top1_ties
        if answered <= 0:
            continue
        checks = [
            check
            for check in (decision.checks if decision else ())
            if check.name in _CHECKS and (check.runtime, check.output) == (runtime, output.name)
        ]
        bounds = [check.bound for check in checks if isinstance(check.bound, float)]
        same = max(answered - parity.top1_disagreements, 0)
        low, high = share_limits(same, answered, _LEVEL)
        yield _Row(
            name=name,
            agreement=same / answered,
            low=low,
            high=high,
            bound=max(bounds, default=None),
            failed=any(check.verdict is Verdict.FAIL for check in checks),
            counted=f"{same} of {answered}",
        )


MAX_CLASSES = 20

_CONFIDENCE_PITCH, _CONFIDENCE_REST = 15, 78

_MIN_ROWS, _MIN_RANGE = 6, 1e-3
"""Most rows of the chart, and the smallest range of its confidence axis."""


def confidence_chart(evidence: Evidence) -> Chart | None:
    """Draw the classes that changed most, in the runtime with the largest changes. None without an
    output of classes."""
    outputs = ((name, output.classification) for name, _, output in _outputs(evidence))
    rows = [(name, each) for name, each in outputs if each and each.confidence.per_class]
    if not rows:
        return None
    name, parity = max(rows, key=lambda row: nan_as_infinite(row[1].confidence.max))
    classes = sorted(parity.confidence.per_class, key=lambda entry: -abs(_moved(entry)))
    shown = classes[:MAX_CLASSES]
    signed = all(entry.signed_mean is not None for entry in shown)

    def paint(figure: Figure) -> None:
        has_means = signed and all(entry.reference_mean is not None for entry in shown)
        left, *right = figure.subplots(1, 2 if has_means else 1, squeeze=False, sharey=True)[0]
        _changes(left, shown, signed=signed)
        if right:
            _answers(right[0], shown)
            figure.legend(loc="outside lower center", ncols=3, handletextpad=0.3)

    of = (
        f", the {len(shown)} of {len(classes)} that changed most"
        if len(classes) > len(shown)
        else ""
    )
    changes = "; ".join(f"class {entry.label} {_moved(entry):+.2g}" for entry in shown[:5])
    return chart(
        "confidence",
        paint,
        title=f"Confidence by class{of} ({name})",
        alternative=f"Mean change of the confidence{'' if signed else ', sign not recorded'}: "
        f"{changes}. Largest of a single sample: {format_number(parity.confidence.max)}",
        height=_CONFIDENCE_REST + _CONFIDENCE_PITCH * max(len(shown), _MIN_ROWS),
    )


def _changes(axes: Axes, shown: list[ConfidenceOfClass], *, signed: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    changes = [_moved(entry) for entry in shown]
    colors = [BLUE if change >= 0.0 else ORANGE for change in changes]
    axes.barh(range(len(shown)), changes, color=colors, height=0.7)
    axes.axvline(0.0, color=TEXT, linewidth=0.8)
    widest = max(map(abs, changes)) or 1.0
    axes.set_xlim(-1.15 * widest if min(changes) < 0 else 0.0, 1.15 * widest)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_change))
    axes.set_yticks(range(len(shown)), [str(entry.label) for entry in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_ylabel("class of the reference")
    axes.set_xlabel("file - reference" if signed else "|file - reference|")
    axes.grid(visible=True, axis="x")


def _change(value: float, _position: int | None = None) -> str:
    """Return the label of a change at the axis: 0.01, -8·10⁻⁶."""
    if value == 0.0 or abs(value) >= 1e-3:
        return f"{value:.2g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}·{decimal(10.0 ** int(power))}"


def _answers(axes: Axes, shown: list[ConfidenceOfClass]) -> None:
    from matplotlib.ticker import MaxNLocator

    before = [_finite(entry.reference_mean) for entry in shown]
    after = [_finite(entry.candidate_mean) for entry in shown]
    rows = range(len(shown))
    axes.hlines(rows, before, after, color=GREY, linewidth=1)
    axes.plot(before, rows, "o", color=TEXT, fillstyle="none", markersize=6, label="reference")
    axes.plot(after, rows, "x", color=BLUE, markersize=5, label="file")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.margins(x=0.12)
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = min(*before, *after), max(*before, *after)
    if high - low < _MIN_RANGE:
        axes.set_xlim(low - _MIN_RANGE, high + _MIN_RANGE)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.set_xlabel("mean confidence")
    axes.grid(visible=True, axis="x")


def _moved(entry: ConfidenceOfClass) -> float:
    """Return the mean change of confidence, signed if the sign was recorded."""
    return _finite(entry.mean if entry.signed_mean is None else entry.signed_mean)


def _finite(value: float | None) -> float:
    return min(max(value, -1.0), 1.0) if value is not None and math.isfinite(value) else 0.0


_HEIGHT = 230

_SMALLEST, _LARGEST = 1e-30, 1e30
"""The range of an axis of differences."""


def differences_chart(evidence: Evidence, decision: Decision | None = None) -> Chart | None:
    """Draw |file - reference| of the output with the largest error, by runtime.

    Includes the bounds of the decision. None if no histogram was recorded, or nothing differs.
    """
    rows = [
        (runtime, output, output.differences)
        for _, runtime, output in _outputs(evidence)
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
    shown = [row for row in rows if row[1].name == worst.name][: len(SERIES)]
    lines = list(_lines(worst, decision))

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        _draw_differences(axes, [(name, spread) for name, _, spread in shown], lines)
        figure.legend(loc="outside lower center", ncols=2, handlelength=2.2, columnspacing=1.2)

    equal = ", ".join(f"{name}: {_equal(spread)}" for name, _, spread in shown)
    marks = ", ".join(f"{label} {format_number(at)}" for label, at in lines)
    return chart(
        "differences",
        paint,
        title=f"Distribution of the differences of elements ({make_printable(worst.name)})",
        alternative=f"Largest difference {format_number(worst.max_abs_diff)}, mean "
        f"{format_number(worst.mean_abs_diff)}; {marks or 'no floor was measured'}. "
        f"Equal: {equal}",
        height=_HEIGHT,
    )


def _draw_differences(
    axes: Axes, spreads: list[tuple[str, Histogram]], lines: list[tuple[str, float]]
) -> None:
    edges = [_edges(spread) for _, spread in spreads]
    marks = [at for _, at in lines]
    low, high = min(min(e) for e in edges), max(max(e) for e in edges)
    logarithmic(axes, min([low, *marks]) / 3, max([high, *marks]) * 3)
    for (name, spread), bin_edges, style in zip(spreads, edges, SERIES, strict=False):
        total = sum(spread.counts) + spread.zeros + spread.nonfinite
        shares = [100 * count / total for count in spread.counts]
        axes.stairs(shares, bin_edges, color=style[0], linestyle=style[2], linewidth=1.6,
                    label=literal(name))  # fmt: skip
    top = axes.get_ylim()[1]
    axes.set_ylim(0, 1.45 * top)
    for number, (label, at) in enumerate(lines):
        axes.axvline(at, color=TEXT, linewidth=1.2, linestyle="-" if number else ":")
        right = math.log(at) > math.log(low) + 0.6 * math.log(high / low)
        height = (1.36 - 0.11 * number) * top
        axes.text(at, height, f" {literal(label)} ", ha="right" if right else "left",
                  va="center", fontsize=SMALL)  # fmt: skip
    axes.set_xlabel("|file - reference|")
    axes.set_ylabel("share of elements, %")


def _lines(output: OutputParity, decision: Decision | None) -> Iterator[tuple[str, float]]:
    """Yield the vertical lines, in the units of the output: the rounding floor, and the bounds."""
    floor = output.noise.floor_rms if output.noise is not None else math.nan
    if not _SMALLEST < floor < _LARGEST:
        floor = math.nan
    else:
        yield "rounding", floor
    for name, unit, label in (
        ("noise_diff", floor, "allowed"),
        ("max_abs_diff", 1.0, "max_abs_diff"),
    ):
        bounds = [
            check.bound
            for check in (decision.checks if decision else ())
            if check.name == name and check.output == output.name and isinstance(check.bound, float)
        ]
        if bounds and _SMALLEST < min(bounds) * unit < _LARGEST:
            yield label, min(bounds) * unit


def _edges(spread: Histogram) -> list[float]:
    powers = range(spread.first, spread.first + len(spread.counts) + 1)
    return [min(max(2.0 ** max(min(power / PER_OCTAVE, 1000.0), -1000.0), _SMALLEST), _LARGEST)
            for power in powers]  # fmt: skip


def _equal(spread: Histogram) -> str:
    total = sum(spread.counts) + spread.zeros + spread.nonfinite
    nonfinite = f", {spread.nonfinite} not finite" if spread.nonfinite else ""
    return f"{spread.zeros} of {total} elements{nonfinite}"


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


def worst_first(entries: Iterable[CheckRow]) -> list[CheckRow]:
    """Sort the rows with a bound, worst first; NaN is the worst.

    Counts of graph findings come after measured failures, because their bound is 0 and the used
    share is undefined.
    """
    bounded = [entry for entry in entries if entry.bound_usage is not None]
    return sorted(bounded, key=lambda entry: (_kind(entry), -nan_as_infinite(entry.bound_usage)))


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

    def paint(figure: Figure) -> None:
        axes: Axes = figure.add_subplot()
        ends = [position for position in map(_position, shown) if position < _AXIS_MAX]
        low, high = min([0.1, *ends]) / 2.5, max([10.0, *ends]) * 2.5
        logarithmic(axes, low, high)
        axes.axvspan(1.0, high, color=RED, alpha=0.07, linewidth=0)
        axes.axvline(1.0, color=TEXT, linewidth=1.2)
        for y, (_, row) in enumerate(rows):
            for entry in row:
                _mark(axes, y, entry, runtimes)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        # the name of the check, with its worst number and the bound below
        labels = [(label, format_bound_usage(row[0].check, unit=False)) for label, row in rows]
        axes.set_yticks(
            range(len(rows)),
            ["\n".join(literal(part, _MAX_LETTERS) for part in parts) for parts in labels],
        )
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("observed ÷ bound")
        for runtime, marker in zip(runtimes, itertools.cycle(_MARKERS), strict=False):
            axes.plot([], [], marker, color=TEXT, fillstyle="none", label=literal(runtime, 24))
        figure.legend(loc="outside lower center", ncols=columns, handletextpad=0.1)

    beyond = sum(any(entry.check.verdict is Verdict.FAIL for entry in row) for _, row in rows)
    more = f"; {len(by_check) - len(rows)} more in the table" if len(by_check) > len(rows) else ""
    return chart(
        name,
        paint,
        title=f"Used share of each bound{more}",
        alternative=f"{len(rows)} checks, {beyond} beyond their bound. The worst: "
        + "; ".join(f"{label} {_usage_text(row[0])}" for label, row in rows[:5]),
        height=_AXIS + _USAGE_PITCH * len(rows) + _LEGEND_PITCH * -(-len(runtimes) // columns),
    )


_FILE = "the file"
"""Label of checks without a runtime."""


def _mark(axes: Axes, row: int, entry: CheckRow, runtimes: list[str]) -> None:
    """Draw one mark of a row below the others, so that equal ones can be distinguished."""
    color, (low, high) = _COLORS[entry.check.verdict], axes.get_xlim()
    series = runtimes.index(entry.check.runtime or _FILE)
    y = row + 0.6 * ((series + 0.5) / len(runtimes) - 0.5)
    x = min(_position(entry), high)
    axes.hlines(y, low, x, color=color, linewidth=1.2, alpha=0.6)
    fill: Any = "full" if entry.check.verdict is Verdict.FAIL else "none"
    marker = ">" if x >= high else _MARKERS[series % len(_MARKERS)]
    axes.plot(x, y, marker, color=color, fillstyle=fill, markersize=5.5, clip_on=False)


def _usage_text(entry: CheckRow) -> str:
    value = entry.bound_usage or 0.0
    if math.isfinite(value):
        return f"{format_number(value)} times its bound"
    return format_bound_usage(entry.check)


def _position(entry: CheckRow) -> float:
    return clamped(entry.bound_usage, _AXIS_MIN, _AXIS_MAX)


def _kind(entry: CheckRow) -> int:
    """Return a sort key: failures by measured size, then failures of the graph, then passes."""
    if entry.check.verdict is Verdict.FAIL and entry.check.name.startswith("graph_"):
        return 1
    return 0 if nan_as_infinite(entry.bound_usage) > 1.0 else 2
