"""Memory by runtime, beside the size of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gate.records.evidence import Evidence
from gate.report.charts.drawing import BLUE, Chart, chart, label, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PITCH, _REST = 30, 50
_MB = 1e6


def memory(evidence: Evidence) -> Chart | None:
    """By how much the process grew at its peak for each runtime; None: not measured."""
    measured = [(one.runtime, one.memory_bytes) for one in evidence.runtimes]
    grown = [(str(name), size / _MB) for name, size in measured if size is not None]
    if not grown:
        return None
    rows = [("the file", evidence.subject.size_bytes / _MB), *grown]

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        places = [place + 0.18 for place in range(len(rows))]
        axes.barh(places, [size for _, size in rows], color=BLUE, height=0.34)
        for place, (name, size) in enumerate(rows):
            label(axes, place - 0.27, name=literal(name), value=f"{size:.3g} MB")
        axes.set_xlim(0, 1.05 * max(size for _, size in rows) or 1.0)
        axes.set_ylim(len(rows) - 0.4, -0.7)
        axes.set_yticks([])
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("megabytes that the process grew by at its peak; roughly")

    return chart(
        "memory",
        paint,
        title="Memory by runtime",
        alternative="; ".join(f"{name}: {size:.3g} MB" for name, size in rows),
        height=_REST + _PITCH * len(rows),
    )
