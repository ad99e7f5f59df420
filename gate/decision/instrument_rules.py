"""Stability, probes, graph findings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.bound_rules import BoundedMetric, check_metric
from gate.decision.catalog import REASONS
from gate.decision.check_result import CheckResult, Problem, Verdict, check_result
from gate.policy.policy import Policy
from gate.policy.runtime_options import is_recorded, is_server, may_lack_probes
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import (
    BeyondRange,
    GraphReport,
    ProbeResult,
    StabilityParity,
    UndefinedCast,
    drawn_batch_sizes,
)
from gate.records.outputs import OutputParity

# An instrument that the policy enables and that measured nothing, or less than it should, is an
# ERROR.


_STABILITY = (
    "repeatability",
    "repeatability_ratio",
    "batch_invariance",
    "batch_invariance_ratio",
)


def check_stability(bounds: Bounds, output: OutputParity) -> Iterator[CheckResult]:
    """Yield repeatability and batch invariance of an output, if the policy bounds them."""
    measured = output.stability
    for name in _STABILITY:
        bound = getattr(bounds, name)
        if bound is None:
            continue
        observed = getattr(measured, name) if measured else None
        check = check_metric(BoundedMetric(name, observed, "<=", bound), samples=output.samples)
        if measured is not None and measured.samples == 0:
            check = check.with_code("unmeasured", Verdict.ERROR)
        elif observed is None and output.samples == 1 and name.startswith("batch_invariance"):
            # `check_samples` lets one sample pass only with probes.
            check = check.with_code("left_to_probes", Verdict.PASS)
        elif measured is not None and name.startswith("batch_") and _is_undefined(measured):
            sizes = list(measured.batch_sizes)[:-1]
            check = check.with_code("undefined", Verdict.ERROR, sizes=sizes)
        yield check.model_copy(update={"samples": measured.samples if measured else 0})


def _is_undefined(measured: StabilityParity) -> bool:
    """Return whether the model returns NaN or infinity for some samples only in smaller batches."""
    return measured.batch_invariance_ratio is None and math.isinf(measured.unit)


def check_concurrency(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """Yield one check for each load of a server; an ERROR if a requested load is missing."""
    if not is_server(policy, runtime.runtime):
        return
    runtime_policy = policy.runtimes[runtime.runtime]
    if runtime_policy.options.get("connections") == [] or not policy.instruments.stability_samples:
        return
    measured = {load.connections for load in runtime.concurrency if load.rate is None}
    stated = runtime_policy.options.get("connections")
    lacking = set(stated) - measured if isinstance(stated, list) else set()
    unstable = any(math.isnan(load.batch_invariance_ratio) for load in runtime.concurrency)
    if not measured or lacking or unstable:
        problem = {"code": "unstable_reference" if unstable else "no_load"}
        yield check_result("concurrency", "unmeasured", Verdict.ERROR, problems=[problem])
    bound = runtime_policy.bounds.batch_invariance_ratio
    for load in runtime.concurrency:
        if math.isnan(load.batch_invariance_ratio) and not load.crossed:
            continue
        within = bound is None or load.batch_invariance_ratio <= bound
        connections = f"{load.connections} connections"
        yield CheckResult(
            name="concurrency",
            point=connections if load.rate is None else f"{load.rate:g} requests/s",
            observed=load.batch_invariance_ratio,
            bound=bound,
            relation=None if bound is None else "<=",
            verdict=Verdict.PASS if within and not load.crossed else Verdict.FAIL,
            code="crossed" if load.crossed else "within" if within else "beyond",
            params={"crossed": load.crossed, "requests": load.requests},
        )


def check_probes(
    policy: Policy, evidence: Evidence, runtime: RuntimeEvidence, *, samples_fail: bool = False
) -> Iterator[CheckResult]:
    """Yield one check for each probe.

    An ERROR if probes that the policy requires are missing. `samples_fail`: the samples themselves
    disagree, so a failing probe adds nothing.
    """
    if not policy.instruments.probes:
        return
    lacking = list(_lacking_probes(policy, evidence, runtime))
    unsearched = bool(policy.instruments.search_inputs) and evidence.trace_search is None
    waived = may_lack_probes(policy, runtime.runtime) and not unsearched
    if unsearched:
        lacking.append({"code": "unsearched"})
    if lacking and waived:
        yield check_result("probes", "missing_waived", Verdict.WAIVED, problems=lacking)
    elif lacking:
        code = "missing_recorded" if is_recorded(policy, runtime.runtime) else "missing"
        yield check_result("probes", code, Verdict.ERROR, problems=lacking)
    for probe in runtime.probes:
        result = _probe(policy, evidence, runtime, probe)
        if result.verdict is Verdict.FAIL and probe.failure is None:
            if samples_fail:
                result = result.with_code("fails_like_samples")
            elif probe.unexamined:
                result = result.with_code("unexamined", Verdict.ERROR)
        yield result


def check_graph(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """Yield one check for each kind of finding that the policy forbids, or an ERROR if the graph
    was not read or is of another file."""
    report, files = evidence.graph, evidence.subject.external_data
    if not policy.instruments.graph:
        return
    if report is None or evidence.graph_unread is not None:
        reason = (evidence.graph_unread or "no reason is recorded").rstrip(".")
        yield check_result("graph", "unread", Verdict.ERROR, reason=reason)
    elif report.nodes == 0 or sum(report.operators.values()) != report.nodes:
        counts = {"nodes": report.nodes, "operators": len(report.operators)}
        yield check_result("graph", "unread_count", Verdict.ERROR, **counts)
    elif set(report.external_data) != set(files):
        names = {"reported": sorted(report.external_data), "files": files}
        yield check_result("graph", "unread_files", Verdict.ERROR, **names)
    else:
        yield from _check_findings(policy, evidence, report)


def _check_findings(
    policy: Policy, evidence: Evidence, report: GraphReport
) -> Iterator[CheckResult]:
    settings = evidence.export.settings if evidence.export else {}
    for code in policy.instruments.graph_forbid:
        if code == "fixed_batch" and settings.get("dynamic_batch") is not True:
            continue
        if code in ("float16", "rounded_weights") and policy.precision != "exact":
            continue
        if code == "quantized" and policy.precision == "quantized":
            continue
        findings = [finding.to_params() for finding in report.findings if finding.code == code]
        metric = BoundedMetric(f"graph_{code}", float(len(findings)), "<=", 0.0)
        check = check_metric(metric, samples=None)
        if findings:
            yield check.with_code("findings", findings=findings)
        elif code not in ("other_weights", "rounded_weights"):
            yield check.with_code("no_findings")
        elif report.weights is not None:
            yield check.with_code("weights_equal", weights=report.weights.to_plain())
        else:
            yield check_result(metric.name, "not_compared", Verdict.ERROR)


def _lacking_probes(
    policy: Policy, evidence: Evidence, runtime: RuntimeEvidence
) -> Iterator[Problem]:
    instruments = policy.instruments
    if not any(probe.inapplicable is None for probe in runtime.probes):
        yield {"code": "no_probe"}
    if not evidence.has_fixed_batch:
        sizes = {probe.batch_size for probe in runtime.probes if probe.kind == "batch"}
        batch_sizes = instruments.probe_batch_sizes
        drawn, _ = drawn_batch_sizes(evidence.subject.sha256, batch_sizes)
        lacking = sorted({*batch_sizes, drawn} - sizes)
        if lacking:
            yield {"code": "no_batch_probe", "sizes": lacking}
    if runtime.unprobed:
        yield {"code": "unprobed", "names": list(runtime.unprobed)}


def _probe(
    policy: Policy, evidence: Evidence, runtime: RuntimeEvidence, probe: ProbeResult
) -> CheckResult:
    metric, numbers = _compared_number(policy, runtime, probe), _numbers(probe)
    contradictory = (
        bool(numbers) + (probe.failure is not None) + (probe.inapplicable is not None) > 1
    )
    params: Problem = {"metric": metric.name}
    if probe.failure is not None:
        verdict, code, params = Verdict.FAIL, "failed", {"failure": probe.failure}
    elif contradictory:
        verdict, code = Verdict.ERROR, "contradictory"
    elif probe.inapplicable is not None:
        verdict, params = Verdict.PASS, {"reason": probe.inapplicable}
        code = "not_judged" if probe.inapplicable in REASONS else "inapplicable"
    elif metric.observed is None:
        verdict, code = Verdict.ERROR, "no_numbers"
    else:
        is_within = metric.holds()
        are_numbers = not any(math.isnan(number) for number in numbers)
        passed = is_within and are_numbers
        verdict, code = (Verdict.PASS, "within") if passed else (Verdict.FAIL, "beyond")
        if are_numbers and not is_within and (why := _reason_unjudged(policy, runtime, probe)):
            verdict, code = Verdict.WAIVED, why
    breaks = probe.beyond_range
    if breaks is not None and verdict is Verdict.FAIL and _rest_holds(policy, runtime, breaks):
        note = {"factor": breaks.factor, "elements": breaks.elements, "failure": probe.failure}
        code, params["notes"] = "beyond_range", [{"code": breaks.kind, **note}]
        if policy.instruments.probe_beyond_range == "warn":
            verdict = Verdict.WAIVED
    elif verdict is Verdict.FAIL and probe.kind == "value" and _trace_agrees(evidence):
        code = f"{code}_untraced"
    elif probe.undefined and verdict is Verdict.PASS:
        code, verdict = "undefined", Verdict.WAIVED
        params["conversions"] = _cast_texts(probe.undefined)
    return CheckResult(
        name=f"probe_{probe.name}",
        observed=metric.observed if probe.inapplicable is None else None,
        bound=metric.bound,
        relation="<=",
        samples=probe.batch_size,
        verdict=verdict,
        code=code,
        params={"kind": probe.kind, **params},
    )


def _trace_agrees(evidence: Evidence) -> bool:
    """Return True if a trace of the model is the model on all inputs that were tried, and nothing
    warned: then tracing is not what made the file another function."""
    search, export = evidence.trace_search, evidence.export
    if search is None or search.reason or search.found or search.tried < 2:
        return False
    return export is None or not (
        export.tracer_warnings
        or any(finding.level == "error" and not finding.suppressed for finding in export.lint)
    )


def check_undefined(evidence: Evidence) -> Iterator[CheckResult]:
    """Warn of conversions on the samples that ONNX leaves undefined."""
    if evidence.undefined:
        texts = _cast_texts(evidence.undefined)
        check = check_result("undefined_casts", "undefined", Verdict.WAIVED, conversions=texts)
        yield check.model_copy(update={"samples": evidence.dataset.samples})


def _cast_texts(casts: tuple[UndefinedCast, ...]) -> list[str]:
    return [f"{cast.elements} to {cast.dtype} ({cast.tensor})" for cast in casts]


def _rest_holds(policy: Policy, runtime: RuntimeEvidence, breaks: BeyondRange) -> bool:
    """Return True if everything that does not break is within the bounds of a probe."""
    if breaks.failure is not None:
        return False
    if breaks.relative_diff is None:
        return breaks.kind == "no_rows" and breaks.noise_ratio is None
    is_within = _compared_number(policy, runtime, breaks).holds()
    return is_within and not any(map(math.isnan, _numbers(breaks)))


def _numbers(probe: ProbeResult | BeyondRange) -> list[float]:
    return [n for n in (probe.noise_ratio, probe.relative_diff) if n is not None]


def _compared_number(
    policy: Policy, runtime: RuntimeEvidence, probe: ProbeResult | BeyondRange
) -> BoundedMetric:
    """Return the number by which a probe is judged."""
    bounds = policy.instruments
    if _uses_noise_ratio(policy, probe):
        return BoundedMetric("noise_ratio", probe.noise_ratio, "<=", bounds.probe_noise_ratio)
    bound = bounds.probe_relative_diff
    if policy.precision == "quantized":
        bound = max(bound, _share_of_samples(runtime))
    return BoundedMetric("relative_diff", probe.relative_diff, "<=", bound)


_SAMPLE_SHARES, _MAX_SHARE = 2.0, 0.9


def _share_of_samples(runtime: RuntimeEvidence) -> float:
    """Return twice the relative difference of the samples, at most 0.9.

    Samples of a quantized file are judged by their predictions. A probe of samples in another batch
    deviates as far, more so if scales are computed from the batch.
    """
    shares = [
        output.max_abs_diff / output.reference_abs_max
        for output in runtime.outputs
        if output.reference_abs_max > 0.0
    ]
    largest = max((share for share in shares if math.isfinite(share)), default=0.0)
    return min(_SAMPLE_SHARES * largest, _MAX_SHARE)


def _uses_noise_ratio(policy: Policy, probe: ProbeResult | BeyondRange) -> bool:
    """Return whether a probe is judged in units of rounding.

    In 16 bits it is judged by the bound of which it uses the smaller share, because far beyond the
    samples some models amplify any rounding.
    """
    if probe.noise_ratio is None or policy.precision == "quantized":
        return False
    if policy.precision == "exact" or probe.relative_diff is None:
        return True
    bounds = policy.instruments
    ratio = _used_share(probe.noise_ratio, bounds.probe_noise_ratio)
    return ratio < _used_share(probe.relative_diff, bounds.probe_relative_diff)


def _used_share(observed: float, bound: float) -> float:
    """Return the share of the bound that is used; infinite for NaN and infinite numbers."""
    if bound and math.isfinite(observed):
        return observed / bound
    return math.inf if observed else 0.0


def _reason_unjudged(policy: Policy, runtime: RuntimeEvidence, probe: ProbeResult) -> str | None:
    """Return the code of why finite numbers of a probe refuse nothing; None: they do. A failure
    always does."""
    if policy.precision != "quantized":
        return None
    if probe.kind == "value":  # cut off on purpose
        return "out_of_calibration"
    if not all(policy.judges(output.name) for output in runtime.outputs):
        return "checked_in_chain"
    if policy.runtimes[runtime.runtime].bounds.empty:
        return "checked_by_metric"
    return None
