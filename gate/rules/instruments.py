"""Checks on what the instruments saw: noise floor, stability, probes, the graph of the file."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.checks import CheckResult, Verdict
from gate.evidence import Evidence, OutputParity, RuntimeEvidence
from gate.instruments import ProbeParity
from gate.policy import Bounds, Policy
from gate.remedies import REMEDIES
from gate.rules.comparisons import Comparison, check

_CLOSER = {
    "reference": "PyTorch is closer to the float64 truth.",
    "candidate": "The runtime is closer to the float64 truth than PyTorch.",
    "neither": "Both are equally far from the float64 truth.",
}


def noise(
    policy: Policy, bounds: Bounds, evidence: Evidence, place: tuple[RuntimeEvidence, OutputParity]
) -> Iterator[CheckResult]:
    """`noise_ratio`, `noise_peak` and `noise_diff` of an output of floats."""
    runtime, output = place
    if not output.dtype.startswith("float"):
        return
    seen = output.noise
    for name, observed, bound in (
        ("noise_ratio", seen.ratio if seen else None, bounds.noise_ratio),
        ("noise_peak", seen.peak if seen else None, bounds.noise_peak),
        ("noise_diff", seen.diff if seen else None, bounds.noise_diff),
    ):
        if bound is None:
            continue
        result = check(Comparison(name, observed, "<=", bound), runtime, output)
        if seen is not None:
            enough = seen.samples > 0 and seen.elements > 0
            verdict = result.verdict if enough else Verdict.ERROR
            told = (
                f"{name} is {observed:.6g}, allowed <= "
                f"{bound:.6g} (n = {seen.samples}). {_CLOSER[seen.closer]}"
            )
        else:
            waived = name in policy.waive
            verdict = Verdict.WAIVED if waived else Verdict.ERROR
            why = evidence.noise_unmeasured or "no reason is recorded"
            told = f"{name} was not measured: {why}"
        yield result.model_copy(
            update={
                "samples": seen.samples if seen else 0,
                "verdict": verdict,
                "explanation": told,
            }
        )


def stability(
    bounds: Bounds, runtime: RuntimeEvidence, output: OutputParity
) -> Iterator[CheckResult]:
    """Repeatability and batch invariance of an output, where the policy bounds them."""
    seen = output.stability
    for name, bound in (
        ("repeatability", bounds.repeatability),
        ("repeatability_ratio", bounds.repeatability_ratio),
        ("batch_invariance", bounds.batch_invariance),
        ("batch_invariance_ratio", bounds.batch_invariance_ratio),
    ):
        if bound is not None:
            observed = getattr(seen, name) if seen else None
            result = check(Comparison(name, observed, "<=", bound), runtime, output)
            if seen is not None and seen.samples == 0:
                result = result.model_copy(update={"verdict": Verdict.ERROR})
            yield result.model_copy(update={"samples": seen.samples if seen else 0})


def probes(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """One check a probe; without any that applies, an ERROR."""
    if not policy.instruments.probes:
        return
    if not any(probe.inapplicable is None for probe in runtime.probes):
        yield CheckResult(
            name="probes",
            runtime=runtime.runtime,
            verdict=Verdict.ERROR,
            explanation="no probe was computed, so behaviour that was baked in would pass unseen.",
            remedy=REMEDIES["probes"],
        )
    for probe in runtime.probes:
        yield _probe(policy, runtime, probe)


def graph(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """One check for each kind of finding that the policy forbids."""
    if not policy.instruments.graph:
        return
    if evidence.graph is None:
        yield CheckResult(
            name="graph",
            verdict=Verdict.ERROR,
            explanation="the graph of the file was not read.",
            remedy=REMEDIES["graph"],
        )
        return
    for code in policy.instruments.graph_forbid:
        if code == "fixed_batch" and not _dynamic_asked(evidence):
            continue
        found = [finding for finding in evidence.graph.findings if finding.code == code]
        shown = "; ".join(f"{finding.place}: {finding.detail}" for finding in found[:3])
        more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
        yield CheckResult(
            name=f"graph_{code}",
            observed=float(len(found)),
            bound=0.0,
            relation="<=",
            verdict=Verdict.FAIL if found else Verdict.PASS,
            explanation=f"{shown}{more}." if found else "Nothing of the kind is in the graph.",
            remedy=REMEDIES[f"graph_{code}"],
        )


def _dynamic_asked(evidence: Evidence) -> bool:
    """True if the record of the export says that the batch axis should be dynamic."""
    return evidence.export is not None and evidence.export.settings.get("dynamic_batch") is True


def _probe(policy: Policy, runtime: RuntimeEvidence, probe: ProbeParity) -> CheckResult:
    instruments = policy.instruments
    exact = policy.precision == "exact" and probe.noise_ratio is not None
    observed = probe.noise_ratio if exact else probe.relative_diff
    bound = instruments.probe_noise_ratio if exact else instruments.probe_relative_diff
    metric = "noise_ratio" if exact else "relative_diff"
    if probe.inapplicable is not None:
        verdict, told = Verdict.PASS, f"the model does not take this input: {probe.inapplicable}"
        observed = None
    elif probe.failure is not None:
        verdict, told = Verdict.FAIL, probe.failure
    elif observed is None:
        verdict, told = Verdict.ERROR, "the probe has neither numbers nor a reason"
    else:
        held = math.isfinite(observed) and 0.0 <= observed <= bound
        verdict = Verdict.PASS if held else Verdict.FAIL
        told = f"{metric} is {observed:.6g} on this input, allowed <= {bound:.6g}."
    return CheckResult(
        name=f"probe_{probe.name}",
        runtime=runtime.runtime,
        observed=observed,
        bound=bound,
        relation="<=",
        samples=probe.batch_size,
        verdict=verdict,
        explanation=told,
        remedy=REMEDIES[f"probe_{probe.kind}"],
    )
