"""Findings group the checks with one cause; the cause that explains most is first."""

from __future__ import annotations

import pytest

from gate import CheckResult, Localization, Verdict, decide
from gate.decision.catalog import CHECKS
from gate.records.localization import Explanation, LayerRow, OptimizerFault
from gate.summary.summarize import summarize
from tests.builders import digest, evidence, policy

RUNTIMES = ("ort-cpu", "ort-cpu-optimized")


def check(name, *, runtime="ort-cpu", verdict=Verdict.FAIL, **fields):
    about = {"output": "logits", "observed": 9.0, "bound": 1.0, "relation": "<=", **fields}
    if name.startswith(("graph_", "export_", "probe_", "runtime", "repeats")):
        about["output"] = None
    return CheckResult(name=name, runtime=runtime, verdict=verdict, **{"code": "beyond", **about})  # type: ignore[arg-type]


def summarize_checks(*checks, passed=(), explanation=None):
    update = {"checks": checks, "verdict": Verdict.FAIL, "runtimes": passed}
    decision = decide(policy(), evidence(), decided_at="now").model_copy(update=update)
    return summarize(decision, evidence(), explanation=explanation)


def find(*checks, **context):
    return summarize_checks(*checks, **context).findings


def create_explanation(fault="a.weight differs from the model's", **fields):
    values: dict[str, object] = {
        "subject_sha256": digest("x"), "runtime": "ort-cpu", "samples": 8, "layers": (),
        "first_divergence": "a", "cause": "a is wrong", "fault": fault, **fields,
    }  # fmt: skip
    return Explanation(localisation=Localization(**values))  # type: ignore[arg-type]


NOISY = check("noise_ratio")
OPTIMIZED, CUDA, ACME = (
    check("noise_ratio", runtime=name) for name in ("ort-cpu-optimized", "ort-cuda", "acme")
)
BROKEN = check("runtime", runtime="ort-cuda")
LOWER = check("precision", runtime="acme", observed=None)
BATCH = check("graph_fixed_batch", runtime=None)
LAYERED = (NOISY, check("accuracy_drop"), check("probe_zeros"), check("batch_invariance"),
           check("graph_rounded_weights", runtime=None))  # fmt: skip


def error(name, **fields):
    return check(name, verdict=Verdict.ERROR, **fields)


@pytest.mark.parametrize(("checks", "passed", "explanation", "causes"), [
    ([NOISY, OPTIMIZED], (), None, {"numbers": 2}),
    ([OPTIMIZED], ("ort-cpu",), None, {"optimiser": 1}),
    ([OPTIMIZED], (), None, {"numbers": 1}),
    ([OPTIMIZED], ("ort-cuda-optimized",), None, {"numbers": 1}),
    ([CUDA], ("ort-cpu",), None, {"device": 1}),
    ([ACME], ("ort-cpu",), None, {"device": 1}),
    ([ACME, NOISY], (), None, {"numbers": 2}),
    ([ACME, LOWER], ("ort-cpu",), None, {"device": 2}),
    ([error("repeats", runtime=None), NOISY, check("probe_zeros")], (), create_explanation(), {"model": 3}),
    ([error("outputs", output=None), error("reference", output=None)], (), None, {"samples": 2}),
    ([BROKEN, NOISY], (), None, {"runtime": 1, "numbers": 1}),
    ([BROKEN, OPTIMIZED], ("ort-cpu",), None, {"runtime": 1, "optimiser": 1}),
    ([BROKEN, error("measured", runtime=None, output=None)], (), None, {"runtime": 2}),
    ([NOISY, BATCH], (), None, {"batch": 1, "numbers": 1}),
    ([NOISY, BATCH], (), create_explanation(), {"batch": 1, "layer": 1}),
    (LAYERED, (), create_explanation(), {"layer": 5}),
    ([NOISY, check("export_lint", runtime=None), check("noise_ratio", runtime="torch-cuda")], (),
     create_explanation(), {"layer": 1, "export": 1, "device": 1}),
    ([OPTIMIZED], (), create_explanation(fault_code="training_mode"), {"training_mode": 1}),
    ([OPTIMIZED], (), create_explanation(fault_code="output_order"), {"outputs": 1}),
    ([OPTIMIZED], (), create_explanation(fault_code="not_returned"), {"outputs": 1}),
    ([OPTIMIZED], (), create_explanation(fault_code="tf32"), {"device": 1}),
    ([OPTIMIZED], (), create_explanation(fault_code="weights"), {"layer": 1}),
    ([OPTIMIZED], (), create_explanation(fault_code="weights", optimiser=True), {"optimiser": 1}),
    ([ACME], (), create_explanation(None, optimiser=True, runtime="acme"), {"optimiser": 1}),
    ([error("noise_ratio", observed=None, code="no_floor")], (), None, {"evidence": 1}),
    ([error("accuracy_drop", observed=None, code="unmeasured")], (), None, {"evidence": 1}),
    ([error("top1_lower_bound", observed=0.9, code="too_few_samples")], (), None, {"samples": 1}),
    ([error("threshold_crossing", observed=None, code="unmeasured")], (), None, {"evidence": 1}),
])  # fmt: skip
def test_checks_with_one_cause_are_one_finding(checks, passed, explanation, causes):
    findings = find(*checks, passed=passed, explanation=explanation)
    assert {finding.cause: len(finding.checks) for finding in findings} == causes
    assert len(findings) == len(causes)


