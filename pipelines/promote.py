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
from gate.registry.promotion import Release, promote
from gate.report import html, localisation, markdown, plots
from gate.report.terminal import print_decision
from gate.storage import atomic
from gate.storage.temporary import temporary_folder
from gate.tracking.page import DESCRIPTION_LIMIT, RunPage, cut
from gate.tracking.record import Judgement, write_promotion
from pipelines import pages, paths, stage
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
    decision = decide(policy, evidence, decided_at=now())
    decision.save(paths.DECISION)
    explanation = Explanation() if decision.passed else Explanation.load(paths.EXPLANATION)
    drawn = plots.draw(evidence, decision)
    if explanation.localisation is not None:
        drawn["localisation"] = localisation.chart(explanation.localisation)
    atomic.write_text(paths.PAGE, html.page(decision, evidence, drawn, explanation))
    tracker = Tracker(registry_params.experiment)

    def replay(page: RunPage) -> None:
        pages.write_export(page, export)
        pages.write_parity(page, evidence, policy)

    with (
        temporary_folder() as folder,
        tracker.shared_run("promote", earlier="parity", settings={}, replay=replay) as page,
    ):
        judgement = Judgement(
            decision=decision, evidence=evidence, policy=policy, explanation=explanation
        )
        pages.write_decision(page, judgement)
        for name, png in drawn.items():
            page.bytes(png, f"plots/{name}.png")
        twin = judged_twin(policy, Path(folder, "twin"), decided_at=decision.decided_at)
        if twin is not None:
            assert policy.twin is not None  # by judged_twin
            pages.write_twin(page, twin, policy.twin, exact=decision)
        beside = "" if twin is None else markdown.describe_twin(twin.decision, twin.evidence)
        release = Release(
            model_name=registry_params.model_name,
            onnx_path=paths.ONNX,
            evidence=evidence,
            decision=decision,
            run_id=page.run_id,
            description=cut(
                markdown.describe(decision, evidence, pages.links(page), explanation),
                DESCRIPTION_LIMIT - len(beside),
            )
            + beside,
            golden=_golden(Path(folder), policy, evidence) if decision.passed else None,
            preprocessing=paths.PREPROCESSING,
            twin=twin,
        )
        ledger = Ledger(paths.state() / "ledger.jsonl")
        promotion = promote(MlflowRegistry(tracker.uri), release, policy=policy, ledger=ledger)
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
        links = pages.links(page, report)
        note = markdown.describe(decision, evidence, links, explanation) + beside
        note = f"{note}\n{report.sentence()}\n"
        write_promotion(page, promotion, model_name=release.model_name, note=note)
        report.save(paths.PROMOTION)
    _tell(decision, evidence, report, confidence=policy.confidence)
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


def _tell(
    decision: Decision, evidence: Evidence, report: PromotionReport, *, confidence: float
) -> None:
    print_decision(decision, evidence, console(sys.stdout), confidence=confidence)
    print(report.sentence())
    print("Where to look: make ui")


def _tell_twin(twin: Judged) -> None:
    decision = twin.decision
    print(f"Quantized twin: {decision.verdict}, {decision.subject_sha256}")
    for check in decision.problems:
        print(f"  {check.verdict} {check.title}: {check.explanation}")


if __name__ == "__main__":
    stage.run(main)
