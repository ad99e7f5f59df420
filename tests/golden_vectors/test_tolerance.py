"""Tolerances of golden vectors come from the policy bounds of the served runtime."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import Evidence, Policy
from gate.golden.tolerance import tolerances_for
from gate.policy.sections import Bounds, RuntimePolicy
from gate.records.evidence import TensorSpec
from gate.records.instruments import EPSILON
from tests import builders
from tests.golden_vectors import vectors

FLOOR = 1.7e-5 / 1.5
"""max_abs_diff / noise_diff of the builders' passing output."""


def policy(**bounds: Any) -> Policy:
    requested = Bounds(**{"top1_agreement": 1.0, **bounds})
    runtime = RuntimePolicy(required="always", bounds=requested)
    return builders.policy(
        precision="reduced", runtimes={"ort-cpu": runtime, "ort-cpu-optimized": runtime}
    )


def tolerance(measured: Evidence, **bounds: Any) -> float:
    return tolerances_for(policy(**bounds), measured)["logits"].max_abs_diff


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"max_abs_diff": 1e-4, "noise_diff": 32.0, "scaled_diff": 1e-3}, 1e-4),
        ({"max_abs_diff": 0.0, "noise_diff": 32.0}, 0.0),
        ({"noise_diff": 32.0, "scaled_diff": 1e-3}, 32.0 * FLOOR),
        ({"scaled_diff": 1e-3}, 1e-3 * 3.0),
        ({}, 2.0 * 1.7e-5),
    ],
)
def test_first_set_bound_gives_the_tolerance(bounds, expected) -> None:
    assert tolerance(vectors.evidence(), **bounds) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("output", "bounds", "expected"),
    [
        ({"noise": builders.noise_parity(diff=0.0), "max_abs_diff": 0.0}, {"noise_diff": 32.0}, 32e-6),
        ({"noise": builders.noise_parity(diff=math.nan)}, {"noise_diff": 32.0}, 32e-6),
        ({"noise": builders.noise_parity(diff=math.nan, reference_rms=math.nan)}, {"noise_diff": 32.0},
         32.0 * EPSILON * 12.0),
        ({"noise": None}, {"noise_diff": 32.0, "scaled_diff": 1e-3}, 3e-3),
        ({"max_abs_diff": math.nan}, {}, EPSILON * 12.0),
        ({"max_abs_diff": math.inf}, {}, EPSILON * 12.0),
        ({"max_abs_diff": 0.0}, {}, EPSILON * 12.0),
        ({"reference_std": math.nan}, {"scaled_diff": 1e-3}, 0.0),
        ({"dtype": "int64"}, {"noise_diff": 32.0}, 0.0),
        ({"dtype": "int64"}, {"noise_diff": 32.0, "scaled_diff": 1e-3}, 1e-3),
        ({"dtype": "bool", "max_abs_diff": 7.0}, {}, 0.0),
    ],
)  # fmt: skip
def test_unmeasured_output_gets_a_small_tolerance(output, bounds, expected) -> None:
    assert tolerance(vectors.evidence(**output), **bounds) == pytest.approx(expected)


@given(difference=st.floats(), noise=st.floats(), std=st.floats(), biggest=st.floats())
def test_tolerance_is_finite(difference, noise, std, biggest) -> None:
    parity = builders.noise_parity(diff=noise)
    measured = vectors.evidence(
        max_abs_diff=difference, noise=parity, reference_std=std, reference_abs_max=biggest
    )
    for bounds in ({"noise_diff": 32.0}, {"scaled_diff": 1e-3}, {}):
        assert 0.0 <= tolerance(measured, **bounds) < math.inf


def test_output_without_evidence_must_be_equal() -> None:
    observed = builders.evidence()
    more = (*observed.subject.outputs, TensorSpec(name="more", dtype="float32", shape=("batch", 2)))
    subject = observed.subject.model_copy(update={"outputs": more})
    result = tolerances_for(
        policy(noise_diff=32.0), observed.model_copy(update={"subject": subject})
    )
    assert result["more"].max_abs_diff == 0.0
    unmeasured = observed.model_copy(update={"runtimes": ()})
    assert tolerances_for(policy(noise_diff=32.0), unmeasured)["logits"].max_abs_diff == 0.0


def test_agreement_applies_to_logits_only() -> None:
    observed = vectors.evidence()
    assert tolerances_for(policy(top1_agreement=0.9), observed)["logits"].top1_agreement == 0.9
    observed = vectors.evidence(classification=None)
    assert tolerances_for(policy(), observed)["logits"].top1_agreement is None


@pytest.mark.parametrize(("named", "expected"), [((), 2.0 * 1.7e-5), (("logits",), 0.5)])
def test_part_uses_the_bounds_that_name_its_output(named: tuple[str, ...], expected: float) -> None:
    bounds = Bounds(max_abs_diff=0.5, top1_agreement=0.9)
    runtime = RuntimePolicy(required="always", bounds=bounds)
    twin = builders.policy(
        task="auto",
        precision="quantized",
        instruments=Policy.quantized().instruments,
        logits=named,
        runtimes={"ort-cpu": runtime, "ort-cpu-optimized": runtime},
    )
    result = tolerances_for(twin.for_part(["logits"]), vectors.evidence())["logits"]
    assert result.max_abs_diff == pytest.approx(expected)
    assert result.top1_agreement == (0.9 if named else None)
    assert tolerances_for(twin, vectors.evidence())["logits"].max_abs_diff == 0.5