def test_lower_precision_explains_only_its_own_runtime():
    findings = find(CUDA, LOWER, passed=("ort-cpu",))
    assert [len(finding.checks) for finding in findings] == [1, 1]


_TURNED = {"details": [{"code": "transposed", "name": "a.weight"}]}
_OPERATORS = {"nodes": "Gemm x", "kind": "Linear", "details": [], "excluded": ["shape"]}


@pytest.mark.parametrize(("fields", "blamed", "sentence"), [
    ({"fault": "`a.weight` differs"}, "a.weight", "a.weight differs: 9"),
    ({"fault": "it differs"}, "a", "a: it differs: 9"),
    ({"fault_code": "weights", "fault_params": _TURNED}, "a.weight", "a.weight is transposed"),
    ({"fault_code": "operators", "fault_params": _OPERATORS}, "a", "a: it computes"),
    ({"fault_code": "weights", "fault_params": {"details": "edited"}}, "a", "a"),
])  # fmt: skip
def test_fault_names_the_tensor_or_its_module(fields, blamed, sentence):
    codes = {"outcome": ({"code": "source"},)} if "fault_code" in fields else {}
    result = create_explanation(**{"fault": "a", **codes, **fields})
    explanation = Explanation.from_json(result.to_json())
    headline = summarize_checks(NOISY, explanation=explanation).headline
    assert headline.blamed == blamed
    assert headline.sentence.startswith(sentence)


CODE = "code in the model's own forward differs in the file"


@pytest.mark.parametrize(("fault", "probe", "beside", "cause", "is_located"), [
    ("Relu computes something else than ReLU6", "zeros", (), "beyond", True),
    ("Relu computes something else than ReLU6", "size_9x9", (), "beyond", True),
    (CODE, "zeros", (), "beyond", True),
    (CODE, "size_9x9", (), "baked_in", False),
    (CODE, "zeros", ("graph_other_weights",), "weights", False),
    ("Relu computes something else", "zeros", ("graph_training_mode",), "training_mode", False),
])  # fmt: skip
def test_cause_of_fault_visible_only_in_a_probe(fault, probe, beside, cause, is_located):
    kind = "value" if probe == "zeros" else "size"
    shows = check(
        f"probe_{probe}",
        code="beyond_untraced" if kind == "value" else "beyond",
        params={"kind": kind, "metric": "noise_ratio"},
    )
    rest = [check(name, runtime=None) for name in beside]
    code = "code" if fault == CODE else "operators"
    result = create_explanation(fault, probe="zeros", first_divergence="act", fault_code=code)
    (finding,) = find(shows, *rest, explanation=result)
    assert finding.cause == cause
    assert ("'zeros' shows it" in finding.sentence) == is_located
    assert ("'zeros' it begins here: code in" in finding.sentence) == (cause == "baked_in")


BLAME = {"names": ("FuseReluClip",), "level": "ORT_ENABLE_BASIC", "below": "ORT_DISABLE_ALL"}


def blame_optimizer(**fields: object) -> Explanation:
    """Return an explanation that blames an optimizer of ORT_ENABLE_BASIC, or an unnamed one."""
    blame = OptimizerFault.model_validate({**BLAME, **fields})
    return create_explanation(
        None, runtime="ort-cpu-optimized", optimiser=True, blame=blame, first_divergence=None,
        layers=(LayerRow(module="", kind="output of the whole file, optimized", verdict="source"),),
    )  # fmt: skip


def test_only_an_optimizer_that_breaks_a_session_explains_it():
    breaks = check("runtime", runtime="ort-cpu-optimized")
    rest = check("runtime", runtime="ort-cpu")
    explanation = blame_optimizer(raises="Fail: [ONNXRuntimeError] : 1 : FAIL : no float64")
    findings = find(breaks, rest, explanation=explanation)
    assert {f.cause: f.checks for f in findings} == {"optimiser": (breaks,), "runtime": (rest,)}
    (finding,) = [f for f in findings if f.cause == "optimiser"]
    assert finding.sentence.startswith("With FuseReluClip enabled, ONNX Runtime fails")
    assert "with optimizations off the file agrees: no float64" in finding.sentence
    assert 'disabled_optimizers=["FuseReluClip"]' in str(finding.remedy)
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    findings = find(breaks, noisy, explanation=blame_optimizer())
    assert {f.cause: f.checks for f in findings} == {"optimiser": (noisy,), "runtime": (breaks,)}


