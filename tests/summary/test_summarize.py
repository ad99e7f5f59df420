"""The summary of a decision: its headline, runtimes, costs and next steps."""

from __future__ import annotations

import math
import re
import shlex
from typing import Any

import pytest

from gate import CheckResult, Decision, Evidence, Verdict, decide
from gate.cli import COMMANDS, main
from gate.policy.sections import RuntimePolicy
from gate.records.evidence import Cost, Latency
from gate.records.instruments import GraphFinding
from gate.summary.summarize import SummaryInputs, costs_of, summarize
from gate.summary.summary import COST_HEADINGS, RuntimeProof, Summary
from tests.builders import absent, evidence, noise_parity, output_parity, policy, runtime_evidence
from tests.frozen.store import input_names
from tests.frozen.test_decisions import Records
from tests.report.samples import failed, passed


def summarize_with(**overrides: Any) -> Summary:
    """Return the summary of a correct file with bounds on its cost."""
    bounds = policy().runtimes["ort-cpu"].bounds
    bounds = bounds.model_copy(update={"latency_ratio": 0.5, "memory_mb": 100.0})
    settings = policy(runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)})
    batch = Latency(batch_size=32, batches=9, median_ms=20.0, p95_ms=20.0)
    single = batch.model_copy(update={"batch_size": 1, "median_ms": 1.0})
    cost = Cost(single=single)
    fields = {"latency": batch, "cost": cost, "memory_bytes": 150_000_000} | overrides
    measured = evidence(
        runtimes=(runtime_evidence("ort-cpu", **fields),),
        reference_latency=batch,
        reference_cost=cost,
    )
    return summarize(decide(settings, measured, decided_at="now"), measured)


def test_latency_and_memory_findings_name_the_runtime():
    summary = summarize_with()
    assert (summary.headline.verdict, summary.headline.cause) == ("FAIL", "cost")
    assert summary.headline.blamed == "ort-cpu"
    assert summary.headline.sentence == (
        "ort-cpu is slower than the policy allows: latency_ratio 1, allowed 0.5"
    )
    assert [finding.cause for finding in summary.findings] == ["cost"]
    assert {check.name for check in summary.findings[0].checks} == {"latency_ratio", "memory_mb"}


NOW = "2026-01-01T00:00:00+00:00"


def judgment(**given: Any) -> SummaryInputs:
    decision = decide(policy(), evidence(), decided_at=NOW)
    return SummaryInputs(decision=decision, evidence=evidence(), policy=policy(), **given)


@pytest.mark.parametrize(("given", "field", "shown"), [
    ({"model_name": "digits"}, "name", "digits"),
    ({"signed_by": "ci 1234\x1b[31m"}, "signed_by", "ci 1234�[31m"),
])  # fmt: skip
def test_subject_is_named(given, field, shown):
    assert getattr(judgment().summary.subject, field) is None
    assert getattr(judgment(**given).summary.subject, field) == shown


@pytest.mark.parametrize(
    ("noise", "warned"),
    [
        ({"candidate_rms": 3e-4, "rounding_rms": 3e-4}, True),
        # below 1e-5 of the output's magnitude
        ({"candidate_rms": 3e-5, "rounding_rms": 3e-5}, False),
        ({"candidate_rms": 3e-4, "reference_rms": 3e-4}, False),  # PyTorch's error is as large
        ({"candidate_rms": 3e-4, "ratio": 300.0}, False),  # rejected, so that the bound explains it
    ],
)
def test_large_rounding_error_is_a_warning(noise, warned):
    output = output_parity(noise=noise_parity(**noise))
    measured = evidence(runtimes=(runtime_evidence("ort-cpu", outputs=(output,)),))
    summary = summarize(decide(policy(), measured, decided_at=NOW), measured)
    assert any("rounding error of this runtime" in line for line in summary.warnings) is warned


def proof(decision: Decision, measured: Evidence) -> dict[str, RuntimeProof]:
    return {row.runtime: row for row in summarize(decision, measured).proof}


def test_passed_runtime_shows_the_closest_bound():
    rows = proof(*passed())
    row, absent_row = rows["ort-cpu"], rows["ort-cuda"]
    assert (row.state, row.provider, row.agreement) == ("passed", "CPUExecutionProvider", 1.0)
    assert row.nodes
    assert row.worst is not None
    assert row.bound_usage is not None
    assert 0.0 < row.bound_usage <= 1.0
    assert (absent_row.state, absent_row.worst) == ("waived", None)
    assert "CUDA" in str(absent_row.reason)


def test_failed_check_is_the_worst():
    row = proof(*failed())["ort-cpu"]
    assert row.state == "failed"
    assert row.worst is not None
    assert row.worst.verdict == "FAIL"


