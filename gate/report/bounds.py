"""Figures of the numbers beside their bounds: differences, and errors in units of rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.report.figure import BLUE, FLOOR, GREY, MOST_ROWS, RED, figure, finite, legend, name_rows
from gate.story.wording import observed, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_IN_UNITS = ("noise_", "repeatability_ratio", "batch_invariance_ratio", "probe_")
"""Beginnings of the names of checks whose numbers are in units of float32 rounding."""


def differences(decision: Decision) -> Figure | None:
    """Each bounded difference as a point, its bound as a tick, on a logarithmic axis."""
    checks = [check for check in _bounded(decision) if not check.name.startswith(_IN_UNITS)]
    return _draw(checks, "Differences to the PyTorch model, and their bounds", "difference")


def noise(decision: Decision) -> Figure | None:
    """The same for what the instruments saw, in units of PyTorch's own rounding error."""
    checks = [check for check in _bounded(decision) if check.name.startswith(_IN_UNITS)]
    title = "Errors in units of float32 rounding (a correct export has about 1)"
    return _draw(checks, title, "times the rounding error of PyTorch itself")


def _bounded(decision: Decision) -> list[CheckResult]:
    return [
        check
        for check in decision.checks
        if check.relation == "<=" and isinstance(check.observed, float) and check.runtime
    ]


def _draw(checks: list[CheckResult], title: str, unit: str) -> Figure | None:
    rows, more = checks[:MOST_ROWS], len(checks) - MOST_ROWS
    if not rows:
        return None
    drawn, axes = figure(rows=len(rows))
    axes.set_xscale("log")
    beyond = 10 * max(max(finite(check.observed), _bound(check)) for check in rows)
    for place, check in enumerate(rows):
        _difference(axes, place, check, beyond)
    several = len({check.output for check in rows}) > 1
    name_rows(axes, [_row_name(check, several) for check in rows])
    note = f" (first {MOST_ROWS}; {more} more in decision.json)" if more > 0 else ""
    axes.set_title(f"{title}{note}")
    axes.set_xlabel(f"{unit}; 0 is drawn at {FLOOR:g}, NaN and infinity at the right edge")
    for label, color, marker in (
        ("observed", BLUE, "o"),
        ("beyond its bound", RED, "X"),
        ("bound", "black", "|"),
    ):
        axes.plot([], [], linestyle="none", label=label, color=color, marker=marker)
    legend(drawn)
    return drawn


def _difference(axes: Axes, place: int, check: CheckResult, beyond: float) -> None:
    is_number = isinstance(check.observed, float) and math.isfinite(check.observed)
    shown = max(finite(check.observed), FLOOR) if is_number else beyond
    bound = _bound(check)
    failed = check.verdict is not Verdict.PASS
    axes.plot([shown, bound], [place, place], color=RED if failed else GREY, linewidth=0.8)
    axes.plot(bound, place, color="black", marker="|", markersize=12)
    axes.plot(shown, place, color=RED if failed else BLUE, marker="X" if failed else "o")


def _bound(check: CheckResult) -> float:
    return max(finite(check.bound), FLOOR)


def _row_name(check: CheckResult, several: bool) -> str:
    output = f"{check.output} / " if several else ""
    return printable(f"{check.runtime} / {output}{check.label}  {observed(check)}")
