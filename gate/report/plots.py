"""Figures of the evidence as PNG bytes, drawn without matplotlib's global state.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; what failed also
has another marker.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gate.checks import CheckResult, Verdict
from gate.decision import Decision
from gate.evidence import ClassParity, Evidence
from gate.report.wording import number, observed, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = ("differences", "confidence_bands", "confidence_by_class", "latency")
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#888888"
_BANDS = {"< 1 %": _BLUE, "1-5 %": _GREEN, "5-10 %": _ORANGE, "> 10 % or NaN": _RED}
_FLOOR = 1e-12
"""Smallest value on a logarithmic axis; zero is drawn here."""
_ROWS = 60
"""A figure with more rows can't be read; the rest is in evidence.json."""


def draw(evidence: Evidence, decision: Decision | None = None) -> dict[str, bytes]:
    """PNG bytes by name: `differences` (needs the decision, for the bounds), `latency`, and for
    logits `confidence_bands` and `confidence_by_class`. What has no data is left out."""
    figures: dict[str, Figure | None] = {
        "differences": _differences(decision) if decision else None,
        "confidence_bands": _confidence_bands(evidence),
        "confidence_by_class": _confidence_by_class(evidence),
        "latency": _latency(evidence),
    }
    return {name: _png(figure) for name, figure in figures.items() if figure is not None}


def _differences(decision: Decision) -> Figure | None:
    """Each bounded difference as a point, its bound as a tick, on a logarithmic axis."""
    checks = [
        check
        for check in decision.checks
        if check.relation == "<=" and isinstance(check.observed, float) and check.runtime
    ]
    rows, more = checks[:_ROWS], len(checks) - _ROWS
    if not rows:
        return None
    figure, axes = _figure(rows=len(rows))
    axes.set_xscale("log")
    beyond = 10 * max(max(_finite(check.observed), _bound(check)) for check in rows)
    for place, check in enumerate(rows):
        _difference(axes, place, check, beyond)
    several = len({check.output for check in rows}) > 1
    _name_rows(axes, [_row_name(check, several) for check in rows])
    note = f" (first {_ROWS}; {more} more in evidence.json)" if more > 0 else ""
    axes.set_title(f"Differences to the PyTorch model, and their bounds{note}")
    axes.set_xlabel(f"difference; 0 is drawn at {_FLOOR:g}, NaN and infinity at the right edge")
    for label, color, marker in (
        ("observed", _BLUE, "o"),
        ("beyond its bound", _RED, "X"),
        ("bound", "black", "|"),
    ):
        axes.plot([], [], linestyle="none", label=label, color=color, marker=marker)
    _legend(figure)
    return figure


def _difference(axes: Axes, place: int, check: CheckResult, beyond: float) -> None:
    finite = isinstance(check.observed, float) and math.isfinite(check.observed)
    seen = max(_finite(check.observed), _FLOOR) if finite else beyond
    bound = _bound(check)
    failed = check.verdict is not Verdict.PASS
    axes.plot([seen, bound], [place, place], color=_RED if failed else _GREY, linewidth=0.8)
    axes.plot(bound, place, color="black", marker="|", markersize=12)
    axes.plot(seen, place, color=_RED if failed else _BLUE, marker="X" if failed else "o")


def _bound(check: CheckResult) -> float:
    return max(_finite(check.bound), _FLOOR)


def _row_name(check: CheckResult, several: bool) -> str:
    output = f"{check.output} / " if several else ""
    return printable(f"{check.runtime} / {output}{check.name}  {observed(check)}")


