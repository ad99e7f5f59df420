"""Missing or invalid records of noise, stability, probes and graph findings never pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from gate import Evidence, Policy, Verdict
from gate.policy.overrides import with_overrides
from gate.policy.sections import Bounds, Instruments, RuntimePolicy
from gate.records.evidence import ExportRecord, TensorSpec
from gate.records.instruments import GraphFinding, ReferenceValidity, TraceSearch, WeightsReport
from gate.records.runtime import RUNTIMES
from gate.storage.record import Record
from gate.summary.render import render_check
from gate.summary.summarize import summarize
from tests import builders
from tests.builders import find_check, judge

NAN, INF = math.nan, math.inf
FAIL, ERROR, PASS, WAIVED = Verdict.FAIL, Verdict.ERROR, Verdict.PASS, Verdict.WAIVED


def with_output_fields(**fields: Any) -> Evidence:
    """Return valid evidence in which these fields of the output of all runtimes are replaced."""
    return builders.with_outputs(builders.output_parity(**fields))


def evidence_with_noise(**fields: Any) -> Evidence:
    return with_output_fields(noise=builders.noise_parity(**fields))


def evidence_with_stability(**fields: Any) -> Evidence:
    return with_output_fields(stability=builders.stability_parity(**fields))


def with_probes(*probes: Any, **evidence: Any) -> Evidence:
    """Return valid evidence in which the probes of `ort-cpu` are replaced."""
    bad = builders.runtime_evidence("ort-cpu", probes=probes)
    good = builders.evidence(**evidence)
    runtimes = tuple(bad if r.runtime == "ort-cpu" else r for r in good.runtimes)
    return good.model_copy(update={"runtimes": runtimes})


def with_probes_and_batches(*probes: Any, **evidence: Any) -> Evidence:
    """Return evidence with these probes and all batch probes."""
    batches = [p for p in builders.runtime_evidence("ort-cpu").probes if p.kind == "batch"]
    return with_probes(*batches, *probes, **evidence)


def evidence_with_graph(**fields: Any) -> Evidence:
    return builders.evidence(graph=builders.graph_report(**fields))


def findings_fields(code: str) -> dict[str, Any]:
    return {"findings": (GraphFinding(code=code, place="Conv:conv1", detail="is odd"),)}


def evidence_without_float64(**evidence: Any) -> Evidence:
    """Return evidence without a float64 reference."""
    return with_output_fields(noise=None).model_copy(
        update={"noise_unmeasured": "the model can't run in float64", **evidence}
    )


def export_record(dynamic_batch: bool | None) -> ExportRecord:
    settings = {} if dynamic_batch is None else {"dynamic_batch": dynamic_batch}
    return ExportRecord(strategy="traced", settings=settings)


NOISE_METRICS = ("noise_ratio", "noise_peak", "noise_diff")
make_probe = builders.probe_parity
NO_NUMBERS = {"noise_ratio": None, "relative_diff": None}


@pytest.mark.parametrize(
    ("evidence", "name", "verdict"),
    [
        (with_output_fields(noise=None), "noise_ratio", ERROR),
        (evidence_without_float64(), "noise_peak", ERROR),
        (evidence_without_float64(), "noise_diff", ERROR),
        (evidence_with_noise(samples=0), "noise_ratio", ERROR),
        (evidence_with_noise(samples=31), "noise_ratio", ERROR),
        (evidence_with_noise(elements=0), "noise_peak", ERROR),
        (evidence_with_noise(samples=31, ratio=1e6), "noise_ratio", FAIL),
        (evidence_with_noise(ratio=0.0, candidate_rms=1e-3), "noise_ratio", FAIL),
        (evidence_with_noise(ratio=0.0, reference_rms=0.0, truth_rms=0.0), "noise_ratio", FAIL),
        (evidence_with_noise(candidate_rms=NAN), "noise_ratio", FAIL),
        (evidence_with_noise(reference_rms=INF), "noise_ratio", FAIL),
        (evidence_with_noise(rounding_rms=NAN), "noise_ratio", FAIL),
        (evidence_with_noise(rounding_rms=INF), "noise_ratio", FAIL),
        (evidence_with_noise(ratio=0.0, candidate_rms=1e-3, rounding_rms=1e-4), "noise_ratio", FAIL),
        (evidence_with_noise(ratio=0.5, candidate_rms=1e-3, rounding_rms=2e-3), "noise_ratio", PASS),
        (evidence_with_noise(truth_rms=NAN), "finite", FAIL),
        (with_output_fields(stability=None), "repeatability_ratio", ERROR),
        (evidence_with_stability(samples=0), "batch_invariance_ratio", ERROR),
        (evidence_with_stability(unit=NAN), "finite", FAIL),
        (evidence_with_stability(repeatability=NAN), "finite", FAIL),
        (with_probes(), "probes", ERROR),
        (with_probes(make_probe(**NO_NUMBERS, inapplicable="too small")), "probes", ERROR),
        (with_probes(make_probe()), "probes", ERROR),
        (with_probes(make_probe("b", kind="batch", batch_size=1)), "probes", ERROR),
        (with_probes(*(make_probe(f"b{n}", kind="batch", batch_size=n) for n in (1, 4, 7))), "probes", ERROR),
        (with_probes_and_batches(make_probe(**NO_NUMBERS)), "probe_zeros", ERROR),
        (with_probes_and_batches(make_probe(noise_ratio=None)), "probe_zeros", PASS),
        (with_probes_and_batches(make_probe(noise_ratio=None, relative_diff=2e-3)), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(noise_ratio=33.0)), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(noise_ratio=NAN)), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(noise_ratio=INF)), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(noise_ratio=-1.0)), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(relative_diff=NAN)), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(failure="other shapes")), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(**NO_NUMBERS, failure="other shapes")), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(**NO_NUMBERS, failure="x", inapplicable="y")), "probe_zeros", FAIL),
        (with_probes_and_batches(make_probe(inapplicable="too small")), "probe_zeros", ERROR),
        (with_probes_and_batches(make_probe(noise_ratio=None, inapplicable="too small")), "probe_zeros", ERROR),
        (with_probes_and_batches(make_probe(**NO_NUMBERS, inapplicable="too small")), "probe_zeros", PASS),
        (with_probes_and_batches(trace_search=None), "probes", ERROR),
        (builders.evidence(graph=None), "graph", ERROR),
        (builders.evidence(graph=None, graph_unread="no model"), "graph", ERROR),
        (builders.evidence(graph_unread="no model"), "graph", ERROR),
        (evidence_with_graph(nodes=0, operators={}), "graph", ERROR),
        (evidence_with_graph(operators={}), "graph", ERROR),
        (evidence_with_graph(external_data={"w.bin": "sha256:0"}), "graph", ERROR),
        (evidence_with_graph(**findings_fields("training_mode")), "graph_training_mode", FAIL),
        (evidence_with_graph(**findings_fields("zero_initializer")), "graph_zero_initializer", FAIL),
        (evidence_with_graph(**findings_fields("nonfinite_initializer")), "graph_nonfinite_initializer", FAIL),
        (evidence_with_graph(**findings_fields("float16")), "graph_float16", FAIL),
        (evidence_with_graph(**findings_fields("other_weights")), "graph_other_weights", FAIL),
        (evidence_with_graph(**findings_fields("rounded_weights")), "graph_rounded_weights", FAIL),
        (evidence_with_graph(weights=None), "graph_other_weights", ERROR),
        (evidence_with_graph(weights=None), "graph_rounded_weights", ERROR),
        (evidence_with_graph(weights=None, **findings_fields("other_weights")), "graph_other_weights", FAIL),
        (evidence_with_graph(**findings_fields("external_data")), "graph_external_data", FAIL),
    ],
)  # fmt: skip
def test_invalid_instrument_record_has_its_verdict(evidence, name, verdict):
    decision = judge(evidence)
    checks = [check for check in decision.checks if check.name == name]
    assert verdict in {check.verdict for check in checks}
    assert all(render_check(check, "remedy") for check in checks)
    assert decision.passed is (verdict is PASS)


@pytest.mark.parametrize(("codes", "precision"), [
    (("float64", "unused_output", "domain", "opset", "fixed_batch"), "exact"),
    (("float16", "rounded_weights"), "reduced"),
])  # fmt: skip
def test_informative_findings_do_not_fail(codes, precision):
    for code in codes:
        assert judge(evidence_with_graph(**findings_fields(code)), precision=precision).passed
    assert not judge(
        evidence_with_graph(**findings_fields("other_weights")), precision=precision
    ).passed


def test_output_of_zeros_is_summarized():
    evidence = evidence_with_noise(
        ratio=0.5, candidate_rms=1e-3, rounding_rms=2e-3, reference_rms=1e-5, truth_rms=0.0
    )
    decision = judge(evidence)
    assert summarize(decision, evidence).headline.verdict is decision.verdict


def test_output_that_differs_by_a_turn_is_noted():
    noise = builders.noise_parity(ratio=1e6)
    for difference, is_noted in ((2.0 * math.pi, True), (3.0, False)):
        evidence = with_output_fields(
            noise=noise, reference_abs_max=math.pi, max_abs_diff=difference
        )
        warnings = summarize(judge(evidence), evidence).warnings
        assert any("2π" in warning for warning in warnings) is is_noted


def test_findings_are_counted_and_three_are_shown():
    matches = tuple(
        GraphFinding(code="training_mode", place=f"Dropout:{i}", detail="drops") for i in range(5)
    )
    (check,) = judge(evidence_with_graph(findings=matches)).problems
    text = render_check(check)
    assert (check.observed, text.count("Dropout:"), "and 2 more" in text) == (5.0, 3, True)


@pytest.mark.parametrize(("export", "passed"), [(None, True), (False, True), (True, False)])
def test_fixed_batch_fails_only_when_export_requested_dynamic_batch(export, passed):
    evidence = evidence_with_graph(**findings_fields("fixed_batch")).model_copy(
        update={"export": export_record(export)}
    )
    assert judge(evidence).passed is passed
    without_record = evidence.model_copy(update={"export": None})
    assert judge(without_record).passed


WEIGHTS = WeightsReport(
    constants=9, matched={"folded": 5, "packed": 2}, unmatched=1, unmatched_names=("table",),
    absent=1, absent_names=("alpha",),
)  # fmt: skip
NO_WEIGHTS = WeightsReport(constants=0, matched={}, unmatched=0, absent=0)


@pytest.mark.parametrize(("weights", "text"), [
    (WEIGHTS, "7 of 9 weights match (5 folded, 2 packed); 1 differ; 1 could not be matched: table. "
     "1 tensors of the model have no counterpart in the file: alpha."),
    (NO_WEIGHTS, "The file has no weights to compare."),
])  # fmt: skip
def test_unmatched_weights_are_listed_and_pass(weights, text):
    decision = judge(evidence_with_graph(weights=weights))
    assert decision.passed
    assert render_check(find_check(decision, "graph_other_weights", None)) == text


def test_problems_contain_the_reason_for_missing_measurements():
    decision = judge(evidence_without_float64(graph=None, graph_unread="it is no model"))
    reported = " ".join(render_check(check) for check in decision.problems)
    assert "the model can't run in float64" in reported
    assert "it is no model" in reported
    partly = judge(
        evidence_with_noise(samples=8).model_copy(update={"noise_unmeasured": "out of memory"})
    )
    assert "8 of 32 samples were computed in float64: out of memory" in " ".join(
        render_check(check) for check in partly.problems
    )


@pytest.mark.parametrize(("asked", "samples", "passed"), [
    (32, 32, True), (32, 64, True), (500, 400, True), (500, 399, False), (8, 7, False),
])  # fmt: skip
def test_noise_needs_requested_samples_or_all(asked, samples, passed):
    instruments = Instruments(noise_samples=asked)
    assert judge(evidence_with_noise(samples=samples), instruments=instruments).passed is passed


@pytest.mark.parametrize("waive", [(), NOISE_METRICS[:1], NOISE_METRICS])
def test_missing_metric_passes_only_when_waived_by_name(waive):
    decision = judge(evidence_without_float64(), waive=waive)
    assert decision.verdict is (PASS if waive == NOISE_METRICS else ERROR)
    assert {c.name for c in decision.problems} == set(NOISE_METRICS) - set(waive)
    assert {c.name for c in decision.waived if c.output} == set(waive)
    assert not judge(with_output_fields(noise=None, max_abs_diff=1.0), waive=waive).passed


@pytest.mark.parametrize(
    "seen",
    [{"ratio": 4.0}, {"ratio": NAN}, {"peak": INF}, {"diff": 33.0}, {"samples": 8, "ratio": 4.0}],
)
def test_measured_metric_is_never_waived(seen):
    assert judge(evidence_with_noise(**seen), waive=NOISE_METRICS).verdict is FAIL


def test_output_with_only_waived_bounds_is_an_error():
    """Require a bound that is not waived; otherwise nothing checks the output."""
    bounds = Bounds(noise_ratio=3.0, noise_peak=6.0, noise_diff=32.0, top1_agreement=1.0)
    policy = Policy(
        precision="reduced",
        waive=NOISE_METRICS,
        runtimes={"ort-cpu": RuntimePolicy(required="always", bounds=bounds)},
    )
    boxes = builders.output_parity(name="boxes", classification=None, noise=None)
    evidence = builders.with_outputs(builders.output_parity(), boxes)
    decision = judge(evidence, by=policy)
    assert [check.title for check in decision.problems] == ["ort-cpu / boxes / bounds"]
    assert decision.verdict is ERROR


def test_integer_outputs_have_no_noise_checks():
    counts = with_output_fields(dtype="int64", noise=None, classification=None, scaled_diff=0.0)
    names = {check.name for check in judge(counts, task="classification").checks}
    assert not names & set(NOISE_METRICS)


@pytest.mark.parametrize(("kind", "fields", "verdict"), [
    ("value", {"relative_diff": 0.9}, Verdict.WAIVED),
    ("value", {"relative_diff": 0.1}, PASS),
    ("value", {"relative_diff": math.nan}, FAIL),
    ("value", {"relative_diff": None, "failure": "it returned another shape"}, FAIL),
    ("batch", {"relative_diff": 0.9}, FAIL),
    ("search", {"relative_diff": 0.9}, FAIL),
])  # fmt: skip
def test_quantized_policy_waives_only_value_probes(kind, fields, verdict):
    probe = make_probe("zeros", kind=kind, noise_ratio=None, **fields)
    decision = judge(with_probes_and_batches(probe), by=Policy.quantized())
    assert find_check(decision, "probe_zeros").verdict is verdict


@pytest.mark.parametrize(("of_samples", "of_probe", "verdict"), [
    (0.3, 0.55, PASS), (0.3, 0.65, FAIL), (0.8, 0.95, FAIL), (0.01, 0.19, PASS), (math.inf, 0.3, FAIL),
])  # fmt: skip
def test_quantized_probe_may_deviate_twice_as_far_as_the_samples(of_samples, of_probe, verdict):
    probe = make_probe("batch_9", kind="batch", noise_ratio=None, relative_diff=of_probe)
    evidence = with_probes_and_batches(probe)
    output = builders.output_parity(reference_abs_max=10.0, max_abs_diff=10.0 * of_samples)
    evidence = builders.with_outputs(output, runtimes=evidence.runtimes)
    decision = judge(evidence, by=Policy.quantized())
    assert find_check(decision, "probe_batch_9").verdict is verdict


@pytest.mark.parametrize("samples_fail", [True, False])
def test_probe_failing_like_the_samples_has_its_own_code(samples_fail):
    bad = with_probes_and_batches(make_probe("zeros", noise_ratio=1e6))
    if samples_fail:
        output = builders.output_parity(noise=builders.noise_parity(ratio=1e6))
        bad = builders.with_outputs(output, runtimes=bad.runtimes)
    result = find_check(judge(bad), "probe_zeros")
    assert result.verdict is FAIL
    assert (result.code == "fails_like_samples") is samples_fail


@pytest.mark.parametrize(
    ("shapes", "passed"),
    [([("batch", 3)], False), ([(4, 3)], True), ([("batch", 3), (4, 3)], True), ([()], False)],
)
def test_batch_probes_are_required_for_dynamic_batch(shapes, passed):
    evidence = with_probes(make_probe())
    inputs = tuple(
        TensorSpec(name=str(i), dtype="float32", shape=shape) for i, shape in enumerate(shapes)
    )
    subject = evidence.subject.model_copy(update={"inputs": inputs})
    assert judge(evidence.model_copy(update={"subject": subject})).passed is passed


def test_trace_search_is_not_required_when_policy_has_none():
    evidence = builders.evidence(trace_search=None)
    assert judge(evidence, instruments=Instruments(search_inputs=0)).passed
    assert judge(builders.evidence(trace_search=TraceSearch(tried=0, reason="random"))).passed


def test_disabled_instruments_are_not_checked():
    bare = with_output_fields(noise=None, stability=None).model_copy(
        update={"graph": None, "trace_search": None}
    )
    bounds = (
        builders.policy()
        .runtimes["ort-cpu"]
        .bounds.model_copy(
            update=dict.fromkeys((*NOISE_METRICS, "repeatability_ratio", "batch_invariance_ratio"))
        )
    )
    runtimes = {"ort-cpu": RuntimePolicy(required="always", bounds=bounds)}
    assert judge(bare, instruments=Instruments.none(), runtimes=runtimes).passed


NumberPath = tuple[str | int, ...]


def number_paths(value: Any, path: NumberPath = ()) -> Iterator[NumberPath]:
    """Yield the paths of all measured numbers of a record."""
    if isinstance(value, float):
        yield path
    elif isinstance(value, Record):
        for name, item in value:
            yield from number_paths(item, (*path, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from number_paths(item, (*path, index))


def replace_number(value: Any, path: NumberPath, new: float) -> Any:
    """Return the record with the number at `path` replaced."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(value, tuple):
        assert isinstance(first, int)
        return (*value[:first], replace_number(value[first], rest, new), *value[first + 1 :])
    return value.model_copy(update={first: replace_number(getattr(value, first), rest, new)})


