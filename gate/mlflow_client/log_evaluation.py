"""Log a complete evaluation to a run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from gate.decision.check_result import CheckResult
from gate.decision.decide import Decision
from gate.mlflow_client.runs import DECIDED_TAG, RunLogger, headline_tags, run_name, status_of
from gate.policy.policy import Policy
from gate.records.evidence import Cost, Evidence, ExportRecord, RuntimeEvidence, Source, Subject
from gate.records.layout import (
    CHANGE,
    DECISION,
    DECISION_STATEMENT,
    EVIDENCE,
    EVIDENCE_STATEMENT,
    EXPLANATION,
    LOCALISATION,
    MARKDOWN,
    METRICS,
    PAGE,
    PICTURES,
    PLOTS,
    SAMPLES,
)
from gate.records.outputs import ClassParity, OutputParity
from gate.registry.release import PromotionResult
from gate.report import markdown
from gate.storage.record import Record
from gate.storage.safe_text import redacted
from gate.storage.workspace import page_address
from gate.summary import render
from gate.summary.summarize import SummaryInputs, costs_of

LARGEST, SMALLEST = "largest", "smallest"

COMPARED = {
    "noise_ratio": LARGEST,
    "noise_peak": LARGEST,
    "max_abs_diff": LARGEST,
    "top1_agreement": SMALLEST,
    "confidence_diff_max": LARGEST,
    "crossed_share": LARGEST,
    "accuracy_candidate": SMALLEST,
    "accuracy_drop": LARGEST,
    "probe_noise_ratio": LARGEST,
}
"""Checks that become MLflow metrics of each runtime, with the choice of the worst output."""


_MB = 1e6
_ELEMENTWISE = ("max_abs_diff", "mean_abs_diff", "scaled_diff", "l2_mean", "l2_max")
_CLASSES = ("top1_agreement", "top5_agreement", "l2_probabilities_mean", "l2_probabilities_max")
_BANDS = ("below_1", "from_1_to_5", "from_5_to_10", "over_10")


def named_outputs(evidence: Evidence) -> Iterator[tuple[str, OutputParity]]:
    """Yield each measured output with the prefix of its metrics: `runtime` or `runtime/output`."""
    for runtime in evidence.runtimes:
        several = len(runtime.outputs) > 1
        for output in runtime.outputs:
            yield f"{runtime.runtime}/{output.name}" if several else runtime.runtime, output


def metrics_from_evidence(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yield `runtime/metric` and its value, including NaN and infinity; latencies in
    milliseconds."""
    for place, output in named_outputs(evidence):
        for name, value in _output_metrics(output):
            yield f"{place}/{name}", value
    for runtime in evidence.runtimes:
        for name, value in _probe_metrics(runtime):
            yield f"{runtime.runtime}/{name}", value
    latencies = [("reference", evidence.reference_latency)]
    latencies += [(runtime.runtime, runtime.latency) for runtime in evidence.runtimes]
    for name, latency in latencies:
        if latency is not None:
            yield f"{name}/latency_median_ms", latency.median_ms
            yield f"{name}/latency_p95_ms", latency.p95_ms
    costs = [("reference", evidence.reference_cost)]
    costs += [(runtime.runtime, runtime.cost) for runtime in evidence.runtimes]
    for name, cost in costs:
        for number, value in _cost_metrics(cost):
            yield f"{name}/{number}", value
    yield from _compared_costs(evidence)


def comparable_metrics(evidence: Evidence) -> dict[str, float]:
    """Return the metrics that have the same names for every model, so that runs can be compared.

    `runtime/metric`: the metrics of `COMPARED`, of the worst output (NaN is worse than any number),
    and the latencies."""
    numbers = {"export/size_bytes": float(evidence.subject.size_bytes)}
    numbers["dataset/samples"] = float(evidence.dataset.samples)
    if evidence.reference_latency is not None:
        numbers["reference/latency_median_ms"] = evidence.reference_latency.median_ms
    for runtime in evidence.runtimes:
        for name, value in _compared_metrics(runtime):
            numbers[f"{runtime.runtime}/{name}"] = value
    return numbers | dict(_compared_costs(evidence)) | dict(_task_metrics(evidence))


