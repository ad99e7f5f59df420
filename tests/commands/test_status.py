from __future__ import annotations

import pytest

from gate.commands.result import ExitCode


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("ERROR", 2)])
def test_a_verdict_is_an_exit_code(verdict: str, code: int) -> None:
    assert int(ExitCode.from_verdict(verdict)) == code


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [
        ("promoted", "PASS", 0),
        ("passed", "PASS", 0),
        ("unchanged", "PASS", 0),
        ("dry_run", "PASS", 0),
        ("rolled_back", None, 0),
        ("refused", "FAIL", 1),
        ("refused", "ERROR", 2),
        # These bytes were rolled back, or a reviewer rejected them.
        ("refused", "PASS", 1),
        ("refused", None, 1),
    ],
)
def test_a_refusal_is_what_its_decision_is(outcome: str, verdict: str | None, code: int) -> None:
    assert int(ExitCode.from_promotion(outcome, verdict)) == code
