"""The matrix of runtimes."""

from __future__ import annotations

from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import decide
from gate.summary.summarize import proof_of
from tests.builders import evidence, output_parity, policy, runtime_evidence
from tests.report.samples import failed, passed


def test_a_runtime_that_passed_shows_what_came_nearest() -> None:
    rows = {row.runtime: row for row in proof_of(*passed())}
    row = rows["ort-cpu"]
    assert (row.state, row.provider) == ("passed", "CPUExecutionProvider")
    assert row.nodes
    assert row.worst is not None
    assert row.strain is not None
    assert 0.0 < row.strain <= 1.0
    assert row.agreement == 1.0


def test_a_runtime_without_its_device_says_why() -> None:
    row = next(row for row in proof_of(*passed()) if row.runtime == "ort-cuda")
    assert row.state == "waived"
    assert row.reason is not None
    assert "CUDA" in row.reason
    assert row.worst is None


def test_what_fails_is_the_worst_however_much_of_another_bound_is_used() -> None:
    row = next(row for row in proof_of(*failed()) if row.runtime == "ort-cpu")
    assert row.state == "failed"
    assert row.worst is not None
    assert row.worst.verdict == "FAIL"


def test_a_runtime_that_broke_says_how() -> None:
    broken = runtime_evidence("ort-cpu", outputs=(), failure="Reshape failed")
    measured = evidence(runtimes=(broken, runtime_evidence("ort-cpu-optimized")))
    rows = proof_of(decide(policy(), measured, decided_at="now"), measured)
    row = next(row for row in rows if row.runtime == "ort-cpu")
    assert (row.state, row.reason) == ("failed", "Reshape failed")


def test_an_error_alone_is_not_judged() -> None:
    constant = output_parity(reference_constant=True, max_abs_diff=1e-6)
    measured = evidence(runtimes=(runtime_evidence("ort-cpu", outputs=(constant,)),))
    rows = proof_of(decide(policy(), measured, decided_at="now"), measured)
    assert next(row for row in rows if row.runtime == "ort-cpu").state in ("failed", "not judged")


def test_what_is_waived_is_never_the_worst() -> None:
    decision, measured = passed()
    waived = CheckResult(
        name="probe_value_far",
        runtime="ort-cpu",
        observed=9.0,
        bound=1.0,
        relation="<=",
        verdict=Verdict.WAIVED,
        explanation="noise_ratio is 9 on this input, allowed <= 1. Nobody can judge it.",
    )
    beside = decision.model_copy(update={"checks": (*decision.checks, waived)})
    assert proof_of(beside, measured) == proof_of(decision, measured)
