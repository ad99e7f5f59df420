"""Stage `promote`: decide on the evidence, and move the registry's alias or refuse."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gate.commands.outcome import console
from gate.commands.status import Status
from gate.decision.decision import Decision, decide
from gate.golden.tolerance import refit
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.localisation import Explanation
from gate.registry.judged import GoldenFolder, Judged
from gate.registry.ledger import Ledger, now
from gate.registry.mlflow.registry import MlflowRegistry
from gate.registry.page.status_line import BODY_LIMIT
from gate.registry.promotion import Release, promote
from gate.registry.registered_model import RegisteredModel
from gate.report import markdown
from gate.report.folder import pictures
from gate.report.page import page as page_of
from gate.report.report import Report
from gate.report.terminal import print_story
from gate.storage import atomic
from gate.storage.temporary import temporary_folder
from gate.story.change import change_of
from gate.story.making import story_of
from gate.story.story import Step, Story
from gate.story.wording import printable
from gate.tracking.page import RunPage, cut
from gate.tracking.record import Judgement, write_promotion
from pipelines import pages, paths, stage
from pipelines.beside import champion_beside
from pipelines.export_report import ExportReport
from pipelines.params import RegistryParams, load_policy
from pipelines.promotion_report import PromotionReport
from pipelines.run import Tracker
from pipelines.twin_files import judged_twin


def main() -> int:
    """Write reports/decision.json and reports/promotion.json; exit code by its outcome."""
    policy, registry_params = load_policy(), RegistryParams.load()
    evidence = Evidence.load(paths.EVIDENCE)
    export = ExportReport.load(paths.EXPORT_REPORT)
    paths.PROMOTION.unlink(missing_ok=True)
    tracker = Tracker(registry_params.experiment)
    model = RegisteredModel(
        MlflowRegistry(tracker.uri),
        Ledger(paths.state() / "ledger.jsonl"),
        registry_params.model_name,
    )
    champion = champion_beside(model, policy, evidence)
    decision = decide(policy, evidence, incumbent=champion.incumbent, decided_at=now())
    decision.save(paths.DECISION)
    change = change_of(decision, evidence, champion)
    change.save(paths.CHANGE)
    explanation = Explanation() if decision.passed else Explanation.load(paths.EXPLANATION)
    judgement = Judgement(
        decision=decision,
        evidence=evidence,
        policy=policy,
        explanation=explanation,
        change=change,
        model_name=registry_params.model_name,
        steps=_steps(decision),
    )
    story = judgement.story
    drawn = Report(
        story, evidence, decision, explanation=explanation, pictures=pictures(paths.REPORTS)
    )
    atomic.write_text(paths.PAGE, page_of(drawn))

    def replay(page: RunPage) -> None:
        pages.write_export(page, export)
        pages.write_parity(page, evidence, policy)

    with (
        temporary_folder() as folder,
        tracker.shared_run("promote", earlier="parity", settings={}, replay=replay) as page,
    ):
        pages.write_decision(page, judgement)
        for chart in drawn.charts:
            page.bytes(chart.file(), f"plots/{chart.name}.svg")
        twin = judged_twin(policy, Path(folder, "twin"), decided_at=decision.decided_at)
        if twin is not None:
            assert policy.twin is not None  # by judged_twin
            pages.write_twin(page, twin, policy.twin, exact=decision)
        beside = "" if twin is None else markdown.describe_twin(_story(twin))
        release = Release(
            model_name=registry_params.model_name,
            onnx_path=paths.ONNX,
            evidence=evidence,
            decision=decision,
            run_id=page.run_id,
            description=cut(
                markdown.describe(story, pages.links(page)),
                BODY_LIMIT - len(beside),
            )
            + beside,
            golden=_golden(Path(folder), policy, evidence) if decision.passed else None,
            preprocessing=paths.PREPROCESSING,
            twin=twin,
            trend=champion.trend,
        )
        promotion = promote(model.registry, release, policy=policy, ledger=model.ledger)
        report = PromotionReport(
            verdict=decision.verdict,
            outcome=promotion.outcome,
            model_name=release.model_name,
            version=promotion.version,
            previous_version=promotion.previous_version,
            reason=promotion.reason,
            sha256=decision.subject_sha256,
            run_id=page.run_id,
            experiment_id=page.experiment_id,
        )
        note = markdown.describe(story, pages.links(page, report)) + beside
        note = f"{note}\n{report.sentence()}\n"
        write_promotion(page, promotion, model_name=release.model_name, note=note)
        report.save(paths.PROMOTION)
    _tell(story, report)
    if twin is not None:
        _tell_twin(twin)
    # An experiment is there to be compared, whatever came out.
    if "DVC_EXP_NAME" in os.environ:
        return Status.DONE
    return Status.of_promotion(report.outcome, report.verdict.value)


def _golden(folder: Path, policy: Policy, evidence: Evidence) -> GoldenFolder:
    """The vectors that `parity` wrote, with the tolerances of the policy as it is now: another
    bound decides anew without another measurement."""
    refit(paths.GOLDEN, folder / "golden", policy=policy, evidence=evidence)
    return GoldenFolder.open(folder / "golden")


def _steps(decision: Decision) -> tuple[Step, ...]:
    """What to do next in this project."""
    look = Step(label="Look at it in MLflow", command="make ui")
    if decision.passed:
        return (look, Step(label="Serve it", command="make stack"))
    return (look, Step(label="Judge it again, when the cause is mended", command="make repro"))


def _story(twin: Judged) -> Story:
    return story_of(twin.decision, twin.evidence)


def _tell(story: Story, report: PromotionReport) -> None:
    print_story(story, console(sys.stdout))
    print(report.sentence())
    print("Where to look: make ui")


def _tell_twin(twin: Judged) -> None:
    decision = twin.decision
    print(f"Quantized twin: {decision.verdict}, {decision.subject_sha256}")
    for check in decision.problems:
        print("  " + printable(f"{check.verdict} {check.title}: {check.explanation}"))


if __name__ == "__main__":
    stage.run(main)
