"""Missing, failed or differing preprocessing consumers never pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gate import Decision, Evidence, Verdict
from gate.policy.sections import PreprocessingPolicy
from gate.records.evidence import Source, TensorSpec
from gate.records.preprocessing import (
    ConsumerParity,
    Decisions,
    PictureTensor,
    PreprocessingParity,
    TensorSummary,
)
from gate.summary.render import render_check
from tests import builders

NAN, INF = math.nan, math.inf
FAIL, ERROR, PASS, WAIVED = Verdict.FAIL, Verdict.ERROR, Verdict.PASS, Verdict.WAIVED
REQUIRED = PreprocessingPolicy(consumers=("torchvision", "phone"), max_flips=0.02)
SPEC = builders.digest("spec")


def consumer(name: str = "torchvision", **fields: Any) -> ConsumerParity:
    good: dict[str, Any] = {
        "consumer": name,
        "images": 60,
        "shape": (3, 64, 64),
        "max_diff": 1.0,
        "mean_diff": 0.1,
        "decisions": decisions(),
    }
    return ConsumerParity(**good | fields)


def decisions(**fields: Any) -> Decisions:
    good: dict[str, Any] = {
        "images": 60,
        "flips": 0,
        "confidence_diff_max": 0.01,
        "confidence_diff_mean": 0.001,
    }
    return Decisions(**good | fields)


def parity(**fields: Any) -> PreprocessingParity:
    good: dict[str, Any] = {
        "spec_sha256": SPEC,
        "reference": "pillow",
        "reference_values": TensorSummary(min=-2.0, max=2.0, mean=0.0),
        "images": 60,
        "images_sha256": builders.digest("pictures"),
        "model_sha256": builders.digest("model.onnx"),
        "tensor": tensor(),
        "distinct": fields.get("images", 60),
        "consumers": (consumer(), consumer("phone")),
    }
    return PreprocessingParity(**good | fields)


def tensor(*shape: int | None, dtype: str = "float32") -> PictureTensor:
    """Return the tensor that the file in `builders` takes, or one of another shape."""
    return PictureTensor(dtype=dtype, shape=shape or (3, 64, 64))


def evidence_with_parity(parity: PreprocessingParity | None, **source: Any) -> Evidence:
    fields = Source(**{"factory": "f", "preprocess_sha256": SPEC} | source)
    return builders.evidence(preprocessing=parity, source=fields)


def judge(evidence: Evidence, policy: PreprocessingPolicy | None = REQUIRED) -> Decision:
    return builders.judge(evidence, preprocessing=policy)


def with_consumer(**fields: Any) -> PreprocessingParity:
    return parity(consumers=(consumer(**fields), consumer("phone")))


def test_valid_preprocessing_passes_with_a_check_per_consumer():
    decision = judge(evidence_with_parity(parity()))
    assert decision.verdict is PASS
    names = [c.name for c in decision.checks if c.name.startswith("preprocessing")]
    assert names == [
        "preprocessing",
        "preprocessing_torchvision",
        "preprocessing_flips_torchvision",
        "preprocessing_phone",
        "preprocessing_flips_phone",
    ]


def test_preprocessing_is_unchecked_without_policy():
    assert judge(evidence_with_parity(None), None).verdict is PASS
    decision = judge(evidence_with_parity(with_consumer(max_diff=99.0)), None)
    assert not [c for c in decision.checks if c.name.startswith("preprocessing")]


@pytest.mark.parametrize(
    ("seen", "name", "verdict", "says"),
    [
        (None, "preprocessing", ERROR, "was not measured"),
        (parity(spec_sha256=builders.digest("other")), "preprocessing", ERROR, "is not the model's"),
        (parity(reference="torchvision"), "preprocessing", ERROR, "not pillow"),
        (parity(model_sha256=None), "preprocessing", ERROR, "another file"),
        (parity(model_sha256=SPEC), "preprocessing", ERROR, "another file"),
        (parity(tensor=None), "preprocessing", ERROR, "does not state dtype and shape"),
        (parity(tensor=tensor(3, 64, 224)), "preprocessing", ERROR,
         "spec makes float32 [batch, 3, 64, 224], the file takes float32 [batch, 3, 64, 64]"),
        (parity(tensor=tensor(64, 64, 3)), "preprocessing", ERROR, "spec makes float32 [batch, 64"),
        (parity(tensor=tensor(12)), "preprocessing", ERROR, "spec makes float32 [batch, 12]"),
        (parity(tensor=tensor(dtype="uint8")), "preprocessing", ERROR, "spec makes uint8"),
        (parity(images=0, consumers=()), "preprocessing", ERROR, "0 distinct pictures were measured, at least 50"),
        (parity(images=49), "preprocessing", ERROR, "49 distinct pictures were measured, at least"),
        (parity(distinct=49), "preprocessing", ERROR, "49 distinct pictures were measured, at least 50"),
        (parity(distinct=0), "preprocessing", ERROR, "0 distinct pictures"),
        (parity(images=49, distinct=60), "preprocessing", ERROR, "49 distinct pictures"),
        (parity(consumers=(consumer(),)), "preprocessing_phone", ERROR, "recorded 0 times"),
        (parity(consumers=(consumer(), consumer(), consumer("phone"))),
         "preprocessing_torchvision", ERROR, "recorded 2 times"),
        (with_consumer(max_diff=1.001), "preprocessing_torchvision", FAIL, "1.001/255"),
        (with_consumer(max_diff=30.0, causes=("no antialias",)), "preprocessing_torchvision", FAIL,
         "Cause: no antialias."),
        (with_consumer(max_diff=None), "preprocessing_torchvision", FAIL, "pictures were compared"),
        (with_consumer(max_diff=NAN), "preprocessing_torchvision", FAIL, "nan/255"),
        (with_consumer(max_diff=INF), "preprocessing_torchvision", FAIL, "inf/255"),
        (with_consumer(max_diff=-1.0), "preprocessing_torchvision", FAIL, "-1/255"),
        (with_consumer(images=59), "preprocessing_torchvision", FAIL, "59 of 60"),
        (with_consumer(images=0), "preprocessing_torchvision", FAIL, "0 of 60"),
        (with_consumer(nonfinite=1), "preprocessing_torchvision", FAIL, "1 values are NaN"),
        (with_consumer(mismatched=("a: float64",)), "preprocessing_torchvision", FAIL, "a: float64"),
        (with_consumer(failure="crashed"), "preprocessing_torchvision", FAIL, "crashed"),
        (with_consumer(unavailable="no browser"), "preprocessing_torchvision", ERROR, "no browser"),
        (with_consumer(incapable="no bicubic"), "preprocessing_torchvision", ERROR, "no bicubic"),
        (with_consumer(decisions=None), "preprocessing_flips_torchvision", ERROR, "not compared"),
        (with_consumer(decisions=decisions(images=0)), "preprocessing_flips_torchvision", ERROR,
         "not compared"),
        (with_consumer(decisions=decisions(images=10)), "preprocessing_flips_torchvision", ERROR,
         "not compared"),
        (with_consumer(decisions=decisions(flips=2)), "preprocessing_flips_torchvision", FAIL,
         "2 of 60 answers change"),
        (with_consumer(decisions=decisions(confidence_diff_max=NAN)),
         "preprocessing_flips_torchvision", FAIL, "NaN"),
    ],
)  # fmt: skip
def test_invalid_preprocessing_never_passes(seen, name, verdict, says):
    decision = judge(evidence_with_parity(seen))
    assert decision.verdict is not PASS
    matches = {check.name: check for check in decision.checks}[name]
    assert matches.verdict is verdict
    assert says in render_check(matches)
    assert render_check(matches, "remedy")


def test_source_without_preprocessing_spec_is_an_error():
    decision = judge(evidence_with_parity(parity(), preprocess_sha256=None))
    assert decision.verdict is ERROR


def test_unavailable_consumer_is_waived_only_when_present_is_stated():
    observed = parity(
        consumers=(consumer(), ConsumerParity(consumer="phone", unavailable="no browser"))
    )
    assert judge(evidence_with_parity(observed)).verdict is ERROR
    lenient = REQUIRED.model_copy(update={"required": "when_present"})
    decision = judge(evidence_with_parity(observed), lenient)
    assert decision.verdict is PASS
    assert [check.name for check in decision.waived if check.name.startswith("pre")] == [
        "preprocessing_phone"
    ]
    for fields in ({}, {"unavailable": "no browser"}):
        unable = ConsumerParity(consumer="phone", incapable="no bicubic", **fields)
        assert (
            judge(evidence_with_parity(parity(consumers=(consumer(), unable))), lenient).verdict
            is ERROR
        )
    broken = parity(consumers=(consumer(), consumer("phone", unavailable="no browser")))
    assert judge(evidence_with_parity(broken), lenient).verdict is ERROR


@pytest.mark.parametrize(("inputs", "verdict"), [
    ([("batch", 3, "h", "w")], PASS),
    ([(1, 3, 64, 64)], PASS),
    ([("batch", 7), ("batch", 3, 64, 64)], PASS),
    ([("batch", 12)], ERROR),
    ([(3, 64, 64)], ERROR),
    ([], ERROR),
])  # fmt: skip
def test_spec_shape_must_match_an_input_of_the_file(inputs, verdict):
    evidence = evidence_with_parity(parity())
    specs = tuple(TensorSpec(name="x", dtype="float32", shape=shape) for shape in inputs)
    subject = evidence.subject.model_copy(update={"inputs": specs})
    decision = judge(evidence.model_copy(update={"subject": subject}))
    matches = {check.name: check for check in decision.checks}["preprocessing"]
    assert matches.verdict is verdict


def test_dynamic_spec_shape_fits_fixed_input():
    assert judge(evidence_with_parity(parity(tensor=tensor(3, None, None)))).verdict is PASS


def test_decisions_are_optional_without_bound_on_flips():
    settings = PreprocessingPolicy(consumers=("torchvision",))
    observed = parity(model_sha256=None, consumers=(consumer(decisions=None),))
    assert judge(evidence_with_parity(observed), settings).verdict is PASS


NUMBERS = st.floats(0.0, 3.0) | st.sampled_from([NAN, INF])


@given(
    difference=NUMBERS,
    flips=st.integers(0, 60),
    images=st.integers(0, 60),
    worse=st.sampled_from(["max_diff", "flips", "images", "nonfinite", "failure", "mismatched"]),
)
def test_larger_difference_never_turns_fail_into_pass(difference, flips, images, worse):
    before = consumer(max_diff=difference, images=images, decisions=decisions(flips=flips))
    change: dict[str, Any] = {
        "max_diff": {"max_diff": 2 * difference + 0.1},
        "flips": {"decisions": decisions(flips=min(flips + 1, 60))},
        "images": {"images": max(images - 1, 0)},
        "nonfinite": {"nonfinite": 1},
        "failure": {"failure": "crashed"},
        "mismatched": {"mismatched": ("a: another shape",)},
    }[worse]
    phone = consumer("phone")
    first = judge(evidence_with_parity(parity(consumers=(before, phone))))
    second = judge(
        evidence_with_parity(parity(consumers=(before.model_copy(update=change), phone)))
    )
    if first.verdict is not PASS:
        assert second.verdict is not PASS


@pytest.mark.parametrize(("fields", "says"), [
    ({"consumers": ()}, "at least 1"),
    ({"consumers": ("onnx", "onnx")}, "list each once"),
    ({"consumers": ("pillow",)}, "without the training side"),
    ({"consumers": ("Own Phone",)}, "pattern"),
    ({"consumers": ("onnx",), "max_diff": NAN}, "finite"),
    ({"consumers": ("onnx",), "max_flips": 1.5}, "less than or equal to 1"),
    ({"consumers": ("onnx",), "min_images": 0}, "greater than or equal to 1"),
    ({"consumers": ("onnx",), "training_side": "phone"}, "Input should be"),
])  # fmt: skip
def test_invalid_preprocessing_policy_is_refused(fields, says):
    with pytest.raises(ValidationError, match=says):
        PreprocessingPolicy(**fields)
