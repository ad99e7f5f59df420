"""Figures of the evidence as PNG bytes. What failed has another marker too, not only a colour."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.decision.decision import Decision
from gate.records.evidence import ClassParity, Evidence
from gate.report import bounds
from gate.report.figure import (
    BLUE,
    FLOOR,
    GREEN,
    MOST_ROWS,
    ORANGE,
    RED,
    figure,
    finite,
    legend,
    literal,
    name_rows,
    png,
)
from gate.story.wording import number, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("differences", "noise", "confidence_bands", "confidence_by_class", "latency")
_BANDS = {"< 1 %": BLUE, "1-5 %": GREEN, "5-10 %": ORANGE, "> 10 % or NaN": RED}


def draw(evidence: Evidence, decision: Decision | None = None) -> dict[str, bytes]:
    """PNG bytes by name: `differences` and `noise` (need the decision, for the bounds), `latency`,
    and for logits `confidence_bands` and `confidence_by_class`. What has no data is left out."""
    figures: dict[str, Figure | None] = {
        "differences": bounds.differences(decision) if decision else None,
        "noise": bounds.noise(decision) if decision else None,
        "confidence_bands": _confidence_bands(evidence),
        "confidence_by_class": _confidence_by_class(evidence),
        "latency": _latency(evidence),
    }
    return {name: png(drawn) for name, drawn in figures.items() if drawn is not None}


def _confidence_bands(evidence: Evidence) -> Figure | None:
    """How many samples moved by how much confidence, per runtime."""
    rows = list(_logits(evidence))[:MOST_ROWS]
    if not rows:
        return None
    drawn, axes = figure(rows=len(rows), pitch=0.45)
    left = [0.0] * len(rows)
    for band, (label, color) in enumerate(_BANDS.items()):
        shares = [100 * finite(parity.confidence.bands[band]) for _, parity in rows]
        bars = axes.barh(range(len(rows)), shares, left=left, color=color, label=label)
        texts = [f"{share:.3g} %" if share >= 8 else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", color="white")
        left = [start + share for start, share in zip(left, shares, strict=True)]
    name_rows(axes, [f"{name}  (largest {number(parity.confidence.max)})" for name, parity in rows])
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of samples in %")
    axes.set_title("By how much the confidence moved")
    legend(drawn)
    return drawn


def _confidence_by_class(evidence: Evidence) -> Figure | None:
    """The confidence difference in every class that the reference predicts."""
    rows = [row for row in _logits(evidence) if row[1].confidence.per_class][:MOST_ROWS]
    if not rows:
        return None
    from matplotlib.ticker import MaxNLocator

    drawn, axes = figure(rows=12)
    axes.set_yscale("log")
    largest = max(finite(entry.max) for _, parity in rows for entry in parity.confidence.per_class)
    axes.set_ylim(FLOOR / 3, 3 * max(largest, FLOOR))
    width = 0.6 / len(rows)
    for place, (name, parity) in enumerate(rows):
        shift = (place - (len(rows) - 1) / 2) * width
        classes = [entry.label + shift for entry in parity.confidence.per_class]
        means = [max(finite(entry.mean), FLOOR) for entry in parity.confidence.per_class]
        highs = [max(finite(entry.max), FLOOR) for entry in parity.confidence.per_class]
        color = f"C{place}"
        axes.vlines(classes, means, highs, color=color, linewidth=1)
        axes.plot(classes, highs, "v", color=color, label=literal(f"{name}: largest"), markersize=5)
        axes.plot(classes, means, "o", color=color, label=literal(f"{name}: mean"), markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("class that the PyTorch model predicts")
    axes.set_ylabel(f"confidence difference; 0 is drawn at {FLOOR:g}")
    axes.set_title("Confidence difference per class")
    axes.grid(visible=True, axis="y", alpha=0.3)
    legend(drawn)
    return drawn


def _latency(evidence: Evidence) -> Figure | None:
    """Median and 95th percentile of one batch, the PyTorch reference first."""
    measured = [("reference (torch, CPU)", evidence.reference_latency)]
    measured += [(runtime.runtime, runtime.latency) for runtime in evidence.runtimes]
    rows = [(name, latency) for name, latency in measured if latency is not None]
    rows = [row for row in rows if math.isfinite(row[1].median_ms + row[1].p95_ms)]
    if not rows:
        return None
    drawn, axes = figure(rows=len(rows), pitch=0.45)
    places = range(len(rows))
    p95 = axes.barh(places, [latency.p95_ms for _, latency in rows], color=ORANGE, label="p95")
    axes.barh(places, [latency.median_ms for _, latency in rows], color=BLUE, label="median")
    texts = [f"{latency.median_ms:.3g} / {latency.p95_ms:.3g}" for _, latency in rows]
    axes.bar_label(p95, texts, padding=4)
    axes.margins(x=0.18)
    name_rows(axes, [f"{name}, batch {latency.batch_size}" for name, latency in rows])
    axes.set_xlabel("milliseconds per batch, transfers included: median / p95")
    axes.set_title("Latency")
    legend(drawn)
    return drawn


def _logits(evidence: Evidence) -> Iterator[tuple[str, ClassParity]]:
    for runtime in evidence.runtimes:
        several = len(runtime.outputs) > 1
        for output in runtime.outputs:
            if output.classification is not None:
                name = f"{runtime.runtime} / {output.name}" if several else runtime.runtime
                yield printable(name), output.classification
