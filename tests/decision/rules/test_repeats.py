"""A reference that does not repeat itself proves nothing."""

from __future__ import annotations

import math

import pytest

from gate.decision.check_result import Verdict
from gate.decision.decide import decide
from tests import builders


@pytest.mark.parametrize(
    ("spread", "verdict"),
    [(0.0, Verdict.PASS), (1e-6, Verdict.PASS), (2e-4, Verdict.ERROR), (1.0, Verdict.ERROR),
     (math.inf, Verdict.ERROR), (math.nan, Verdict.ERROR), (-1.0, Verdict.ERROR)],
)  # fmt: skip
def test_a_spread_beyond_rounding_is_an_error(spread: float, verdict: Verdict) -> None:
    evidence = builders.evidence(reference_spread=spread)
    decision = decide(builders.policy(), evidence, decided_at="2026-01-01T00:00:00+00:00")
    (found,) = [check for check in decision.checks if check.name == "repeats"]
    assert found.verdict is verdict
    assert decision.passed is (verdict is Verdict.PASS)


def test_evidence_of_before_it_was_measured_is_decided_as_it_was() -> None:
    decision = decide(
        builders.policy(), builders.evidence(), decided_at="2026-01-01T00:00:00+00:00"
    )
    assert "repeats" not in {check.name for check in decision.checks}
