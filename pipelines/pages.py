"""What each stage writes on the run's page, with what only the pipeline has. A replaced run gets
all of it again."""

from __future__ import annotations

from gate.decision.decision import Decision
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.registry.judged import Judged
from gate.tracking import record
from gate.tracking.names import unjudged_name
from gate.tracking.page import RunPage
from gate.tracking.record import Judgement
from pipelines import paths
from pipelines.export_report import ExportReport
from pipelines.promotion_report import PromotionReport


def write_export(page: RunPage, report: ExportReport) -> None:
    """Every export setting, the file's SHA-256 and size, the self-check, where it comes from."""
    subject = report.subject
    record.write_export(page, subject, source=report.source, export=report.record)
    page.tags({"gate.verdict": "not judged yet", "gate.train_run": report.train_run or "unknown"})
    page.metrics({"export/size_bytes": float(subject.size_bytes), **report.self_check_numbers()})
    page.file(paths.EXPORT_REPORT)
    page.file(paths.PREPROCESSING)
    page.note(
        f"Exported as `{subject.sha256}`, {subject.size_bytes} bytes, opset {subject.opset}; "
        "not measured yet.\n"
    )
    page.named(unjudged_name("exported", subject.sha256))


def write_refused_export(page: RunPage, refusal: str) -> None:
    """Why there is no file. The run ends FAILED."""
    first = next(iter(refusal.splitlines()), "the exporter refused")
    page.tags({"gate.verdict": "FAIL", "gate.cause": "export", "gate.headline": first[:5000]})
    page.note(f"Not exported.\n\n```\n{refusal}\n```\n")
    page.named("gate FAIL not exported")
    page.ends = "FAILED"


def write_parity(page: RunPage, evidence: Evidence, policy: Policy) -> None:
    """The numbers of the evidence, the switches, the machine, and the data set."""
    record.write_evidence(page, evidence, policy, inputs=paths.EVAL_IMAGES)
    page.file(paths.EVIDENCE)
    page.file(paths.SAMPLES)
    for plot in sorted(paths.PLOTS.glob("*.svg")):
        page.file(plot, "plots")
    page.note(
        f"Measured `{evidence.subject.sha256}` on {evidence.dataset.samples} samples; "
        "not decided yet.\n"
    )
    page.named(unjudged_name("measured", evidence.subject.sha256))


def write_decision(page: RunPage, judgement: Judgement) -> None:
    """The report, the verdict, and the settings that it was made by."""
    record.write_report(page, paths.REPORTS)
    page.file(paths.PARAMS)
    record.write_decision(page, judgement)


def write_twin(page: RunPage, twin: Judged, policy: Policy, *, exact: Decision) -> None:
    """The verdict on the quantized twin, by the twin's own policy."""
    judgement = Judgement(decision=twin.decision, evidence=twin.evidence, policy=policy)
    record.write_twin(page, judgement, exact=exact)


def links(page: RunPage, report: PromotionReport | None = None) -> dict[str, str]:
    """To the run and its report, and to the version of which the report of the promotion speaks."""
    version = (report.model_name, report.version) if report and report.version else None
    return record.links(page, version=version)
