"""Checks without a number: is the evidence whole, was it measured as the policy asks?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.remedies import REMEDIES
from gate.policy.policy import Policy, RuntimePolicy
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import RUNTIMES, RuntimeName

_SPREAD = 1e-4
"""Of the largest output: far above what two runs of one batch differ by in rounding, if at all."""


def samples(policy: Policy, evidence: Evidence) -> CheckResult:
    """Enough samples; fewer prove nothing, for or against the file."""
    n = evidence.dataset.samples
    return CheckResult(
        name="samples",
        observed=float(n),
        bound=float(policy.min_samples),
        relation=">=",
        samples=n,
        verdict=Verdict.PASS if n >= policy.min_samples else Verdict.ERROR,
        explanation=f"{n} samples were measured, at least {policy.min_samples} are asked for.",
        remedy=REMEDIES["samples"],
    )


def determinism(policy: Policy, evidence: Evidence) -> CheckResult:
    """The switches in force were the policy's."""
    want, got = policy.determinism, evidence.environment.determinism
    differences = [
        f"{switch} is {actual}, asked for {wanted}"
        for switch, actual, wanted in (
            ("tf32_matmul", got.tf32_matmul, want.tf32),
            ("tf32_cudnn", got.tf32_cudnn, want.tf32),
            ("cudnn_deterministic", got.cudnn_deterministic, want.cudnn_deterministic),
            ("cudnn_benchmark", got.cudnn_benchmark, want.cudnn_benchmark),
            ("grad", got.grad, False),
            ("seed", got.seed, want.seed),
            ("threads", got.threads, want.threads or got.threads),
            ("algorithms", got.algorithms, want.algorithms),
        )
        if actual != wanted
    ]
    return statement(
        "determinism",
        problems=differences,
        fine="The determinism switches of the policy were in force.",
    )


def measured_once(evidence: Evidence) -> CheckResult:
    """Each runtime is recorded once, and at least one was measured."""
    names = [runtime.runtime for runtime in evidence.runtimes]
    problems = [f"{n} is recorded twice" for n in sorted({n for n in names if names.count(n) > 1})]
    if not any(runtime.outputs for runtime in evidence.runtimes):
        problems.append("no runtime was measured")
    fine = "Each runtime is recorded once, and at least one was measured."
    return statement("measured", problems=problems, fine=fine, verdict=Verdict.ERROR)


def missing(
    runtime_policy: RuntimePolicy, runtime: RuntimeEvidence | None, name: RuntimeName
) -> CheckResult:
    """The only check of a runtime without outputs: absent may be waived, failed never."""
    verdict = Verdict.ERROR
    if runtime is None:
        reason = "there is no record of it: neither numbers nor a reason"
    elif runtime.failure:
        verdict, reason = Verdict.FAIL, f"it failed: {runtime.failure}"
    elif runtime.absent_reason and runtime_policy.required == "when_present":
        verdict = Verdict.WAIVED
        reason = f"the policy asks for it only when present: {runtime.absent_reason}"
    elif runtime.absent_reason:
        reason = f"the policy always asks for it: {runtime.absent_reason}"
    else:
        reason = "it has neither outputs nor a reason"
    return CheckResult(
        name="runtime",
        runtime=name,
        verdict=verdict,
        explanation=f"{name} was not measured; {reason}",
        remedy=REMEDIES["runtime"],
    )


def session(policy: Policy, runtime: RuntimeEvidence) -> CheckResult:
    """The session options were the policy's and those that the runtime's name promises."""
    traits = RUNTIMES[runtime.runtime]
    want: dict[str, str] = {}
    if traits.optimization is not None:
        want["graph_optimization_level"] = traits.optimization
        if policy.determinism.threads is not None:
            want["intra_op_num_threads"] = str(policy.determinism.threads)
        if policy.determinism.algorithms:
            want["use_deterministic_compute"] = "1"
        if traits.cuda:
            want |= policy.cuda_provider.provider_options(tf32=policy.determinism.tf32)
    differences = [
        f"{key} is {runtime.session_options.get(key, 'not recorded')}, asked for {value}"
        for key, value in want.items()
        if runtime.session_options.get(key) != value
    ]
    return statement(
        "session",
        problems=differences,
        place=(runtime.runtime, None),
        fine="The session options of the policy were in force.",
    )


def provider(runtime: RuntimeEvidence) -> CheckResult:
    """The provider is proven: active, first, and it ran the compute nodes."""
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
    return statement(
        "provider",
        problems=problems,
        place=(runtime.runtime, None),
        fine=f"{traits.provider} is active and ran the nodes.",
    )


def repeats(evidence: Evidence) -> Iterator[CheckResult]:
    """A reference that draws random numbers in eval mode has any answer, and a huge noise floor."""
    spread = evidence.reference_spread
    if spread is None:
        return
    problems = []
    if not (math.isfinite(spread) and 0.0 <= spread <= _SPREAD):
        problems.append(
            f"two runs of the reference on the same samples differ by {spread:.3g} of its largest "
            "output"
        )
    yield statement(
        "repeats",
        problems=problems,
        fine="The reference gives the same answer twice.",
        verdict=Verdict.ERROR,
    )


def inputs(evidence: Evidence) -> Iterator[CheckResult]:
    """That the file does not take all that the model takes, which is right of what changes no
    output: numbers and probes decide."""
    if evidence.dataset.model_only:
        yield statement(
            "inputs",
            problems=[],
            fine=f"The model takes {', '.join(evidence.dataset.model_only)}, the file does not; it "
            "was given to the model as the samples and the probes have it, so an input that "
            "changes the outputs shows.",
        )


def statement(
    name: str,
    problems: list[str],
    fine: str,
    *,
    verdict: Verdict = Verdict.FAIL,
    place: tuple[RuntimeName | None, str | None] = (None, None),
) -> CheckResult:
    """A check without a number: `problems` is empty or says what is wrong."""
    return CheckResult(
        name=name,
        runtime=place[0],
        output=place[1],
        verdict=verdict if problems else Verdict.PASS,
        explanation="; ".join(problems) + "." if problems else fine,
        remedy=REMEDIES[name],
    )
