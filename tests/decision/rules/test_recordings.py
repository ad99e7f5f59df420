"""Rules for recorded outputs cover origin, missing probes, and fields that only a run has."""

from __future__ import annotations

import pytest

from gate import Evidence, Policy, Verdict, decide
from gate.records.evidence import Cost, Latency
from gate.records.runtime import RuntimeIdentity
from gate.summary.render import render_check
from tests import builders
from tests.policy.test_recorded import policy

RECORDED_FIELDS = {
    "recording": f"sha256:{'0' * 64}",
    "runtime": "TensorRT 10.3",
    "recorded_at": "2026-11-20T12:00:00+00:00",
}


def evidence(policy: Policy, **fields) -> Evidence:
    good = builders.evidence()
    cpu = good.runtime("ort-cpu")
    outputs = tuple(output.model_copy(update={"stability": None}) for output in cpu.outputs)
    identity = RuntimeIdentity(
        kind="recorded", provider="recorded", bounds="cuda", precision="float32",
        options=policy.runtimes["phone"].options, device="Jetson Orin Nano",
    )  # fmt: skip
    phone = cpu.model_copy(
        update={
            "runtime": "phone", "identity": identity, "providers_active": ("recorded",),
            "nodes_per_provider": {}, "session_options": RECORDED_FIELDS, "latency": None,
            "memory_bytes": None, "outputs": outputs, **fields,
        }
    )  # fmt: skip
    return good.model_copy(update={"runtimes": (*good.runtimes, phone)})


def decide_recording(policy: Policy, **fields):
    stored = Evidence.from_json(evidence(policy, **fields).to_json())
    decision = decide(policy, stored, decided_at="now")
    return decision, {check.name: check for check in decision.checks if check.runtime == "phone"}


REQUIRED, LENIENT = policy(), policy(options={"probes": "when_recorded"})


def test_recording_check_names_runtime_and_device():
    decision, checks = decide_recording(REQUIRED)
    assert decision.verdict is Verdict.PASS, decision.problems
    assert "TensorRT 10.3 computed it on Jetson Orin Nano" in render_check(checks["recording"])


@pytest.mark.parametrize("key", RECORDED_FIELDS)
def test_recording_without_origin_fails(key):
    _, checks = decide_recording(
        REQUIRED, session_options={k: v for k, v in RECORDED_FIELDS.items() if k != key}
    )
    assert checks["recording"].verdict is Verdict.FAIL


def test_recording_with_cost_or_stability_fails():
    latency = Latency(batch_size=1, batches=1, median_ms=1.0, p95_ms=1.0)
    outputs = builders.evidence().runtime("ort-cpu").outputs
    costs = ({"latency": latency}, {"cost": Cost(single=latency)}, {"memory_bytes": 1})
    for fields in (*costs, {"outputs": outputs}):
        _, checks = decide_recording(REQUIRED, **fields)
        assert checks["recording"].verdict is Verdict.FAIL


@pytest.mark.parametrize("fields", [{"probes": ()}, {"unprobed": ("zeros",)}])
def test_missing_probes_are_waived_only_when_policy_allows(fields):
    decision, checks = decide_recording(REQUIRED, **fields)
    assert (decision.verdict, checks["probes"].verdict) == (Verdict.ERROR, Verdict.ERROR)
    assert "gate samples export" in render_check(checks["probes"], "remedy")
    decision, checks = decide_recording(LENIENT, **fields)
    assert (decision.verdict, checks["probes"].verdict) == (Verdict.PASS, Verdict.WAIVED)
    assert "The policy allows" in render_check(checks["probes"])


def test_differing_probe_is_never_waived():
    wrong = builders.probe_parity("bright", noise_ratio=1e6, relative_diff=1.0)
    good = builders.evidence().runtime("ort-cpu").probes
    decision, checks = decide_recording(LENIENT, probes=(*good, wrong))
    assert decision.verdict is Verdict.FAIL
    assert checks["probe_bright"].verdict is Verdict.FAIL


def test_executing_runtime_needs_all_probes():
    good = builders.evidence()
    without_probe = good.runtime("ort-cpu").model_copy(update={"unprobed": ("zeros",)})
    rest = [runtime for runtime in good.runtimes if runtime.runtime != "ort-cpu"]
    incomplete = good.model_copy(update={"runtimes": (without_probe, *rest)})
    decision = decide(builders.policy(), incomplete, decided_at="now")
    assert decision.verdict is Verdict.ERROR


def test_cost_bounds_on_a_recording_are_an_error():
    bounds = REQUIRED.runtimes["phone"].bounds
    bounded = bounds.model_copy(update={"latency_ratio": 2.0, "memory_mb": 100.0})
    phone = REQUIRED.runtimes["phone"].model_copy(update={"bounds": bounded})
    bounded_policy = REQUIRED.model_copy(update={"runtimes": {**REQUIRED.runtimes, "phone": phone}})
    decision, checks = decide_recording(bounded_policy)
    assert decision.verdict is Verdict.ERROR
    assert checks["latency_ratio"].verdict is checks["memory_mb"].verdict is Verdict.ERROR
    assert checks["latency_ratio"].params["problems"] == [{"code": "not_timed"}]
