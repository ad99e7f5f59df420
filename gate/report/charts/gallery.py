"""Which charts a report has."""

from __future__ import annotations

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.report.charts.agreement import agreement
from gate.report.charts.confidence import confidence
from gate.report.charts.depth import depth
from gate.report.charts.differences import differences
from gate.report.charts.drawing import Chart
from gate.report.charts.latency import latency
from gate.report.charts.memory import memory
from gate.report.charts.strain import strain
from gate.story.story import Story

NAMES = ("strain", "differences", "confidence", "agreement", "localisation", "latency", "memory")
_CAUSE_ROWS, _CAUSE_HEIGHT = 6, 195
"""Of the first chart, which has to fit on a telephone's first screen."""


def of_evidence(evidence: Evidence, decision: Decision | None = None) -> tuple[Chart, ...]:
    """What was measured, with bounds where there is a decision. What has no data is left out."""
    drawn = (
        differences(evidence, decision),
        confidence(evidence),
        agreement(evidence, decision),
        latency(evidence),
        memory(evidence),
    )
    return tuple(chart for chart in drawn if chart is not None)


def of_report(
    story: Story, evidence: Evidence, decision: Decision, explanation: Explanation
) -> tuple[Chart, ...]:
    """All charts of a report."""
    found = explanation.localisation
    layers = depth(found) if found is not None else None
    return (
        *(chart for chart in (strain(story.words), layers) if chart is not None),
        *of_evidence(evidence, decision),
    )


def of_cause(story: Story, explanation: Explanation) -> Chart | None:
    """The one chart that shows why: the depth where a layer is to blame, else the numbers of the
    first finding beside their bounds, else all that were measured. None: nothing could be drawn."""
    found = explanation.localisation
    if found is not None and found.first_divergence is not None:
        along = depth(found, name="cause", height=_CAUSE_HEIGHT)
        if along is not None:
            return along
    blamed = {check for finding in story.findings[:1] for check in finding.checks}
    words = [word for word in story.words if word.check in blamed]
    measured = [word for word in story.words if word.check.runtime is not None]
    return strain(words, name="cause", most=_CAUSE_ROWS) or strain(
        measured, name="cause", most=_CAUSE_ROWS
    )