@pytest.mark.further
def test_nan_in_any_number_never_passes():
    good = builders.evidence(
        runtimes=tuple(map(builders.runtime_evidence, RUNTIMES)),
        reference_latency=builders.runtime_evidence().latency,
    )
    assert judge(good).passed
    paths = list(number_paths(good))
    assert len(paths) > 150
    for path in paths:
        # Latency does not decide the verdict.
        informs = "latency" in path or "reference_latency" in path
        assert judge(replace_number(good, path, NAN)).passed is informs, path


def test_nan_in_unchecked_class_statistics_passes():
    bounds = Bounds(max_abs_diff=1e-4)
    runtimes = {"ort-cpu": RuntimePolicy(required="always", bounds=bounds)}
    nan = builders.class_parity(l2_probabilities_mean=NAN)
    evidence = with_output_fields(classification=nan)
    assert judge(evidence, task="tensors", runtimes=runtimes).passed
    assert not judge(evidence).passed


@pytest.mark.parametrize(("relative_diff", "noise_ratio", "passes"), [
    (0.1, 1e30, True), (0.9, 9e3, True), (0.9, 3e5, False), (0.9, None, False), (INF, INF, False), (NAN, 1.0, False),
])  # fmt: skip
def test_reduced_precision_probe_passes_by_relative_diff_or_noise_ratio(
    relative_diff, noise_ratio, passes
):
    probe = make_probe("bright", relative_diff=relative_diff, noise_ratio=noise_ratio)
    decision = judge(with_probes_and_batches(probe), by=Policy.built_in("reduced"))
    assert (find_check(decision, "probe_bright").verdict is PASS) is passes


