"""The distribution of the differences of single elements, beside the noise floor and the bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.output_parity import OutputParity
from gate.records.samples import PER_OCTAVE, Histogram
from gate.report.charts.drawing import SERIES, SMALL, TEXT, Chart, chart, literal, logarithmic
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 230
_SMALLEST, _LARGEST = 1e-30, 1e30
"""What an axis of differences can show."""


def differences(evidence: Evidence, decision: Decision | None = None) -> Chart | None:
    """Sizes of |file - PyTorch| of the output that is farthest off, one line a runtime; None:
    they were not recorded, or nothing differs. With the decision: the bounds beside them."""
    rows = list(_recorded(evidence))
    if not rows:
        return None
    worst = max((output for _, output, _ in rows), key=_off)
    shown = [row for row in rows if row[1].name == worst.name][: len(SERIES)]
    lines = list(_lines(worst, decision))

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        _draw(axes, [(name, spread) for name, _, spread in shown], lines)
        drawn.legend(loc="outside lower center", ncols=2, handlelength=2.2, columnspacing=1.2)

    equal = ", ".join(f"{name}: {_equal(spread)}" for name, _, spread in shown)
    beside = ", ".join(f"{label} {number(at)}" for label, at in lines)
    return chart(
        "differences",
        paint,
        title=f"How large the differences of single elements are ({printable(worst.name)})",
        alternative=f"Largest difference {number(worst.max_abs_diff)}, mean "
        f"{number(worst.mean_abs_diff)}; {beside or 'no floor was measured'}. Equal: {equal}",
        height=_HEIGHT,
    )


def _draw(axes: Axes, spreads: list[tuple[str, Histogram]], lines: list[tuple[str, float]]) -> None:
    edges = [_edges(spread) for _, spread in spreads]
    marks = [at for _, at in lines]
    low, high = min(min(e) for e in edges), max(max(e) for e in edges)
    logarithmic(axes, min([low, *marks]) / 3, max([high, *marks]) * 3)
    for (name, spread), places, look in zip(spreads, edges, SERIES, strict=False):
        total = sum(spread.counts) + spread.zeros + spread.nonfinite
        shares = [100 * count / total for count in spread.counts]
        axes.stairs(shares, places, color=look[0], linestyle=look[2], linewidth=1.6,
                    label=literal(name))  # fmt: skip
    top = axes.get_ylim()[1]
    axes.set_ylim(0, 1.45 * top)
    for place, (label, at) in enumerate(lines):
        axes.axvline(at, color=TEXT, linewidth=1.2, linestyle="-" if place else ":")
        right = math.log(at) > math.log(low) + 0.6 * math.log(high / low)
        height = (1.36 - 0.11 * place) * top
        axes.text(at, height, f" {literal(label)} ", ha="right" if right else "left",
                  va="center", fontsize=SMALL)  # fmt: skip
    axes.set_xlabel("|file - PyTorch|")
    axes.set_ylabel("share in %")


def _recorded(evidence: Evidence) -> Iterator[tuple[str, OutputParity, Histogram]]:
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            if output.differences is not None and any(output.differences.counts):
                yield runtime.runtime, output, output.differences


def _lines(output: OutputParity, decision: Decision | None) -> Iterator[tuple[str, float]]:
    """Where vertical lines stand: the floor, and what the bounds allow, in the output's units."""
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
    spoilt = f", {spread.nonfinite} not finite" if spread.nonfinite else ""
    return f"{spread.zeros} of {total} elements{spoilt}"


def _off(output: OutputParity) -> float:
    """How far off an output is: in units of rounding where that is measured."""
    value = output.noise.ratio if output.noise is not None else output.scaled_diff
    return math.inf if math.isnan(value) else value
