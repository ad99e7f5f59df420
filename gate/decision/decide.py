"""The rules: policy and evidence in, checks out. Pure, total, fail closed."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.checks import CheckResult, Verdict
from gate.decision.rules import (
    comparisons,
    costs,
    devices,
    export,
    incumbent,
    instruments,
    noise,
    outputs,
    parts,
    preprocessing,
    recordings,
    roles,
    statements,
    thresholds,
)
from gate.policy.policy import Policy, RuntimePolicy
from gate.policy.roles import all_nonfinite
from gate.records.evidence import Evidence
from gate.records.incumbent import Incumbent
from gate.records.runtime import RUNTIMES, RuntimeName


def all_checks(
    policy: Policy, evidence: Evidence, compared: Incumbent | None = None
) -> Iterator[CheckResult]:
    """All checks, in the order in which people should read them.

    It does not follow the order in the policy's file, which is no part of the policy's digest.
    """
    yield statements.samples(policy, evidence)
    yield statements.determinism(policy, evidence)
    yield statements.measured_once(evidence)
    yield from statements.repeats(evidence)
    yield from statements.inputs(evidence)
    yield from export.export_checks(policy, evidence)
    yield from roles.named(policy, evidence)
    if evidence.subject.parts:  # each has a graph of its own
        yield from _of_parts(policy, evidence)
    else:
        yield from instruments.graph(policy, evidence)
    yield from preprocessing.parity(policy, evidence)
    yield from incumbent.beside(policy, evidence, compared)
    others = sorted(set(policy.runtimes) - set(RUNTIMES))
    for name in (*RUNTIMES, *others):
        runtime_policy = policy.runtimes.get(name)
        if runtime_policy is not None and runtime_policy.required != "never":
            yield from _of_runtime(policy, runtime_policy, evidence, name)


def _of_parts(policy: Policy, evidence: Evidence) -> Iterator[CheckResult]:
    for name, part in evidence.subject.parts.items():
        measured = evidence.parts.get(name)
        yield parts.whole(part, measured, name)
        if measured is not None:
            own = policy.of_part([spec.name for spec in measured.subject.outputs])
            for check in all_checks(own, measured):
                yield check.model_copy(update={"part": name})


def _of_runtime(
    policy: Policy, runtime_policy: RuntimePolicy, evidence: Evidence, name: RuntimeName
) -> Iterator[CheckResult]:
    runtime = evidence.runtime(name)
    if runtime is None or not runtime.measured:
        chained = bool(evidence.subject.parts)
        yield statements.missing(runtime_policy, runtime, name, chained=chained)
        return
    yield statements.session(policy, runtime)
    yield statements.provider(policy, runtime)
    yield from statements.precision(policy, runtime)
    yield from recordings.recorded(policy, runtime)
    if devices.compares(name):
        yield devices.device(policy, runtime_policy.bounds, evidence, runtime)
    yield outputs.measured(policy, evidence, runtime)
    yield from outputs.varies(runtime)
    samples_fail = False
    for output in runtime.outputs:
        if output.elements == 0:  # `outputs` says so; it has no numbers
            continue
        yield outputs.reference(policy, runtime, output)
        yield outputs.finite(policy, runtime, output)
        yield from roles.role(policy, runtime, output)
        bounds = policy.bounds_of(name, output.name)
        compared = roles.comparisons(policy, bounds, output)
        checks = [
            comparisons.judged(policy, comparisons.check(c, runtime, output), output)
            for c in compared
            if c.bound is not None
        ]
        if not all_nonfinite(output):
            checks += thresholds.crossings(policy, bounds, runtime, output)
        if roles.judges_noise(policy, output):
            checks += noise.noise(policy, bounds, evidence, (runtime, output))
        if all(c.verdict is Verdict.WAIVED for c in checks) and not all_nonfinite(output):
            yield outputs.unbounded(policy, runtime, output)
        yield from checks
        if policy.judges(output.name):
            yield from comparisons.near_ties(policy, runtime, output)
        yield from instruments.stability(runtime_policy.bounds, runtime, output)
        samples_fail = samples_fail or any(check.verdict is Verdict.FAIL for check in checks)
    yield from instruments.probes(policy, evidence, runtime, samples_fail=samples_fail)
    yield from costs.costs(runtime_policy.bounds, evidence, runtime)
