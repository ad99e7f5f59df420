"""A judgment's story is that of its decision, about its model, with its own next steps."""

from __future__ import annotations

from typing import Any

import pytest

from gate.decision.decide import decide
from gate.summary.summarize import SummaryInputs, summarize
from gate.summary.summary import Step
from tests.builders import evidence, noise_parity, output_parity, policy, runtime_evidence

STEP = Step(label="Look at it", command="gate locate model.onnx")
NOW = "2026-01-01T00:00:00+00:00"


def judgment(**given: Any) -> SummaryInputs:
    decision = decide(policy(), evidence(), decided_at=NOW)
    return SummaryInputs(decision=decision, evidence=evidence(), policy=policy(), **given)


def test_what_is_not_said_is_what_follows_from_the_decision() -> None:
    made = judgment()
    assert made.story == summarize(made.decision, made.evidence, confidence=policy().confidence)


@pytest.mark.parametrize(
    ("given", "field", "shown"),
    [
        ({"model_name": "digits"}, "name", "digits"),
        ({"signed_by": "ci 1234\x1b[31m"}, "signed_by", "ci 1234�[31m"),
    ],
)
def test_the_subject_is_named(given: dict[str, str], field: str, shown: str) -> None:
    assert getattr(judgment().story.subject, field) is None
    assert getattr(judgment(**given).story.subject, field) == shown


def test_its_own_steps_come_in_the_place_of_the_decision_s() -> None:
    assert judgment(steps=(STEP,)).story.steps == (STEP,)
    assert judgment().story.steps != (STEP,)


@pytest.mark.parametrize(
    ("noise", "warned"),
    [
        ({"candidate_rms": 3e-4, "rounding_rms": 3e-4}, True),
        ({"candidate_rms": 3e-5, "rounding_rms": 3e-5}, False),  # below 1e-5 of the output
        ({"candidate_rms": 3e-4, "reference_rms": 3e-4}, False),  # PyTorch is as far off
        ({"candidate_rms": 3e-4, "ratio": 300.0}, False),  # refused, so the bound says it
    ],
)
def test_a_runtime_with_large_rounding_errors_is_warned_of(
    noise: dict[str, float], warned: bool
) -> None:
    output = output_parity(noise=noise_parity(**noise))
    measured = evidence(runtimes=(runtime_evidence("ort-cpu", outputs=(output,)),))
    story = summarize(decide(policy(), measured, decided_at=NOW), measured)
    assert any("rounding error of this runtime" in line for line in story.warnings) is warned
