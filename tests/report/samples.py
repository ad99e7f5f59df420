"""Decisions that every report must show, and one with malicious names."""

from __future__ import annotations

from gate import Decision, Evidence, decide
from tests.builders import evidence, output_parity, policy, runtime_evidence

HOSTILE = "lo|g[red]\x1b[31m_<script>alert(1)</script>$x`*\n#h"


def passed() -> tuple[Decision, Evidence]:
    """Return a decision with CPU passed and CUDA waived."""
    return _judged(evidence())


def failed(output: str = "logits") -> tuple[Decision, Evidence]:
    """Return a decision with one runtime beyond its bounds, NaN, and an output of this name."""
    bad = output_parity(name=output, max_abs_diff=0.66, mean_abs_diff=float("nan"))
    return _judged(
        evidence(
            runtimes=tuple(
                runtime_evidence(runtime.runtime, outputs=(bad,)) if runtime.outputs else runtime
                for runtime in evidence().runtimes
            )
        )
    )


def _judged(measured: Evidence) -> tuple[Decision, Evidence]:
    return decide(policy(), measured, decided_at="2026-01-01T00:00:00+00:00"), measured
