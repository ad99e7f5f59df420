"""`decide` on good evidence, and on every way to spoil it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision, decide
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.evidence import Evidence, TensorSpec
from gate.records.runtime import CPU_PROVIDER, CUDA_PROVIDER, RUNTIMES
from gate.summary.render import render_check
from tests import builders
from tests.builders import absent, class_parity, output_parity, runtime_evidence

NAN, INF = math.nan, math.inf
AT = "2026-01-01T00:00:00+00:00"


def judge(evidence: Evidence, **policy) -> Decision:
    return decide(builders.policy(**policy), evidence, decided_at=AT)


def with_runtime(runtime=None, **fields) -> Evidence:
    """Good evidence but for `ort-cpu`."""
    spoiled = runtime or runtime_evidence("ort-cpu", **fields)
    good = builders.evidence()
    return good.model_copy(
        update={"runtimes": tuple(spoiled if r.runtime == "ort-cpu" else r for r in good.runtimes)}
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


def with_determinism(**fields) -> Evidence:
    good = builders.evidence()
    determinism = good.environment.determinism.model_copy(update=fields)
    environment = good.environment.model_copy(update={"determinism": determinism})
    return good.model_copy(update={"environment": environment})


def with_samples(samples: int) -> Evidence:
    good = builders.evidence()
    return good.model_copy(update={"dataset": good.dataset.model_copy(update={"samples": samples})})


def test_good_evidence_passes_and_shows_what_was_waived():
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


def test_all_five_runtimes_pass_together():
    decision = judge(builders.evidence(runtimes=tuple(map(runtime_evidence, RUNTIMES))))
    assert decision.verdict is Verdict.PASS
    assert decision.runtimes == tuple(RUNTIMES)
    assert decision.waived == ()


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
def test_a_bad_metric_fails_its_own_check(name, value):
    decision = judge(METRICS[name](value))
    assert decision.verdict is Verdict.FAIL
    problem = {c.name: c for c in decision.problems}[name]
    assert problem.runtime == "ort-cpu"
    assert problem.output == "logits"
    assert render_check(problem, "remedy")
    assert name in render_check(problem)
    assert "ort-cpu" not in decision.runtimes


def test_every_bounded_metric_is_in_the_table_above():
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
def test_spoiled_evidence_never_passes(evidence, name, verdict):
    decision = judge(evidence)
    assert decision.verdict is not Verdict.PASS
    problems = [c for c in decision.problems if c.name == name]
    assert problems
    assert {c.verdict for c in problems} == {verdict}
    assert all(render_check(c, "remedy") for c in problems)


def test_a_negative_seed_is_what_pytorch_makes_of_it():
    for seed, problems in ((2**64 - 3, set()), (3, {"determinism"})):
        decision = judge(with_determinism(seed=seed), determinism={"seed": -3})
        assert {check.name for check in decision.problems} == problems


def test_cuda_that_fell_back_fails_even_where_it_is_optional():
    fallback = runtime_evidence("ort-cuda", providers_active=(CPU_PROVIDER,))
    partly = runtime_evidence("ort-cuda", fallback_nodes=("Conv:conv1",))
    for cuda in (fallback, partly):
        decision = judge(builders.evidence(runtimes=(*builders.evidence().runtimes[1:3], cuda)))
        assert decision.verdict is Verdict.FAIL
        assert "provider" in {c.name for c in decision.problems if c.runtime == "ort-cuda"}


def test_a_missing_record_is_no_waiver():
    """Without a word on CUDA, nobody knows whether it was there."""
    runtimes = tuple(r for r in builders.evidence().runtimes if r.runtime != "ort-cuda")
    decision = judge(builders.evidence(runtimes=runtimes))
    assert decision.verdict is Verdict.ERROR


def test_a_runtime_of_no_interest_is_not_judged():
    policy = builders.policy()
    only_cpu = {"ort-cpu": policy.runtimes["ort-cpu"]}
    good = runtime_evidence("ort-cpu")
    broken = runtime_evidence("ort-cpu-optimized", failure="boom", outputs=())
    decision = judge(builders.evidence(runtimes=(good, broken)), runtimes=only_cpu)
    assert decision.verdict is Verdict.PASS
    assert decision.runtimes == ("ort-cpu",)


def test_logits_can_be_named():
    boxes = output_parity(name="boxes", classification=class_parity(top1_agreement=0.5))
    good = builders.evidence()
    spec = good.subject.outputs[0]
    subject = good.subject.model_copy(
        update={"outputs": (spec, spec.model_copy(update={"name": "boxes"}))}
    )
    runtimes = tuple(
        r.model_copy(update={"outputs": (*r.outputs, boxes)}) if r.outputs else r
        for r in good.runtimes
    )
    evidence = good.model_copy(update={"subject": subject, "runtimes": runtimes})
    assert judge(evidence).verdict is Verdict.FAIL
    assert judge(evidence, logits=("logits",)).verdict is Verdict.PASS
    assert judge(evidence, logits=("logits", "more")).verdict is Verdict.ERROR


def test_nan_in_the_same_places_is_parity_where_the_policy_says_so():
    gaps = with_output(nonfinite_same=7, nonfinite_reference=7)
    assert judge(gaps).verdict is Verdict.FAIL
    assert judge(gaps, nonfinite="same_places").verdict is Verdict.PASS
    one_side = with_output(nonfinite_same=7, nonfinite_reference=7, nonfinite_mismatched=1)
    assert judge(one_side, nonfinite="same_places").verdict is Verdict.FAIL
    nothing_else = with_output(nonfinite_same=4000, nonfinite_reference=4000)
    assert judge(nothing_else, nonfinite="same_places").verdict is Verdict.ERROR


def test_rows_of_nan_are_no_samples_of_agreement():
    """One disagreement among two rows that have an answer, and 398 that have none."""
    classes = class_parity(nan_rows=398, top1_disagreements=1, top1_agreement=0.5)
    decision = judge(with_output(nonfinite_same=3980, classification=classes),
                     nonfinite="same_places")  # fmt: skip
    seen = {c.name: c for c in decision.problems}
    assert seen["top1_agreement"].observed == 0.5
    none = class_parity(nan_rows=400, top1_agreement=NAN)
    decision = judge(with_output(nonfinite_same=4000, classification=none), nonfinite="same_places")
    assert {"top1_agreement", "top1_lower_bound"} <= {c.name for c in decision.problems}


def test_an_output_without_any_bound_never_passes():
    """Bounds on classes say nothing about an output that has none."""
    bounds = Bounds(top1_agreement=1.0)
    policy = {
        "precision": "reduced",
        "runtimes": {"ort-cpu": RuntimePolicy(required="always", bounds=bounds)},
    }
    evidence = with_runtime(
        outputs=(output_parity(), output_parity(name="boxes", classification=None))
    )
    specs = tuple(
        TensorSpec(name=n, dtype="float32", shape=("batch",)) for n in ("logits", "boxes")
    )
    subject = evidence.subject.model_copy(update={"outputs": specs})
    decision = judge(evidence.model_copy(update={"subject": subject}), **policy)
    assert decision.verdict is Verdict.ERROR
    assert [problem.title for problem in decision.problems] == ["ort-cpu / boxes / bounds"]
    assert judge(builders.evidence(), **policy).verdict is Verdict.PASS


worse = st.floats(min_value=0.0, max_value=1e9) | st.just(NAN) | st.just(INF)


@given(st.sampled_from(sorted(METRICS)), worse, st.sampled_from(sorted(METRICS)), worse)
def test_making_a_metric_worse_never_turns_a_refusal_into_a_pass(one, amount, other, more):
    first = METRICS[one](amount)
    if judge(first).verdict is Verdict.PASS:
        return
    broken = next(r for r in first.runtimes if r.runtime == "ort-cpu")
    second = next(r for r in METRICS[other](more).runtimes if r.runtime == "ort-cpu")
    both = first.model_copy(
        update={
            "runtimes": (
                broken,
                second.model_copy(update={"runtime": "ort-cpu-optimized"}),
                *(r for r in first.runtimes if r.absent_reason),
            )
        }
    )
    assert judge(both).verdict is not Verdict.PASS


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_larger_difference_never_passes_where_a_smaller_fails(a, b):
    small, large = sorted((a, b))
    if judge(with_output(max_abs_diff=small)).verdict is Verdict.FAIL:
        assert judge(with_output(max_abs_diff=large)).verdict is Verdict.FAIL


def test_the_order_in_the_policy_s_file_does_not_matter():
    here = builders.policy()
    there = here.model_copy(update={"runtimes": dict(reversed(here.runtimes.items()))})
    assert there.digest() == here.digest()
    first, second = (
        decide(policy, builders.evidence(), decided_at="2026-01-01T00:00:00+00:00")
        for policy in (here, there)
    )
    assert first.digest() == second.digest()
