"""Each bounded number as observed ÷ bound, on one logarithmic axis, the worst first.

A row has its name above its mark, so that the whole width is left for the axis: a name beside the
axis would take half a telephone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gate.decision.checks import CheckResult, Verdict
from gate.report.charts.drawing import (
    BLUE,
    GREY,
    PINK,
    RED,
    TEXT,
    Chart,
    chart,
    label,
    literal,
    logarithmic,
)
from gate.story.story import Word
from gate.story.wording import allowed, number, observed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 25
"""More rows than this nobody reads; the table has all."""
_PITCH, _AXIS = 25, 46
_LEAST, _MOST = 1e-4, 1e7
"""Where the axis ends; what is beyond is drawn at its end with an arrow."""
_LOOKS = {
    Verdict.PASS: (BLUE, "o"),
    Verdict.FAIL: (RED, "X"),
    Verdict.ERROR: (PINK, "D"),
    Verdict.WAIVED: (GREY, "s"),
}


def worst_first(words: Iterable[Word]) -> list[Word]:
    """Those with a number beside a bound; what is no number at all is the worst. What is counted in
    the graph comes after what fails by measure: one of none allowed is beyond by no factor."""
    bounded = [word for word in words if word.strain is not None]
    return sorted(bounded, key=lambda word: (_kind(word), -_sortable(word)))


def strain(words: Iterable[Word], *, name: str = "strain", most: int = MOST_ROWS) -> Chart | None:
    """The chart of the worst `most`; None: nothing has a bound."""
    ranked = worst_first(words)
    rows = ranked[:most]
    if not rows:
        return None

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        strains = [_place(word) for word in rows]
        ends = [place for place in strains if place < _MOST]
        low, high = min([0.1, *ends]) / 2.5, max([10.0, *ends]) * 2.5
        logarithmic(axes, low, high)
        axes.axvspan(1.0, high, color=RED, alpha=0.07, linewidth=0)
        axes.axvline(1.0, color=TEXT, linewidth=1.2)
        for row, (word, place) in enumerate(zip(rows, strains, strict=True)):
            _mark(axes, row, word, min(place, high))
        axes.set_ylim(len(rows) - 0.4, -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("observed ÷ bound (1: exactly at its bound)")

    beyond = sum(word.check.verdict is Verdict.FAIL for word in rows)
    more = f"; {len(ranked) - len(rows)} more in the table" if len(ranked) > len(rows) else ""
    return chart(
        name,
        paint,
        title=f"How much of its bound each number has used{more}",
        alternative=f"{len(rows)} numbers, {beyond} beyond their bound. The worst: "
        + "; ".join(f"{word.check.title} {_of_bound(word)}" for word in rows[:5]),
        height=_AXIS + _PITCH * len(rows),
    )


def _mark(axes: Axes, row: int, word: Word, place: float) -> None:
    color, marker = _LOOKS[word.check.verdict]
    low, high = axes.get_xlim()
    axes.hlines(row + 0.2, low, place, color=color, linewidth=1.5, alpha=0.7)
    end = {"marker": ">", "clip_on": False} if place >= high else {"marker": marker}
    axes.plot(place, row + 0.2, color=color, markersize=6.5, linestyle="none", **end)
    named, numbers = literal(_named(word.check)), literal(_numbers(word.check), 24)
    label(axes, row - 0.26, name=named, value=numbers)


def _named(check: CheckResult) -> str:
    return " / ".join(part for part in (check.part, check.runtime, check.name) if part)


def _numbers(check: CheckResult) -> str:
    return f"{observed(check)} {allowed(check)}".strip()


def _of_bound(word: Word) -> str:
    value = word.strain or 0.0
    return f"{number(value)} times its bound" if math.isfinite(value) else "no finite number"


def _place(word: Word) -> float:
    return min(max(_sortable(word), _LEAST), _MOST)


def _kind(word: Word) -> int:
    """What fails by measure, then what is counted, then what passes: each by its size."""
    if word.check.verdict is Verdict.FAIL and word.check.name.startswith("graph_"):
        return 1
    return 0 if _sortable(word) > 1.0 else 2


def _sortable(word: Word) -> float:
    value = word.strain or 0.0
    return math.inf if math.isnan(value) else value
