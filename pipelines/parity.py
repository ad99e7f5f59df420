"""Stage `parity`: measure the exported file or release against the model.

`promote` makes the decision. If it will be a rejection, this stage locates the first diverging
layer, because the model is loaded here.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from gate.api import explain_failure
from gate.commands.result import ExitCode
from gate.decision.decide import decide
from gate.measure.job import MeasurementJob
from gate.mlflow_client.log_evaluation import named_outputs, runtime_state, switches
from gate.mlflow_client.runs import RunLogger
from gate.policy.policy import Policy
from gate.records.evidence import Evidence, Subject
from gate.report import folder, html_page, terminal
from gate.statistics.sample_table import SampleTable
from gate.storage import files
from pipelines import ci_files, numbers, pages, paths, signing, stage
from pipelines.export_report import ExportReport
from pipelines.measuring import (
    add_export_records,
    measure,
    measure_preprocessing,
    write_golden,
    write_samples,
)
from pipelines.params import RegistryParams, ReleaseParams, load_policy
from pipelines.run import Tracker


@ci_files.record_failure("parity")
def main() -> int:
    """Write the signed evidence, its numbers and plots, and log them, whatever the result."""
    signatory = signing.signatory()
    policy = load_policy()
    report = ExportReport.load(paths.EXPORT_REPORT)
    tracker = Tracker(RegistryParams.load().experiment)

    def replay(page: RunLogger) -> None:
        pages.write_export(page, report)

    with tracker.shared_run(
        "parity", earlier="export", settings=switches(policy), replay=replay
    ) as page:
        evidence, case, table = _measure(policy, report)
        golden = write_golden(paths.GOLDEN, case, evidence)
        # Sign before the evidence is on disk, where it could be changed.
        onnx = case.candidate.path
        signing.write_measured(paths.EVIDENCE_STATEMENT, signatory, onnx, evidence, golden=golden)
        evidence.save(paths.EVIDENCE)
        foreseen = decide(policy, evidence, decided_at=evidence.measured_at)
        explanation = explain_failure(case, evidence, foreseen)
        explanation.save(paths.EXPLANATION)
        write_samples(case, evidence, table)
        _write_numbers(evidence)
        pages.write_parity(page, evidence, policy)
    print(
        f"{paths.EVIDENCE}: {evidence.dataset.samples} samples; "
        + ", ".join(
            f"{runtime.runtime} {runtime_state(evidence, runtime.runtime).split(':')[0]}"
            for runtime in evidence.runtimes
        )
    )
    for sentence in terminal.localisation_sentences(explanation):
        print(sentence)
    return ExitCode.DONE


def _measure(policy: Policy, report: ExportReport) -> tuple[Evidence, MeasurementJob, SampleTable]:
    onnx = ReleaseParams.load().path
    evidence, case, table = measure(onnx, policy, source=report.source, title="parity")
    if _is_exported(onnx, evidence.subject, report):
        evidence = add_export_records(evidence, report.record, report.records)
    preprocessing = measure_preprocessing(policy, onnx)
    return evidence.model_copy(update={"preprocessing": preprocessing}), case, table


def _is_exported(onnx: Path, subject: Subject, report: ExportReport) -> bool:
    """Return whether the file is the one that `export` wrote; print a message if not."""
    if subject.sha256 == report.subject.sha256:
        return True
    print(
        f"parity: {onnx} is {subject.sha256}, export wrote {report.subject.sha256}. "
        "The file as it is now was measured, without a record of its export."
    )
    return False


def _write_numbers(evidence: Evidence) -> None:
    """Write DVC metrics, and plots of the same numbers."""
    text_of_metrics = json.dumps(numbers.headline_metrics(evidence), indent=2)
    files.write_text(paths.PARITY_METRICS, f"{text_of_metrics}\n")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["runtime", "label", "mean", "max"])
    for name, output in named_outputs(evidence):
        logits = output.classification
        for entry in logits.confidence.per_class if logits else ():
            writer.writerow([name, entry.label, entry.mean, entry.max])
    files.write_text(paths.CONFIDENCE_BY_CLASS, text.getvalue())
    folder.write_charts(paths.PLOTS, html_page.evidence_charts(evidence))


if __name__ == "__main__":
    stage.run(main)
