"""The decision: a pure function of policy and evidence. No clock, file, network, torch, MLflow."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from gate.decision.checks import CheckResult, Verdict
from gate.decision.rules import all_checks
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.records.incumbent import Incumbent
from gate.records.runtime import RuntimeName
from gate.storage.record import Record, Sha256, later


class Decision(Record):
    """The verdict with all that led to it, bound to the digests of file, policy and evidence."""

    schema_version: Literal[1] = 1
    subject_sha256: Sha256
    policy_sha256: Sha256
    evidence_sha256: Sha256
    verdict: Verdict
    checks: tuple[CheckResult, ...]
    runtimes: tuple[RuntimeName, ...]
    """The runtimes that were measured and passed every check that is not waived."""
    incumbent: Incumbent | None = later(None)
    """The version that served, where the policy asks for it."""
    tried: dict[str, JsonValue] = later({})
    """Values that were tried out in the place of the policy's: such a verdict promotes nothing."""
    decided_at: str
    """UTC, ISO 8601, passed in by the caller."""

    @property
    def passed(self) -> bool:
        """True only for PASS."""
        return self.verdict is Verdict.PASS

    @property
    def problems(self) -> tuple[CheckResult, ...]:
        """The checks that are FAIL or ERROR."""
        return tuple(c for c in self.checks if c.verdict in (Verdict.FAIL, Verdict.ERROR))

    @property
    def waived(self) -> tuple[CheckResult, ...]:
        """The checks that are WAIVED; shown wherever a pass is shown."""
        return tuple(c for c in self.checks if c.verdict is Verdict.WAIVED)


def decide(
    policy: Policy, evidence: Evidence, *, incumbent: Incumbent | None = None, decided_at: str
) -> Decision:
    """Judge the evidence by the policy. `incumbent`: the version that serves now; a policy that
    does not ask for it takes no notice.

    Total: never raises on bad evidence; what can't be judged is an ERROR check.
    Monotone: making any metric worse never turns a FAIL into a PASS.
    PASS only if every check is PASS or WAIVED and at least one measured runtime passed.
    """
    compared = None if policy.incumbent is None else incumbent
    checks = tuple(all_checks(policy, evidence, compared))
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
    """Measured runtimes of the policy without any check that is FAIL or ERROR."""
    refused = (Verdict.FAIL, Verdict.ERROR)
    spoiled = {check.runtime for check in checks if check.verdict in refused}
    return tuple(
        runtime.runtime
        for runtime in evidence.runtimes
        if runtime.outputs and runtime.runtime in policy.runtimes and runtime.runtime not in spoiled
    )


def _verdict(checks: tuple[CheckResult, ...], passed: tuple[RuntimeName, ...]) -> Verdict:
    verdicts = {check.verdict for check in checks}
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    if Verdict.ERROR in verdicts or not passed:
        return Verdict.ERROR
    return Verdict.PASS