def _task_metrics(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yield the policy's metrics on all samples: `metric/NAME` of each side, and the bound of its
    drop."""
    for metric in evidence.metrics:
        for group in metric.groups[:1]:
            yield f"reference/metric/{metric.name}", group.reference.value
            for runtime, side in group.runtimes.items():
                yield f"{runtime}/metric/{metric.name}", side.value
                yield f"{runtime}/metric/{metric.name}/drop_bound", side.change.bounds[0]


def _compared_metrics(runtime: RuntimeEvidence) -> Iterator[tuple[str, float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for output in runtime.outputs:
        for name, value in _output_metrics(output):
            found[name].append(value)
        for crossing in output.classification.crossings if output.classification else ():
            found["crossed_share"].append(crossing.crossed / max(crossing.samples, 1))
    ratios = [probe.noise_ratio for probe in runtime.probes if probe.noise_ratio is not None]
    found["probe_noise_ratio"] = ratios
    for name, sense in COMPARED.items():
        if found[name]:
            yield name, _worst(found[name], sense)
    if runtime.latency is not None:
        yield "latency_median_ms", runtime.latency.median_ms


def metrics_table(evidence: Evidence) -> list[dict[str, object]]:
    """Return all metrics as rows. Values have six digits, because the page truncates longer ones
    before the exponent; the evidence has all digits."""
    rows: list[dict[str, object]] = []
    for name, value in metrics_from_evidence(evidence):
        where, _, number = name.partition("/")
        rows.append({"runtime": where, "number": number, "value": float(f"{value:.6g}")})
    return rows


def classes_table(evidence: Evidence) -> list[dict[str, object]]:
    """Return the difference of the confidence as rows, by runtime and class of the reference."""
    return [
        {"runtime": place, **entry.model_dump()}
        for place, output in named_outputs(evidence)
        for entry in (output.classification.confidence.per_class if output.classification else ())
    ]


def _worst(values: list[float], sense: str) -> float:
    for value in values:
        if math.isnan(value):
            return value
    return max(values) if sense == LARGEST else min(values)


def _output_metrics(output: OutputParity) -> Iterator[tuple[str, float]]:
    for name in _ELEMENTWISE:
        yield name, getattr(output, name)
    yield "nonfinite_mismatched", float(output.nonfinite_mismatched)
    if output.noise is not None:
        yield "noise_ratio", output.noise.ratio
        yield "noise_peak", output.noise.peak
    if output.stability is not None:
        yield "repeatability", output.stability.repeatability
        if output.stability.batch_invariance is not None:
            yield "batch_invariance", output.stability.batch_invariance
    if output.classification is not None:
        yield from _class_metrics(output.classification)


def _cost_metrics(cost: Cost | None) -> Iterator[tuple[str, float]]:
    """Yield the costs in milliseconds and megabytes."""
    if cost is None:
        return
    for name, time in (("open_ms", cost.open_ms), ("first_ms", cost.first_ms)):
        if time is not None:
            yield name, time
    if cost.single is not None:
        yield "latency_single_median_ms", cost.single.median_ms
        yield "latency_single_p95_ms", cost.single.p95_ms
    for name, size in (("peak_mb", cost.peak_bytes), ("cuda_mb", cost.cuda_bytes)):
        if size is not None:
            yield name, size / _MB


def _compared_costs(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yield the costs that users compare between runs: latency relative to PyTorch, memory."""
    for row in costs_of(evidence):
        if row.latency_ratio is not None:
            yield f"{row.runtime}/latency_ratio", row.latency_ratio
        if row.memory_bytes is not None:
            yield f"{row.runtime}/memory_mb", row.memory_bytes / _MB


def _probe_metrics(runtime: RuntimeEvidence) -> Iterator[tuple[str, float]]:
    """Yield the metrics of the probes, by name; a probe that failed has no number."""
    for probe in runtime.probes:
        if probe.noise_ratio is not None:
            yield f"probes/{probe.name}/noise_ratio", probe.noise_ratio
        elif probe.relative_diff is not None:
            yield f"probes/{probe.name}/relative_diff", probe.relative_diff


def _class_metrics(logits: ClassParity) -> Iterator[tuple[str, float]]:
    for name in _CLASSES:
        yield name, getattr(logits, name)
    yield "top1_disagreements", float(logits.top1_disagreements)
    for name in ("mean", "min", "max"):
        yield f"confidence_diff_{name}", getattr(logits.confidence, name)
    for name, share in zip(_BANDS, logits.confidence.bands, strict=True):
        yield f"confidence_{name}_percent", share
    for crossing in logits.crossings:
        point = f"{crossing.threshold:g}"
        place = point if crossing.label is None else f"{point}_class_{crossing.label}"
        yield f"crossed_at_{place}", float(crossing.crossed)
    if logits.accuracy is not None:
        for name in ("reference", "candidate", "drop"):
            yield f"accuracy_{name}", getattr(logits.accuracy, name)


_FILES = (
    EVIDENCE, EVIDENCE_STATEMENT, DECISION, DECISION_STATEMENT, CHANGE, EXPLANATION, LOCALISATION,
    MARKDOWN, PAGE, SAMPLES, METRICS,
)  # fmt: skip

_FOLDERS = (PLOTS, PICTURES)
_HARDWARE = ("cpu", "cores", "os", "kernel", "cuda", "cudnn", "gpu", "driver")

_LONG = 5000
"""Characters of a tag or param: databases other than SQLite refuse more."""


def log_evaluation(
    page: RunLogger, judgment: SummaryInputs, *, folder: Path, inputs: Path | str | None = None
) -> None:
    """Log an evaluation to a new MLflow run.

    folder: the result of `gate.report.folder.write_report`. inputs: address of the samples, if
    known.
    """
    log_numbers(page, judgment, inputs=inputs)
    log_files(page, judgment, folder=folder)


def log_numbers(page: RunLogger, judgment: SummaryInputs, *, inputs: Path | str | None) -> None:
    """Write params, tags, metrics, the name and the data set, in a few requests."""
    evidence = judgment.evidence
    with page.batched():
        write_export(page, evidence.subject, source=evidence.source, export=evidence.export)
        _write_numbers(page, evidence, judgment.policy)
        _write_verdict(page, judgment)
    _write_dataset(page, evidence, inputs=inputs)
    _write_name(page, judgment)


def log_files(page: RunLogger, judgment: SummaryInputs, *, folder: Path) -> None:
    """Write the artifacts, a request each, and last the tag of a complete run."""
    with page.batched():
        _write_tables(page, judgment.evidence)
        write_report(page, folder)
        _write_checks(page, judgment)
        page.tags({DECIDED_TAG: judgment.decision.digest().hex})


def write_export(
    page: RunLogger, subject: Subject, *, source: Source, export: ExportRecord | None
) -> None:
    """Log the file, its model, and the settings of its export, if recorded."""
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
    page: RunLogger, evidence: Evidence, policy: Policy, *, inputs: Path | str | None
) -> None:
    """Log the metrics of the evidence, the settings, the machine, and the data set."""
    with page.batched():
        _write_numbers(page, evidence, policy)
    _write_tables(page, evidence)
    _write_dataset(page, evidence, inputs=inputs)


