"""What happened to the confidence in each class: its change with its sign, and both answers'."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.records.evidence import Evidence
from gate.records.output_parity import ClassParity, ConfidenceOfClass
from gate.report.charts.drawing import BLUE, GREY, ORANGE, TEXT, Chart, chart, decimal
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLASSES = 20
_PITCH, _REST = 15, 78
_FEWEST, _NARROWEST = 6, 1e-3
"""Rows that the chart has room for, and what its axis of confidence spans at least."""


def confidence(evidence: Evidence) -> Chart | None:
    """The classes that moved most, in the runtime that moved most; None: no output of classes."""
    rows = [row for row in _logits(evidence) if row[1].confidence.per_class]
    if not rows:
        return None
    name, parity = max(rows, key=lambda row: _size(row[1].confidence.max))
    classes = sorted(parity.confidence.per_class, key=lambda one: -abs(_moved(one)))
    shown = classes[:MOST_CLASSES]
    signed = all(one.signed_mean is not None for one in shown)

    def paint(drawn: Figure) -> None:
        both = signed and all(one.reference_mean is not None for one in shown)
        left, *right = drawn.subplots(1, 2 if both else 1, squeeze=False, sharey=True)[0]
        _changes(left, shown, signed=signed)
        if right:
            _answers(right[0], shown)
            drawn.legend(loc="outside lower center", ncols=3, handletextpad=0.3)

    of = (
        f", the {len(shown)} of {len(classes)} that moved most" if len(classes) > len(shown) else ""
    )
    words = "; ".join(f"class {one.label} {_moved(one):+.2g}" for one in shown[:5])
    return chart(
        "confidence",
        paint,
        title=f"Confidence by class{of} ({name})",
        alternative=f"Mean change of the confidence{'' if signed else ', sign not recorded'}: "
        f"{words}. Largest of a single sample: {number(parity.confidence.max)}",
        height=_REST + _PITCH * max(len(shown), _FEWEST),
    )


def _changes(axes: Axes, shown: list[ConfidenceOfClass], *, signed: bool) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    changes = [_moved(one) for one in shown]
    colors = [BLUE if change >= 0.0 else ORANGE for change in changes]
    axes.barh(range(len(shown)), changes, color=colors, height=0.7)
    axes.axvline(0.0, color=TEXT, linewidth=0.8)
    widest = max(map(abs, changes)) or 1.0
    axes.set_xlim(-1.15 * widest if min(changes) < 0 else 0.0, 1.15 * widest)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3, symmetric=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_change))
    axes.set_yticks(range(len(shown)), [str(one.label) for one in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_ylabel("class that PyTorch predicts")
    axes.set_xlabel("file - PyTorch" if signed else "|file - PyTorch|")
    axes.grid(visible=True, axis="x")


def _change(value: float, _place: int | None = None) -> str:
    """A change at the axis: 0.01, -8·10⁻⁶."""
    if value == 0.0 or abs(value) >= 1e-3:
        return f"{value:.2g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}·{decimal(10.0 ** int(power))}"


def _answers(axes: Axes, shown: list[ConfidenceOfClass]) -> None:
    from matplotlib.ticker import MaxNLocator

    before = [_finite(one.reference_mean) for one in shown]
    after = [_finite(one.candidate_mean) for one in shown]
    places = range(len(shown))
    axes.hlines(places, before, after, color=GREY, linewidth=1)
    axes.plot(before, places, "o", color=TEXT, fillstyle="none", markersize=6, label="PyTorch")
    axes.plot(after, places, "x", color=BLUE, markersize=5, label="file")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=3))
    axes.margins(x=0.12)
    axes.ticklabel_format(axis="x", useOffset=False)
    low, high = min(*before, *after), max(*before, *after)
    if high - low < _NARROWEST:
        axes.set_xlim(low - _NARROWEST, high + _NARROWEST)
    axes.tick_params(axis="y", left=False, labelleft=False)
    axes.set_xlabel("mean confidence")
    axes.grid(visible=True, axis="x")


def _logits(evidence: Evidence) -> Iterator[tuple[str, ClassParity]]:
    for runtime in evidence.runtimes:
        several = len(runtime.outputs) > 1
        for output in runtime.outputs:
            if output.classification is not None:
                name = f"{runtime.runtime} / {output.name}" if several else runtime.runtime
                yield printable(name), output.classification


def _moved(one: ConfidenceOfClass) -> float:
    """With its sign where that was recorded."""
    return _finite(one.mean if one.signed_mean is None else one.signed_mean)


def _finite(value: float | None) -> float:
    return min(max(value, -1.0), 1.0) if value is not None and math.isfinite(value) else 0.0


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value
