from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.decision.check_result import CheckResult, Verdict
from gate.decision.decide import decide
from gate.policy.policy import Policy
from gate.records.evidence import ModelCode
from gate.report.markdown import summary_markdown
from gate.summary import render
from gate.summary.summarize import (
    agreement_sentences,
    check_sentences,
    code_sentences,
    summarize,
)
from tests import builders
from tests.builders import class_parity, evidence, output_parity, policy, runtime_evidence


def _decision(**overrides: object):
    return decide(policy(), evidence(**overrides), decided_at="2026-01-01T00:00:00+00:00")


@given(st.text())
def test_printable_text_is_one_line_that_cannot_steer_a_terminal(text: str) -> None:
    assert render.make_printable(text).isprintable()


@pytest.mark.parametrize(
    ("observed", "bound", "shown"),
    [
        (0.66, 1e-4, "0.66"),
        (1.00001e-4, 1e-4, "0.000100001"),
        (0.99999, 1.0, "0.99999"),
        (1.0, 1.0, "1"),
        (math.nan, 1e-4, "nan"),
        (math.inf, 1e-4, "inf"),
        (None, 1e-4, ""),
    ],
)
def test_an_observed_number_never_looks_like_its_bound_unless_it_is(
    observed: float | None, bound: float, shown: str
) -> None:
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


def test_agreement_is_told_with_samples_confidence_and_lower_bound() -> None:
    parity = class_parity(top1_agreement=0.98, top1_disagreements=8)
    seen = evidence(runtimes=(runtime_evidence(outputs=(output_parity(classification=parity),)),))
    decision = decide(policy(), seen, decided_at="now")
    (sentence,) = agreement_sentences(decision, seen, confidence=0.95)
    assert "392 of 400 samples" in sentence
    assert "95 % confidence" in sentence
    assert "0.9642" in sentence


def test_what_only_the_model_takes_is_said_on_every_page() -> None:
    dataset = evidence().dataset.model_copy(update={"model_only": ("mask",)})
    lacking = evidence(dataset=dataset)
    decision = decide(policy(), lacking, decided_at="now")
    (sentence,) = check_sentences(decision, "inputs")
    assert sentence.startswith("The model has the inputs mask, the file does not")
    assert "The model has the inputs mask" in summary_markdown(summarize(decision, lacking), {})
    assert list(check_sentences(decide(policy(), evidence(), decided_at="now"), "inputs")) == []


def test_where_no_agreement_is_claimed_that_is_one_line() -> None:
    one = output_parity(classification=class_parity(predicted_classes=1))
    runtimes = tuple(
        runtime_evidence(r.runtime, outputs=(one,)) if r.outputs else r for r in evidence().runtimes
    )
    seen = evidence(runtimes=runtimes)
    decision = decide(Policy.default(), seen, decided_at="now")
    (sentence,) = agreement_sentences(decision, seen, confidence=0.95)
    assert sentence.startswith(
        "logits: Agreement of answers is not judged: every sample has the same"
    )
    assert (
        summary_markdown(summarize(decision, seen), {}).count("Agreement of answers is not judged")
        == 1
    )
    tensors = decide(Policy.default(task="tensors"), seen, decided_at="now")
    assert not list(agreement_sentences(tensors, seen, confidence=0.95))


def test_rows_of_nan_are_no_samples() -> None:
    parity = class_parity(nan_rows=100)
    seen = evidence(runtimes=(runtime_evidence(outputs=(output_parity(classification=parity),)),))
    decision = decide(policy(), seen, decided_at="now")
    (sentence,) = agreement_sentences(decision, seen, confidence=0.95)
    assert "300 of 300 samples" in sentence


def test_code_that_changed_since_the_export_is_told() -> None:
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
        assert decision.passed  # the measurement decides
        text = summary_markdown(summarize(decision, evidence), {})
        sentences = list(code_sentences(evidence))
        assert all(s[:20] in text for s in sentences)
        return " ".join(sentences)

    assert "mine, torch 2.9 -> 2.10" in told(measured, exported)
    assert told(measured, measured) == told(measured, None) == told(None, exported) == ""
    unread = measured.model_copy(update={"unread": {"fast": "it is compiled"}})
    assert "not read" in told(unread, None)
    assert "fast: it is compiled" in told(unread, unread)
