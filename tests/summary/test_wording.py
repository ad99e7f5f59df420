"""The wording of checks, numbers and sentences."""

from __future__ import annotations

import math

import pytest

from gate import CheckResult, Evidence, Policy, Verdict, decide
from gate.decision.catalog import CHECKS, meaning_of
from gate.records.evidence import ModelCode
from gate.report.markdown import summary_markdown
from gate.summary import render
from gate.summary.render import bound_usage, format_bound_usage
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests import builders
from tests.builders import class_parity, evidence, output_parity, policy, runtime_evidence
from tests.exhaustive import for_each


def check(name: str, **fields: object) -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.FAIL, code="beyond", **fields)  # type: ignore[arg-type]


def summarize_by(applied: Policy, measured: Evidence) -> Summary:
    return summarize(decide(applied, measured, decided_at="now"), measured)


@pytest.mark.parametrize(("observed", "bound", "shown"), [
    (0.66, 1e-4, "0.66"),
    (1.00001e-4, 1e-4, "0.000100001"),
    (0.99999, 1.0, "0.99999"),
    (1.0, 1.0, "1"),
    (math.nan, 1e-4, "nan"),
    (math.inf, 1e-4, "inf"),
    (None, 1e-4, ""),
])  # fmt: skip
def test_observed_number_is_shown_equal_to_bound_only_when_equal(observed, bound, shown):
    result = check("max_abs_diff", observed=observed, bound=bound, relation="<=")
    assert render.observed(result) == shown
    assert render.allowed(result).startswith("≤ ")


@pytest.mark.parametrize(("fields", "samples", "lower"), [
    ({"top1_agreement": 0.98, "top1_disagreements": 8}, "392 of 400 samples", "0.9642"),
    ({"nan_rows": 100}, "300 of 300 samples", "0.99"),  # which are not counted as samples
])  # fmt: skip
def test_agreement_text_has_samples_confidence_and_lower_bound(fields, samples, lower):
    output = output_parity(classification=class_parity(**fields))
    measured = evidence(runtimes=(runtime_evidence(outputs=(output,)),))
    (note,) = [n for n in summarize_by(policy(), measured).notes if "top-1 agrees" in n]
    assert all(text in note for text in (samples, lower, "95 % confidence"))


def test_inputs_missing_in_the_file_are_stated():
    dataset = evidence().dataset.model_copy(update={"model_only": ("mask",)})
    text = "The model has the inputs mask, the file does not"
    assert any(text in n for n in summarize_by(policy(), evidence(dataset=dataset)).notes)
    assert not any("the inputs" in n for n in summarize_by(policy(), evidence()).notes)


def test_unclaimed_agreement_is_one_line():
    output = output_parity(classification=class_parity(predicted_classes=1))
    runtimes = tuple(
        runtime_evidence(r.runtime, outputs=(output,)) if r.outputs else r
        for r in evidence().runtimes
    )
    measured, text = evidence(runtimes=runtimes), "Agreement of answers is not judged"
    summary = summarize_by(Policy.default(), measured)
    assert summary_markdown(summary, {}).count(text) == 1
    tensors = summarize_by(Policy.default(task="tensors"), measured)
    assert not [n for n in tensors.notes if text in n or "top-1" in n]


def test_code_changed_since_export_is_stated():
    measured = ModelCode(files={"mine": builders.digest("b")}, packages={"torch": "2.10"})
    exported = ModelCode(files={"mine": builders.digest("a")}, packages={"torch": "2.9"})
    plain = builders.evidence()
    assert plain.export is not None

    def warnings(source: ModelCode | None, export: ModelCode | None) -> str:
        update = {
            "source": plain.source.model_copy(update={"code": source}),
            "export": plain.export.model_copy(update={"code": export}),
        }
        summary = summarize_by(policy(), plain.model_copy(update=update))
        assert summary.headline.verdict == "PASS"  # only the measurement decides
        return " ".join(summary.warnings)

    assert "mine, torch 2.9 -> 2.10" in warnings(measured, exported)
    for source, export in ((measured, measured), (measured, None), (None, exported)):
        assert warnings(source, export) == ""
    unread = measured.model_copy(update={"unread": {"fast": "it is compiled"}})
    assert "not read" in warnings(unread, None)
    assert "fast: it is compiled" in warnings(unread, unread)


@for_each(sorted(CHECKS))
def test_each_check_has_wording(name):
    meaning = meaning_of(name)
    assert meaning.meaning.endswith("?")
    assert meaning.why
    if meaning.unit is not None:
        assert meaning.formula is not None


@pytest.mark.parametrize(("observed", "relation", "bound", "expected"), [
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
])  # fmt: skip
def test_share_of_bound(observed, relation, bound, expected):
    used = bound_usage(check("x", observed=observed, relation=relation, bound=bound))
    assert used == (expected if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(("name", "observed", "relation", "bound", "expected"), [
    ("noise_ratio", 33.7, "<=", 1.67, "33.7 × rounding, allowed 1.67"),
    ("top1_agreement", 0.5, ">=", 1.0, "50 %, allowed at least 100 %"),
    ("max_abs_diff", math.nan, "<=", 0.1, "nan, allowed 0.1"),
    ("accuracy_drop", 0.012, "<=", 0.0, "1.2 %, allowed 0 %"),
    ("provider", None, None, None, ""),
])  # fmt: skip
def test_number_has_its_unit(name, observed, relation, bound, expected):
    result = check(name, observed=observed, relation=relation, bound=bound)
    assert format_bound_usage(result) == expected
