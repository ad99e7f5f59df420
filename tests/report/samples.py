"""Decisions that every report has to show, and a file whose names attack the report."""

from __future__ import annotations

from gate import Decision, Evidence, decide
from tests.builders import evidence, output_parity, policy, runtime_evidence

HOSTILE = "lo|g[red]\x1b[31m_<script>alert(1)</script>$x`*\n#h"


def passed() -> tuple[Decision, Evidence]:
    """CPU passed, CUDA waived."""
    return _judged(evidence())


def failed(output: str = "logits") -> tuple[Decision, Evidence]:
    """One runtime off by far, with NaN, and an output of the given name."""
    bad = output_parity(name=output, max_abs_diff=0.66, mean_abs_diff=float("nan"))
    return _judged(
        evidence(
            runtimes=tuple(
                runtime_evidence(runtime.runtime, outputs=(bad,)) if runtime.outputs else runtime
                for runtime in evidence().runtimes
            )
        )
    )


def _judged(seen: Evidence) -> tuple[Decision, Evidence]:
    return decide(policy(), seen, decided_at="2026-01-01T00:00:00+00:00"), seen
