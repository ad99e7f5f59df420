"""What each stage writes to the MLflow run, including data that only the pipeline has.

If a new run replaces an earlier one, all of this is written again.
"""

from __future__ import annotations

from gate.mlflow_client import log_evaluation
from gate.mlflow_client.runs import RunLogger, unjudged_name
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.layout import EVIDENCE, EVIDENCE_STATEMENT, PLOTS, SAMPLES
from gate.summary.summarize import SummaryInputs
from pipelines import paths
from pipelines.export_report import ExportReport
from pipelines.promotion_report import PromotionReport

_PARITY_FILES = (EVIDENCE, EVIDENCE_STATEMENT, SAMPLES, PLOTS)


def write_export(page: RunLogger, report: ExportReport) -> None:
    """Write the export settings, the file's SHA-256 and size, the self-check and the sources."""
    subject = report.subject
    log_evaluation.write_export(page, subject, source=report.source, export=report.record)
    for name, part in report.parts.items():
        settings = {f"export.{name}.{key}": value for key, value in part.record.settings.items()}
        page.params({f"export.{name}.strategy": part.record.strategy, **settings})
    page.tags({"gate.verdict": "not judged yet", "gate.train_run": report.train_run or "unknown"})
    page.metrics({"export/size_bytes": float(subject.size_bytes), **report.self_check_numbers()})
    page.file(paths.EXPORT_REPORT)
    page.file(paths.PREPROCESSING)
    page.note(
        f"Exported as `{subject.sha256}`, {subject.size_bytes} bytes, opset {subject.opset}; "
        "not measured yet.\n"
    )
    page.named(unjudged_name("exported", subject.sha256))


def write_refused_export(page: RunLogger, refusal: str) -> None:
    """Write why the export was rejected. The run ends with the status FAILED."""
    first = next(iter(refusal.splitlines()), "the exporter refused")
    page.tags({"gate.verdict": "FAIL", "gate.cause": "export", "gate.headline": first[:5000]})
    page.note(f"Not exported.\n\n```\n{refusal}\n```\n")
    page.named("gate FAIL not exported")
    page.ends = "FAILED"


def write_parity(page: RunLogger, evidence: Evidence, policy: Policy) -> None:
    """Write the numbers of the evidence, the settings, the machine and the data set."""
    log_evaluation.write_evidence(page, evidence, policy, inputs=paths.EVAL_IMAGES)
    page.file(paths.EVIDENCE)
    # without a statement, the stage promote rejects the measurement
    if paths.EVIDENCE_STATEMENT.is_file():
        page.file(paths.EVIDENCE_STATEMENT)
    page.file(paths.SAMPLES)
    for plot in sorted(paths.PLOTS.glob("*.svg")):
        page.file(plot, "plots")
    page.note(
        f"Measured `{evidence.subject.sha256}` on {evidence.dataset.samples} samples; "
        "not decided yet.\n"
    )
    page.named(unjudged_name("measured", evidence.subject.sha256))


def write_decision(page: RunLogger, judgment: SummaryInputs) -> None:
    """Write the report, the verdict and the settings, except files that `write_parity` writes."""
    log_evaluation.write_report(page, paths.REPORTS, without=_PARITY_FILES)
    page.file(paths.PARAMS)
    log_evaluation.write_decision(page, judgment)


def links(page: RunLogger, report: PromotionReport | None = None) -> dict[str, str]:
    """Return links to the run and its report, and to the promoted version."""
    version = (report.model_name, report.version) if report and report.version else None
    return log_evaluation.links(page, version=version)
