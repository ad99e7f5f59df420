"""Time of a batch by runtime, the PyTorch reference first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gate.records.evidence import Evidence
from gate.report.charts.drawing import BLUE, ORANGE, Chart, chart, label, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PITCH, _REST = 34, 66


def latency(evidence: Evidence) -> Chart | None:
    """Median and 95th percentile of one batch; None: not measured."""
    measured = [("PyTorch, CPU", evidence.reference_latency)]
    measured += [(runtime.runtime, runtime.latency) for runtime in evidence.runtimes]
    rows = [(name, one) for name, one in measured if one is not None]
    rows = [row for row in rows if math.isfinite(row[1].median_ms + row[1].p95_ms)]
    if not rows:
        return None

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        places = [place + 0.18 for place in range(len(rows))]
        medians, highs = [one.median_ms for _, one in rows], [one.p95_ms for _, one in rows]
        axes.barh(places, medians, color=BLUE, height=0.34, label="median")
        axes.hlines(places, medians, highs, color=ORANGE, linewidth=1.5)
        axes.plot(highs, places, "D", color=ORANGE, markersize=5, label="95th percentile")
        for place, (name, one) in enumerate(rows):
            times = f"{one.median_ms:.3g} / {one.p95_ms:.3g} ms"
            named = literal(f"{name}, batch {one.batch_size}")
            label(axes, place - 0.27, name=named, value=times)
        axes.set_xlim(0, 1.05 * max(highs) or 1.0)
        axes.set_ylim(len(rows) - 0.4, -0.7)
        axes.set_yticks([])
        axes.grid(visible=True, axis="x")
        axes.set_xlabel("milliseconds a batch, transfers included")
        drawn.legend(loc="outside lower center", ncols=2)

    return chart(
        "latency",
        paint,
        title="Time of a batch",
        alternative="; ".join(
            f"{name}: median {one.median_ms:.3g} ms, 95th percentile {one.p95_ms:.3g} ms "
            f"of a batch of {one.batch_size}"
            for name, one in rows
        ),
        height=_REST + _PITCH * len(rows),
    )
