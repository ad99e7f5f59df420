"""Findings: what fails for one cause is one of them, and the cause that explains most is first."""

from __future__ import annotations

import pytest

from gate.decision.catalog import CHECKS
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import Decision, decide
from gate.records.localization import Explanation, LayerRow, Localization, OptimizerFault
from gate.summary.explanations import account_of
from gate.summary.grouping import CheckGroup, groups_of
from gate.summary.render import explained
from tests.builders import digest, evidence, policy

RUNTIMES = ("ort-cpu", "ort-cpu-optimized")


def check(
    name: str, *, runtime: str | None = "ort-cpu", verdict: Verdict = Verdict.FAIL, **fields: object
) -> CheckResult:
    about = {"output": "logits", "observed": 9.0, "bound": 1.0, "relation": "<=", **fields}
    if name.startswith(("graph_", "export_", "probe_", "runtime", "repeats")):
        about["output"] = None
    return CheckResult(
        name=name,
        runtime=runtime,
        verdict=verdict,
        **{"code": "beyond", **about},
    )  # type: ignore[arg-type]


def grouped(
    *checks: CheckResult,
    passed: tuple[str, ...] = (),
    explanation: Explanation | None = None,
) -> list[CheckGroup]:
    plain: Decision = decide(policy(), evidence(), decided_at="now")
    decision = plain.model_copy(
        update={"checks": checks, "verdict": Verdict.FAIL, "runtimes": passed}
    )
    return groups_of(decision, explanation or Explanation())


def located(
    fault: str | None = "a.weight differs from the model's", **fields: object
) -> Explanation:
    values: dict[str, object] = {
        "subject_sha256": digest("x"),
        "runtime": "ort-cpu",
        "samples": 8,
        "layers": (),
        "first_divergence": "a",
        "cause": "a is wrong",
        "fault": fault,
        **fields,
    }
    return Explanation(localisation=Localization(**values))  # type: ignore[arg-type]


def test_the_same_on_two_runtimes_is_one_finding() -> None:
    (group,) = grouped(*(check("noise_ratio", runtime=name) for name in RUNTIMES))
    assert (group.cause, len(group.checks)) == ("numbers", 2)


def test_a_layer_takes_numbers_probes_and_weights_with_it() -> None:
    checks = [check("noise_ratio"), check("accuracy_drop"), check("probe_zeros"),
              check("graph_rounded_weights", runtime=None), check("batch_invariance")]  # fmt: skip
    (group,) = grouped(*checks, explanation=located())
    assert (group.cause, len(group.checks)) == ("layer", len(checks))


def test_what_has_nothing_to_do_with_the_layer_stays_beside_it() -> None:
    checks = (check("noise_ratio"), check("export_lint", runtime=None),
              check("noise_ratio", runtime="torch-cuda"))  # fmt: skip
    causes = [group.cause for group in grouped(*checks, explanation=located())]
    assert sorted(causes) == ["device", "export", "layer"]


@pytest.mark.parametrize(
    ("code", "fields", "cause"),
    [
        ("training_mode", {}, "training_mode"),
        ("output_order", {}, "outputs"),
        ("not_returned", {}, "outputs"),
        ("tf32", {}, "device"),
        ("weights", {}, "layer"),
        ("weights", {"optimiser": True}, "optimiser"),
    ],
)
def test_a_localisation_may_blame_something_else_than_a_layer(
    code: str, fields: dict[str, object], cause: str
) -> None:
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    (group,) = grouped(noisy, explanation=located(fault_code=code, **fields))
    assert group.cause == cause


_TURNED = {"details": [{"code": "transposed", "name": "a.weight"}]}
_OPERATORS = {"nodes": "Gemm x", "kind": "Linear", "details": [], "excluded": ["shape"]}


@pytest.mark.parametrize(
    ("fields", "blamed", "sentence"),
    [
        ({"fault": "`a.weight` differs"}, "a.weight", "a.weight differs: 9"),
        ({"fault": "it differs"}, "a", "a: it differs: 9"),
        ({"fault_code": "weights", "fault_params": _TURNED}, "a.weight", "a.weight is transposed"),
        ({"fault_code": "operators", "fault_params": _OPERATORS}, "a", "a: Gemm x computes"),
        ({"fault_code": "weights", "fault_params": {"details": "edited"}}, "a", "a"),
    ],
)
def test_a_fault_blames_a_tensor_or_its_module(
    fields: dict[str, object], blamed: str, sentence: str
) -> None:
    codes = {"outcome": ({"code": "source"},)} if "fault_code" in fields else {}
    found = located(**{"fault": "a", **codes, **fields})
    explanation = explained(Explanation.from_json(found.to_json()))
    (group,) = grouped(check("noise_ratio"), explanation=explanation)
    account = account_of(group, evidence(), explanation)
    assert account.blamed == blamed
    assert account.sentence.startswith(sentence)


