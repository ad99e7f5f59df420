"""Checks in plain words."""

from __future__ import annotations

import math

import pytest

from gate.decision.catalog import CHECKS, meaning_of
from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import decide
from gate.records.instruments import NoiseParity
from gate.summary.render import bound_usage, format_bound_usage
from gate.summary.summarize import check_row, summarize
from tests.builders import (
    evidence,
    noise_parity,
    output_parity,
    policy,
    probe_parity,
    runtime_evidence,
)


def check(name: str, **fields: object) -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.FAIL, code="beyond", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_check_has_its_words(name: str) -> None:
    meaning = meaning_of(name)
    assert meaning.meaning.endswith("?")
    assert meaning.why
    if meaning.unit is not None:
        assert meaning.formula is not None


def test_no_word_of_a_whole_decision_is_lacking() -> None:
    measured = evidence(runtimes=(runtime_evidence(probes=(probe_parity(),)),))
    for entry in summarize(decide(policy(), measured, decided_at="now"), measured).words:
        assert entry.meaning.endswith("?"), entry.check.name
        assert "None" not in f"{entry.meaning} {entry.formula or ''} {entry.unit or ''} {entry.why}"


@pytest.mark.parametrize(
    ("observed", "relation", "bound", "expected"),
    [
        (3.0, "<=", 2.0, 1.5),
        (0.0, "<=", 0.0, 0.0),
        (1e-9, "<=", 0.0, math.inf),
        (math.nan, "<=", 2.0, math.inf),
        (-math.inf, "<=", 2.0, math.inf),
        (0.98, ">=", 0.99, 2.0),
        (1.0, ">=", 1.0, 0.0),
        (0.9, ">=", 1.0, math.inf),
        (447.0, ">=", 400.0, 400.0 / 447.0),
        ("CPU", None, None, None),
        (None, "<=", 1.0, None),
    ],
)
def test_how_much_of_its_bound_is_used(
    observed: float | str | None, relation: str | None, bound: float | None, expected: float | None
) -> None:
    used = bound_usage(check("x", observed=observed, relation=relation, bound=bound))
    assert used == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("name", "observed", "relation", "bound", "expected"),
    [
        ("noise_ratio", 33.7, "<=", 1.67, "33.7 × rounding, allowed 1.67"),
        ("top1_agreement", 0.5, ">=", 1.0, "50 %, allowed at least 100 %"),
        ("max_abs_diff", math.nan, "<=", 0.1, "nan, allowed 0.1"),
        ("accuracy_drop", 0.012, "<=", 0.0, "1.2 %, allowed 0 %"),
        ("provider", None, None, None, ""),
    ],
)
def test_a_number_has_its_unit(
    name: str, observed: float | None, relation: str | None, bound: float | None, expected: str
) -> None:
    assert (
        format_bound_usage(check(name, observed=observed, relation=relation, bound=bound))
        == expected
    )


def of_noise(parity: NoiseParity) -> str:
    output = output_parity(noise=parity)
    measured = evidence(runtimes=(runtime_evidence("ort-cpu", outputs=(output,)),))
    decision = decide(policy(), measured, decided_at="now")
    noisy = next(c for c in decision.checks if c.name == "noise_ratio")
    return check_row(noisy, measured).why


def test_a_widened_bound_says_so() -> None:
    assert "3, widened to 3.335 for 320 elements" in of_noise(noise_parity(scatter=None))
    assert "Divided by 1.2" in of_noise(noise_parity(scatter=1.2))
    assert "Divided" not in of_noise(noise_parity(scatter=1.0))
