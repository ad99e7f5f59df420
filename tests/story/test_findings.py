"""Findings: what fails for one cause is one of them, and the cause that explains most is first."""

from __future__ import annotations

import pytest

from gate.decision.catalog import REMEDIES, cause_for
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import Decision, decide
from gate.records.evidence import Evidence
from gate.records.localization import Explanation, LayerRow, Localization, OptimizerFault
from gate.summary.explanations import account_of
from gate.summary.grouping import CheckGroup, groups_of
from tests.builders import digest, evidence, policy, runtime_evidence

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
        **{"remedy": REMEDIES.get(name), "explanation": f"{name} is wrong.", **about},
    )  # type: ignore[arg-type]


def grouped(
    *checks: CheckResult,
    passed: tuple[str, ...] = (),
    explanation: Explanation | None = None,
    broken: str | None = None,
    failure: str = "it broke",
) -> list[CheckGroup]:
    """`broken`: the runtime that fails."""
    measured: Evidence = evidence()
    if broken is not None:
        (other, *_) = measured.runtimes
        failed = other.model_copy(update={"runtime": broken, "failure": failure, "outputs": ()})
        measured = measured.model_copy(update={"runtimes": (failed,)})
    plain: Decision = decide(policy(), measured, decided_at="now")
    decision = plain.model_copy(
        update={"checks": checks, "verdict": Verdict.FAIL, "runtimes": passed}
    )
    return groups_of(decision, measured, explanation or Explanation())


def located(
    fault: str | None = "`a.weight` of the file is another", **fields: object
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
    ("fault", "fields", "cause"),
    [
        ("its nodes compute as in training", {}, "training_mode"),
        ("output a is what the model returns elsewhere", {}, "outputs"),
        ("its relative error, 1e-4, is that of TF32", {}, "device"),
        ("`a.weight` of the file is another", {"optimiser": True}, "optimiser"),
    ],
)
def test_a_localisation_may_blame_something_else_than_a_layer(
    fault: str, fields: dict[str, object], cause: str
) -> None:
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    (group,) = grouped(noisy, explanation=located(fault, **fields))
    assert group.cause == cause


CODE = "code in the model's own forward is another in the file"


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
    shows = check(f"probe_{probe}", remedy=REMEDIES["probe_value"])
    others = [check(name, runtime=None) for name in beside]
    found = located(fault, probe="zeros", first_divergence="act")
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
        layers=(LayerRow(module="", kind="output of the whole file, optimised", verdict="source"),),
    )  # fmt: skip


def test_a_runtime_that_an_optimiser_breaks_is_told_with_it() -> None:
    explanation = blamed(raises="Fail: [ONNXRuntimeError] : 1 : FAIL : no float64")
    breaks = check("runtime", runtime="ort-cpu-optimized")
    others = check("runtime", runtime="ort-cpu")
    both = grouped(breaks, others, explanation=explanation, broken="ort-cpu-optimized")
    group = next(group for group in both if group.cause == "optimiser")
    assert group.checks == [breaks]
    account = account_of(group, evidence(), explanation)
    assert account.blamed == "FuseReluClip"
    assert account.sentence == (
        "ONNX Runtime's FuseReluClip makes the session fail from ORT_ENABLE_BASIC on; with "
        "optimisations off the file agrees: no float64"
    )
    assert account.remedy is not None
    assert account.remedy.startswith('Serve with disabled_optimizers=["FuseReluClip"]')


def test_an_optimiser_that_answers_otherwise_breaks_no_session() -> None:
    breaks = check("runtime", runtime="ort-cpu-optimized")
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    groups = grouped(breaks, noisy, explanation=blamed(), broken="ort-cpu-optimized")
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
        update={"fault": "`a.weight` computes something else"}
    )
    explanation = Explanation(localisation=found)
    (group,) = grouped(check("noise_ratio", runtime="ort-cpu-optimized"), explanation=explanation)
    account = account_of(group, evidence(), explanation)
    assert account.sentence.endswith("No optimiser is named: 32 sessions did not tell")


def test_numbers_with_optimisations_on_only_are_the_optimisers() -> None:
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
    groups = grouped(broken, check("noise_ratio"), broken="ort-cuda")
    assert {group.cause for group in groups} == {"runtime", "numbers"}
    noisy = check("noise_ratio", runtime="ort-cpu-optimized")
    groups = grouped(broken, noisy, passed=("ort-cpu",), broken="ort-cuda")
    assert {group.cause for group in groups} == {"runtime", "optimiser"}


def test_a_runtime_that_breaks_explains_that_nothing_was_measured() -> None:
    measured = check("measured", runtime=None, verdict=Verdict.ERROR, output=None)
    (group,) = grouped(check("runtime"), measured, broken="ort-cpu")
    assert group.cause == "runtime"


@pytest.mark.parametrize(
    ("failure", "cause", "words"),
    [
        (
            "ort-cpu returned float32 (29, 4) for output 'y', the model returns float32 (28, 4). "
            "Look there.",
            "outputs",
            ("(29, 4)", "Look there."),
        ),
        (
            "ort-cpu returned the outputs ['a'], and the model has names of its own for some of "
            "them only: its 'a.0' is 'a'. Name all.",
            "outputs",
            ("its 'a.0' is 'a'", "Name all."),
        ),
        (
            "ort-cpu returned float16 (1, 4) for output 'y', and the model is judged as it "
            "computes in float32. Say precision: reduced.",
            "outputs",
            ("float16", "Say precision: reduced."),
        ),
        (
            "InvalidArgument: Gemm mismatch. It computes batches of 2.",
            "batch",
            ("computes batches of 2 only", "Gemm mismatch"),
        ),
    ],
)
def test_a_runtime_that_breaks_on_the_samples_says_what_the_file_is(
    failure: str, cause: str, words: tuple[str, ...]
) -> None:
    found = check("runtime", explanation=f"ort-cpu was not measured; it failed: {failure}")
    (group,) = grouped(found, broken="ort-cpu", failure=failure)
    account = account_of(group, evidence(), Explanation())
    assert group.cause == cause
    assert all(word in f"{account.sentence} {account.remedy}" for word in words)


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
        ("noise_ratio", {"observed": None}, "evidence"),
        ("accuracy_drop", {"observed": None}, "evidence"),
        ("top1_lower_bound", {"observed": 0.9, "bound": 0.99, "relation": ">="}, "samples"),
        ("threshold_crossing", {"observed": None, "point": "0.5"}, "evidence"),
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
        for name in sorted(REMEDIES.keys() - {"unsure", "probe_as_samples"})
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
        explanation="ort-cuda was not measured; the policy asks for it only when present: no GPU",
    )
    far = check("probe_value_far", verdict=Verdict.WAIVED, explanation="Nobody can judge it.")
    (group,) = grouped(absent, far)
    sentence = account_of(group, evidence(), Explanation()).sentence
    assert sentence == (
        "ort-cuda: not measured, as the policy allows (no GPU); "
        "probe_value_far: measured, and not judged (Nobody can judge it)"
    )


def test_the_other_outputs_of_a_part_are_read_from_its_own_evidence() -> None:
    failure = "it failed: the model returns 1 output and the file 2. Export both."
    broken = runtime_evidence("ort-cpu", outputs=(), failure=failure)
    of_part = evidence(runtimes=(broken,))
    whole = evidence().model_copy(update={"parts": {"head": of_part}})
    shown = check("runtime", part="head", explanation=failure)
    assert cause_for(shown, whole) == "outputs"
    assert cause_for(shown.model_copy(update={"part": None}), whole) != "outputs"
