"""`decide` passes valid evidence and rejects each kind of invalid evidence."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Decision, Evidence, Verdict
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.instruments import GraphFinding
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER, RUNTIMES
from gate.summary.render import render_check
from tests import builders
from tests.builders import absent, class_parity, judge, output_parity, runtime_evidence

NAN, INF = math.nan, math.inf


def with_runtime(runtime=None, **fields) -> Evidence:
    """Return valid evidence in which the record of `ort-cpu` is replaced."""
    replacement = runtime or runtime_evidence("ort-cpu", **fields)
    good = builders.evidence()
    return good.model_copy(
        update={
            "runtimes": tuple(replacement if r.runtime == "ort-cpu" else r for r in good.runtimes)
        }
    )


def with_output(**fields) -> Evidence:
    return with_runtime(outputs=(output_parity(**fields),))


def with_classes(**fields) -> Evidence:
    return with_output(classification=class_parity(**fields))


def with_confidence(**fields) -> Evidence:
    return with_classes(confidence=class_parity().confidence.model_copy(update=fields))


def with_accuracy(**fields) -> Evidence:
    accuracy = class_parity().accuracy
    assert accuracy is not None
    return with_classes(accuracy=accuracy.model_copy(update=fields))


def with_noise(**fields) -> Evidence:
    return with_output(noise=builders.noise_parity(**fields))


def with_stability(**fields) -> Evidence:
    return with_output(stability=builders.stability_parity(**fields))


def with_probe(**fields) -> Evidence:
    probe = builders.probe_parity(**fields)
    return with_runtime(probes=(*runtime_evidence("ort-cpu").probes, probe))


def with_findings(count: int) -> Evidence:
    findings = tuple(
        GraphFinding(code="training_mode", place=str(index), detail="") for index in range(count)
    )
    return builders.evidence(graph=builders.graph_report(findings=findings))


def with_determinism(**fields) -> Evidence:
    good = builders.evidence()
    determinism = good.environment.determinism.model_copy(update=fields)
    environment = good.environment.model_copy(update={"determinism": determinism})
    return good.model_copy(update={"environment": environment})


def with_samples(samples: int) -> Evidence:
    good = builders.evidence()
    return good.model_copy(update={"dataset": good.dataset.model_copy(update={"samples": samples})})


def test_valid_evidence_passes_and_lists_waived_checks():
    evidence = builders.evidence()
    decision = judge(evidence)
    assert decision.verdict is Verdict.PASS
    assert decision.passed
    assert decision.problems == ()
    assert decision.runtimes == ("ort-cpu", "ort-cpu-optimized")
    assert [c.title for c in decision.waived] == [
        f"{name} / runtime" for name, traits in RUNTIMES.items() if traits.cuda
    ]
    assert decision.subject_sha256 == evidence.subject.sha256
    assert decision.evidence_sha256 == evidence.digest()
    assert decision.policy_sha256 == builders.policy().digest()
    assert Decision.from_json(decision.to_json()) == decision


METRICS = {
    "max_abs_diff": lambda x: with_output(max_abs_diff=x),
    "mean_abs_diff": lambda x: with_output(mean_abs_diff=x),
    "scaled_diff": lambda x: with_output(scaled_diff=x),
    "l2_logits": lambda x: with_output(l2_max=x),
    "l2_probabilities": lambda x: with_classes(l2_probabilities_max=x),
    "confidence_diff": lambda x: with_confidence(max=x),
    "confidence_over_1_percent": lambda x: with_confidence(bands=(1.0, x, 0.0, 0.0)),
    "confidence_over_5_percent": lambda x: with_confidence(bands=(1.0, 0.0, x, 0.0)),
    "confidence_over_10_percent": lambda x: with_confidence(bands=(1.0, 0.0, 0.0, x)),
    "top1_agreement": lambda x: with_classes(top1_agreement=1.0 - x),
    "top1_lower_bound": lambda x: with_classes(
        top1_disagreements=5 if math.isfinite(x) else 0,
        top1_agreement=1.0 if math.isfinite(x) else NAN,
    ),
    "top5_agreement": lambda x: with_classes(top5_agreement=1.0 - x),
    "accuracy_drop": lambda x: with_accuracy(drop=x),
    "noise_ratio": lambda x: with_noise(ratio=1e4 * x),
    "noise_peak": lambda x: with_noise(peak=1e4 * x),
    "noise_diff": lambda x: with_noise(diff=1e4 * x),
    "repeatability_ratio": lambda x: with_stability(repeatability_ratio=1e4 * x),
    "batch_invariance_ratio": lambda x: with_stability(batch_invariance_ratio=1e4 * x),
}


@pytest.mark.parametrize("value", [0.02, NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", METRICS)
def test_metric_beyond_bound_fails_its_check(name, value):
    decision = judge(METRICS[name](value))
    assert decision.verdict is Verdict.FAIL
    problem = {c.name: c for c in decision.problems}[name]
    assert problem.runtime == "ort-cpu"
    assert problem.output == "logits"
    assert render_check(problem, "remedy")
    assert name in render_check(problem)
    assert "ort-cpu" not in decision.runtimes


def test_each_bounded_metric_is_tested():
    good = judge(builders.evidence())
    bounded = {check.name for check in good.checks if check.bound is not None} - {"samples"}
    families = ("probe_", "graph_")
    assert {name for name in bounded if not name.startswith(families)} == set(METRICS)


@pytest.mark.parametrize(
    ("evidence", "name", "verdict"),
    [
        (with_samples(0), "samples", Verdict.ERROR),
        (with_samples(299), "samples", Verdict.ERROR),
        (with_samples(401), "outputs", Verdict.ERROR),
        (builders.evidence(runtimes=()), "measured", Verdict.ERROR),
        (builders.evidence(runtimes=tuple(map(absent, RUNTIMES))), "measured", Verdict.ERROR),
        (with_runtime(absent("ort-cpu")), "runtime", Verdict.ERROR),
        (with_runtime(failure="out of memory"), "runtime", Verdict.FAIL),
        (with_runtime(outputs=(), failure="extra output"), "runtime", Verdict.FAIL),
        (with_runtime(outputs=()), "runtime", Verdict.ERROR),
        (with_runtime(runtime_evidence("ort-cpu-optimized")), "measured", Verdict.ERROR),
        (with_runtime(runtime_evidence("ort-cpu-optimized")), "runtime", Verdict.ERROR),
        (with_output(name="other"), "outputs", Verdict.ERROR),
        (with_output(samples=0), "outputs", Verdict.ERROR),
        (with_output(elements=0), "empty", Verdict.ERROR),
        (with_runtime(outputs=(output_parity(), output_parity(name="more"))), "outputs", Verdict.ERROR),
        (with_output(classification=None), "outputs", Verdict.ERROR),
        (with_output(nonfinite_mismatched=1), "finite", Verdict.FAIL),
        (with_output(nonfinite_same=1), "finite", Verdict.FAIL),
        (with_classes(nan_rows=1), "finite", Verdict.FAIL),
        (with_output(nonfinite_reference=4000), "nonfinite", Verdict.ERROR),
        (with_output(reference_constant=True), "reference", Verdict.ERROR),
        (with_output(reference_abs_max=0.0), "reference", Verdict.ERROR),
        (with_output(reference_abs_max=NAN), "reference", Verdict.ERROR),
        (with_classes(predicted_classes=1), "reference", Verdict.ERROR),
        (with_classes(accuracy=None), "accuracy_drop", Verdict.ERROR),
        (with_classes(top1_disagreements=1), "top1_agreement", Verdict.FAIL),
        (with_runtime(providers_active=()), "provider", Verdict.FAIL),
        (with_runtime(providers_active=(CUDA_PROVIDER, CPU_PROVIDER)), "provider", Verdict.FAIL),
        (with_runtime(nodes_per_provider={}), "provider", Verdict.FAIL),
        (with_runtime(nodes_per_provider={CPU_PROVIDER: 0}), "provider", Verdict.FAIL),
        (with_runtime(nodes_per_provider={CPU_PROVIDER: 1, CUDA_PROVIDER: 1}), "provider", Verdict.FAIL),
        (with_runtime(session_options={}), "session", Verdict.FAIL),
        (with_runtime(session_options={"graph_optimization_level": "ORT_ENABLE_ALL"}), "session", Verdict.FAIL),
        (with_determinism(tf32_matmul=True), "determinism", Verdict.FAIL),
        (with_determinism(tf32_cudnn=True), "determinism", Verdict.FAIL),
        (with_determinism(cudnn_deterministic=False), "determinism", Verdict.FAIL),
        (with_determinism(cudnn_benchmark=True), "determinism", Verdict.FAIL),
        (with_determinism(grad=True), "determinism", Verdict.FAIL),
        (with_determinism(seed=1), "determinism", Verdict.FAIL),
        (with_determinism(algorithms=True), "determinism", Verdict.FAIL),
    ],
)  # fmt: skip
def test_invalid_evidence_never_passes(evidence, name, verdict):
    decision = judge(evidence)
    assert decision.verdict is not Verdict.PASS
    problems = [c for c in decision.problems if c.name == name]
    assert problems
    assert {c.verdict for c in problems} == {verdict}
    assert all(render_check(c, "remedy") for c in problems)


def test_negative_seed_equals_its_unsigned_value():
    for seed, problems in ((2**64 - 3, set()), (3, {"determinism"})):
        decision = judge(with_determinism(seed=seed), determinism={"seed": -3})
        assert {check.name for check in decision.problems} == problems


def test_cuda_fallback_fails_even_when_cuda_is_optional():
    fallback = runtime_evidence("ort-cuda", providers_active=(CPU_PROVIDER,))
    partly = runtime_evidence("ort-cuda", fallback_nodes=("Conv:conv1",))
    for cuda in (fallback, partly):
        decision = judge(builders.evidence(runtimes=(*builders.evidence().runtimes[1:3], cuda)))
        assert decision.verdict is Verdict.FAIL
        assert "provider" in {c.name for c in decision.problems if c.runtime == "ort-cuda"}


def test_missing_runtime_record_is_an_error():
    """Return an ERROR if a CUDA runtime has no record, not even of its absence."""
    runtimes = tuple(r for r in builders.evidence().runtimes if r.runtime != "ort-cuda")
    decision = judge(builders.evidence(runtimes=runtimes))
    assert decision.verdict is Verdict.ERROR


def test_runtime_outside_the_policy_is_ignored():
    policy = builders.policy()
    only_cpu = {"ort-cpu": policy.runtimes["ort-cpu"]}
    good = runtime_evidence("ort-cpu")
    broken = runtime_evidence("ort-cpu-optimized", failure="boom", outputs=())
    decision = judge(builders.evidence(runtimes=(good, broken)), runtimes=only_cpu)
    assert decision.verdict is Verdict.PASS
    assert decision.runtimes == ("ort-cpu",)


def test_policy_logits_select_classified_outputs():
    boxes = output_parity(name="boxes", classification=class_parity(top1_agreement=0.5))
    evidence = builders.with_outputs(output_parity(), boxes)
    assert judge(evidence).verdict is Verdict.FAIL
    assert judge(evidence, logits=("logits",)).verdict is Verdict.PASS
    assert judge(evidence, logits=("logits", "more")).verdict is Verdict.ERROR


def test_nan_in_same_places_passes_only_when_policy_allows():
    with_nan = with_output(nonfinite_same=7, nonfinite_reference=7)
    assert judge(with_nan).verdict is Verdict.FAIL
    assert judge(with_nan, nonfinite="same_places").verdict is Verdict.PASS
    one_side = with_output(nonfinite_same=7, nonfinite_reference=7, nonfinite_mismatched=1)
    assert judge(one_side, nonfinite="same_places").verdict is Verdict.FAIL
    only_nan = with_output(nonfinite_same=4000, nonfinite_reference=4000)
    assert judge(only_nan, nonfinite="same_places").verdict is Verdict.ERROR


@pytest.mark.parametrize(("waive", "diff", "verdict"), [
    (("empty",), 0.0, Verdict.PASS), ({"y": ("nonfinite", "empty")}, 0.0, Verdict.PASS),
    ((), 0.0, Verdict.ERROR), (("nonfinite",), 0.0, Verdict.ERROR), (("empty",), INF, Verdict.ERROR),
    ({"logits": ("empty",)}, 0.0, Verdict.ERROR), ({"other": ("empty",)}, 0.0, Verdict.ERROR),
])  # fmt: skip
def test_empty_output_passes_only_when_waived(waive, diff, verdict):
    empty = output_parity(name="y", elements=0, max_abs_diff=diff, classification=None)
    decision = judge(builders.with_outputs(output_parity(), empty), waive=waive)
    assert decision.verdict is verdict
    waived = {each.name for each in decision.waived if each.output == "y"}
    assert waived == ({"empty"} if verdict is Verdict.PASS else set())
    names = {each.name for each in decision.problems}
    assert names <= {"empty", "role"}
    assert ("role" in names) is ("other" in waive)


def test_nan_rows_are_excluded_from_agreement():
    """Compute the agreement without the rows of NaN: one disagreement in two valid rows."""
    classes = class_parity(nan_rows=398, top1_disagreements=1, top1_agreement=0.5)
    decision = judge(with_output(nonfinite_same=3980, classification=classes),
                     nonfinite="same_places")  # fmt: skip
    observed = {c.name: c for c in decision.problems}
    assert observed["top1_agreement"].observed == 0.5
    all_nan = class_parity(nan_rows=400, top1_agreement=NAN)
    decision = judge(
        with_output(nonfinite_same=4000, classification=all_nan), nonfinite="same_places"
    )
    assert {"top1_agreement", "top1_lower_bound"} <= {c.name for c in decision.problems}


def test_output_without_bound_is_an_error():
    """Require a bound for an output without classes; bounds on classes do not cover it."""
    bounds = Bounds(top1_agreement=1.0)
    policy = {
        "precision": "reduced",
        "runtimes": {"ort-cpu": RuntimePolicy(required="always", bounds=bounds)},
    }
    boxes = output_parity(name="boxes", classification=None)
    decision = judge(builders.with_outputs(output_parity(), boxes), **policy)
    assert decision.verdict is Verdict.ERROR
    assert [problem.title for problem in decision.problems] == ["ort-cpu / boxes / bounds"]
    assert judge(builders.evidence(), **policy).verdict is Verdict.PASS


FAULTS = METRICS | {
    "candidate rms": lambda x: with_noise(candidate_rms=x),
    "probe ratio": lambda x: with_probe(noise_ratio=1e4 * x),
    "probe diff": lambda x: with_probe(noise_ratio=None, relative_diff=x),
    "findings": lambda x: with_findings(min(int(1e2 * x), 3) if math.isfinite(x) else 3),
}
error_sizes = st.floats(0.0, 1e9) | st.floats(0.0, 1.0) | st.sampled_from([NAN, INF])


@given(st.sampled_from(sorted(FAULTS)), error_sizes, error_sizes)
def test_larger_error_never_turns_fail_into_pass(name, a, b):
    """Treat NaN and infinity as the largest errors."""
    better, worse = sorted((a, b), key=lambda x: x if math.isfinite(x) else INF)
    if not judge(FAULTS[name](better)).passed:
        assert not judge(FAULTS[name](worse)).passed


@given(st.sampled_from(sorted(FAULTS)), error_sizes, st.sampled_from(sorted(FAULTS)), error_sizes)
def test_two_faults_together_never_pass(fault, amount, other_fault, other_amount):
    """Combine a fault of each CPU runtime, with the graph findings of both."""
    first, second = FAULTS[fault](amount), FAULTS[other_fault](other_amount)
    if judge(first).passed and judge(second).passed:
        return
    optimized = runtime_evidence("ort-cpu-optimized")
    optimized_fields = {
        "runtime": "ort-cpu-optimized",
        "session_options": optimized.session_options,
    }
    findings = (*first.graph.findings, *second.graph.findings)
    pair = first.model_copy(
        update={
            "graph": builders.graph_report(findings=findings),
            "runtimes": (
                first.runtime("ort-cpu"),
                second.runtime("ort-cpu").model_copy(update=optimized_fields),
                *(r for r in first.runtimes if r.absent_reason),
            ),
        }
    )
    assert not judge(pair).passed


def test_runtime_order_in_policy_does_not_change_digests():
    in_order = builders.policy()
    reversed_order = in_order.model_copy(
        update={"runtimes": dict(reversed(in_order.runtimes.items()))}
    )
    assert reversed_order.digest() == in_order.digest()
    first, second = (judge(builders.evidence(), by=each) for each in (in_order, reversed_order))
    assert first.digest() == second.digest()
