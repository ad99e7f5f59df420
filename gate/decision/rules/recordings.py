"""Outputs that were computed elsewhere: what a pass of them stands on, and what it can't show."""

from __future__ import annotations

from collections.abc import Iterator

from gate.decision.checks import CheckResult
from gate.decision.rules.statements import statement
from gate.policy.policy import Policy
from gate.policy.recorded import is_recorded
from gate.records.evidence import RuntimeEvidence


def recorded(policy: Policy, runtime: RuntimeEvidence) -> Iterator[CheckResult]:
    """One check of a recording: that it says where it comes from, and that nothing is recorded of
    it that only a run could show."""
    if not is_recorded(policy, runtime.runtime):
        return
    options = runtime.session_options
    lacking = [key for key in ("recording", "runtime", "recorded_at") if not options.get(key)]
    problems = [f"it does not say its {', '.join(lacking)}"] if lacking else []
    if any(output.stability is not None for output in runtime.outputs) or _has_cost(runtime):
        problems.append("it has numbers of a run, and a recording does not run")
    device = runtime.identity.device if runtime.identity else None
    yield statement(
        "recording",
        problems=problems,
        place=(runtime.runtime, None),
        fine=f"Computed elsewhere: by {options.get('runtime')} on {device or 'an unnamed device'}, "
        f"recorded {options.get('recorded_at')}, by the word of whoever packed it "
        f"({options.get('recording')}). It was not run here: repeatability, batch invariance, "
        "latency and memory are unmeasured.",
    )


def _has_cost(runtime: RuntimeEvidence) -> bool:
    return bool(runtime.latency or runtime.cost or runtime.memory_bytes is not None)
