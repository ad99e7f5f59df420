"""Rules for outputs with stated roles, with inferred roles, and with constant values."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Decision, Policy, Verdict
from gate.records.outputs import OutputParity
from tests import builders
from tests.builders import class_parity, output_parity, row_parity

NAN, INF = math.nan, math.inf
INTEGERS: dict[str, Any] = {
    "dtype": "int64", "classification": None, "noise": None, "unequal": 0, "rows": None,
    "max_abs_diff": 0.0, "scaled_diff": 0.0, "mean_abs_diff": 0.0,
}  # fmt: skip
ROLES = ("logits", "probabilities", "scores", "embedding", "boxes", "indices", "mask", "tensor")


def with_bounds(policy: Policy, **bounds: float) -> Policy:
    """Return the policy with these bounds for all runtimes."""
    runtimes = {
        name: r.model_copy(update={"bounds": r.bounds.model_copy(update=bounds)})
        for name, r in policy.runtimes.items()
    }
    return policy.model_copy(update={"runtimes": runtimes})


def judge(*outputs: OutputParity, task: Any = "auto", **policy: Any) -> Decision:
    """Decide on runtimes that all have these outputs, by default with the built-in policy."""
    chosen = with_bounds(Policy.default(task=task), scaled_diff=2e-2).model_copy(update=policy)
    return builders.judge(builders.with_outputs(*outputs), by=chosen)


def output_for(role: str | None, **fields: Any) -> OutputParity:
    """Return a correct output that fits the role."""
    base: dict[str, Any] = {"rows": row_parity()}
    if role == "indices":
        base = dict(INTEGERS)
    if role == "mask":
        base["max_abs_diff"] = 0.0
    return output_parity(**base | fields)


def problems(decision: Decision) -> set[str]:
    return {check.name for check in decision.problems}


@pytest.mark.parametrize("role", ROLES)
def test_correct_output_passes_in_its_role(role):
    decision = judge(output_for(role), outputs={"logits": role})
    assert decision.verdict is Verdict.PASS, decision.problems
    (observed, _) = [c.observed for c in decision.checks if c.name == "role"]
    assert observed == role


@pytest.mark.parametrize(
    ("role", "fields", "name"),
    [
        ("logits", {"classification": class_parity(top1_disagreements=1)}, "top1_agreement"),
        ("probabilities", {"classification": class_parity(top1_disagreements=1)}, "top1_agreement"),
        ("probabilities", {"rows": row_parity(sum_diff=2e-3)}, "row_sum_diff"),
        ("probabilities", {"rows": row_parity(sum_diff=NAN)}, "row_sum_diff"),
        ("embedding", {"rows": row_parity(cosine_distance=2e-4)}, "cosine_distance"),
        ("embedding", {"rows": row_parity(cosine_distance=NAN)}, "cosine_distance"),
        ("embedding", {"rows": row_parity(cosine_distance=NAN)}, "finite"),
        ("indices", {"unequal": 1, "max_abs_diff": 1.0}, "unequal_share"),
        ("indices", {"unequal": 0, "max_abs_diff": 1.0}, "unequal_share"),
        ("mask", {"max_abs_diff": 1e-30}, "mask_diff"),
        ("mask", {"max_abs_diff": NAN}, "mask_diff"),
        *((role, {"scaled_diff": 1.0}, "scaled_diff") for role in ("scores", "boxes", "tensor")),
        *((role, {"nonfinite_mismatched": 1}, "finite") for role in ROLES),
    ],
)  # fmt: skip
def test_each_role_fails_by_its_own_check(role, fields, name):
    decision = judge(output_for(role, **fields), outputs={"logits": role})
    assert decision.verdict is Verdict.FAIL
    assert name in problems(decision)


def test_policy_bounds_apply_to_roles():
    runtimes = with_bounds(Policy.default(), cosine_distance=1e-3, unequal_share=0.01).runtimes
    distant = output_for("embedding", rows=row_parity(cosine_distance=2e-4))
    assert judge(distant, outputs={"logits": "embedding"}, runtimes=runtimes).passed
    at_bound = output_for("indices", unequal=40, max_abs_diff=9.0)
    assert judge(at_bound, outputs={"logits": "indices"}, runtimes=runtimes).passed
    beyond_bound = output_for("indices", unequal=41, max_abs_diff=9.0)
    assert not judge(beyond_bound, outputs={"logits": "indices"}, runtimes=runtimes).passed


@pytest.mark.parametrize(("role", "fields", "code"), [
    ("logits", {"classification": None}, "wrong_shape"),
    ("logits", INTEGERS, "wrong_shape"),
    ("logits", {"classification": class_parity(predicted_classes=1)}, "matches"),
    ("probabilities", {"rows": row_parity(sum_error=3.0)}, "wrong_sums"),
    ("probabilities", {"rows": row_parity(sum_error=NAN)}, "wrong_sums"),
    ("probabilities", {"rows": None}, "matches"),
    ("scores", INTEGERS, "not_float"),
    ("embedding", INTEGERS, "not_float"),
    ("embedding", {"rows": None}, "no_vectors"),
    ("indices", {"unequal": None}, "not_integer"),
    ("indices", {"dtype": "float32"}, "not_integer"),
])  # fmt: skip
def test_role_contradicting_the_output_is_an_error(role, fields, code):
    decision = judge(output_parity(**{"rows": row_parity()} | fields), outputs={"logits": role})
    assert decision.verdict is not Verdict.PASS
    assert Verdict.ERROR in {check.verdict for check in decision.problems}
    check = builders.find_check(decision, "role")
    assert (check.code, check.verdict is Verdict.PASS) == (code, code == "matches")


def test_role_of_missing_output_is_an_error():
    decision = judge(output_parity(), outputs={"other": "tensor"})
    assert decision.verdict is Verdict.ERROR
    assert decision.problems[0].params == {"names": ["other"], "outputs": ["logits"]}


def test_confidence_bounds_of_probabilities_use_raw_values():
    """Check the confidence of the stored probabilities, not of a softmax of them."""
    rows = row_parity(confidence_diff=0.5, bands=(0.0, 0.0, 0.0, 1.0))
    evidence = builders.with_outputs(output_parity(rows=rows))
    decision = builders.judge(evidence, outputs={"logits": "probabilities"})
    assert problems(decision) == {
        "confidence_diff", "confidence_over_1_percent", "confidence_over_5_percent",
        "confidence_over_10_percent",
    }  # fmt: skip


def test_inferred_role_never_causes_an_error():
    """Pass inferred logits that would be an ERROR if the policy required classes."""
    one_class = output_parity(classification=class_parity(predicted_classes=1, top1_agreement=0.5))
    assert judge(one_class).verdict is Verdict.PASS
    assert "agreement" in {check.name for check in judge(one_class).checks}
    assert judge(one_class, task="classification").verdict is not Verdict.PASS
    assert judge(one_class, logits=("logits",)).verdict is not Verdict.PASS
    assert judge(one_class, task="tensors").verdict is Verdict.PASS


def test_inferred_logits_check_agreement_only():
    """Check no confidence for inferred logits, because the output may not contain logits."""
    confidence = class_parity().confidence.model_copy(update={"max": NAN, "mean": NAN})
    masked = output_parity(classification=class_parity(confidence=confidence))
    assert judge(masked).verdict is Verdict.PASS
    assert judge(masked, task="classification").verdict is Verdict.FAIL
    wrong = output_parity(classification=class_parity(top1_disagreements=1))
    assert problems(judge(wrong)) == {"top1_agreement"}


CONSTANT: dict[str, Any] = {
    "name": "scale", "reference_constant": True, "max_abs_diff": 0.0, "scaled_diff": 0.0,
    "reference_std": 0.0, "classification": None,
}  # fmt: skip


@pytest.mark.parametrize("task", ["auto", "classification", "tensors"])
@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"reference_abs_max": 0.0}, Verdict.PASS),
        ({"classification": class_parity(predicted_classes=1)}, Verdict.PASS),
        ({"max_abs_diff": 1e-6, "scaled_diff": INF}, Verdict.PASS),
        ({"max_abs_diff": 1.0, "scaled_diff": INF}, Verdict.FAIL),
        ({"max_abs_diff": 1e-6, "scaled_diff": INF, "reference_abs_max": 0.0}, Verdict.FAIL),
        ({"nonfinite_mismatched": 1, "max_abs_diff": NAN}, Verdict.FAIL),
        ({"elements": 0, "max_abs_diff": NAN}, Verdict.ERROR),
        ({"nonfinite_reference": 4000, "reference_abs_max": NAN, "reference_std": NAN, "scaled_diff": NAN,
          "noise": builders.noise_parity(elements=0, ratio=NAN, peak=NAN, diff=NAN)}, Verdict.ERROR),
        ({"nonfinite_reference": 4000, "reference_abs_max": NAN, "max_abs_diff": 1.0}, Verdict.ERROR),
        ({"nonfinite_reference": 4000, "nonfinite_same": 4000, "reference_abs_max": NAN}, Verdict.ERROR),
    ],
)  # fmt: skip
def test_constant_output_passes_only_next_to_varying_output(task, fields, verdict):
    decision = judge(output_parity(), output_parity(**CONSTANT | fields), task=task)
    assert decision.verdict is verdict, decision.problems
    assert {check.output for check in decision.problems} <= {"scale", None}
    codes = {c.code for c in decision.checks if (c.name, c.output) == ("reference", "scale")}
    equal = verdict is Verdict.PASS and "max_abs_diff" not in fields
    assert (codes == {"proven_constant"}) is equal


@pytest.mark.parametrize("task", ["auto", "classification", "tensors"])
def test_constant_outputs_alone_are_an_error(task):
    decision = judge(output_parity(**CONSTANT | {"name": "logits"}), task=task)
    assert decision.verdict is Verdict.ERROR
    codes = [each["code"] for c in decision.problems for each in c.params.get("problems", ())]
    assert "no_output_varies" in codes


METRICS = {
    "max_abs_diff": lambda x: {"max_abs_diff": x},
    "scaled_diff": lambda x: {"scaled_diff": x},
    "unequal": lambda x: {"unequal": math.ceil(min(x, 4e3)), "max_abs_diff": x},
    "noise": lambda x: {"noise": builders.noise_parity(ratio=x, peak=x, diff=x)},
    "top1": lambda x: {"classification": class_parity(top1_agreement=1.0 - min(x, 1.0))},
    "cosine": lambda x: {"rows": row_parity(cosine_distance=x)},
    "sums": lambda x: {"rows": row_parity(sum_diff=x)},
    "mismatched": lambda x: {"nonfinite_mismatched": math.ceil(min(x, 4e3))},
    "same": lambda x: {"nonfinite_same": math.ceil(min(x, 4e3))},
}
ANY_POLICY = st.fixed_dictionaries(
    {"task": st.sampled_from(["auto", "classification", "tensors"]),
     "nonfinite": st.sampled_from(["refuse", "same_places"]),
     "outputs": st.sampled_from([{}, *({"logits": role} for role in ROLES)])}
)  # fmt: skip
SIZES = st.floats(0.0, 1e6)


@given(ANY_POLICY, st.sampled_from(sorted(METRICS)), SIZES, SIZES, st.booleans(), st.integers(0, 3))
def test_larger_error_never_turns_fail_into_pass_in_any_role(
    policy, metric, a, b, constant, classes
):
    """Keep the order of verdicts in every task, role and treatment of NaN, also for constants."""
    small, large = sorted((a, b))
    role = policy["outputs"].get("logits")
    fixed = {"reference_constant": constant}
    if role != "indices":
        fixed["classification"] = class_parity(predicted_classes=classes)
    verdicts = []
    for size in (small, large):
        fields = METRICS[metric](size)
        if "classification" in fields and role != "indices":
            worse = fields["classification"].model_copy(update={"predicted_classes": classes})
            fields["classification"] = worse
        verdicts.append(judge(output_for(role, **fixed | fields), **policy).verdict)
    if verdicts[0] is not Verdict.PASS:
        assert verdicts[1] is not Verdict.PASS
    if verdicts[0] is Verdict.FAIL:
        assert verdicts[1] is Verdict.FAIL


ANY_NUMBER = st.sampled_from([0.0, 1e-7, 1.0, NAN, INF, -INF, -1.0])


@given(ANY_POLICY, st.data())
def test_decide_never_raises(policy, data):
    draw = data.draw
    fields = {
        "dtype": draw(st.sampled_from(["float32", "int64", "bool", "float64"])),
        "samples": draw(st.sampled_from([0, 1, 400])),
        "elements": draw(st.sampled_from([0, 1, 4000])),
        "nonfinite_reference": draw(st.integers(0, 4000)),
        "nonfinite_same": draw(st.integers(0, 4000)),
        "nonfinite_mismatched": draw(st.integers(0, 2)),
        "unequal": draw(st.none() | st.integers(0, 5000)),
        "reference_constant": draw(st.booleans()),
        "classification": draw(st.none() | st.builds(
            lambda n, rows, share: class_parity(
                predicted_classes=n, nan_rows=rows, top1_agreement=share),
            st.integers(0, 3), st.integers(0, 500), ANY_NUMBER)),
        "rows": draw(st.none() | st.builds(
            lambda a, b: row_parity(cosine_distance=a, sum_error=b), ANY_NUMBER, ANY_NUMBER)),
        "noise": draw(st.none() | st.just(builders.noise_parity(ratio=NAN))),
    }  # fmt: skip
    for name in ("max_abs_diff", "scaled_diff", "reference_abs_max", "reference_std"):
        fields[name] = draw(ANY_NUMBER)
    decision = judge(output_parity(**fields), **policy)
    complete = not math.isnan(fields["max_abs_diff"]) and fields["nonfinite_mismatched"] == 0
    assert decision.verdict is not Verdict.PASS or (complete and fields["elements"] > 0)


TIES = {"top1_ties": 30}
UNSURE = {"unsure": 28, "sure": 4}


@pytest.mark.parametrize("task", ["auto", "classification"])
@pytest.mark.parametrize(("fields", "stated", "guess"), [
    ({}, Verdict.PASS, Verdict.PASS),
    ({"top1_ties": 1}, Verdict.PASS, Verdict.PASS),
    (TIES, Verdict.FAIL, Verdict.PASS),
    (UNSURE, Verdict.PASS, Verdict.PASS),
    (UNSURE | {"top1_disagreements": 3}, Verdict.ERROR, Verdict.PASS),
    ({"unsure": 1, "sure": 31, "top1_disagreements": 3}, Verdict.FAIL, Verdict.FAIL),
], ids=["none", "one", "many", "unsure", "unsure and other", "sure and other"])  # fmt: skip
def test_answers_decided_by_rounding(task, fields, stated, guess):
    """Make no claim for inferred logits that rounding decides, but fail stated logits."""
    decision = judge(output_parity(classification=class_parity(**fields)), task=task)
    assert decision.verdict is (guess if task == "auto" else stated), decision.problems
    claims = {check.code for check in decision.checks if check.name == "agreement"}
    assert (claims == {"not_claimed"}) is (task == "auto" and guess is not stated)


@pytest.mark.parametrize(("ties", "verdict"), [(0, "PASS"), (40, "PASS"), (41, "FAIL")])
def test_near_ties_of_integers_are_limited(ties, verdict):
    decision = judge(output_for("indices", elements=4000, near_ties=ties))
    assert decision.verdict == verdict
    assert ("near_ties" in {check.name for check in decision.checks}) is (ties > 0)
