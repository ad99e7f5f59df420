"""Inferred roles only add checks, and only if the samples can prove them."""

from __future__ import annotations

import pytest

from gate.policy.output_roles import (
    class_metrics_for,
    infer_role,
    is_unsure,
    max_ties,
    proven_constant,
    unmeasurable,
    unprovable_reason,
)
from gate.policy.policy import Policy
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.outputs import OutputParity
from tests import builders


def policy(task: str = "auto") -> Policy:
    agreement = None if task == "tensors" else 1.0
    runtime = RuntimePolicy(
        required="always", bounds=Bounds(max_abs_diff=1e-3, top1_agreement=agreement)
    )
    return Policy(task=task, runtimes={"ort-cpu": runtime})


AUTO = policy()


def output(**classes: object) -> OutputParity:
    return builders.output_parity(classification=builders.class_parity(**classes))


@pytest.mark.parametrize(
    ("classes", "reason"),
    [
        ({}, None),
        ({"predicted_classes": 1}, "every sample has the same largest column"),
        ({"top1_ties": 5}, "rounding decides which column is the largest in 5 samples"),
        (
            {"top1_disagreements": 1, "unsure": 60, "sure": 300},
            "PyTorch's own rounding changes the largest column in 60 samples",
        ),
    ],
)
def test_inferred_role_is_dropped_when_samples_cannot_prove_it(classes, reason) -> None:
    first = output(**classes)
    assert infer_role(AUTO, first)
    assert unprovable_reason(AUTO, first) == reason
    assert (class_metrics_for(AUTO, first) is None) == (reason is not None)


@pytest.mark.parametrize("classes", [{"predicted_classes": 1}, {"top1_ties": 5}])
def test_stated_task_always_uses_class_metrics(classes) -> None:
    demanded = policy("classification")
    first = output(**classes)
    assert not infer_role(demanded, first)
    assert unprovable_reason(demanded, first) is None
    assert class_metrics_for(demanded, first) == first.classification


def test_tensor_outputs_have_no_class_metrics() -> None:
    assert class_metrics_for(policy("tensors"), output()) is None
    assert class_metrics_for(AUTO, builders.output_parity(classification=None)) is None


@pytest.mark.parametrize(("total", "most"), [(1, 1), (100, 1), (101, 2), (1000, 10)])
def test_most_ties_is_one_percent(total: int, most: int) -> None:
    assert max_ties(total) == most


@pytest.mark.parametrize(
    ("unsure", "sure", "is_it"), [(0, 0, False), (1, 0, False), (2, 3, True), (9, 91, False)]
)
def test_is_unsure_above_ten_percent(unsure: int, sure: int, is_it: bool) -> None:
    assert is_unsure(builders.class_parity(unsure=unsure, sure=sure)) == is_it


@pytest.mark.parametrize(
    "spoiled",
    [
        {},
        {"reference_constant": False},
        {"max_abs_diff": 1e-9},
        {"nonfinite_mismatched": 1},
        {"elements": 0},
    ],
)
def test_proven_constant_needs_exact_equality(spoiled) -> None:
    good = {"reference_constant": True, "max_abs_diff": 0.0, "nonfinite_mismatched": 0}
    constant = builders.output_parity(**{**good, **spoiled})
    assert proven_constant(constant) == (not spoiled)


def test_output_without_finite_elements_is_unmeasurable() -> None:
    first = builders.output_parity()
    assert unmeasurable(first) is None
    assert unmeasurable(first.model_copy(update={"elements": 0})) == "empty"
    assert unmeasurable(first.model_copy(update={"nonfinite_reference": 4000})) == "nonfinite"
