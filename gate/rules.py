"""The rules: each turns policy and evidence into checks. Pure, total, fail closed.

A comparison passes only if the observed number is finite and within its bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from scipy.special import betaincinv

from gate.checks import CheckResult, Verdict
from gate.evidence import ClassParity, Evidence, OutputParity, RuntimeEvidence
from gate.policy import Bounds, Policy, RuntimePolicy
from gate.remedies import REMEDIES
from gate.runtime import RUNTIMES, RuntimeName


def all_checks(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """All checks, in the order in which people should read them."""
    yield _samples(policy, evidence)
    yield _determinism(policy, evidence)
    yield _measured_once(evidence)
    for name, runtime_policy in policy.runtimes.items():
        if runtime_policy.required != "never":
            yield from _runtime(policy, runtime_policy, evidence, name)


def top1_lower_bound(disagreements: int, samples: int, *, confidence: float) -> float:
    """One-sided Clopper-Pearson lower bound of the agreement, in [0, 1].

    The exact binomial bound (Clopper and Pearson, Biometrika 26, 1934): the
    `1 - confidence` quantile of Beta(agreements, disagreements + 1); 0.0 without agreements.
    """
    agreements = samples - disagreements
    if agreements <= 0:
        return 0.0
    return float(betaincinv(agreements, disagreements + 1, 1.0 - confidence))


def _samples(policy: Policy, evidence: Evidence) -> CheckResult:
    n = evidence.dataset.samples
    return CheckResult(
        name="samples",
        observed=float(n),
        bound=float(policy.min_samples),
        relation=">=",
        samples=n,
        verdict=Verdict.PASS if n >= policy.min_samples else Verdict.FAIL,
        explanation=f"{n} samples were measured, at least {policy.min_samples} are asked for.",
        remedy=REMEDIES["samples"],
    )


def _determinism(policy: Policy, evidence: Evidence) -> CheckResult:
    want, got = policy.determinism, evidence.environment.determinism
    differences = [
        f"{switch} is {seen}, asked for {asked}"
        for switch, seen, asked in (
            ("tf32_matmul", got.tf32_matmul, want.tf32),
            ("tf32_cudnn", got.tf32_cudnn, want.tf32),
            ("cudnn_deterministic", got.cudnn_deterministic, want.cudnn_deterministic),
            ("cudnn_benchmark", got.cudnn_benchmark, want.cudnn_benchmark),
            ("grad", got.grad, False),
            ("seed", got.seed, want.seed),
        )
        if seen != asked
    ]
    return _statement(
        "determinism",
        problems=differences,
        fine="The determinism switches of the policy were in force.",
    )


def _measured_once(evidence: Evidence) -> CheckResult:
    names = [runtime.runtime for runtime in evidence.runtimes]
    problems = [f"{n} is recorded twice" for n in sorted({n for n in names if names.count(n) > 1})]
    if not any(runtime.outputs for runtime in evidence.runtimes):
        problems.append("no runtime was measured")
    fine = "Each runtime is recorded once, and at least one was measured."
    return _statement("measured", problems=problems, fine=fine, verdict=Verdict.ERROR)


def _runtime(
    policy: Policy, runtime_policy: RuntimePolicy, evidence: Evidence, name: RuntimeName
) -> Iterator[CheckResult]:
    runtime = evidence.runtime(name)
    missing = _missing(runtime_policy, runtime, name)
    if missing is not None:
        yield missing
        return
    assert runtime is not None
    yield _session(policy, runtime)
    yield _provider(runtime)
    yield _outputs(policy, evidence, runtime)
    for output in runtime.outputs:
        yield _reference(policy, runtime, output)
        yield _finite(runtime, output)
        for check in _numeric(runtime_policy.bounds, output):
            yield check.model_copy(update={"runtime": name, "output": output.name})
        logits = _logits(policy, output)
        if logits is not None:
            for check in _classification(policy, runtime_policy.bounds, output, logits):
                yield check.model_copy(update={"runtime": name, "output": output.name})


def _logits(policy: Policy, output: OutputParity) -> ClassParity | None:
    """The class metrics of an output that the policy counts as logits, else None."""
    counted = not policy.logits or output.name in policy.logits
    return output.classification if counted else None


def _missing(
    runtime_policy: RuntimePolicy, runtime: RuntimeEvidence | None, name: RuntimeName
) -> CheckResult | None:
    """The only check of a runtime that was not measured; None if it was."""
    verdict = Verdict.ERROR
    if runtime is None:
        seen = "there is no record of it: neither numbers nor a reason"
    elif runtime.failure is not None:
        verdict, seen = Verdict.FAIL, f"it failed: {runtime.failure}"
    elif runtime.absent_reason is not None and runtime_policy.required == "when_present":
        verdict = Verdict.WAIVED
        seen = f"the policy asks for it only when present: {runtime.absent_reason}"
    elif runtime.absent_reason is not None:
        seen = f"the policy always asks for it: {runtime.absent_reason}"
    elif not runtime.outputs:
        seen = "it has neither outputs nor a reason"
    else:
        return None
    return CheckResult(
        name="runtime",
        runtime=name,
        verdict=verdict,
        explanation=f"{name} was not measured; {seen}",
        remedy=REMEDIES["runtime"],
    )


def _session(policy: Policy, runtime: RuntimeEvidence) -> CheckResult:
    traits = RUNTIMES[runtime.runtime]
    want: dict[str, str] = {}
    if traits.optimization is not None:
        want["graph_optimization_level"] = traits.optimization
        if traits.cuda:
            want |= policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
    differences = [
        f"{key} is {runtime.session_options.get(key, 'not recorded')}, asked for {value}"
        for key, value in want.items()
        if runtime.session_options.get(key) != value
    ]
    return _statement(
        "session",
        runtime=runtime.runtime,
        problems=differences,
        fine="The session options of the policy were in force.",
    )


def _provider(runtime: RuntimeEvidence) -> CheckResult:
    traits = RUNTIMES[runtime.runtime]
    problems = []
    active = runtime.providers_active[0] if runtime.providers_active else "none"
    if active != traits.provider:
        problems.append(f"the active provider is {active}, not {traits.provider}")
    if traits.engine == "onnxruntime":
        if not runtime.nodes_per_provider.get(traits.provider):
            problems.append(f"no node is known to have run on {traits.provider}")
        if runtime.fallback_nodes:
            shown = ", ".join(runtime.fallback_nodes[:3])
            problems.append(f"{len(runtime.fallback_nodes)} compute nodes ran on the CPU ({shown})")
        if not traits.cuda and set(runtime.nodes_per_provider) - {traits.provider}:
            problems.append(f"nodes ran on {', '.join(sorted(runtime.nodes_per_provider))}")
    return _statement(
        "provider",
        runtime=runtime.runtime,
        problems=problems,
        fine=f"{traits.provider} is active and ran the nodes.",
    )


def _outputs(policy: Policy, evidence: Evidence, runtime: RuntimeEvidence) -> CheckResult:
    want = [spec.name for spec in evidence.subject.outputs]
    got = [output.name for output in runtime.outputs]
    problems = []
    if got != want:
        problems.append(f"outputs {got} were measured, the file has {want}")
    n = evidence.dataset.samples
    problems += [
        f"'{output.name}' was measured on {output.samples} samples, the data set has {n}"
        for output in runtime.outputs
        if output.samples != n or output.elements == 0
    ]
    logits = {output.name for output in runtime.outputs if output.classification is not None}
    if policy.task == "classification":
        lacking = sorted(set(policy.logits) - logits)
        if lacking or not logits:
            problems.append(
                f"no output of shape (batch, classes) for the logits {lacking or 'that are judged'}"
            )
    return _statement(
        "outputs",
        runtime=runtime.runtime,
        problems=problems,
        fine="Every output of the file was measured on every sample.",
        verdict=Verdict.ERROR,
    )


def _reference(policy: Policy, runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    """A degenerate reference proves nothing."""
    problems = []
    if output.nonfinite_reference >= output.elements:
        problems.append("the reference has no finite element")
    if not (math.isfinite(output.reference_abs_max) and output.reference_abs_max > 0.0):
        problems.append(f"the reference's largest absolute value is {output.reference_abs_max}")
    if output.reference_constant:
        problems.append("the reference gives the same output for every sample")
    logits = _logits(policy, output)
    if policy.task == "classification" and logits is not None and logits.predicted_classes < 2:
        problems.append("the reference predicts one class for every sample")
    return _statement(
        "reference",
        runtime=runtime.runtime,
        output=output.name,
        problems=problems,
        fine="The reference is finite and varies over the samples.",
        verdict=Verdict.ERROR,
    )


def _finite(runtime: RuntimeEvidence, output: OutputParity) -> CheckResult:
    problems = []
    if output.nonfinite_mismatched:
        problems.append(f"{output.nonfinite_mismatched} elements are NaN, or infinite on one side")
    return _statement(
        "finite",
        runtime=runtime.runtime,
        output=output.name,
        problems=problems,
        fine="No NaN, and no infinity on one side only.",
    )


def _numeric(bounds: Bounds, output: OutputParity) -> Iterator[CheckResult]:
    n = output.samples
    yield from _at_most("max_abs_diff", output.max_abs_diff, bounds.max_abs_diff, n)
    yield from _at_most("mean_abs_diff", output.mean_abs_diff, bounds.mean_abs_diff, n)
    yield from _at_most("scaled_diff", output.scaled_diff, bounds.scaled_diff, n)
    yield from _at_most("l2_logits", output.l2_max, bounds.l2_logits, n)


def _classification(
    policy: Policy, bounds: Bounds, output: OutputParity, logits: ClassParity
) -> Iterator[CheckResult]:
    n = output.samples
    lower = top1_lower_bound(logits.top1_disagreements, n, confidence=policy.confidence)
    # A count and a share that contradict each other must not pass by the better of the two.
    agreement = min(logits.top1_agreement, 1.0 - logits.top1_disagreements / n if n else 0.0)
    if math.isnan(logits.top1_agreement):
        agreement = lower = math.nan
    yield from _at_least("top1_agreement", agreement, bounds.top1_agreement, n)
    yield from _at_least("top1_lower_bound", lower, bounds.top1_lower_bound, n)
    yield from _at_least("top5_agreement", logits.top5_agreement, bounds.top5_agreement, n)
    yield from _at_most("l2_probabilities", logits.l2_probabilities_max, bounds.l2_probabilities, n)
    confidence = logits.confidence
    yield from _at_most("confidence_diff", confidence.max, bounds.confidence_diff, n)
    if bounds.confidence_bands is not None:
        _, from1, from5, from10 = confidence.bands
        over = {"1": from1 + from5 + from10, "5": from5 + from10, "10": from10}
        for percent, share in over.items():
            bound = getattr(bounds.confidence_bands, f"over_{percent}_percent")
            yield from _at_most(f"confidence_over_{percent}_percent", share, bound, n)
    drop = logits.accuracy.drop if logits.accuracy else None
    yield from _at_most("accuracy_drop", drop, bounds.accuracy_drop, n)


def _at_most(
    name: str, observed: float | None, bound: float | None, samples: int
) -> Iterator[CheckResult]:
    if bound is not None:
        good = observed is not None and math.isfinite(observed) and observed <= bound
        yield _bounded(name, observed, ("<=", bound), good=good, samples=samples)


def _at_least(
    name: str, observed: float | None, bound: float | None, samples: int
) -> Iterator[CheckResult]:
    if bound is not None:
        good = observed is not None and math.isfinite(observed) and observed >= bound
        yield _bounded(name, observed, (">=", bound), good=good, samples=samples)


def _bounded(
    name: str, observed: float | None, limit: tuple[str, float], *, good: bool, samples: int
) -> CheckResult:
    relation, bound = limit
    if observed is None:
        verdict, seen = Verdict.ERROR, "was not measured"
    else:
        verdict = Verdict.PASS if good and samples > 0 else Verdict.FAIL
        seen = f"is {observed:.6g}"
    return CheckResult.model_validate(
        {
            "name": name,
            "observed": observed,
            "bound": bound,
            "relation": relation,
            "samples": samples,
            "verdict": verdict,
            "explanation": f"{name} {seen}, allowed {relation} {bound:.6g} (n = {samples}).",
            "remedy": REMEDIES[name],
        }
    )


def _statement(
    name: str,
    *,
    problems: list[str],
    fine: str,
    verdict: Verdict = Verdict.FAIL,
    **place: str | None,
) -> CheckResult:
    """A check without a number: `problems` is empty or says what is wrong."""
    return CheckResult.model_validate(
        {
            "name": name,
            "verdict": verdict if problems else Verdict.PASS,
            "explanation": "; ".join(problems) + "." if problems else fine,
            "remedy": REMEDIES[name],
            **place,
        }
    )