def _write_numbers(page: RunLogger, evidence: Evidence, policy: Policy) -> None:
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
    page.metrics(comparable_metrics(evidence))


def _write_tables(page: RunLogger, evidence: Evidence) -> None:
    page.table(metrics_table(evidence), "numbers.json")
    by_class = classes_table(evidence)
    if by_class:
        page.table(by_class, "confidence_by_class.json")


def _write_dataset(page: RunLogger, evidence: Evidence, *, inputs: Path | str | None) -> None:
    page.dataset(
        "evaluation",
        digest=str(evidence.dataset.sha256),
        source=redacted(str(inputs)) if inputs else "not recorded",
        context="eval",
    )


def write_report(page: RunLogger, folder: Path, *, without: Collection[str] = ()) -> None:
    """Write the files of a report's folder: records, statements, page and figures.

    `without`: names of files that the run already has."""
    for name in _FILES:
        if name not in without and (folder / name).is_file():
            page.file(folder / name)
    for name in _FOLDERS:
        if name not in without and (folder / name).is_dir():
            page.folder(folder / name, name)


def write_decision(page: RunLogger, judgment: SummaryInputs) -> None:
    """Write the verdict as name, status and tags, the table of checks, the policy, and the note."""
    with page.batched():
        _write_verdict(page, judgment)
    _write_checks(page, judgment)
    _write_name(page, judgment)
    page.tags({DECIDED_TAG: judgment.decision.digest().hex})


