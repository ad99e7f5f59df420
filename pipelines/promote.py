"""Stage `promote`: decide on the evidence; move the registry's alias, or refuse."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gate.commands.promote import uses_submission
from gate.commands.result import ExitCode, console
from gate.decision.decide import Decision, decide
from gate.golden.tolerance import refit
from gate.ledger.entry import now
from gate.mlflow_client.log_evaluation import write_promotion, write_twin
from gate.mlflow_client.registry import MlflowRegistry
from gate.mlflow_client.runs import RunLogger, cut
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.localization import Explanation
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import EvaluatedFile, GoldenFolder, Release
from gate.registry.version_page import BODY_LIMIT
from gate.report import markdown
from gate.report.folder import pictures
from gate.report.html_page import Report
from gate.report.html_page import render_page as page_of
from gate.report.terminal import print_summary
from gate.storage import files
from gate.storage.files import temporary_folder
from gate.storage.safe_text import make_printable
from gate.summary.champion_changes import compare_with_champion
from gate.summary.render import render_check
from gate.summary.summarize import SummaryInputs
from gate.summary.summary import Step, Summary
from pipelines import ci_files, pages, paths, stage
from pipelines.champion import load_compared_champion
from pipelines.export_report import ExportReport
from pipelines.ledger import project_ledger
from pipelines.params import RegistryParams, ReleaseParams, load_policy
from pipelines.promotion_report import PromotionReport
from pipelines.run import Tracker
from pipelines.signed_verdict import SignedVerdict
from pipelines.twin_files import decide_on_twin


@ci_files.record_failure("promote")
def main() -> int:
    """Write reports/decision.json, reports/promotion.json and the CI files; return the exit
    code."""
    ci_files.remove_files()
    policy, registry_params = load_policy(), RegistryParams.load()
    evidence = Evidence.load(paths.EVIDENCE)
    export = ExportReport.load(paths.EXPORT_REPORT)
    paths.PROMOTION.unlink(missing_ok=True)
    tracker = Tracker(registry_params.experiment)
    model = RegisteredModel(
        MlflowRegistry(tracker.uri),
        project_ledger(is_written=not uses_submission(policy, None)),
        registry_params.model_name,
    )
    champion = load_compared_champion(model, policy, evidence)
    decision = decide(policy, evidence, incumbent=champion.compared_by(policy), decided_at=now())
    decision.save(paths.DECISION)
    change = compare_with_champion(decision, evidence, champion)
    change.save(paths.CHANGE)
    explanation = Explanation() if decision.passed else Explanation.load(paths.EXPLANATION)

    def replay(page: RunLogger) -> None:
        pages.write_export(page, export)
        pages.write_parity(page, evidence, policy)

    with temporary_folder() as folder:
        release = Release(
            model_name=registry_params.model_name,
            onnx_path=ReleaseParams.load().path,
            evidence=evidence,
            decision=decision,
            golden=_golden(folder, policy, evidence) if decision.passed else None,
            preprocessing=paths.PREPROCESSING,
            twin=decide_on_twin(policy, folder / "twin", decided_at=decision.decided_at),
            trend=champion.trend,
        )
        verdict = SignedVerdict.from_release(release, policy, model)
        judgment = SummaryInputs(
            decision=decision,
            evidence=evidence,
            policy=policy,
            explanation=explanation,
            change=change,
            model_name=registry_params.model_name,
            steps=_steps(decision),
            signed_by=verdict.signed_by,
        )
        twin = _twin_summary(release.twin, policy.twin)
        report_page = Report(
            judgment.summary,
            evidence,
            decision,
            explanation=explanation,
            pictures=pictures(paths.REPORTS),
        )
        files.write_text(paths.PAGE, page_of(report_page))
        with tracker.shared_run("promote", earlier="parity", settings={}, replay=replay) as page:
            pages.write_decision(page, judgment)
            for chart in report_page.charts:
                page.bytes(chart.file(), f"plots/{chart.name}.svg")
            if twin is not None:
                write_twin(page, twin, exact=decision)
            report = _promote(page, verdict, judgment.summary, twin)
            ci_files.write(judgment.summary, report)
    _print_result(judgment.summary, report)
    if twin is not None:
        _print_twin_result(twin.decision)
    # Experiments are compared whatever their verdict, but an unsigned one can't be.
    if "DVC_EXP_NAME" in os.environ and verdict.refusal is None:
        return ExitCode.DONE
    return ExitCode.from_promotion(report.outcome, report.verdict.value)


def _promote(
    page: RunLogger, verdict: SignedVerdict, summary: Summary, twin: SummaryInputs | None
) -> PromotionReport:
    """Promote, submit or reject the release; write the outcome to the page and its report."""
    twin_text = "" if twin is None else markdown.twin_markdown(twin.summary)
    text = markdown.summary_markdown(summary, pages.links(page))
    promotion = verdict.promote(
        run_id=page.run_id,
        description=cut(text, BODY_LIMIT - len(twin_text)) + twin_text,
    )
    name = verdict.release.model_name
    report = PromotionReport(
        verdict=summary.headline.verdict,
        outcome=promotion.outcome,
        model_name=name,
        version=promotion.version,
        previous_version=promotion.previous_version,
        reason=promotion.reason,
        sha256=summary.subject.sha256,
        run_id=page.run_id,
        experiment_id=page.experiment_id,
        signed_by=verdict.word,
    )
    note = markdown.summary_markdown(summary, pages.links(page, report)) + twin_text
    note += f"\n{report.sentence()}\n"
    write_promotion(page, promotion, model_name=name, note=note)
    report.save(paths.PROMOTION)
    return report


def _twin_summary(twin: EvaluatedFile | None, policy: Policy | None) -> SummaryInputs | None:
    """Return the verdict on the quantized twin by the twin's policy."""
    if twin is None or policy is None:
        return None
    return SummaryInputs(decision=twin.decision, evidence=twin.evidence, policy=policy)


def _golden(folder: Path, policy: Policy, evidence: Evidence) -> GoldenFolder:
    """Return the golden vectors of `parity` with the current tolerances of the policy.

    A changed bound needs a new decision, but no new measurement.
    """
    refit(paths.GOLDEN, folder / "golden", policy=policy, evidence=evidence)
    return GoldenFolder.open(folder / "golden")


def _steps(decision: Decision) -> tuple[Step, ...]:
    """Return the next steps in this project."""
    look = Step(label="Open it in MLflow", command="make ui")
    if decision.passed:
        return (look, Step(label="Serve it", command="make stack"))
    return (look, Step(label="Check again after fixing the cause", command="make repro"))


def _print_result(summary: Summary, report: PromotionReport) -> None:
    print_summary(summary, console(sys.stdout))
    print(report.sentence())
    if report.signed_by is not None:
        print(make_printable(report.signed_by[:1].upper() + report.signed_by[1:]))
    print("Next: make ui")


def _print_twin_result(decision: Decision) -> None:
    print(f"Quantized twin: {decision.verdict}, {decision.subject_sha256}")
    for check in decision.problems:
        print("  " + make_printable(f"{check.verdict} {check.title}: {render_check(check)}"))


if __name__ == "__main__":
    stage.run(main)
