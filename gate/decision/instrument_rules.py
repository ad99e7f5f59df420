"""Stability, probes, graph findings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.bound_rules import BoundedMetric, check
from gate.decision.catalog import REMEDIES
from gate.decision.check_result import CheckCode, CheckResult, Verdict
from gate.policy.policy import Policy
from gate.policy.runtime_options import is_recorded, may_lack_probes
from gate.policy.sections import Bounds
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.instruments import (
    BeyondRange,
    GraphCode,
    GraphReport,
    ProbeResult,
    drawn_batch_sizes,
)
from gate.records.outputs import OutputParity

# An instrument that the policy asks for and that saw nothing, or less than it was asked to see, is
# an ERROR.


_WEIGHTS = ("other_weights", "rounded_weights")


def stability(
    bounds: Bounds, runtime: RuntimeEvidence, output: OutputParity
) -> Iterator[CheckResult]:
    """Repeatability and batch invariance of an output, where the policy bounds them."""
    measured = output.stability
    for name, bound in (
        ("repeatability", bounds.repeatability),
        ("repeatability_ratio", bounds.repeatability_ratio),
        ("batch_invariance", bounds.batch_invariance),
        ("batch_invariance_ratio", bounds.batch_invariance_ratio),
    ):
        if bound is not None:
            observed = getattr(measured, name) if measured else None
            result = check(BoundedMetric(name, observed, "<=", bound), runtime, output)
            if measured is not None and measured.samples == 0:
                result = result.model_copy(update={"verdict": Verdict.ERROR})
            elif observed is None and output.samples == 1 and name.startswith("batch_invariance"):
                result = _of_one_sample(result)
            yield result.model_copy(update={"samples": measured.samples if measured else 0})


def _of_one_sample(result: CheckResult) -> CheckResult:
    """Batch invariance of one sample, which `samples` lets pass only with probes."""
    return result.model_copy(
        update={
            "verdict": Verdict.PASS,
            "observed": "left to the probes",
            "explanation": "One sample has no other batch: the probes of other batch sizes decide.",
        }
    )


def probes(
    policy: Policy, evidence: Evidence, runtime: RuntimeEvidence, *, samples_fail: bool = False
) -> Iterator[CheckResult]:
    """One check a probe; an ERROR where probes that the policy asks for are lacking.

    `samples_fail`: the samples themselves disagree, so a probe that does says nothing new.
    """
    if not policy.instruments.probes:
        return
    lacking = list(_lacking_probes(policy, evidence, runtime))
    unsearched = bool(policy.instruments.search_inputs) and evidence.trace_search is None
    waived = may_lack_probes(policy, runtime.runtime) and not unsearched
    if unsearched:
        lacking.append("inputs on which trace and model disagree were not searched")
    if lacking:
        recorded = is_recorded(policy, runtime.runtime)
        words = " The policy says that probes may be missing from it." if waived else ""
        yield CheckResult(
            name="probes",
            runtime=runtime.runtime,
            verdict=Verdict.WAIVED if waived else Verdict.ERROR,
            explanation=f"{'; '.join(lacking)}: behaviour that was baked in would pass unseen."
            f"{words}",
            remedy=REMEDIES["probes_recorded" if recorded else "probes"],
        )
    for probe in runtime.probes:
        result = _probe(policy, runtime, probe)
        if samples_fail and result.verdict is Verdict.FAIL:
            result = result.model_copy(update={"remedy": REMEDIES["probe_as_samples"]})
        elif probe.unexamined and result.verdict is Verdict.FAIL and probe.failure is None:
            text = f"{result.explanation} Rounding was not measured on this input. Measure again."
            result = result.model_copy(update={"verdict": Verdict.ERROR, "explanation": text})
        yield result


def graph(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """One check for each kind of finding that the policy forbids."""
    if not policy.instruments.graph:
        return
    report = evidence.graph
    unread = _unread(evidence, report)
    if report is None or unread is not None:
        yield CheckResult(
            name="graph",
            verdict=Verdict.ERROR,
            explanation=f"the graph of the file was not read: {unread}",
            remedy=REMEDIES["graph"],
        )
        return
    for code in policy.instruments.graph_forbid:
        if code == "fixed_batch" and not _dynamic_asked(evidence):
            continue
        if code in ("float16", "rounded_weights") and policy.precision != "exact":
            continue
        if code == "quantized" and policy.precision == "quantized":
            continue
        found = [finding for finding in report.findings if finding.code == code]
        if code in _WEIGHTS and report.weights is None and not found:
            yield CheckResult(
                name=f"graph_{code}",
                verdict=Verdict.ERROR,
                explanation="the weights of the file were not compared with the model's: the "
                "evidence is of an older version.",
                remedy=REMEDIES["graph"],
            )
            continue
        shown = "; ".join(f"{finding.place}: {finding.detail}" for finding in found[:3])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        yield CheckResult(
            name=f"graph_{code}",
            observed=float(len(found)),
            bound=0.0,
            relation="<=",
            verdict=Verdict.FAIL if found else Verdict.PASS,
            explanation=f"{shown}{more}." if found else _nothing(report, code),
            remedy=REMEDIES[f"graph_{code}"],
        )


def _nothing(report: GraphReport, code: GraphCode) -> str:
    if code in _WEIGHTS and report.weights is not None:
        return report.weights.sentence
    return "Nothing of the kind is in the graph."


def _lacking_probes(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> Iterator[str]:
    instruments = policy.instruments
    if not any(probe.inapplicable is None for probe in runtime.probes):
        yield "no probe was computed"
    if not evidence.has_fixed_batch:
        sizes = {probe.batch_size for probe in runtime.probes if probe.kind == "batch"}
        batch_sizes = instruments.probe_batch_sizes
        drawn, _ = drawn_batch_sizes(evidence.subject.sha256, batch_sizes)
        lacking = sorted({*batch_sizes, drawn} - sizes)
        if lacking:
            yield f"there is no probe of the batch sizes {', '.join(map(str, lacking))}"
    if runtime.unprobed:
        shown, more = ", ".join(runtime.unprobed[:4]), len(runtime.unprobed) - 4
        yield f"it has no outputs for {shown}{f' and {more} more probes' if more > 0 else ''}"


def _probe(policy: Policy, runtime: RuntimeEvidence, probe: ProbeResult) -> CheckResult:
    instruments = policy.instruments
    by_noise = _by_noise(policy, probe)
    observed = probe.noise_ratio if by_noise else probe.relative_diff
    bound = instruments.probe_noise_ratio if by_noise else instruments.probe_relative_diff
    metric = "noise_ratio" if by_noise else "relative_diff"
    numbers = [n for n in (probe.noise_ratio, probe.relative_diff) if n is not None]
    told_twice = bool(numbers) + (probe.failure is not None) + (probe.inapplicable is not None) > 1
    code: CheckCode | None = None
    if probe.failure is not None:
        verdict, explanation = Verdict.FAIL, probe.failure
    elif told_twice:
        verdict, explanation = Verdict.ERROR, "the probe has numbers and a reason why it has none"
    elif probe.inapplicable is not None:
        verdict, explanation = (
            Verdict.PASS,
            f"the model does not take this input: {probe.inapplicable}",
        )
    elif observed is None:
        verdict, explanation = Verdict.ERROR, "the probe has neither numbers nor a reason"
    else:
        held = BoundedMetric(metric, observed, "<=", bound).holds()
        are_numbers = not any(math.isnan(number) for number in numbers)
        verdict = Verdict.PASS if held and are_numbers else Verdict.FAIL
        explanation = f"{metric} is {observed:.6g} on this input, allowed <= {bound:.6g}."
        if are_numbers and not held and (why := _unjudged(policy, runtime, probe)):
            verdict = Verdict.WAIVED
            explanation += f" {why}"
    breaks = probe.beyond_range
    if breaks is not None and verdict is Verdict.FAIL and _rest_holds(policy, breaks):
        code, explanation = "beyond_range", _breaks_beyond(probe, breaks)
        if instruments.probe_beyond_range == "warn":
            verdict = Verdict.WAIVED
    elif probe.undefined and verdict is Verdict.PASS:
        code, verdict, explanation = "undefined", Verdict.WAIVED, _undefined(probe)
    return CheckResult(
        name=f"probe_{probe.name}",
        runtime=runtime.runtime,
        observed=observed if probe.inapplicable is None else None,
        bound=bound,
        relation="<=",
        samples=probe.batch_size,
        verdict=verdict,
        explanation=explanation,
        remedy=REMEDIES[f"probe_{code or probe.kind}"],
        code=code,
    )


def _undefined(probe: ProbeResult) -> str:
    """Return the text about conversions that ONNX leaves undefined."""
    shown = "; ".join(f"{c.elements} to {c.dtype} ({c.tensor})" for c in probe.undefined[:3])
    return (
        f"The input makes the model convert floats that the integer type does not hold: {shown}. "
        "ONNX leaves the result open, and so does PyTorch. What depends on it was not compared."
    )


def _rest_holds(policy: Policy, breaks: BeyondRange) -> bool:
    """Return True if everything that does not break is within the bounds of a probe."""
    if breaks.failure is not None:
        return False
    if breaks.relative_diff is None:
        return breaks.kind == "no_rows" and breaks.noise_ratio is None
    by_noise = _by_noise(policy, breaks)
    observed = breaks.noise_ratio if by_noise else breaks.relative_diff
    bounds = policy.instruments
    bound = bounds.probe_noise_ratio if by_noise else bounds.probe_relative_diff
    numbers = [n for n in (breaks.noise_ratio, breaks.relative_diff) if n is not None]
    held = BoundedMetric("rest", observed, "<=", bound).holds()
    return held and not any(map(math.isnan, numbers))


def _breaks_beyond(probe: ProbeResult, breaks: BeyondRange) -> str:
    where = f"at {breaks.factor:.3g} times the samples"
    if breaks.kind == "no_rows":
        return (
            f"The runtime fails {where}, where the model returns an output without elements (no "
            f"box, no row): {probe.failure}"
        )
    return (
        f"The file overflows {where}: {breaks.elements} elements are NaN or infinite, and the "
        "model's are finite. It agrees everywhere else on this input."
    )


def _by_noise(policy: Policy, probe: ProbeResult | BeyondRange) -> bool:
    """Whether a probe is judged in units of rounding. In 16 bits by what it takes the smaller part
    of: far beyond the samples some models make much of any rounding."""
    if probe.noise_ratio is None or policy.precision == "quantized":
        return False
    if policy.precision == "exact" or probe.relative_diff is None:
        return True
    bounds = policy.instruments
    ratio = _part(probe.noise_ratio, bounds.probe_noise_ratio)
    return ratio < _part(probe.relative_diff, bounds.probe_relative_diff)


def _part(observed: float, bound: float) -> float:
    """Of the bound; NaN and infinite numbers take more than all of it."""
    if bound and math.isfinite(observed):
        return observed / bound
    return math.inf if observed else 0.0


def _unjudged(policy: Policy, runtime: RuntimeEvidence, probe: ProbeResult) -> str | None:
    """Why finite numbers of a probe refuse nothing, None where they do; a failure always does."""
    if policy.precision != "quantized":
        return None
    if probe.kind == "value":  # cut off on purpose
        return "It may lie outside of the calibrated range, which a quantized file cuts off."
    if not all(policy.judges(output.name) for output in runtime.outputs):
        return "What a part of a quantized release rounds is judged in the chain."
    return None


def _unread(evidence: Evidence, report: GraphReport | None) -> str | None:
    """Why there is no report on the graph of this file; None: there is."""
    if report is None or evidence.graph_unread is not None:
        return evidence.graph_unread or "no reason is recorded"
    if report.nodes == 0 or sum(report.operators.values()) != report.nodes:
        return f"the report counts {report.nodes} nodes and names {len(report.operators)} operators"
    if set(report.external_data) != set(evidence.subject.external_data):
        return (
            f"the report is about the data files {sorted(report.external_data)}, the file has "
            f"{list(evidence.subject.external_data)}"
        )
    return None


def _dynamic_asked(evidence: Evidence) -> bool:
    """True if the record of the export says that the batch axis should be dynamic."""
    return evidence.export is not None and evidence.export.settings.get("dynamic_batch") is True
