"""Build the summary from the records."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from gate.decision.bound_rules import agreement_lower_bound
from gate.decision.catalog import TITLES, Cause, meaning_of
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.cost_rules import latency_ratios
from gate.decision.decide import Decision
from gate.policy.overrides import override_text
from gate.policy.policy import Policy
from gate.records.evidence import Cost, Evidence, Latency, RuntimeEvidence
from gate.records.localization import Explanation
from gate.records.outputs import largest
from gate.records.runtime import RUNTIMES, traits_of
from gate.storage.safe_text import make_printable
from gate.summary.champion_changes import no_comparison
from gate.summary.explanations import GroupExplanation, explain_group
from gate.summary.grouping import CheckGroup, groups_of
from gate.summary.render import (
    bound_usage,
    count,
    format_bound_usage,
    format_number,
    has_several_outputs,
    nan_as_infinite,
    outputs_of,
    render_check,
    render_explanation,
    render_finding,
    render_weights,
    short_name,
)
from gate.summary.summary import (
    Change,
    CheckRow,
    CostRow,
    Finding,
    Headline,
    RuntimeProof,
    State,
    Step,
    Summary,
    SummarySubject,
)


def costs_of(evidence: Evidence) -> tuple[CostRow, ...]:
    """Return one row for each runtime that ran; none if only batches were timed."""
    timed = [runtime for runtime in evidence.runtimes if runtime.cost]
    rows = []
    if timed and evidence.reference_cost is not None:
        reference = "ONNX Runtime, CPU" if evidence.source.is_onnx else "PyTorch, CPU"
        rows.append(_cost_row(reference, evidence.reference_cost, evidence.reference_latency))
    for runtime in timed:
        if runtime.measured and runtime.cost is not None:
            row = _cost_row(make_printable(runtime.runtime), runtime.cost, runtime.latency)
            ratio = largest(latency_ratios(evidence, runtime)[0].values())
            update = {"latency_ratio": ratio, "memory_bytes": runtime.memory_bytes}
            rows.append(row.model_copy(update=update))
    return tuple(rows)


def _cost_row(name: str, cost: Cost, batch: Latency | None) -> CostRow:
    same = ("open_ms", "first_ms", "single", "peak_bytes", "cuda_bytes")
    return CostRow(runtime=name, batch=batch, **{field: getattr(cost, field) for field in same})


def _proof_of(
    decision: Decision, evidence: Evidence, first: CheckGroup | None
) -> tuple[RuntimeProof, ...]:
    """Return one row for each judged or measured runtime, in the order of their names.

    `first`: the group of the headline. Its runtime comes first, with the number of the headline.
    For a file that passes, the runtime with the number nearest to its bound comes first.
    """
    shown = {check.runtime for check in decision.checks if check.runtime}
    shown |= {runtime.runtime for runtime in evidence.runtimes}
    rows = [
        _proof_row(name, decision, evidence.runtime(name), first)
        for name in (*RUNTIMES, *sorted(shown - set(RUNTIMES)))
        if name in shown
    ]
    if decision.passed:
        leading = max(rows, key=lambda row: row.bound_usage or 0.0, default=None)
    else:
        check = None if first is None else first.headline_check
        leading = next((row for row in rows if row.worst is check), None)
    return tuple(sorted(rows, key=lambda row: row is not leading))


def _proof_row(
    name: str, decision: Decision, runtime: RuntimeEvidence | None, first: CheckGroup | None
) -> RuntimeProof:
    checks = [check for check in decision.checks if check.runtime == name]
    worst = _worst(checks, first)
    agreements = [c.observed for c in checks if c.name == "top1_agreement"]
    numbers = [value for value in agreements if isinstance(value, float)]
    return RuntimeProof(
        runtime=name,
        state=_state(checks, decision, name),
        provider=runtime.providers_active[0] if runtime and runtime.providers_active else None,
        nodes=_nodes(runtime) if runtime and runtime.measured else None,
        worst=worst,
        bound_usage=None if worst is None else bound_usage(worst),
        agreement=min(numbers, default=None),
        latency_ms=runtime.latency.median_ms if runtime and runtime.latency else None,
        reason=None if runtime and runtime.measured else _reason(checks, runtime),
    )


def _worst(checks: list[CheckResult], first: CheckGroup | None) -> CheckResult | None:
    """Return the check that a row shows: the headline check of the runtime, else a failure, else
    the check nearest to its bound."""
    blamed = [check for check in first.checks if check in checks] if first is not None else []
    if first is not None and blamed:
        headline = replace(first, checks=blamed).headline_check
        if bound_usage(headline) is not None:
            return headline
    # A passing check of these names only proves that there are enough samples.
    about_samples = ("samples", "top1_lower_bound")
    judged = [
        check
        for check in checks
        if check.verdict is not Verdict.WAIVED
        and bound_usage(check) is not None
        and not (check.verdict is Verdict.PASS and check.name in about_samples)
    ]
    return max(
        judged,
        key=lambda check: (check.verdict is Verdict.FAIL, nan_as_infinite(bound_usage(check))),
        default=None,
    )


def _state(checks: list[CheckResult], decision: Decision, name: str) -> State:
    verdicts = {check.verdict for check in checks}
    if Verdict.FAIL in verdicts:
        return "failed"
    if Verdict.ERROR in verdicts:
        return "not judged"
    if name in decision.runtimes:
        return "passed"
    return "waived" if Verdict.WAIVED in verdicts else "not measured"


def _nodes(runtime: RuntimeEvidence) -> str | None:
    """Return the number of nodes by provider, else the device."""
    counts = (runtime.nodes_per_provider or {}).items()
    nodes = [f"{count} on {name.removesuffix('ExecutionProvider')}" for name, count in counts]
    return ", ".join(nodes) or make_printable(runtime.session_options.get("device", "")) or None


def _reason(checks: list[CheckResult], runtime: RuntimeEvidence | None) -> str:
    """Return why a runtime has no numbers."""
    why = next((render_check(check) for check in checks if check.name == "runtime"), None)
    if runtime is not None:
        why = runtime.failure or runtime.absent_reason or why
    return make_printable(why) if why else "the policy asks for none"


_MODEL, _SAMPLES = "MODEL.onnx", "SAMPLES"

_OF_LAYERS = ("layer", "training_mode", "numbers", "weights", "nonfinite", "optimiser")

_OF_EXPORT = (
    "baked_in",
    "beyond",
    "outputs",
    "training_mode",
    "layer",
    "weights",
    "batch",
    "graph",
    "cpu_optimized",
)


def _steps_of(decision: Decision, evidence: Evidence, cause: Cause) -> Iterator[tuple[str, str]]:
    """Yield labels and commands: promote a file that passes; inspect and judge again one that does
    not."""
    release = bool(evidence.subject.parts)
    exported = not evidence.source.is_onnx
    factory = shlex.quote(make_printable(evidence.source.factory))
    weights = " --checkpoint CHECKPOINT" if evidence.source.checkpoint_sha256 else ""
    reference = f"{_MODEL} --reference {factory}{weights}"
    check = f"gate check {reference} --inputs {_SAMPLES}"
    if decision.passed:
        findings = evidence.graph.findings if evidence.graph is not None else ()
        if decision.tried:
            command = f"{check} --policy POLICY --report DIR"
            yield "Write the values into the policy, and check again", command
        elif any(finding.code == "quantized" for finding in findings):
            exact = "EXACT.onnx --name NAME --report EXACT_DIR --policy EXACT_POLICY"
            command = f"gate promote {exact} --twin {_MODEL} --twin-report DIR"
            yield "Put it into service with the exact file", command
        else:
            yield "Promote it", f"gate promote {_MODEL} --name NAME --report DIR"
        return
    if cause in _OF_LAYERS or (release and cause == "runtime"):
        where = f"--inputs {_SAMPLES}{_runtime(decision, cause)}"
        yield "See every layer", f"gate locate {reference} {where}"
    elif exported and cause in ("baked_in", "batch", "export", "model"):
        yield "Find source lines that tracing gets wrong", f"gate lint {factory}"
    elif cause in ("device", "runtime", "evidence"):
        yield "Check this machine", "gate doctor"
    elif cause == "preprocessing":
        command = "gate preprocess compare PICTURES --spec SPEC"
        yield "See the pictures side by side", command
    if cause == "server":
        yield from _server_steps(evidence)
    elif exported and not release and cause in _OF_EXPORT:
        export = f"gate export {factory}{weights} --example-input X.npy --output {_MODEL}"
        yield "Export again", export
        mend = f"--inputs {_SAMPLES} --file {_MODEL} --output mended"
        yield "Search for an export that passes", f"gate mend --reference {factory}{weights} {mend}"
    yield "Check it again", f"{check} --report DIR"


def _server_steps(evidence: Evidence) -> Iterator[tuple[str, str]]:
    for runtime in evidence.runtimes:
        url = runtime.identity.options.get("url") if runtime.identity else None
        if runtime.is_server and isinstance(url, str) and url.startswith("http"):
            yield "See what the server has loaded", f"curl {shlex.quote(make_printable(url))}"


def _runtime(decision: Decision, cause: Cause) -> str:
    """Return the option for the first ONNX Runtime runtime whose numbers fail, or that an optimizer
    breaks. Without it, the command uses `ort-cpu`."""
    broken = cause == "optimiser"
    failed = [
        check.runtime
        for check in decision.problems
        if check.runtime and (check.output or (broken and check.name == "runtime"))
    ]
    name = next((name for name in failed if traits_of(name).engine == "onnxruntime"), "ort-cpu")
    return "" if name == "ort-cpu" else f" --runtime {name}"


def check_row(check: CheckResult, evidence: Evidence) -> CheckRow:
    """Describe one check in plain English, with the reason for its bound."""
    row = meaning_of(check.name)
    relative = check.params.get("metric") == "relative_diff"
    return CheckRow(
        check=check,
        meaning=row.meaning,
        formula=row.formula,
        unit="of the largest output" if relative else row.unit,
        why=_why(check, evidence, row.why),
        bound_usage=bound_usage(check),
    )


def _why(check: CheckResult, evidence: Evidence, why: str) -> str:
    """Return the reason for the bound, with its widening for few elements."""
    runtime = evidence.runtime(check.runtime) if check.runtime else None
    outputs = runtime.outputs if runtime and check.name == "noise_ratio" else ()
    noise = next((o.noise for o in outputs if o.name == check.output), None)
    if noise is None or noise.scatter is None or noise.scatter <= 1.0:
        return why
    scatter, elements = format_number(noise.scatter), f"{noise.elements} elements"
    return make_printable(f"{why} Divided by {scatter}, as chance allows of {elements}.")


def summarize(
    decision: Decision,
    evidence: Evidence,
    *,
    explanation: Explanation | None = None,
    change: Change | None = None,
    confidence: float = 0.95,
) -> Summary:
    """Return the summary.

    `explanation`: the localization; `change`: the changes from the champion; `confidence`: the
    level of the proven agreement.
    """
    explanation = render_explanation(explanation or Explanation())
    servers = {runtime.runtime for runtime in evidence.runtimes if runtime.is_server}
    groups = groups_of(decision, explanation, servers=servers)
    cause: Cause
    texts = [explain_group(group, evidence, explanation) for group in groups]
    findings = tuple(
        Finding(
            cause=group.cause,
            verdict=group.verdict,
            title=TITLES[group.cause],
            sentence=text.sentence,
            remedy=text.remedy,
            checks=group.ordered,
        )
        for group, text in zip(groups, texts, strict=True)
    )
    first = groups[0] if groups and groups[0].verdict is not Verdict.WAIVED else None
    proof = _proof_of(decision, evidence, first)
    if decision.passed:
        cause, shown = "passed", GroupExplanation(None, _passed(decision, evidence, proof), None)
    elif first is None:
        cause = "evidence"
        shown = GroupExplanation(None, "No measured runtime passed all its checks", None)
    else:
        cause, shown = first.cause, texts[0]
    headline = Headline(verdict=decision.verdict, cause=cause, **shown._asdict())
    return Summary(
        headline=headline,
        subject=_subject(decision, evidence),
        findings=findings,
        proof=proof,
        costs=costs_of(evidence),
        change=change or no_comparison(),
        steps=tuple(
            Step(label=label, command=command)
            for label, command in _steps_of(decision, evidence, headline.cause)
        ),
        warnings=tuple(_warnings(decision, evidence, explanation, headline.cause)),
        notes=tuple(_notes(decision, evidence, confidence=confidence)),
        check_rows=tuple(check_row(check, evidence) for check in decision.checks),
    )


def _passed(decision: Decision, evidence: Evidence, proof: tuple[RuntimeProof, ...]) -> str:
    """Return the sentence on a pass: samples, runtimes, and the check nearest to its bound."""
    samples = count(evidence.dataset.samples, "sample")
    text = f"Within every bound on {samples}, on {', '.join(decision.runtimes)}"
    nearest = proof[0].worst if proof and proof[0].bound_usage else None
    if nearest is not None and format_bound_usage(nearest):
        name = short_name(nearest, several_outputs=has_several_outputs(decision.checks))
        text += f"; closest to its bound: {name}, {format_bound_usage(nearest)}"
    return make_printable(text)


def _subject(decision: Decision, evidence: Evidence) -> SummarySubject:
    environment, subject = evidence.environment, evidence.subject
    return SummarySubject(
        sha256=decision.subject_sha256,
        size_bytes=subject.size_bytes,
        opset=subject.opset,
        producer=make_printable(subject.producer),
        factory=make_printable(evidence.source.factory),
        samples=evidence.dataset.samples,
        measured_at=evidence.measured_at,
        decided_at=decision.decided_at,
        machine=make_printable(", ".join(filter(None, (environment.cpu, environment.gpu)))),
        policy_sha256=decision.policy_sha256,
        evidence_sha256=decision.evidence_sha256,
        data_sha256=evidence.dataset.sha256,
        checkpoint_sha256=evidence.source.checkpoint_sha256,
        reference_sha256=evidence.source.onnx_sha256,
    )


def _warnings(
    decision: Decision, evidence: Evidence, explanation: Explanation, cause: Cause
) -> Iterator[str]:
    if decision.tried:
        yield make_printable(f"Tried out, so it promotes nothing: {override_text(decision.tried)}.")
    yield from _code_changes(evidence)
    yield from _texts_of(decision, "float64")
    yield from _imprecisions(decision, evidence)
    if not decision.passed:
        yield from _turns(evidence)
    for finding in evidence.graph.findings if evidence.graph else ():
        if finding.code == "checker":
            text = render_finding(finding.to_params())
            yield f"onnx's checker rejects the file, and other runtimes may, too: {text}."
    if explanation.failure is not None and cause != "server":
        yield f"The first diverging layer is not known: {make_printable(explanation.failure)}"


def _notes(decision: Decision, evidence: Evidence, *, confidence: float) -> Iterator[str]:
    yield from _agreements(decision, evidence, confidence=confidence)
    yield from _metric_values(evidence)
    yield from _texts_of(decision, "batch_axes", "inputs")
    if evidence.graph is not None and evidence.graph.weights is not None:
        yield render_weights(evidence.graph.weights.to_plain())
    for warning in (evidence.export.tracer_warnings if evidence.export else ())[:3]:
        yield make_printable(f"The tracer warned: {warning}")


def _agreements(decision: Decision, evidence: Evidence, *, confidence: float) -> Iterator[str]:
    """Yield the proven top-1 agreement of each judged runtime and output, with the samples.

    For an output whose role would have to be guessed, yield once that no agreement is claimed.
    """
    judged = {
        (c.runtime, c.output)
        for c in decision.checks
        if c.name in ("top1_agreement", "top1_lower_bound")
    }
    for name, output in outputs_of(evidence):
        parity = output.classification
        n = output.samples - parity.nan_rows if parity else 0
        if parity is None or (name, output.name) not in judged or n <= 0:
            continue
        lower = agreement_lower_bound(parity.top1_disagreements, n, confidence=confidence)
        yield (
            f"{name} / {make_printable(output.name)}: top-1 agrees on "
            f"{n - parity.top1_disagreements} of {n} samples; "
            f"with {100 * confidence:.4g} % confidence the agreement is at least {lower:.4f}."
        )
    notices = {c.output: render_check(c) for c in decision.checks if c.name == "agreement"}
    for output_name, text in notices.items():
        yield f"{make_printable(output_name or '')}: {text}"


def _texts_of(decision: Decision, *names: str) -> Iterator[str]:
    """Yield the texts of the checks of these names."""
    return (render_check(check) for check in decision.checks if check.name in names)


_IMPRECISE = 1e-5
"""Relative error of a runtime above which a user is warned, though its operators allow it."""

_MIN_MULTIPLE = 8.0
"""Smallest multiple of PyTorch's error for a warning: below it the model itself is sensitive."""