CODE = "code in the model's own forward differs in the file"


@pytest.mark.parametrize(
    ("fault", "probe", "beside", "cause", "is_located"),
    [
        ("Relu computes something else than ReLU6", "zeros", (), "beyond", True),
        ("Relu computes something else than ReLU6", "size_9x9", (), "beyond", True),
        (CODE, "zeros", (), "beyond", True),
        (CODE, "size_9x9", (), "baked_in", False),
        (CODE, "zeros", ("graph_other_weights",), "weights", False),
        ("Relu computes something else", "zeros", ("graph_training_mode",), "training_mode", False),
    ],
)
def test_a_layer_that_only_a_probe_shows(
    fault: str, probe: str, beside: tuple[str, ...], cause: str, is_located: bool
) -> None:
    kind = "value" if probe == "zeros" else "size"
    shows = check(
        f"probe_{probe}",
        code="beyond_untraced" if kind == "value" else "beyond",
        params={"kind": kind, "metric": "noise_ratio"},
    )
    others = [check(name, runtime=None) for name in beside]
    code = "code" if fault == CODE else "operators"
    found = located(fault, probe="zeros", first_divergence="act", fault_code=code)
    (group,) = grouped(shows, *others, explanation=found)
    assert (group.cause, group.localisation is not None) == (cause, is_located)
    sentence = account_of(group, evidence(), found).sentence
    assert ("'zeros' shows it" in sentence) == is_located
    assert ("'zeros' it begins here: code in" in sentence) == (cause == "baked_in")


BLAME = {"names": ("FuseReluClip",), "level": "ORT_ENABLE_BASIC", "below": "ORT_DISABLE_ALL"}


def blamed(**fields: object) -> Explanation:
    """An optimiser of ORT_ENABLE_BASIC is to blame, or none that has a name."""
    blame = OptimizerFault.model_validate({**BLAME, **fields})
    return located(
        None, runtime="ort-cpu-optimized", optimiser=True, blame=blame, first_divergence=None,
        layers=(LayerRow(module="", kind="output of the whole file, optimized", verdict="source"),),
    )  # fmt: skip


def test_a_runtime_that_an_optimiser_breaks_is_told_with_it() -> None:
    explanation = blamed(raises="Fail: [ONNXRuntimeError] : 1 : FAIL : no float64")
    breaks = check("runtime", runtime="ort-cpu-optimized")
    others = check("runtime", runtime="ort-cpu")
    both = grouped(breaks, others, explanation=explanation)
    group = next(group for group in both if group.cause == "optimiser")
    assert group.checks == [breaks]
    account = account_of(group, evidence(), explanation)
    assert account.blamed == "FuseReluClip"
    assert account.sentence == (
        "With FuseReluClip enabled, ONNX Runtime fails from level ORT_ENABLE_BASIC on; with "
        "optimizations off the file agrees: no float64"
    )
    assert account.remedy is not None
    assert account.remedy.startswith('Serve with disabled_optimizers=["FuseReluClip"]')


def test_an_optimiser_that_answers_otherwise_breaks_no_session() -> None:
    breaks = check("runtime", runtime="ort-cpu-optimized")
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    groups = grouped(breaks, noisy, explanation=blamed())
    assert {group.cause: group.checks for group in groups} == {
        "optimiser": [noisy],
        "runtime": [breaks],
    }


def test_numbers_of_the_very_runtime_that_was_located_are_the_optimisers() -> None:
    """Also under a name of the user's."""
    (group,) = grouped(
        check("noise_ratio", runtime="mine"),
        explanation=Explanation(
            localisation=blamed().localisation.model_copy(update={"runtime": "mine"})  # type: ignore[union-attr]
        ),
    )
    assert group.cause == "optimiser"


def test_an_account_says_that_no_optimiser_is_named() -> None:
    explanation = blamed(names=(), reason="32 sessions did not tell")
    found = explanation.localisation.model_copy(  # type: ignore[union-attr]
        update={"fault": "a.weight computes something else"}
    )
    explanation = Explanation(localisation=found)
    (group,) = grouped(check("noise_ratio", runtime="ort-cpu-optimized"), explanation=explanation)
    account = account_of(group, evidence(), explanation)
    assert account.sentence.endswith("No optimizer is identified: 32 sessions did not tell")


def test_numbers_with_optimizations_on_only_are_the_optimisers() -> None:
    failing = check("noise_ratio", runtime="ort-cpu-optimized")
    (group,) = grouped(failing, passed=("ort-cpu",))
    assert group.cause == "optimiser"
    (group,) = grouped(failing, passed=())
    assert group.cause == "numbers"


