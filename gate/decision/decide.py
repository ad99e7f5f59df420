"""Run all checks, derive the verdict; compare two decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from pydantic import JsonValue

from gate.decision import (
    bound_rules,
    champion_rules,
    cost_rules,
    device_rules,
    evidence_rules,
    instrument_rules,
    metric_rules,
    output_rules,
    provenance_rules,
)
from gate.decision.bound_rules import check_metric
from gate.decision.check_result import CheckResult, Verdict
from gate.policy.output_roles import unmeasurable
from gate.policy.policy import Policy
from gate.policy.sections import RuntimePolicy
from gate.records.champion_comparison import ChampionComparison
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.outputs import OutputParity
from gate.records.runtime import RUNTIMES, RuntimeName
from gate.storage.digest import Digest
from gate.storage.record import Record, Sha256, added_field


def iter_checks(
    policy: Policy, evidence: Evidence, compared: ChampionComparison | None = None
) -> Iterator[CheckResult]:
    """Yield all checks in reading order.

    The order does not depend on the policy's file, whose order is not part of the policy's digest.
    """
    stated, policy = policy, policy.for_file(evidence.subject)
    yield evidence_rules.check_samples(policy, evidence)
    yield evidence_rules.check_determinism(policy, evidence)
    yield evidence_rules.check_measured(evidence)
    yield from evidence_rules.check_repeatability(evidence)
    yield from evidence_rules.check_half_precision(policy, evidence)
    yield from evidence_rules.check_validity(evidence)
    yield from instrument_rules.check_undefined(evidence)
    yield from evidence_rules.describe_inputs(evidence)
    yield from provenance_rules.check_export(policy, evidence)
    yield from output_rules.check_role_names(policy, evidence)
    if evidence.subject.parts:  # each part has its own graph
        for part in evidence.subject.parts:
            yield from _located(_part_checks(stated, evidence, part), part=part)
    else:
        yield from instrument_rules.check_graph(policy, evidence)
    yield from provenance_rules.check_preprocessing(policy, evidence)
    yield from metric_rules.check_measured(policy, evidence)
    yield from champion_rules.check_champion(policy, evidence, compared)
    third_party = sorted(set(policy.runtimes) - set(RUNTIMES))
    for name in (*RUNTIMES, *third_party):
        runtime_policy = policy.runtimes.get(name)
        if runtime_policy is not None and runtime_policy.required != "never":
            checks = [*_located(_runtime_checks(policy, evidence, name), runtime=name)]
            checks = bound_rules.mark_left_to_rounding(evidence, checks)
            if runtime_policy.exceeded == "warn" and evidence.runtime(name) is not None:
                checks = [_as_warning(runtime_policy, check) for check in checks]
            yield from checks


def _located(checks: Iterable[CheckResult], **location: str) -> Iterator[CheckResult]:
    """Yield the checks with the part, runtime or output that they are about."""
    return (check.model_copy(update=location) for check in checks)


def _as_warning(runtime_policy: RuntimePolicy, check: CheckResult) -> CheckResult:
    """Return the check as a warning, unless a required runtime is missing."""
    required = check.name == "runtime" and runtime_policy.required == "always"
    if required or check.verdict in (Verdict.PASS, Verdict.WAIVED):
        return check
    return check.with_code(verdict=Verdict.WAIVED, warns=True)


def _part_checks(policy: Policy, evidence: Evidence, name: str) -> Iterator[CheckResult]:
    measured = evidence.parts.get(name)
    yield evidence_rules.check_part(evidence.subject.parts[name], measured)
    if measured is not None:
        outputs = [spec.name for spec in measured.subject.outputs]
        yield from iter_checks(policy.for_part(outputs), measured)


def _runtime_checks(policy: Policy, evidence: Evidence, name: RuntimeName) -> Iterator[CheckResult]:
    runtime, bounds = evidence.runtime(name), policy.runtimes[name].bounds
    if runtime is None or not runtime.measured:
        yield evidence_rules.check_missing(policy, evidence, name)
        return
    yield evidence_rules.check_session(policy, evidence, runtime)
    yield evidence_rules.check_provider(policy, evidence, runtime)
    yield from evidence_rules.check_precision(policy, runtime)
    yield from evidence_rules.check_server(policy, runtime)
    yield from evidence_rules.check_recording(policy, runtime)
    yield from device_rules.check_device(policy, bounds, evidence, runtime)
    yield output_rules.check_measured(policy, evidence, runtime)
    yield from output_rules.check_variation(evidence, runtime)
    samples_fail = False
    for output in runtime.outputs:
        numbers = [] if unmeasurable(output) else _numbers(policy, evidence, runtime, output)
        samples_fail = samples_fail or any(check.verdict is Verdict.FAIL for check in numbers)
        checks = _output_checks(policy, evidence, runtime, output, numbers)
        yield from _located(checks, output=output.name)
    if samples_fail:
        yield from evidence_rules.check_fast_path(evidence)
    yield from instrument_rules.check_probes(policy, evidence, runtime, samples_fail=samples_fail)
    yield from instrument_rules.check_concurrency(policy, runtime)
    yield from metric_rules.check_runtime_metrics(policy, evidence, runtime)
    yield from cost_rules.check_costs(bounds, evidence, runtime)


def _numbers(
    policy: Policy, evidence: Evidence, runtime: RuntimeEvidence, output: OutputParity
) -> list[CheckResult]:
    """Return the checks of the bounded numbers of an output."""
    bounds = policy.bounds_for(runtime.runtime, output.name)
    bounds = bound_rules.with_exceptions(bounds, evidence, output.name)
    checks = [
        bound_rules.mark_unproven(policy, check_metric(metric, samples=output.samples), output)
        for metric in output_rules.bounded_metrics(policy, bounds, output)
        if metric.bound is not None
    ]
    checks += bound_rules.check_crossings(policy, bounds, runtime, output)
    if policy.role_for(output.name) not in ("mask", "indices"):  # which must be equal
        checks += bound_rules.check_noise(policy, bounds, evidence, output)
        checks += bound_rules.check_noise_floor(policy, bounds, evidence, output)
    noise = {each.name: each.noise for each in runtime.outputs}
    few_draws, unexamined = output.noise is not None and output.noise.few_draws, runtime.unexamined
    if (few_draws or unexamined) and not bound_rules.is_refused(policy, runtime.runtime, noise):
        return bound_rules.mark_unexamined(checks, unexamined=unexamined > 0, few_draws=few_draws)
    return checks


def _output_checks(
    policy: Policy,
    evidence: Evidence,
    runtime: RuntimeEvidence,
    output: OutputParity,
    numbers: Sequence[CheckResult],
) -> Iterator[CheckResult]:
    """Yield the checks of one output. `numbers`: those of its bounded numbers."""
    lacking = unmeasurable(output)
    if lacking is not None:
        yield output_rules.check_unmeasurable(policy, evidence, output, lacking)
        yield output_rules.check_finite(policy, output)
        return
    yield output_rules.check_reference(policy, output)
    yield output_rules.check_finite(policy, output)
    yield from output_rules.check_role(policy, output)
    if all(check.verdict is Verdict.WAIVED for check in numbers):
        yield output_rules.check_unbounded(policy, runtime, output)
    yield from numbers
    if policy.judges(output.name):
        yield from bound_rules.check_near_ties(policy, output)
    yield from instrument_rules.check_stability(policy.runtimes[runtime.runtime].bounds, output)


_TEXTS = ("code", "params", "explanation", "remedy")
"""Fields of a check that no conclusion depends on."""

_OLD_TEXTS = (
    "constant, equal bit for bit",
    "judged in the chain",
    "not claimed",
    "left to the probes",
)
"""Texts that replace a number in records of version 1.0. Newer records have codes."""


class Decision(Record):
    """The verdict with its checks, bound to the digests of file, policy and evidence."""

    schema_version: Literal[1] = 1
    subject_sha256: Sha256
    policy_sha256: Sha256
    evidence_sha256: Sha256
    verdict: Verdict
    checks: tuple[CheckResult, ...]
    runtimes: tuple[RuntimeName, ...]
    """The measured runtimes that passed every check that is not waived."""
    incumbent: ChampionComparison | None = added_field(None)
    """The serving version, if the policy requires a comparison."""
    tried: dict[str, JsonValue] = added_field({})
    """Values that replaced those of the policy for a trial. Such a verdict can't promote a file."""
    decided_at: str
    """UTC, ISO 8601, set by the caller."""

    def conclusion(self) -> Digest:
        """Return a digest that is equal for decisions that differ in texts and time only."""
        plain = self.to_plain()
        del plain["decided_at"]
        for check in plain["checks"]:
            for name in _TEXTS:
                check.pop(name, None)
            if check["observed"] in _OLD_TEXTS:
                check["observed"] = None
        return Digest.from_json(plain)

    @property
    def passed(self) -> bool:
        """True only for PASS."""
        return self.verdict is Verdict.PASS

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The checks with the verdict FAIL or ERROR."""
        return tuple(c for c in self.checks if c.verdict in (Verdict.FAIL, Verdict.ERROR))

    @property
    def waived(self) -> tuple[CheckResult, ...]:
        """The waived checks, which are shown with every pass."""
        return tuple(c for c in self.checks if c.verdict is Verdict.WAIVED)


def decide(
    policy: Policy,
    evidence: Evidence,
    *,
    incumbent: ChampionComparison | None = None,
    decided_at: str,
) -> Decision:
    """Judge the evidence by the policy. `incumbent`: the serving version, which is ignored unless
    the policy requires a comparison.

    Total: never raises on bad evidence; a check that can't be judged is an ERROR.
    Monotone: making any metric worse never turns a FAIL into a PASS.
    PASS only if every check is PASS or WAIVED and at least one measured runtime passed.
    """
    compared = None if policy.incumbent is None else incumbent
    checks = tuple(iter_checks(policy, evidence, compared))
    passed = _passed_runtimes(policy, evidence, checks)
    return Decision(
        subject_sha256=evidence.subject.sha256,
        policy_sha256=policy.digest(),
        evidence_sha256=evidence.digest(),
        verdict=_verdict(checks, passed),
        checks=checks,
        runtimes=passed,
        incumbent=compared,
        tried=policy.tried,
        decided_at=decided_at,
    )


def _passed_runtimes(
    policy: Policy, evidence: Evidence, checks: tuple[CheckResult, ...]
) -> tuple[RuntimeName, ...]:
    """Return the measured runtimes of the policy without a check that is FAIL or ERROR."""
    refused = (Verdict.FAIL, Verdict.ERROR)
    failed = {check.runtime for check in checks if check.verdict in refused}
    return tuple(
        runtime.runtime
        for runtime in evidence.runtimes
        if runtime.outputs and runtime.runtime in policy.runtimes and runtime.runtime not in failed
    )


def _verdict(checks: tuple[CheckResult, ...], passed: tuple[RuntimeName, ...]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.ERROR in verdicts or not passed:
        return Verdict.ERROR
    return Verdict.PASS
