"""The matrix of runtimes: what ran where, how that is proven, how near it came to its bounds."""

from __future__ import annotations

import math
from typing import Literal

from gate.decision.checks import CheckResult, Verdict
from gate.decision.decision import Decision
from gate.records.evidence import Evidence, RuntimeEvidence
from gate.records.runtime import RUNTIMES
from gate.story.story import RuntimeProof
from gate.story.wording import printable
from gate.story.words import is_about_samples, strain

State = Literal["passed", "failed", "not judged", "waived", "not measured"]


def proof_of(decision: Decision, evidence: Evidence) -> tuple[RuntimeProof, ...]:
    """One row for each runtime that was judged or measured, in the order of their names."""
    shown = {check.runtime for check in decision.checks if check.runtime}
    shown |= {runtime.runtime for runtime in evidence.runtimes}
    return tuple(
        _row(name, decision, evidence.runtime(name))
        for name in (*RUNTIMES, *sorted(shown - set(RUNTIMES)))
        if name in shown
    )


def _row(name: str, decision: Decision, runtime: RuntimeEvidence | None) -> RuntimeProof:
    checks = [check for check in decision.checks if check.runtime == name]
    judged = [check for check in checks if check.verdict is not Verdict.WAIVED]
    strained = [(strain(check), check) for check in judged if not is_about_samples(check)]
    numbered = [(used, check) for used, check in strained if used is not None]
    used, worst = max(numbered, key=lambda pair: _rank(*pair), default=(None, None))
    agreements = [c.observed for c in checks if c.name == "top1_agreement"]
    numbers = [value for value in agreements if isinstance(value, float)]
    return RuntimeProof(
        runtime=name,
        state=_state(checks, decision, name),
        provider=runtime.providers_active[0] if runtime and runtime.providers_active else None,
        nodes=_nodes(runtime),
        worst=worst,
        strain=used,
        agreement=min(numbers, default=None),
        latency_ms=runtime.latency.median_ms if runtime and runtime.latency else None,
        reason=_reason(checks, runtime),
    )


def _rank(used: float, check: CheckResult) -> tuple[bool, float]:
    """What fails goes before what has used more of its bound."""
    return check.verdict is Verdict.FAIL, math.inf if math.isnan(used) else used


def _state(checks: list[CheckResult], decision: Decision, name: str) -> State:
    verdicts = {check.verdict for check in checks}
    if Verdict.FAIL in verdicts:
        return "failed"
    if Verdict.ERROR in verdicts:
        return "not judged"
    if name in decision.runtimes:
        return "passed"
    return "waived" if Verdict.WAIVED in verdicts else "not measured"


def _nodes(runtime: RuntimeEvidence | None) -> str | None:
    if runtime is None or not runtime.measured:
        return None
    if runtime.nodes_per_provider:
        counts = runtime.nodes_per_provider.items()
        return ", ".join(
            f"{count} on {name.removesuffix('ExecutionProvider')}" for name, count in counts
        )
    return printable(runtime.session_options.get("device", "")) or None


def _reason(checks: list[CheckResult], runtime: RuntimeEvidence | None) -> str | None:
    """Why it has no numbers."""
    if runtime is not None and runtime.measured:
        return None
    why = next((check.explanation for check in checks if check.name == "runtime"), None)
    if runtime is not None:
        why = runtime.failure or runtime.absent_reason or why
    return printable(why) if why else "the policy asks for none"