_SHAPE = {"mismatch": "shape", "tensor": "y", "got": "float32 (29, 4)", "want": "a"}


@pytest.mark.parametrize(("code", "params", "cause", "words"), [
    ("wrong_outputs", _SHAPE, "outputs", ("float32 (29, 4) for output 'y'", "the samples' shape")),
    ("only_batches", {"detail": "fails: Gemm", "batch_sizes": [2]}, "batch",
     ("computes batches of 2 only", "Gemm", "x.shape[0]")),
    ("reshape", {"detail": "cannot reshape. Input shape:{3,4}"}, "batch", ("{3,4}", "x.shape[0]")),
    ("failed", {"failure": "it broke"}, "runtime", ("it broke", "gate doctor")),
    ("unregistered_operator", {"failure": "X"}, "runtime", ("X", "standard operators")),
    ("invalid_graph", {"failure": "X"}, "runtime", ("X", "full_check=True")),
    ("unusable", {"failure": "no CUDA"}, "device", ("no CUDA", "gate doctor")),
])  # fmt: skip
def test_failure_code_of_a_runtime_sets_cause_and_words(code, params, cause, words):
    (finding,) = find(check("runtime", code=code, params=params))
    assert finding.cause == cause
    for word in words:
        assert word in f"{finding.sentence} {finding.remedy}"


def test_near_ties_explain_only_differences_within_rounding():
    ties = check("near_ties", verdict=Verdict.ERROR)
    agreement, noisy = check("top1_agreement"), check("noise_ratio")
    first, second = find(ties, agreement, noisy, check("noise_peak"))
    assert {first.cause, second.cause} == {"numbers", "model"}
    assert find(ties, agreement)[0].checks == (agreement, ties)
    assert find(ties, noisy)[0].cause == "numbers"


@pytest.mark.parametrize(("passed", "agrees"), [(("ort-cpu",), True), (("torch-cuda",), False)])
def test_device_account_states_when_cpu_agrees(passed, agrees):
    (finding,) = find(check("noise_ratio", runtime="torch-cuda"), passed=passed)
    assert ("on the CPU the file agrees" in finding.sentence) is agrees


def test_account_is_short_and_printable_for_any_names():
    long = check("top5_agreement", output="\x1b[31m" + "x" * 10**5)
    headline = summarize_checks(long).headline
    for text in (headline.blamed, headline.sentence):
        assert text is not None
        assert text.isprintable()
        assert len(text) <= 1000


def test_failures_come_before_errors_and_waivers():
    checks = (check("runtime", verdict=Verdict.WAIVED), check("session", verdict=Verdict.ERROR),
              check("preprocessing_opencv", runtime=None))  # fmt: skip
    verdicts = [finding.verdict for finding in find(*checks)]
    assert verdicts == [Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED]


def test_each_check_is_in_exactly_one_finding():
    checks = tuple(
        check(name, runtime=runtime)
        for name in sorted(CHECKS)
        for runtime in (*RUNTIMES, "torch-cuda")
    )
    findings = find(*checks, explanation=create_explanation())
    shown = [c for finding in findings for c in finding.checks]
    assert sorted(map(repr, shown)) == sorted(map(repr, checks))


def test_checks_are_ordered_by_kind_and_excess_then_as_decided():
    """The order must not depend on Python's hash seed."""
    probe = check("probe_zeros", observed=1e9)
    worst, mild = check("noise_ratio", observed=50.0), check("noise_peak", observed=2.0)
    names = ("accuracy_drop", "repeatability", "batch_invariance", "finite")
    equal = tuple(check(name, observed=9.0) for name in names)
    (finding,) = find(probe, mild, *equal, worst, explanation=create_explanation())
    assert finding.checks == (worst, *equal, mild, probe)


def test_measured_waived_check_is_not_called_unmeasured():
    absent = check("runtime", runtime="ort-cuda", verdict=Verdict.WAIVED, observed=None,
                   code="absent_waived", params={"reason": "no GPU"})  # fmt: skip
    params = {"kind": "value", "metric": "noise_ratio"}
    far = check("probe_far", verdict=Verdict.WAIVED, code="out_of_calibration", params=params)
    (finding,) = find(absent, far)
    assert finding.sentence.startswith(
        "ort-cuda: not measured (no GPU); probe_far: noise_ratio is 9 "
    )