def test_failed_runtime_shows_the_failure():
    broken = runtime_evidence("ort-cpu", outputs=(), failure="Reshape failed")
    measured = evidence(runtimes=(broken, runtime_evidence("ort-cpu-optimized")))
    row = proof(decide(policy(), measured, decided_at="now"), measured)["ort-cpu"]
    assert (row.state, row.reason) == ("failed", "Reshape failed")


def test_waived_check_is_never_the_worst():
    decision, measured = passed()
    waived = CheckResult(name="probe_value_far", runtime="ort-cpu", observed=9.0, bound=1.0,
                         relation="<=", verdict=Verdict.WAIVED, explanation="")  # fmt: skip
    more = decision.model_copy(update={"checks": (*decision.checks, waived)})
    assert proof(more, measured) == proof(decision, measured)


@pytest.mark.parametrize("name", [name for name in input_names() if name.startswith("story-")])
def test_one_fault_is_one_finding_with_valid_commands(name, capsys):
    """Waived checks do not count."""
    records = Records.read(name)
    decision = records.decide()
    summary = records.summary(decision)
    decisive = [finding for finding in summary.findings if finding.cause != "waived"]
    assert len(decisive) == 1, [finding.sentence for finding in decisive]
    assert set(decisive[0].checks) == set(decision.problems)
    assert summary.headline.remedy
    assert len(summary.headline.sentence) < 320
    texts = [summary.headline.sentence, summary.headline.remedy, *summary.notes]
    texts += [finding.sentence for finding in summary.findings]
    texts += [row.why for row in summary.check_rows]
    assert not [text for text in texts if "None" in text or "\n" in text]
    assert summary.steps
    for step in summary.steps:
        program, *words = shlex.split(str(step.command))
        assert (program, words[0] in COMMANDS) == ("gate", True)
        named = [word for word in words if re.fullmatch("[a-z]+", word)]
        assert main([*named[: 2 if words[0] == "preprocess" else 1], "--help"]) == 0
        help_text = capsys.readouterr().out
        assert [word for word in words if word.startswith("--") and word not in help_text] == []


def test_quantized_file_is_promoted_with_the_exact_file():
    decision, measured = passed()
    assert measured.graph is not None
    finding = GraphFinding(code="quantized", place="node", detail="8 nodes compute in integers")
    graph = measured.graph.model_copy(update={"findings": (finding,)})
    (step,) = summarize(decision, measured.model_copy(update={"graph": graph})).steps
    assert "gate promote EXACT.onnx" in str(step.command)
    assert "--twin MODEL.onnx --twin-report DIR" in str(step.command)


def test_check_command_is_repeated_in_the_steps():
    command = "gate check it.onnx --policy mine.yaml"
    steps = summarize(*failed()).with_command("gate check ", command).steps
    assert steps[-1].command == command
    assert not str(steps[0].command).startswith("gate check")


def latency(median_ms: float, batch_size: int = 1) -> Latency:
    return Latency(batch_size=batch_size, batches=9, median_ms=median_ms, p95_ms=2 * median_ms)


def test_cost_table_starts_with_pytorch_and_omits_absent_runtimes():
    cost = Cost(open_ms=12.0, first_ms=4.0, first_batch_size=1, single=latency(1.0),
                peak_bytes=700_000_000, cuda_bytes=512_000_000)  # fmt: skip
    runtime = runtime_evidence(
        "ort-cpu", latency=latency(10.0, 32), cost=cost, memory_bytes=30_000_000
    )
    reference = Cost(first_ms=9.0, single=latency(2.0))
    rows = costs_of(
        evidence(
            runtimes=(runtime, absent("ort-cuda")),
            reference_latency=latency(40.0, 32),
            reference_cost=reference,
        )
    )
    assert [row.cells for row in rows] == [
        ("PyTorch, CPU", "", "9 ms", "2 / 4 ms", "40 / 80 ms (32)", "", "", ""),
        ("ort-cpu", "12 ms", "4 ms", "1 / 2 ms", "10 / 20 ms (32)", "0.5 ×",
         "30 MB, CUDA 512 MB", "700 MB"),
    ]  # fmt: skip
    assert {len(row.cells) for row in rows} == {len(COST_HEADINGS)}


def test_missing_latency_is_shown_as_missing():
    runtime = runtime_evidence(
        "ort-cpu", latency=latency(math.nan, 32), cost=Cost(single=latency(1.0))
    )
    reference = Cost(single=latency(2.0))
    created = evidence(
        runtimes=(runtime,), reference_latency=latency(40.0, 32), reference_cost=reference
    )
    assert costs_of(created)[1].cells[5] == "nan ×"
    assert costs_of(evidence()) == ()