_EXACT_BOUND = 64.0
"""Bounds of noise_ratio above it are for reduced precision."""


def _imprecisions(decision: Decision, evidence: Evidence) -> Iterator[str]:
    """Yield the outputs that pass although a runtime computes them with a large rounding error."""
    passed = {
        (check.runtime, check.output)
        for check in decision.checks
        if check.name == "noise_ratio"
        and check.verdict is Verdict.PASS
        and isinstance(check.bound, float)
        and check.bound <= _EXACT_BOUND
    }
    for name, output in outputs_of(evidence):
        noise = output.noise
        if noise is None or not noise.truth_rms or (name, output.name) not in passed:
            continue
        if noise.candidate_rms > max(
            _IMPRECISE * noise.truth_rms, _MIN_MULTIPLE * noise.reference_rms
        ):
            yield (
                f"{name} / {make_printable(output.name)}: the rounding error of "
                f"this runtime is {noise.candidate_rms / noise.truth_rms:.1e} of the output "
                f"(PyTorch: {noise.reference_rms / noise.truth_rms:.1e}). It comes from the "
                "runtime's operators, usually from a sum of many terms that are added in order."
            )


_TURN_TOLERANCE = 1e-3
"""Largest distance from π and 2π of numbers that are taken for those of an angle, in radians."""


