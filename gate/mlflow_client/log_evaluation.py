"""The whole record of a judgement on a run's page, the same from the pipeline, from `gate check`
and from `gate promote`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gate.decision.checks import CheckResult
from gate.decision.decision import Decision
from gate.policy.policy import Policy
from gate.records.evidence import Evidence, ExportRecord, Source, Subject
from gate.records.names import (
    CHANGE,
    DECISION,
    DECISION_STATEMENT,
    EVIDENCE,
    EVIDENCE_STATEMENT,
    EXPLANATION,
    LOCALISATION,
    MARKDOWN,
    PAGE,
    PICTURES,
    PLOTS,
    SAMPLES,
)
from gate.registry.release import Promotion
from gate.report import markdown
from gate.storage.record import Record
from gate.storage.redaction import redacted
from gate.story import wording
from gate.story.judgement import Judgement
from gate.tracking import numbers
from gate.tracking.names import headline_tags, judged_name, status_of
from gate.tracking.page import RunPage

_FILES = (
    EVIDENCE, EVIDENCE_STATEMENT, DECISION, DECISION_STATEMENT, CHANGE, EXPLANATION, LOCALISATION,
    MARKDOWN, PAGE, SAMPLES,
)  # fmt: skip
_FOLDERS = (PLOTS, PICTURES)
_HARDWARE = ("cpu", "cores", "os", "kernel", "cuda", "cudnn", "gpu", "driver")
_LONG = 5000
"""Characters of a tag or param: databases other than SQLite refuse more."""
DECIDED_TAG = "gate.decision_sha256"
"""Written last of the record: a page that has it is whole."""


def write_judgement(
    page: RunPage, judgement: Judgement, *, folder: Path, inputs: Path | str | None = None
) -> None:
    """Write all of it on a new page. `folder`: what `gate.report.folder.write` wrote; `inputs`:
    where the samples lie, if that is known."""
    evidence = judgement.evidence
    write_export(page, evidence.subject, source=evidence.source, export=evidence.export)
    write_evidence(page, evidence, judgement.policy, inputs=inputs)
    write_report(page, folder)
    write_decision(page, judgement)


def write_export(
    page: RunPage, subject: Subject, *, source: Source, export: ExportRecord | None
) -> None:
    """The file and its model, and every setting of its export where that is known."""
    if export is not None:
        settings = {f"export.{key}": value for key, value in export.settings.items()}
        page.params({"export.strategy": export.strategy, **settings})
        page.params({"export.rungs": "\n".join(export.rungs)[:_LONG] or None})
    page.params({"export.opset_in_file": subject.opset, "export.producer": subject.producer})
    page.tags(
        {
            "gate.sha256": subject.sha256.hex,
            "gate.reference": source.factory,
            "gate.checkpoint_sha256": source.checkpoint_sha256,
        }
    )


def write_evidence(
    page: RunPage, evidence: Evidence, policy: Policy, *, inputs: Path | str | None
) -> None:
    """The numbers of the evidence, the switches, the machine, and the data set."""
    page.params(switches(policy))
    environment = evidence.environment
    hardware = {name: getattr(environment, name) for name in _HARDWARE}
    hardware["cpu_flags"] = " ".join(environment.cpu_flags or ()) or None
    page.tags({f"environment.{name}": value for name, value in environment.versions.items()})
    page.tags({f"environment.{name}": value for name, value in hardware.items()})
    page.tags(
        {f"determinism.{name}": value for name, value in environment.determinism.to_plain().items()}
    )
    page.tags({f"runtime.{runtime.runtime}": runtime_state(evidence, runtime.runtime)
               for runtime in evidence.runtimes})  # fmt: skip
    page.metrics(numbers.compared(evidence))
    page.table(numbers.table(evidence), "numbers.json")
    by_class = numbers.classes_table(evidence)
    if by_class:
        page.table(by_class, "confidence_by_class.json")
    page.dataset(
        "evaluation",
        digest=str(evidence.dataset.sha256),
        source=redacted(str(inputs)) if inputs else "not recorded",
        context="eval",
    )


def write_report(page: RunPage, folder: Path, *, without: Collection[str] = ()) -> None:
    """The records, their statements, the page, and the figures that are in the folder of a report.
    `without`: what is on the run already."""
    for name in _FILES:
        if name not in without and (folder / name).is_file():
            page.file(folder / name)
    for name in _FOLDERS:
        if name not in without and (folder / name).is_dir():
            page.folder(folder / name, name)


def write_decision(page: RunPage, judgement: Judgement) -> None:
    """The verdict as name, status and tags, the table of checks, the policy, and the note."""
    decision, headline = judgement.decision, judgement.story.headline
    page.tags(headline_tags(headline))
    page.tags(
        {
            "gate.sha256": decision.subject_sha256.hex,
            "gate.policy_sha256": decision.policy_sha256.hex,
            "gate.evidence_sha256": decision.evidence_sha256.hex,
            "gate.runtimes": ",".join(decision.runtimes) or None,
            "gate.failed_checks": _titles(decision.problems),
            "gate.waived_checks": _titles(decision.waived),
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
    page.text(judgement.policy.to_json(indent=2) + "\n", "policy.json")
    page.note(markdown.describe(judgement.story, {}))
    page.named(judged_name(decision.verdict, decision.subject_sha256, headline))
    page.ends = status_of(decision.verdict)
    page.tags({DECIDED_TAG: decision.digest().hex})


def write_twin(page: RunPage, twin: Judgement, *, exact: Decision) -> None:
    """The verdict on the quantized twin and the table of its checks. Where it alone is rejected,
    so is the release, and the list of runs says that of the twin."""
    decision = twin.decision
    page.tags(
        {
            "gate.twin_sha256": decision.subject_sha256.hex,
            "gate.twin_verdict": decision.verdict,
            "gate.twin_failed_checks": _titles(decision.problems),
        }
    )
    metrics = numbers.compared(twin.evidence)
    page.metrics({f"twin/{name.removeprefix('export/')}": v for name, v in metrics.items()})
    page.table([_row(check) for check in decision.checks], "twin_checks.json")
    page.table(numbers.table(twin.evidence), "twin_numbers.json")
    if exact.passed and not decision.passed:
        its = twin.story.headline
        headline = its.model_copy(
            update={"blamed": "twin", "sentence": f"The quantized twin: {its.sentence}"}
        )
        page.tags(headline_tags(headline))
        page.named(judged_name(decision.verdict, exact.subject_sha256, headline))
        page.ends = status_of(decision.verdict)


def write_promotion(
    page: RunPage, promotion: Promotion, *, model_name: str, note: str | None
) -> None:
    """What became of the decision in the registry, and in the note the way to the version; None:
    the note is somebody else's."""
    page.tags(
        {
            "gate.promotion": promotion.outcome,
            "gate.promotion_reason": promotion.reason[:_LONG],
            "gate.model_version": f"{model_name}/{promotion.version or 'none'}",
        }
    )
    if note is not None:
        page.note(note)


