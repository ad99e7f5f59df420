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
    for prefix, output in named_outputs(evidence):
        for name, value in _output_metrics(output):
            yield f"{prefix}/{name}", value
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
    values_by_name: dict[str, list[float]] = defaultdict(list)
    for output in runtime.outputs:
        for name, value in _output_metrics(output):
            values_by_name[name].append(value)
        for crossing in output.classification.crossings if output.classification else ():
            values_by_name["crossed_share"].append(crossing.crossed / max(crossing.samples, 1))
    ratios = [probe.noise_ratio for probe in runtime.probes if probe.noise_ratio is not None]
    values_by_name["probe_noise_ratio"] = ratios
    for name, worst in COMPARED.items():
        if values_by_name[name]:
            yield name, _worst(values_by_name[name], worst)
    if runtime.latency is not None:
        yield "latency_median_ms", runtime.latency.median_ms


def metrics_table(evidence: Evidence) -> list[dict[str, object]]:
    """Return all metrics as rows. Values have six digits, because the page truncates longer ones
    before the exponent; the evidence has all digits."""
    rows: list[dict[str, object]] = []
    for name, value in metrics_from_evidence(evidence):
        runtime, _, number = name.partition("/")
        rows.append({"runtime": runtime, "number": number, "value": float(f"{value:.6g}")})
    return rows


def classes_table(evidence: Evidence) -> list[dict[str, object]]:
    """Return the difference of the confidence as rows, by runtime and class of the reference."""
    return [
        {"runtime": runtime, **entry.model_dump()}
        for runtime, output in named_outputs(evidence)
        for entry in (output.classification.confidence.per_class if output.classification else ())
    ]


def _worst(values: list[float], worst: str) -> float:
    for value in values:
        if math.isnan(value):
            return value
    return max(values) if worst == LARGEST else min(values)


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
        suffix = point if crossing.label is None else f"{point}_class_{crossing.label}"
        yield f"crossed_at_{suffix}", float(crossing.crossed)
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


def log_evaluation(run: RunLogger, judgment: SummaryInputs, *, folder: Path) -> None:
    """Log an evaluation to a new MLflow run.

    folder: the result of `gate.report.folder.write_report`.
    """
    log_numbers(run, judgment, inputs=None)
    log_files(run, judgment, folder=folder)


def log_numbers(run: RunLogger, judgment: SummaryInputs, *, inputs: Path | str | None) -> None:
    """Write params, tags, metrics, the name and the data set, in a few requests."""
    evidence = judgment.evidence
    with run.batched():
        write_export(run, evidence.subject, source=evidence.source, export=evidence.export)
        _write_numbers(run, evidence, judgment.policy)
        _write_verdict(run, judgment)
    _write_dataset(run, evidence, inputs=inputs)
    _write_name(run, judgment)


def log_files(run: RunLogger, judgment: SummaryInputs, *, folder: Path) -> None:
    """Write the artifacts, a request each, and last the tag of a complete run."""
    with run.batched():
        _write_tables(run, judgment.evidence)
        write_report(run, folder)
        _write_checks(run, judgment)
        run.tags({DECIDED_TAG: judgment.decision.digest().hex})


def write_export(
    run: RunLogger, subject: Subject, *, source: Source, export: ExportRecord | None
) -> None:
    """Log the file, its model, and the settings of its export, if recorded."""
    if export is not None:
        settings = {f"export.{key}": value for key, value in export.settings.items()}
        run.params({"export.strategy": export.strategy, **settings})
        run.params({"export.rungs": "\n".join(export.rungs)[:_LONG] or None})
    run.params({"export.opset_in_file": subject.opset, "export.producer": subject.producer})
    run.tags(
        {
            "gate.sha256": subject.sha256.hex,
            "gate.reference": source.factory,
            "gate.checkpoint_sha256": source.checkpoint_sha256,
        }
    )


def write_evidence(
    run: RunLogger, evidence: Evidence, policy: Policy, *, inputs: Path | str | None
) -> None:
    """Log the metrics of the evidence, the settings, the machine, and the data set."""
    with run.batched():
        _write_numbers(run, evidence, policy)
    _write_tables(run, evidence)
    _write_dataset(run, evidence, inputs=inputs)


def _write_numbers(run: RunLogger, evidence: Evidence, policy: Policy) -> None:
    run.params(switches(policy))
    environment = evidence.environment
    hardware = {name: getattr(environment, name) for name in _HARDWARE}
    hardware["cpu_flags"] = " ".join(environment.cpu_flags or ()) or None
    run.tags({f"environment.{name}": value for name, value in environment.versions.items()})
    run.tags({f"environment.{name}": value for name, value in hardware.items()})
    run.tags(
        {f"determinism.{name}": value for name, value in environment.determinism.to_plain().items()}
    )
    run.tags({f"runtime.{runtime.runtime}": runtime_state(evidence, runtime.runtime)
               for runtime in evidence.runtimes})  # fmt: skip
    run.metrics(comparable_metrics(evidence))


