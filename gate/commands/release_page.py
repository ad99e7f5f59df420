"""The page of the run that a promoted release belongs to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gate.commands.tracked import page_of_release

if TYPE_CHECKING:
    from gate.registry.judged import Judged
    from gate.registry.release import Promotion
    from gate.story.judgement import Judgement
    from gate.tracking.page import RunPage
    from gate.tracking.runs import Runs


@dataclass(frozen=True, kw_only=True)
class ReleasePage:
    """Of the run that was named, else of one of its own, with the whole record."""

    runs: Runs
    run_id: str | None
    """None: of its own."""
    model: str
    report: Path

    def open(self, judgement: Judgement, twin: Judged | None) -> AbstractContextManager[RunPage]:
        """Open it, to be written. Raises as `Runs.page` and `page_of_release`."""
        from gate.decision.decision import decide
        from gate.story.judgement import Judgement

        if self.run_id is not None:
            return nullcontext(self.runs.page(self.run_id))
        policy = judgement.policy.twin
        judged_twin = None
        if twin is not None and policy is not None:
            decision = decide(policy, twin.evidence, decided_at=twin.decision.decided_at)
            judged_twin = Judgement(decision=decision, evidence=twin.evidence, policy=policy)
        return page_of_release(self.runs, judgement, report=self.report, twin=judged_twin)

    def description(
        self, judgement: Judgement, page: RunPage, *, version: tuple[str, str] | None = None
    ) -> str:
        """Markdown with links to the run, to its report where we wrote it, to the version."""
        from gate.registry.page.status_line import BODY_LIMIT
        from gate.report.markdown import describe
        from gate.tracking.page import cut
        from gate.tracking.record import links

        own = self.run_id is None
        there = links(page, version=version) if own else {"MLflow run": page.address}
        return cut(describe(judgement.story, there), BODY_LIMIT)

    def write_outcome(self, page: RunPage, promotion: Promotion, judgement: Judgement) -> None:
        """Write there what became of it. Raises as `write_promotion`."""
        from gate.tracking.record import write_promotion

        version = None if promotion.version is None else (self.model, promotion.version)
        note = self.description(judgement, page, version=version)
        own = self.run_id is None
        closing = f"{note}\n{promotion.outcome}: {promotion.reason}\n" if own else None
        write_promotion(page, promotion, model_name=self.model, note=closing)