def links(page: RunPage, *, version: tuple[str, str] | None = None) -> dict[str, str]:
    """Links that work on any host and port, because they stay within the page's server: to the run,
    its report, and the registered model's `version` (name and number)."""
    addresses = {
        "MLflow run": page.address,
        "report with figures": f"{page.address}/artifacts/{PAGE}",
    }
    if version is not None:
        name, number = version
        addresses["model version"] = f"#/models/{name}/versions/{number}"
    return addresses


def switches(policy: Policy) -> Mapping[str, object]:
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
        if runtime.kind is not None:
            flat[f"gate.runtimes.{name}.kind"] = runtime.kind
        for key, value in runtime.options.items():
            flat[f"gate.runtimes.{name}.options.{key}"] = value
    return flat


def runtime_state(evidence: Evidence, name: str) -> str:
    """`measured`, or why not."""
    runtime = next(r for r in evidence.runtimes if r.runtime == name)
    return (runtime.failure or runtime.absent_reason or "measured")[:_LONG]


def _titles(checks: tuple[CheckResult, ...]) -> str | None:
    return ", ".join(check.title for check in checks)[:_LONG] or None


def _row(check: CheckResult) -> dict[str, Any]:
    return {
        "verdict": check.verdict.value,
        "runtime": check.runtime,
        "output": check.output,
        "name": check.label,
        "observed": wording.observed(check),
        "allowed": wording.allowed(check),
        "samples": check.samples,
        "explanation": check.explanation,
        "remedy": check.remedy,
    }