def _turns(evidence: Evidence) -> Iterator[str]:
    """Yield the outputs that differ by 2π at most and reach π: angles, such as those of an FFT.

    It is no reason to pass: evidence does not state that an output is an angle, and for any other
    output the wrong sign of π is a fault.
    """
    for name in {
        output.name: None
        for _, output in outputs_of(evidence)
        if abs(output.reference_abs_max - math.pi) < _TURN_TOLERANCE
        and abs(output.max_abs_diff - 2.0 * math.pi) < _TURN_TOLERANCE
    }:
        yield (
            f"{make_printable(name)} differs by 2π. If it is an angle, the sign of π is not "
            "defined where the imaginary part is zero (the first and last bin of a real FFT): "
            "return sine and cosine, or the real and imaginary part."
        )


def _code_changes(evidence: Evidence) -> Iterator[str]:
    """Yield changes of the model's code since the export, and code that could not be read."""
    code, exported = evidence.source.code, evidence.export.code if evidence.export else None
    if code is None:
        return
    changes = () if exported is None else code.changes_since(exported)
    if changes:
        yield (
            f"the model's code changed between the export and the measurement: "
            f"{make_printable(', '.join(changes))}."
        )
    for name, reason in code.unread.items():
        yield f"model code not read, so not in the evidence: {make_printable(f'{name}: {reason}')}"


