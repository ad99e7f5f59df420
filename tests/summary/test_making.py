"""The story of a decision."""

from __future__ import annotations

from typing import Any

from gate.decision.decide import decide
from gate.policy.sections import RuntimePolicy
from gate.records.evidence import Cost, Latency
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.builders import evidence, policy, runtime_evidence
from tests.report.samples import failed, passed


def test_a_story_is_exact_through_json() -> None:
    for decision, measured in (passed(), failed()):
        story = summarize(decision, measured)
        text = story.to_json()
        assert Summary.from_json(text).to_json() == text


def told(**overrides: Any) -> Summary:
    """Of a file that is right, within bounds on its cost or not."""
    bounds = policy().runtimes["ort-cpu"].bounds
    bounds = bounds.model_copy(update={"latency_ratio": 0.5, "memory_mb": 100.0})
    asked = policy(runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)})
    batch = Latency(batch_size=32, batches=9, median_ms=20.0, p95_ms=20.0)
    single = batch.model_copy(update={"batch_size": 1, "median_ms": 1.0})
    cost = Cost(single=single)
    fields = {"latency": batch, "cost": cost, "memory_bytes": 150_000_000} | overrides
    measured = evidence(
        runtimes=(runtime_evidence("ort-cpu", **fields),),
        reference_latency=batch,
        reference_cost=cost,
    )
    return summarize(decide(asked, measured, decided_at="now"), measured)


def test_what_is_slow_and_large_is_blamed_by_its_name() -> None:
    story = told()
    assert (story.headline.verdict, story.headline.cause) == ("FAIL", "cost")
    assert story.headline.blamed == "ort-cpu"
    assert story.headline.sentence == (
        "ort-cpu is slower than the policy allows: latency_ratio 1, allowed 0.5"
    )
    assert [finding.cause for finding in story.findings] == ["cost"]
    assert {check.name for check in story.findings[0].checks} == {"latency_ratio", "memory_mb"}


def test_what_nobody_timed_is_a_lack_of_evidence() -> None:
    story = told(cost=None, memory_bytes=None)
    assert (story.headline.verdict, story.headline.cause) == ("ERROR", "evidence")
