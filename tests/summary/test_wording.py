"""The wording of checks, numbers and sentences."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate import CheckResult, Policy, Verdict, decide
from gate.decision.catalog import CHECKS, meaning_of
from gate.records.evidence import ModelCode
from gate.report.markdown import summary_markdown
from gate.summary import render
from gate.summary.render import bound_usage, format_bound_usage
from gate.summary.summarize import (
    agreement_sentences,
    check_sentences,
    code_sentences,
    summarize,
)
from tests import builders
from tests.builders import (
    class_parity,
    evidence,
    output_parity,
    policy,
    runtime_evidence,
)
from tests.exhaustive import for_each


@given(st.text())
def test_printable_text_has_one_line_without_control_characters(text):
    assert render.make_printable(text).isprintable()


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
    check = CheckResult(
        name="max_abs_diff",
        observed=observed,
        bound=bound,
        relation="<=",
        verdict=Verdict.FAIL,
        explanation="",
    )
    assert render.observed(check) == shown
    assert render.allowed(check).startswith("≤ ")


def test_agreement_text_has_samples_confidence_and_lower_bound():
    parity = class_parity(top1_agreement=0.98, top1_disagreements=8)
    observed = evidence(
        runtimes=(runtime_evidence(outputs=(output_parity(classification=parity),)),)
    )
    decision = decide(policy(), observed, decided_at="now")
    (sentence,) = agreement_sentences(decision, observed, confidence=0.95)
    assert "392 of 400 samples" in sentence
    assert "95 % confidence" in sentence
    assert "0.9642" in sentence
    parity = class_parity(nan_rows=100)  # which are not counted as samples
    observed = evidence(
        runtimes=(runtime_evidence(outputs=(output_parity(classification=parity),)),)
    )
    (sentence,) = agreement_sentences(decision, observed, confidence=0.95)
    assert "300 of 300 samples" in sentence


def test_inputs_missing_in_the_file_are_stated():
    dataset = evidence().dataset.model_copy(update={"model_only": ("mask",)})
    lacking = evidence(dataset=dataset)
    decision = decide(policy(), lacking, decided_at="now")
    (sentence,) = check_sentences(decision, "inputs")
    assert sentence.startswith("The model has the inputs mask, the file does not")
    assert "The model has the inputs mask" in summary_markdown(summarize(decision, lacking), {})
    assert list(check_sentences(decide(policy(), evidence(), decided_at="now"), "inputs")) == []


def test_unclaimed_agreement_is_one_line():
    first = output_parity(classification=class_parity(predicted_classes=1))
    runtimes = tuple(
        runtime_evidence(r.runtime, outputs=(first,)) if r.outputs else r
        for r in evidence().runtimes
    )
    observed = evidence(runtimes=runtimes)
    decision = decide(Policy.default(), observed, decided_at="now")
    (sentence,) = agreement_sentences(decision, observed, confidence=0.95)
    assert sentence.startswith(
        "logits: Agreement of answers is not judged: every sample has the same"
    )
    assert (
        summary_markdown(summarize(decision, observed), {}).count(
            "Agreement of answers is not judged"
        )
        == 1
    )
    tensors = decide(Policy.default(task="tensors"), observed, decided_at="now")
    assert not list(agreement_sentences(tensors, observed, confidence=0.95))


def test_code_changed_since_export_is_stated():
    measured = ModelCode(files={"mine": builders.digest("b")}, packages={"torch": "2.10"})
    exported = ModelCode(files={"mine": builders.digest("a")}, packages={"torch": "2.9"})
    plain = builders.evidence()
    assert plain.export is not None

    def told(source: ModelCode | None, export: ModelCode | None) -> str:
        evidence = plain.model_copy(
            update={
                "source": plain.source.model_copy(update={"code": source}),
                "export": plain.export.model_copy(update={"code": export}),
            }
        )
        decision = decide(builders.policy(), evidence, decided_at="now")
        assert decision.passed  # only the measurement decides
        text = summary_markdown(summarize(decision, evidence), {})
        sentences = list(code_sentences(evidence))
        assert all(s[:20] in text for s in sentences)
        return " ".join(sentences)

    assert "mine, torch 2.9 -> 2.10" in told(measured, exported)
    assert told(measured, measured) == told(measured, None) == told(None, exported) == ""
    unread = measured.model_copy(update={"unread": {"fast": "it is compiled"}})
    assert "not read" in told(unread, None)
    assert "fast: it is compiled" in told(unread, unread)


def check(name: str, **fields: object) -> CheckResult:
    return CheckResult(name=name, verdict=Verdict.FAIL, code="beyond", **fields)  # type: ignore[arg-type]


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
    assert (
        format_bound_usage(check(name, observed=observed, relation=relation, bound=bound))
        == expected
    )