def _metric_values(evidence: Evidence) -> Iterator[str]:
    """Yield one sentence for each metric of the policy: values on all samples, and bounds."""
    for metric in evidence.metrics:
        for group in metric.groups[:1]:
            sides = (
                f"{name} {format_number(side.value)} (drop {format_number(side.change.drop)}, at "
                f"most {format_number(side.change.bounds[0])})"
                for name, side in group.runtimes.items()
            )
            slices = len(metric.groups) - 1
            in_slices = f", and in {slices} slices" if slices else ""
            reference = format_number(group.reference.value)
            yield make_printable(
                f"{metric.name} on {group.samples} samples{in_slices}: reference {reference}, "
                f"{', '.join(sides)}."
            )


@dataclass(frozen=True, kw_only=True)
class SummaryInputs:
    """A decision with the records it is based on, and its summary."""

    decision: Decision
    evidence: Evidence
    policy: Policy
    explanation: Explanation = field(default_factory=Explanation)
    change: Change | None = None
    """The changes from the champion, if they were compared."""
    model_name: str | None = None
    """Name of the registered model."""
    steps: tuple[Step, ...] = ()
    """Next steps that replace those that follow from the decision."""
    signed_by: str | None = None
    """Name and short id of the key that signed the verdict, None if it is not signed."""

    @cached_property
    def summary(self) -> Summary:
        """The summary that all outputs render."""
        summary = summarize(
            self.decision,
            self.evidence,
            explanation=self.explanation,
            change=self.change,
            confidence=self.policy.confidence,
        ).about(name=self.model_name, signed_by=self.signed_by and make_printable(self.signed_by))
        return summary.model_copy(update={"steps": self.steps}) if self.steps else summary