def test_numbers_on_cuda_only_are_the_devices() -> None:
    (group,) = grouped(check("noise_ratio", runtime="ort-cuda"), passed=("ort-cpu",))
    assert group.cause == "device"


def test_a_model_that_draws_random_numbers_is_to_blame_for_all_numbers() -> None:
    repeats = check("repeats", runtime=None, verdict=Verdict.ERROR)
    (group,) = grouped(repeats, check("noise_ratio"), check("probe_zeros"), explanation=located())
    assert group.cause == "model"


def test_samples_that_prove_nothing_explain_that_no_output_is_one_of_classes() -> None:
    error = Verdict.ERROR
    checks = [check(name, verdict=error, output=None) for name in ("outputs", "reference")]
    (group,) = grouped(*checks)
    assert (group.cause, len(group.checks)) == ("samples", 2)


def test_a_runtime_that_breaks_explains_no_number_of_another() -> None:
    broken = check("runtime", runtime="ort-cuda")
    groups = grouped(broken, check("noise_ratio"))
    assert {group.cause for group in groups} == {"runtime", "numbers"}
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    groups = grouped(broken, noisy, passed=("ort-cpu",))
    assert {group.cause for group in groups} == {"runtime", "optimiser"}


def test_a_runtime_that_breaks_explains_that_nothing_was_measured() -> None:
    measured = check("measured", runtime=None, verdict=Verdict.ERROR, output=None)
    (group,) = grouped(check("runtime"), measured)
    assert group.cause == "runtime"


@pytest.mark.parametrize(
    ("code", "params", "cause", "words"),
    [
        (
            "wrong_outputs",
            {"mismatch": "ort-cpu returned (29, 4)", "advice": "Look there."},
            "outputs",
            ("(29, 4)", "Look there."),
        ),
        (
            "wrong_outputs",
            {"mismatch": "shape", "tensor": "y", "got": "float32 (29, 4)", "want": "a"},
            "outputs",
            ("float32 (29, 4) for output 'y'", "the samples' shape"),
        ),
        (
            "only_batches",
            {"detail": "fails: Gemm mismatch", "batch_sizes": [2]},
            "batch",
            ("computes batches of 2 only", "Gemm mismatch", "x.shape[0]"),
        ),
        (
            "reshape",
            {"detail": "cannot reshape. Input shape:{3,4}"},
            "batch",
            ("{3,4}", "x.shape[0]"),
        ),
        ("failed", {"failure": "it broke"}, "runtime", ("it broke", "gate doctor")),
        ("unregistered_operator", {"failure": "X"}, "runtime", ("X", "standard operators")),
        ("unusable", {"failure": "no CUDA"}, "device", ("no CUDA", "gate doctor")),
    ],
)
def test_a_runtime_that_breaks_on_the_samples_says_what_the_file_is(
    code: str, params: dict[str, object], cause: str, words: tuple[str, ...]
) -> None:
    (group,) = grouped(check("runtime", code=code, params=params))
    account = account_of(group, evidence(), Explanation())
    assert group.cause == cause
    for word in words:
        assert word in f"{account.sentence} {account.remedy}"


@pytest.mark.parametrize("explanation", [None, located()])
def test_a_fixed_batch_in_the_graph_is_a_finding_of_its_own(explanation: Explanation) -> None:
    checks = (check("noise_ratio"), check("graph_fixed_batch", runtime=None))
    causes = [group.cause for group in grouped(*checks, explanation=explanation)]
    assert sorted(causes) == ["batch", "layer" if explanation else "numbers"]


def test_near_ties_explain_answers_and_no_error_beyond_rounding() -> None:
    ties = check("near_ties", verdict=Verdict.ERROR)
    first, second = grouped(
        ties, check("top1_agreement"), check("noise_ratio"), check("noise_peak")
    )
    assert {first.cause, second.cause} == {"numbers", "model"}
    assert [c.name for c in grouped(ties, check("top1_agreement"))[0].checks] == [
        "near_ties", "top1_agreement",
    ]  # fmt: skip
    first, _ = grouped(ties, check("noise_ratio"))
    assert first.cause == "numbers"


@pytest.mark.parametrize(("passed", "agrees"), [(("ort-cpu",), True), (("torch-cuda",), False)])
def test_that_the_cpu_agrees_is_said_where_it_does(passed: tuple[str, ...], agrees: bool) -> None:
    (group,) = grouped(check("noise_ratio", runtime="torch-cuda"), passed=passed)
    text = account_of(group, evidence(), Explanation()).sentence
    assert ("on the CPU the file agrees" in text) is agrees