def _write_verdict(page: RunLogger, judgment: SummaryInputs) -> None:
    decision = judgment.decision
    page.tags(headline_tags(judgment.summary.headline))
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
    page.note(markdown.summary_markdown(judgment.summary, {}))


def _write_checks(page: RunLogger, judgment: SummaryInputs) -> None:
    page.table(_rows(judgment), "checks.json")
    page.text(judgment.policy.to_json(indent=2) + "\n", "policy.json")


def _write_name(page: RunLogger, judgment: SummaryInputs) -> None:
    decision = judgment.decision
    page.named(run_name(decision.verdict, decision.subject_sha256, judgment.summary.headline))
    page.ends = status_of(decision.verdict)


def write_twin(page: RunLogger, twin: SummaryInputs, *, exact: Decision) -> None:
    """Write the verdict on the quantized twin and the table of its checks. If only the twin is
    rejected, the run gets its verdict, because the release is rejected too."""
    decision = twin.decision
    page.tags(
        {
            "gate.twin_sha256": decision.subject_sha256.hex,
            "gate.twin_verdict": decision.verdict,
            "gate.twin_failed_checks": _titles(decision.problems),
        }
    )
    metrics = comparable_metrics(twin.evidence)
    page.metrics({f"twin/{name.removeprefix('export/')}": v for name, v in metrics.items()})
    page.table(_rows(twin), "twin_checks.json")
    page.table(metrics_table(twin.evidence), "twin_numbers.json")
    if exact.passed and not decision.passed:
        its = twin.summary.headline
        headline = its.model_copy(
            update={"blamed": "twin", "sentence": f"The quantized twin: {its.sentence}"}
        )
        page.tags(headline_tags(headline))
        page.named(run_name(decision.verdict, exact.subject_sha256, headline))
        page.ends = status_of(decision.verdict)


def write_promotion(
    page: RunLogger, promotion: PromotionResult, *, model_name: str, note: str | None
) -> None:
    """Write the outcome of the promotion and the note, with a link to the version, to the run.

    `note`: None for a note that was not written by the gate and stays unchanged.
    """
    page.tags(
        {
            "gate.promotion": promotion.outcome,
            "gate.promotion_reason": promotion.reason[:_LONG],
            "gate.model_version": f"{model_name}/{promotion.version or 'none'}",
        }
    )
    if note is not None:
        page.note(note)


def links(page: RunLogger, *, version: tuple[str, str] | None = None) -> dict[str, str]:
    """Return links to the run, its report, and the registered model's `version` (name and number).

    They are relative to the server, so that they work on any host and port."""
    addresses = {
        "MLflow run": page.address,
        "report with figures": page.report_address,
    }
    if version is not None:
        name, number = version
        addresses["model version"] = page_address(f"models/{name}/versions/{number}")
    return addresses


def switches(policy: Policy) -> Mapping[str, object]:
    """Return the settings of the policy that affect the measurement, flat."""
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
    """Return `measured`, or why the runtime was not measured."""
    runtime = next(r for r in evidence.runtimes if r.runtime == name)
    return (runtime.failure or runtime.absent_reason or "measured")[:_LONG]


def _titles(checks: tuple[CheckResult, ...]) -> str | None:
    return ", ".join(check.title for check in checks)[:_LONG] or None


def _rows(judged: SummaryInputs) -> list[dict[str, Any]]:
    is_onnx = judged.evidence.source.is_onnx
    return [_row(check, onnx_reference=is_onnx) for check in judged.decision.checks]


def _row(check: CheckResult, *, onnx_reference: bool) -> dict[str, Any]:
    return {
        "verdict": check.verdict.value,
        "runtime": check.runtime,
        "output": check.output,
        "name": check.label,
        "observed": render.observed(check),
        "allowed": render.allowed(check),
        "samples": check.samples,
        "explanation": render.render_check(check),
        "remedy": render.render_check(check, "remedy", onnx_reference=onnx_reference),
    }
