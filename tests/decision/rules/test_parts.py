"""Parts of a multi-file release use its policy; quantized intermediate outputs are checked in the
chain.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from gate import CheckResult, Decision, Evidence, Policy, Verdict
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.evidence import SubjectPart
from gate.records.outputs import OutputParity
from tests import builders
from tests.registry.releases import twin_policy

QUANTIZED = twin_policy()
FLIPS = builders.class_parity(top1_agreement=0.4, top1_disagreements=240)
"""Class statistics in which the argmax changes for 240 of 400 samples."""


def output(name: str, **fields: Any) -> OutputParity:
    return builders.output_parity(name=name, **fields)


def evidence_with_outputs(*outputs: OutputParity, **fields: Any) -> Evidence:
    runtime = builders.runtime_evidence("ort-cpu", **fields)
    return builders.with_outputs(*outputs, runtimes=(runtime,))


def release(part: Evidence, chain: Evidence | None = None) -> Evidence:
    """Return the evidence of a release with one part and its chain."""
    chain = chain or evidence_with_outputs(output("logits"))
    subject_parts = {"encoder": SubjectPart(file="encoder.onnx", sha256=part.subject.sha256)}
    subject = chain.subject.model_copy(
        update={"parts": subject_parts, "external_data": ("encoder.onnx",)}
    )
    return chain.model_copy(update={"subject": subject, "parts": {"encoder": part}, "graph": None})


def judge(evidence: Evidence, policy: Policy = QUANTIZED) -> Decision:
    return builders.judge(evidence, by=policy)


def problems(decision: Decision) -> list[tuple[str, str, Verdict]]:
    return [(check.part or "", check.name, check.verdict) for check in decision.problems]


def part_check(decision: Decision, name: str, part: str | None = "encoder") -> CheckResult:
    (check,) = [c for c in decision.checks if c.name == name and c.part == part]
    return check


FEATURES = output("features", classification=FLIPS, max_abs_diff=7.0, scaled_diff=2.0)


def test_quantized_part_is_checked_in_the_chain():
    decision = judge(release(evidence_with_outputs(FEATURES)))
    assert decision.verdict is Verdict.PASS, problems(decision)
    check = part_check(decision, "bounds")
    assert (check.verdict, check.code) == (Verdict.PASS, "checked_in_chain")
    names = {c.name for c in decision.checks if c.part == "encoder"}
    assert names.isdisjoint({"top1_agreement", "confidence_over_5_percent", "agreement"})


def test_intermediate_features_have_no_agreement_check():
    one_class = builders.class_parity(predicted_classes=1)
    decision = judge(release(evidence_with_outputs(output("features", classification=one_class))))
    assert decision.passed, problems(decision)
    assert [c.name for c in decision.checks if c.part and c.name == "agreement"] == []


def test_chain_outputs_keep_all_bounds():
    chain = evidence_with_outputs(output("logits", classification=FLIPS))
    decision = judge(release(evidence_with_outputs(FEATURES), chain))
    assert problems(decision) == [("", "top1_agreement", Verdict.FAIL)]


def test_chain_output_without_bound_is_an_error():
    policy = twin_policy(
        task="auto",
        runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=Bounds(unequal_share=0.0))},
    )
    chain = evidence_with_outputs(output("boxes", classification=None))
    decision = judge(release(evidence_with_outputs(FEATURES), chain), policy)
    assert problems(decision) == [("", "bounds", Verdict.ERROR)]


@pytest.mark.parametrize("named", [{"logits": ("features",)}, {"outputs": {"features": "logits"}}])
def test_output_named_in_policy_is_checked_in_its_part(named):
    chain = evidence_with_outputs(output("features"))
    decision = judge(release(evidence_with_outputs(FEATURES), chain), twin_policy(**named))
    assert problems(decision) == [("encoder", "top1_agreement", Verdict.FAIL)]


@pytest.mark.parametrize("role", [None, "tensor"])
def test_numeric_bounds_apply_to_the_chain(role):
    bounds = Bounds(scaled_diff=0.3)
    policy = twin_policy(
        task="tensors", runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)}
    )
    chain = evidence_with_outputs(output("features" if role else "boxes", scaled_diff=0.1))
    if role:
        policy = policy.model_copy(update={"outputs": {"features": role}})
    decision = judge(release(evidence_with_outputs(FEATURES), chain), policy)
    assert problems(decision) == ([("encoder", "scaled_diff", Verdict.FAIL)] if role else [])
    chain = evidence_with_outputs(output("boxes", scaled_diff=0.4))
    assert not judge(release(evidence_with_outputs(output("features")), chain), policy).passed


def test_exact_release_is_checked_in_each_part():
    chain = evidence_with_outputs(output("logits"))
    decision = judge(release(evidence_with_outputs(FEATURES), chain), builders.policy())
    assert ("encoder", "max_abs_diff", Verdict.FAIL) in problems(decision)


@pytest.mark.parametrize(("spoil", "name", "verdict"), [
    ({"nonfinite_mismatched": 1}, "finite", Verdict.FAIL),
    ({"samples": 1}, "outputs", Verdict.ERROR),
    ({"reference_abs_max": math.nan}, "reference", Verdict.ERROR),
])  # fmt: skip
def test_invalid_part_never_passes(spoil, name, verdict):
    part = evidence_with_outputs(FEATURES.model_copy(update=spoil))
    assert ("encoder", name, verdict) in problems(judge(release(part)))


def test_failed_replaced_or_missing_part_never_passes():
    broken = evidence_with_outputs(FEATURES)
    failed = broken.runtimes[0].model_copy(update={"outputs": (), "failure": "it broke"})
    broken = broken.model_copy(update={"runtimes": (failed,)})
    assert not judge(release(broken)).passed
    good = release(evidence_with_outputs(FEATURES))
    other_subject = good.parts["encoder"].subject.model_copy(
        update={"sha256": builders.digest("other")}
    )
    parts = {"encoder": good.parts["encoder"].model_copy(update={"subject": other_subject})}
    assert ("encoder", "part", Verdict.ERROR) in problems(
        judge(good.model_copy(update={"parts": parts}))
    )
    without_part = good.model_copy(update={"parts": {}})
    assert problems(judge(without_part)) == [("encoder", "part", Verdict.ERROR)]


@pytest.mark.parametrize("kind", ["batch", "search"])
def test_probe_numbers_of_parts_are_shown_but_failures_fail(kind):
    def evidence_with_probe(**fields: Any) -> Evidence:
        probe = builders.probe_parity("more", kind=kind, **fields)
        observed = evidence_with_outputs(FEATURES)
        runtime = observed.runtimes[0]
        changed = runtime.model_copy(update={"probes": (*runtime.probes, probe)})
        return observed.model_copy(update={"runtimes": (changed,)})

    deviating = {"noise_ratio": None, "relative_diff": 0.95}
    decision = judge(release(evidence_with_probe(**deviating)))
    assert decision.passed, problems(decision)
    assert part_check(decision, "probe_more").code == "checked_in_chain"
    policy = twin_policy(logits=("features",))
    chain = evidence_with_outputs(output("features"))
    with_stable_classes = FEATURES.model_copy(update={"classification": builders.class_parity()})
    runtimes = evidence_with_probe(**deviating).runtimes
    part = builders.with_outputs(with_stable_classes, runtimes=runtimes)
    assert problems(judge(release(part, chain), policy)) == [
        ("encoder", "probe_more", Verdict.FAIL)
    ]
    bad = evidence_with_probe(noise_ratio=None, relative_diff=None, failure="another shape")
    assert problems(judge(release(bad))) == [("encoder", "probe_more", Verdict.FAIL)]