@pytest.mark.parametrize(
    ("name", "fields", "cause"),
    [
        ("noise_ratio", {"observed": None, "code": "no_floor"}, "evidence"),
        ("accuracy_drop", {"observed": None, "code": "unmeasured"}, "evidence"),
        ("top1_lower_bound", {"observed": 0.9, "code": "too_few_samples"}, "samples"),
        ("threshold_crossing", {"observed": None, "code": "unmeasured"}, "evidence"),
    ],
)
def test_what_could_not_be_judged_is_not_said_to_differ(
    name: str, fields: dict[str, object], cause: str
) -> None:
    (group,) = grouped(check(name, verdict=Verdict.ERROR, **fields))
    assert group.cause == cause


def test_whatever_the_names_are_an_account_is_short_and_printable() -> None:
    (group,) = grouped(check("top5_agreement", output="\x1b[31m" + "x" * 10**5))
    account = account_of(group, evidence(), Explanation())
    for text in (account.blamed, account.sentence):
        assert text is not None
        assert text.isprintable()
        assert len(text) <= 1000


def test_failures_go_before_errors_and_waivers_are_last() -> None:
    checks = (check("runtime", verdict=Verdict.WAIVED), check("session", verdict=Verdict.ERROR),
              check("preprocessing_opencv", runtime=None))  # fmt: skip
    verdicts = [group.verdict for group in grouped(*checks)]
    assert verdicts == [Verdict.FAIL, Verdict.ERROR, Verdict.WAIVED]


def test_no_check_is_lost_or_shown_twice() -> None:
    checks = tuple(
        check(name, runtime=runtime)
        for name in sorted(CHECKS)
        for runtime in (*RUNTIMES, "torch-cuda")
    )
    shown = [c for group in grouped(*checks, explanation=located()) for c in group.checks]
    assert sorted(map(repr, shown)) == sorted(map(repr, checks))


def test_checks_that_are_equally_far_off_stand_in_the_order_of_the_decision() -> None:
    """Whatever the seed by which Python orders sets."""
    names = ("accuracy_drop", "noise_ratio", "repeatability", "batch_invariance", "finite")
    checks = tuple(check(name, observed=9.0) for name in names)
    (group,) = grouped(*checks, explanation=located())
    assert group.ordered == checks


def test_the_check_that_shows_the_cause_best_is_first() -> None:
    probe = check("probe_zeros", observed=1e9)
    worst, mild = check("noise_ratio", observed=50.0), check("noise_peak", observed=2.0)
    (group,) = grouped(probe, mild, worst, explanation=located())
    assert group.ordered == (worst, mild, probe)


def test_a_runtime_of_others_that_is_off_alone_leaves_the_file_right() -> None:
    (group,) = grouped(check("noise_ratio", runtime="acme"), passed=("ort-cpu",))
    assert (group.cause, group.cpu_agrees) == ("device", True)
    (group,) = grouped(*(check("noise_ratio", runtime=name) for name in ("acme", "ort-cpu")))
    assert group.cause == "numbers"


def test_a_lower_precision_explains_the_numbers_of_its_runtime_and_no_others() -> None:
    lower = check("precision", runtime="acme", observed=None)
    (group,) = grouped(check("noise_ratio", runtime="acme"), lower, passed=("ort-cpu",))
    assert {c.name for c in group.checks} == {"noise_ratio", "precision"}
    groups = grouped(check("noise_ratio", runtime="other"), lower, passed=("ort-cpu",))
    assert sorted(len(group.checks) for group in groups) == [1, 1]


def test_what_was_measured_and_waived_is_not_said_to_be_unmeasured() -> None:
    absent = check(
        "runtime",
        runtime="ort-cuda",
        verdict=Verdict.WAIVED,
        observed=None,
        code="absent_waived",
        params={"reason": "no GPU"},
    )
    params = {"kind": "value", "metric": "noise_ratio"}
    far = check("probe_far", verdict=Verdict.WAIVED, code="out_of_calibration", params=params)
    (group,) = grouped(absent, far)
    sentence = account_of(group, evidence(), Explanation()).sentence
    assert sentence.startswith("ort-cuda: not measured (no GPU); probe_far: noise_ratio is 9 ")


def test_each_absent_runtime_is_waived_for_its_own_reason() -> None:
    checks = [
        check("runtime", runtime=name, verdict=Verdict.WAIVED, observed=None, code="absent_waived",
              params={"reason": reason})
        for name, reason in (("ort-cuda", "no GPU: none at all"), ("browser-wasm", "no Chromium"),
                             ("torch-cuda", "no GPU: none at all"))
    ]  # fmt: skip
    (group,) = grouped(*checks)
    assert account_of(group, evidence(), Explanation()).sentence == (
        "ort-cuda, torch-cuda: not measured (no GPU); browser-wasm: not measured (no Chromium)"
    )