@pytest.mark.parametrize(
    ("noise_ratio", "metric"),
    [(500.0, "relative_diff"), (40.0, "noise_ratio"), (NAN, "relative_diff")],
)
def test_reduced_precision_probe_shows_the_closest_bound(noise_ratio, metric):
    """Show the nearest bound for a custom reduced policy without bounds for probes."""
    probe = make_probe("bright", relative_diff=0.002, noise_ratio=noise_ratio)
    policy = Policy.built_in("reduced").model_copy(update={"instruments": Instruments()})
    check = find_check(judge(with_probes_and_batches(probe), by=policy), "probe_bright")
    assert (check.verdict, check.params["metric"]) == (FAIL, metric)


@pytest.mark.parametrize(("dtype", "ratio", "own", "passes"), [
    ("float16", 12e3, None, True),
    ("float16", 20e3, None, False),
    ("bfloat16", 48e3, None, True),
    ("bfloat16", 60e3, None, False),
    ("bfloat16", 48e3, 20e3, False),
    ("bfloat16", 10e3, 20e3, True),
])  # fmt: skip
def test_bfloat16_has_wider_noise_bound_than_float16(dtype, ratio, own, passes):
    policy = Policy.built_in("reduced")
    if own is not None:
        policy = with_overrides(policy, {"runtimes.ort-cpu.bounds.noise_ratio": str(own)})
    noise = builders.noise_parity(ratio=ratio, peak=ratio, diff=ratio)
    measured = with_output_fields(noise=noise)
    (spec,) = measured.subject.outputs
    outputs = (spec.model_copy(update={"dtype": dtype}),)
    subject = measured.subject.model_copy(update={"outputs": outputs})
    decision = judge(measured.model_copy(update={"subject": subject}), by=policy)
    assert (find_check(decision, "noise_ratio").verdict is PASS) is passes


