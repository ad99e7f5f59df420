"""The rules: policy and evidence in, checks out. Pure, total, fail closed."""

from __future__ import annotations

from collections.abc import Iterator

from gate.checks import CheckResult
from gate.evidence import Evidence
from gate.policy import Policy, RuntimePolicy
from gate.rules import comparisons, statements
from gate.runtime import RuntimeName


def all_checks(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    """All checks, in the order in which people should read them."""
    yield statements.samples(policy, evidence)
    yield statements.determinism(policy, evidence)
    yield statements.measured_once(evidence)
    for name, runtime_policy in policy.runtimes.items():
        if runtime_policy.required != "never":
            yield from _of_runtime(policy, runtime_policy, evidence, name)


def _of_runtime(
    policy: Policy, runtime_policy: RuntimePolicy, evidence: Evidence, name: RuntimeName
) -> Iterator[CheckResult]:
    runtime = evidence.runtime(name)
    if runtime is None or not runtime.outputs or runtime.failure or runtime.absent_reason:
        yield statements.missing(runtime_policy, runtime, name)
        return
    yield statements.session(policy, runtime)
    yield statements.provider(runtime)
    yield statements.outputs(policy, evidence, runtime)
    for output in runtime.outputs:
        yield statements.reference(policy, runtime, output)
        yield statements.finite(runtime, output)
        compared = comparisons.numeric(runtime_policy.bounds, output)
        logits = statements.logits_of(policy, output)
        if logits is not None:
            compared += comparisons.classification(policy, runtime_policy.bounds, output, logits)
        bounded = [comparison for comparison in compared if comparison.bound is not None]
        if not bounded:
            yield statements.unbounded(runtime, output)
        yield from (comparisons.check(comparison, runtime, output) for comparison in bounded)