def _confidence_bands(evidence: Evidence) -> Figure | None:
    """How many samples moved by how much confidence, per runtime."""
    rows = list(_logits(evidence))[:_ROWS]
    if not rows:
        return None
    figure, axes = _figure(rows=len(rows), pitch=0.45)
    left = [0.0] * len(rows)
    for band, (label, color) in enumerate(_BANDS.items()):
        shares = [100 * _finite(parity.confidence.bands[band]) for _, parity in rows]
        bars = axes.barh(range(len(rows)), shares, left=left, color=color, label=label)
        texts = [f"{share:.3g} %" if share >= 8 else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", color="white")
        left = [start + share for start, share in zip(left, shares, strict=True)]
    _name_rows(
        axes, [f"{name}  (largest {number(parity.confidence.max)})" for name, parity in rows]
    )
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of samples in %")
    axes.set_title("By how much the confidence moved")
    _legend(figure)
    return figure


def _confidence_by_class(evidence: Evidence) -> Figure | None:
    """The confidence difference in every class that the reference predicts."""
    rows = [row for row in _logits(evidence) if row[1].confidence.per_class][:_ROWS]
    if not rows:
        return None
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(rows=12)
    axes.set_yscale("log")
    largest = max(_finite(entry.max) for _, parity in rows for entry in parity.confidence.per_class)
    axes.set_ylim(_FLOOR / 3, 3 * max(largest, _FLOOR))
    width = 0.6 / len(rows)
    for place, (name, parity) in enumerate(rows):
        shift = (place - (len(rows) - 1) / 2) * width
        classes = [entry.label + shift for entry in parity.confidence.per_class]
        means = [max(_finite(entry.mean), _FLOOR) for entry in parity.confidence.per_class]
        highs = [max(_finite(entry.max), _FLOOR) for entry in parity.confidence.per_class]
        color = f"C{place}"
        axes.vlines(classes, means, highs, color=color, linewidth=1)
        axes.plot(
            classes, highs, "v", color=color, label=_literal(f"{name}: largest"), markersize=5
        )
        axes.plot(classes, means, "o", color=color, label=_literal(f"{name}: mean"), markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("class that the PyTorch model predicts")
    axes.set_ylabel(f"confidence difference; 0 is drawn at {_FLOOR:g}")
    axes.set_title("Confidence difference per class")
    axes.grid(visible=True, axis="y", alpha=0.3)
    _legend(figure)
    return figure


def _latency(evidence: Evidence) -> Figure | None:
    """Median and 95th percentile of one batch, the PyTorch reference first."""
    measured = [("reference (torch, CPU)", evidence.reference_latency)]
    measured += [(runtime.runtime, runtime.latency) for runtime in evidence.runtimes]
    rows = [(name, latency) for name, latency in measured if latency is not None]
    rows = [row for row in rows if math.isfinite(row[1].median_ms + row[1].p95_ms)]
    if not rows:
        return None
    figure, axes = _figure(rows=len(rows), pitch=0.45)
    places = range(len(rows))
    p95 = axes.barh(places, [latency.p95_ms for _, latency in rows], color=_ORANGE, label="p95")
    axes.barh(places, [latency.median_ms for _, latency in rows], color=_BLUE, label="median")
    texts = [f"{latency.median_ms:.3g} / {latency.p95_ms:.3g}" for _, latency in rows]
    axes.bar_label(p95, texts, padding=4)
    axes.margins(x=0.18)
    _name_rows(axes, [f"{name}, batch {latency.batch_size}" for name, latency in rows])
    axes.set_xlabel("milliseconds per batch, transfers included: median / p95")
    axes.set_title("Latency")
    _legend(figure)
    return figure


def _logits(evidence: Evidence) -> Iterator[tuple[str, ClassParity]]:
    for runtime in evidence.runtimes:
        several = len(runtime.outputs) > 1
        for output in runtime.outputs:
            if output.classification is not None:
                name = f"{runtime.runtime} / {output.name}" if several else runtime.runtime
                yield printable(name), output.classification


def _finite(value: float | str | None) -> float:
    """`value` as far as an axis can show it, or 0.0 where it is no finite number."""
    return min(value, 1e200) if isinstance(value, float) and math.isfinite(value) else 0.0


def _figure(*, rows: int, pitch: float = 0.26) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + pitch * rows), dpi=110, layout="constrained")
    axes: Axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _name_rows(axes: Axes, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), [_literal(label) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(figure: Figure) -> None:
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _literal(text: str) -> str:
    """`text`, cut to what fits, without the dollar signs that would make it a formula."""
    fits = text if len(text) <= 72 else f"{text[:40]}…{text[-31:]}"
    return fits.replace("$", r"\$")


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    stream = io.BytesIO()
    FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; the tables have it in full.
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from font", category=UserWarning
        )
        figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
