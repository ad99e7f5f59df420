"""All that a report is made of, with its charts, which are drawn once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.report.charts import gallery
from gate.report.charts.drawing import Chart
from gate.story.story import Story


@dataclass(frozen=True)
class Report:
    """The story, the records that it tells of, and what is beside them."""

    story: Story
    evidence: Evidence
    decision: Decision
    explanation: Explanation = field(default_factory=Explanation)
    pictures: Mapping[int, bytes] = field(default_factory=dict)
    """PNG bytes of samples, by their index."""

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        """The charts of the evidence; what has no data is left out."""
        return gallery.of_report(self.story, self.evidence, self.decision, self.explanation)
