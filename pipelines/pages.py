"""What each stage writes on the run's page. A replaced run gets all of it again."""

from __future__ import annotations

from typing import Any

from gate.decision.checks import CheckResult
from gate.decision.decision import Decision
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.registry.judged import Judged
from gate.storage.record import Record
from pipelines import numbers, paths
from pipelines.export_report import ExportReport
from pipelines.run_page import RunPage


def write_export(page: RunPage, report: ExportReport) -> None:
    """Every export setting, the file's SHA-256 and size, the self-check, where it comes from."""
    subject, record = report.subject, report.record
    settings = {f"export.{key}": value for key, value in record.settings.items()}
    page.params({"export.strategy": record.strategy, **settings})
    page.params({"export.rungs": "\n".join(record.rungs)[:5000] or "none"})
    page.params({"export.opset_in_file": subject.opset, "export.producer": subject.producer})
    page.tags(
        {
            "gate.sha256": subject.sha256.hex,
            "gate.verdict": "not judged yet",
            "gate.reference": report.source.factory,
            "gate.checkpoint_sha256": report.source.checkpoint_sha256,
            "gate.train_run": report.train_run or "unknown",
        }
    )
    page.metrics({"export/size_bytes": float(subject.size_bytes)})
    page.metrics(report.self_check_numbers())
    page.file(paths.EXPORT_REPORT)
    page.file(paths.PREPROCESSING)
    page.note(
        f"Exported as `{subject.sha256}`, {subject.size_bytes} bytes, opset {subject.opset}; "
        "not measured yet.\n"
    )


def write_parity(page: RunPage, evidence: Evidence, policy: Policy) -> None:
    """Every number of the evidence, the switches, the machine, and the data set."""
    page.params(switches(policy))
    environment = evidence.environment
    page.tags({f"environment.{name}": version for name, version in environment.versions.items()})
    hardware = {
        name: getattr(environment, name) for name in ("cpu", "cuda", "cudnn", "gpu", "driver")
    }
    page.tags({f"environment.{name}": value or "none" for name, value in hardware.items()})
    page.tags(
        {f"determinism.{name}": value for name, value in environment.determinism.to_plain().items()}
    )
    page.tags({f"runtime.{runtime.runtime}": runtime_state(evidence, runtime.runtime)
               for runtime in evidence.runtimes})  # fmt: skip
    page.metrics(dict(numbers.of_evidence(evidence)))
    for runtime, output in numbers.of_outputs(evidence):
        for entry in output.classification.confidence.per_class if output.classification else ():
            curve = {f"{runtime}/confidence_by_class/mean": entry.mean,
                     f"{runtime}/confidence_by_class/max": entry.max}  # fmt: skip
            # From step 1: step 0 is the summary's, which MLflow links to the model.
            page.metrics(curve, step=entry.label + 1)
    page.dataset(
        "evaluation", digest=str(evidence.dataset.sha256), source=paths.EVAL_IMAGES, context="eval"
    )
    page.file(paths.EVIDENCE)
    page.file(paths.SAMPLES)
    for plot in sorted(paths.PLOTS.glob("*.svg")):
        page.file(plot, "plots")
    page.note(
        f"Measured `{evidence.subject.sha256}` on {evidence.dataset.samples} samples; "
        "not decided yet.\n"
    )


def write_decision(page: RunPage, decision: Decision, policy: Policy) -> None:
    """The verdict, the table of checks, and the policy that it was judged by."""
    page.tags(
        {
            "gate.verdict": decision.verdict,
            "gate.sha256": decision.subject_sha256.hex,
            "gate.policy_sha256": decision.policy_sha256.hex,
            "gate.evidence_sha256": decision.evidence_sha256.hex,
            "gate.runtimes": ",".join(decision.runtimes) or "none",
            "gate.failed_checks": ", ".join(c.title for c in decision.problems)[:5000] or "none",
            "gate.waived_checks": ", ".join(c.title for c in decision.waived)[:5000] or "none",
        }
    )
    page.metrics(
        {
            "decision/checks": float(len(decision.checks)),
            "decision/problems": float(len(decision.problems)),
            "decision/waived": float(len(decision.waived)),
        }
    )
    page.table([_row(check) for check in decision.checks], "checks.json")
    page.file(paths.DECISION)
    page.text(policy.to_json(indent=2) + "\n", "policy.json")
    page.file(paths.PARAMS)
    page.file(paths.PAGE)


def write_twin(page: RunPage, twin: Judged) -> None:
    """The verdict on the quantized twin and the table of its checks."""
    decision = twin.decision
    page.tags(
        {
            "gate.twin_sha256": decision.subject_sha256.hex,
            "gate.twin_verdict": decision.verdict,
            "gate.twin_failed_checks": ", ".join(c.title for c in decision.problems)[:5000]
            or "none",
        }
    )
    page.metrics({"twin/size_bytes": float(twin.evidence.subject.size_bytes)})
    page.metrics({f"twin/{name}": value for name, value in numbers.of_evidence(twin.evidence)})
    page.table([_row(check) for check in decision.checks], "twin_checks.json")


def switches(policy: Policy) -> dict[str, object]:
    """The settings of the policy that decide how is measured, flat."""
    sections: dict[str, Record] = {
        "determinism": policy.determinism,
        "cuda_provider": policy.cuda_provider,
        "instruments": policy.instruments,
    }
    flat: dict[str, object] = {
        f"gate.{name}.{key}": value
        for name, section in sections.items()
        for key, value in section.to_plain().items()
    }
    for name, runtime in policy.runtimes.items():
        flat[f"gate.runtimes.{name}.required"] = runtime.required
    return flat


def runtime_state(evidence: Evidence, name: str) -> str:
    """`measured`, or why not."""
    runtime = next(r for r in evidence.runtimes if r.runtime == name)
    return (runtime.failure or runtime.absent_reason or "measured")[:5000]


def _row(check: CheckResult) -> dict[str, Any]:
    plain = check.to_plain()
    keys = ("verdict", "runtime", "output", "name", "observed", "relation", "bound", "samples",
            "explanation", "remedy")  # fmt: skip
    return {key: plain[key] for key in keys}