@pytest.mark.parametrize(
    ("own_choices", "floor", "verdict"),
    [(True, 0.1, ERROR), (False, 0.1, FAIL), (True, 1e-6, FAIL)],
)
def test_choices_decided_by_rounding_are_an_error_instead_of_fail(own_choices, floor, verdict):
    """Return an ERROR if rounding changes the model's choices so much that it could hide faults."""
    runtime = builders.runtime_evidence(
        outputs=(
            builders.output_parity(
                noise=builders.noise_parity(ratio=8.0, peak=9.0, reference_rms=floor)
            ),
        )
    )
    probe = builders.probe_parity("far", noise_ratio=INF)
    broken = builders.probe_parity(
        "broken", failure="it raised", noise_ratio=None, relative_diff=None
    )
    evidence = builders.evidence(
        runtimes=(runtime.model_copy(update={"probes": (*runtime.probes, probe, broken)}),),
        validity=ReferenceValidity(own_choices=own_choices),
    )
    matches = {check.name: check.verdict for check in judge(evidence).checks}
    assert matches["noise_ratio"] is matches["noise_peak"] is matches["probe_far"] is verdict
    assert matches["probe_broken"] is FAIL


@pytest.mark.parametrize(
    ("spread", "verdict"),
    [(0.0, Verdict.PASS), (1e-6, Verdict.PASS), (2e-4, ERROR), (1.0, ERROR),
     (math.inf, ERROR), (math.nan, ERROR), (-1.0, ERROR)],
)  # fmt: skip
def test_reference_spread_beyond_rounding_is_an_error(spread, verdict):
    decision = judge(builders.evidence(reference_spread=spread))
    assert find_check(decision, "repeats", None).verdict is verdict
    assert decision.passed is (verdict is Verdict.PASS)
    names = {check.name for check in judge(builders.evidence()).checks}
    assert "repeats" not in names  # as in older evidence, which has no spread