def _write_tables(run: RunLogger, evidence: Evidence) -> None:
    run.table(metrics_table(evidence), "numbers.json")
    by_class = classes_table(evidence)
    if by_class:
        run.table(by_class, "confidence_by_class.json")


def _write_dataset(run: RunLogger, evidence: Evidence, *, inputs: Path | str | None) -> None:
    source = redacted(str(inputs)) if inputs else "not recorded"
    run.dataset(digest=str(evidence.dataset.sha256), source=source)


def write_report(run: RunLogger, folder: Path, *, without: Collection[str] = ()) -> None:
    """Write the files of a report's folder: records, statements, page and figures.

    `without`: names of files that the run already has."""
    for name in _FILES:
        if name not in without and (folder / name).is_file():
            run.file(folder / name)
    for name in _FOLDERS:
        if name not in without and (folder / name).is_dir():
            run.folder(folder / name, name)


def write_decision(run: RunLogger, judgment: SummaryInputs) -> None:
    """Write the verdict as name, status and tags, the table of checks, the policy, and the note."""
    with run.batched():
        _write_verdict(run, judgment)
    _write_checks(run, judgment)
    _write_name(run, judgment)
    run.tags({DECIDED_TAG: judgment.decision.digest().hex})


def _write_verdict(run: RunLogger, judgment: SummaryInputs) -> None:
    decision = judgment.decision
    run.tags(headline_tags(judgment.summary.headline))
    run.tags(
        {
            "gate.sha256": decision.subject_sha256.hex,
            "gate.policy_sha256": decision.policy_sha256.hex,
            "gate.evidence_sha256": decision.evidence_sha256.hex,
            "gate.runtimes": ",".join(decision.runtimes) or None,
            "gate.failed_checks": _titles(decision.problems),
            "gate.waived_checks": _titles(decision.waived),
        }
    )
    run.metrics(
        {
            "decision/checks": float(len(decision.checks)),
            "decision/problems": float(len(decision.problems)),
            "decision/waived": float(len(decision.waived)),
        }
    )
    run.note(markdown.summary_markdown(judgment.summary, {}))


def _write_checks(run: RunLogger, judgment: SummaryInputs) -> None:
    run.table(_rows(judgment), "checks.json")
    run.text(judgment.policy.to_json(indent=2) + "\n", "policy.json")


def _write_name(run: RunLogger, judgment: SummaryInputs) -> None:
    decision = judgment.decision
    run.named(run_name(decision.verdict, decision.subject_sha256, judgment.summary.headline))
    run.ends = status_of(decision.verdict)


def write_twin(run: RunLogger, twin: SummaryInputs, *, exact: Decision) -> None:
    """Write the verdict on the quantized twin and the table of its checks. If only the twin is
    rejected, the run gets its verdict, because the release is rejected too."""
    decision = twin.decision
    run.tags(
        {
            "gate.twin_sha256": decision.subject_sha256.hex,
            "gate.twin_verdict": decision.verdict,
            "gate.twin_failed_checks": _titles(decision.problems),
        }
    )
    metrics = comparable_metrics(twin.evidence)
    run.metrics({f"twin/{name.removeprefix('export/')}": v for name, v in metrics.items()})
    run.table(_rows(twin), "twin_checks.json")
    run.table(metrics_table(twin.evidence), "twin_numbers.json")
    if exact.passed and not decision.passed:
        twin_headline = twin.summary.headline
        headline = twin_headline.model_copy(
            update={"blamed": "twin", "sentence": f"The quantized twin: {twin_headline.sentence}"}
        )
        run.tags(headline_tags(headline))
        run.named(run_name(decision.verdict, exact.subject_sha256, headline))
        run.ends = status_of(decision.verdict)


def write_promotion(
    run: RunLogger, promotion: PromotionResult, *, model_name: str, note: str
) -> None:
    """Write the outcome of the promotion and the note, with a link to the version, to the run."""
    run.tags(
        {
            "gate.promotion": promotion.outcome,
            "gate.promotion_reason": promotion.reason[:_LONG],
            "gate.model_version": f"{model_name}/{promotion.version or 'none'}",
        }
    )
    run.note(note)


def links(run: RunLogger, *, version: tuple[str, str] | None = None) -> dict[str, str]:
    """Return links to the run, its report, and the registered model's `version` (name and number).

    They are relative to the server, so that they work on any host and port."""
    addresses = {
        "MLflow run": run.address,
        "report with figures": run.report_address,
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


def _rows(judgment: SummaryInputs) -> list[dict[str, Any]]:
    is_onnx = judgment.evidence.source.is_onnx
    return [_row(check, onnx_reference=is_onnx) for check in judgment.decision.checks]


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
