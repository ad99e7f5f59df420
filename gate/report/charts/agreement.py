"""The agreement on the answer, with what the number of samples proves, beside its bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from scipy.special import betaincinv

from gate.decision.checks import Verdict
from gate.decision.decision import Decision
from gate.decision.rules.comparisons import top1_lower_bound
from gate.records.evidence import Evidence
from gate.records.output_parity import ClassParity, OutputParity
from gate.report.charts.drawing import BLUE, RED, TEXT, Chart, chart, label, literal
from gate.story.wording import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEVEL = 0.95
_PITCH, _REST, _MOST_ROWS = 30, 50, 12
_CHECKS = ("top1_agreement", "top1_lower_bound")


class _Row(NamedTuple):
    name: str
    agreement: float
    low: float
    high: float
    bound: float | None
    failed: bool
    counted: str


def agreement(evidence: Evidence, decision: Decision | None = None) -> Chart | None:
    """Top-1 agreement of each runtime and output with its Clopper-Pearson interval; None: no
    output of classes. With the decision: the bounds."""
    rows = list(_rows(evidence, decision))[:_MOST_ROWS]
    if not rows:
        return None

    def paint(drawn: Figure) -> None:
        axes: Axes = drawn.add_subplot()
        for place, row in enumerate(rows):
            _draw(axes, place, row)
        least = min([row.low for row in rows] + [row.bound for row in rows if row.bound])
        axes.set_xlim(least - 0.12 * (1.0 - least) - 1e-4, 1.0 + 0.04 * (1.0 - least) + 1e-5)
        axes.set_ylim(len(rows) - 0.4, -0.8)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=True, axis="x")
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel("share of samples with the same answer; | its bound")

    return chart(
        "agreement",
        paint,
        title="Same answer as PyTorch, and what the samples prove",
        alternative="; ".join(
            f"{row.name}: {row.counted}, with 95 % confidence at least {row.low:.4f}"
            + (f", allowed from {row.bound:g}" if row.bound is not None else "")
            for row in rows
        ),
        height=_REST + _PITCH * len(rows),
    )


def _draw(axes: Axes, place: int, row: _Row) -> None:
    color, marker = (RED, "X") if row.failed else (BLUE, "o")
    at = place + 0.2
    axes.plot([row.low, row.high], [at, at], color=color, linewidth=2.5, solid_capstyle="butt")
    axes.plot(row.agreement, at, marker=marker, color=color, markersize=7)
    if row.bound is not None:
        axes.plot([row.bound] * 2, [at - 0.22, at + 0.22], color=TEXT, linewidth=2)
    label(axes, place - 0.25, name=literal(row.name, 36), value=row.counted)


def _rows(evidence: Evidence, decision: Decision | None) -> Iterator[_Row]:
    for runtime in evidence.runtimes:
        for output in runtime.outputs:
            parity = output.classification
            answered = _answered(output, parity) if parity is not None else 0
            if parity is None or answered <= 0:
                continue
            checks = [
                check
                for check in (decision.checks if decision else ())
                if check.name in _CHECKS
                and (check.runtime, check.output) == (runtime.runtime, output.name)
            ]
            bounds = [check.bound for check in checks if isinstance(check.bound, float)]
            same = max(answered - parity.top1_disagreements, 0)
            several = f" / {output.name}" if len(runtime.outputs) > 1 else ""
            yield _Row(
                name=printable(f"{runtime.runtime}{several}"),
                agreement=same / answered,
                low=top1_lower_bound(parity.top1_disagreements, answered, confidence=_LEVEL),
                high=_upper_bound(answered - same, answered),
                bound=max(bounds, default=None),
                failed=any(check.verdict is Verdict.FAIL for check in checks),
                counted=f"{same} of {answered}",
            )


def _answered(output: OutputParity, parity: ClassParity) -> int:
    return output.samples - parity.nan_rows - parity.top1_ties


def _upper_bound(disagreements: int, samples: int) -> float:
    """As `top1_lower_bound`, from above: 1.0 without a disagreement."""
    if disagreements <= 0:
        return 1.0
    return float(betaincinv(samples - disagreements + 1, disagreements, _LEVEL))
