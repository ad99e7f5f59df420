from __future__ import annotations

from typing import Any

import pytest

from gate.decision.check_result import Verdict
from gate.decision.decide import decide
from gate.errors import PolicyError
from gate.policy.overrides import override_text, with_overrides
from gate.policy.policy import Policy
from gate.summary.summarize import summarize
from tests.builders import evidence, policy

RATIO = "runtimes.ort-cpu.bounds.noise_ratio"


def policy_with_dotted_name() -> Policy:
    """Return a policy with a runtime whose name contains a dot."""
    plain = policy()
    return plain.model_copy(
        update={"runtimes": {**plain.runtimes, "ort.v2": plain.runtimes["ort-cpu"]}}
    )


@pytest.mark.parametrize(
    ("place", "text", "found"),
    [
        (RATIO, "2", lambda p: p.runtimes["ort-cpu"].bounds.noise_ratio == 2.0),
        (RATIO, "null", lambda p: p.runtimes["ort-cpu"].bounds.noise_ratio is None),
        ("min_samples", "7", lambda p: p.min_samples == 7),
        ("instruments.probes", "false", lambda p: p.instruments.probes is False),
        ("waive", "[noise_ratio]", lambda p: p.waive == ("noise_ratio",)),
        ("runtimes.ort-cpu.required", "always", lambda p: p.runtimes["ort-cpu"].required),
        ("runtimes.ort.v2.bounds.noise_ratio", "2", lambda p: p.runtimes["ort.v2"].bounds.noise_ratio == 2),
    ],
)  # fmt: skip
def test_override_sets_the_value_and_is_recorded(place: str, text: str, found: Any) -> None:
    before = policy_with_dotted_name()
    tried = with_overrides(before, {place: text})
    assert found(tried)
    if tried != before:
        assert list(tried.tried) == [place]
        assert tried.digest() != before.digest()
    assert before.tried == {}


def test_override_with_equal_value_is_not_recorded() -> None:
    before = policy()
    custom = before.runtimes["ort-cpu"].bounds.noise_ratio
    assert with_overrides(before, {RATIO: str(custom), "min_samples": "300"}) is before
    pair = with_overrides(with_overrides(before, {RATIO: "2"}), {"min_samples": "7"})
    assert pair.tried == {RATIO: 2, "min_samples": 7}
    assert override_text(pair.tried) == f"{RATIO} = 2, min_samples = 7"


@pytest.mark.parametrize(
    ("place", "text", "says"),
    [
        ("runtimes.ort-cp.bounds.noise_ratio", "2", "Did you mean ort-cpu?"),
        ("runtimes.beyond.required", "always", "--runtime adds one"),
        ("runtimes.ort-cpu.bounds.noise", "2", "runtimes.ort-cpu.bounds.noise"),
        ("nowhere", "2", "nowhere"),
        ("min_samples.of", "2", "is a value"),
        ("tried.min_samples", "2", "records the overrides"),
        ("runtimes", "{}", "runtimes"),
        (RATIO, "two", "valid number"),
        (RATIO, ".nan", "finite"),
        (RATIO, "-1", "greater than or equal to 0"),
        (RATIO, "[", "not a YAML value"),
        ("min_samples", "", "integer"),
    ],
)
def test_invalid_override_is_refused(place: str, text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=r"^--set") as error:
        with_overrides(policy(), {place: text})
    assert says in str(error.value)


def test_decision_and_summary_contain_overrides() -> None:
    tried = with_overrides(policy(), {RATIO: "2.5"})
    decision = decide(tried, evidence(), decided_at="now")
    assert decision.verdict is Verdict.PASS
    assert decision.tried == {RATIO: 2.5}
    summary = summarize(decision, evidence())
    assert summary.warnings[0] == f"Tried out, so it promotes nothing: {RATIO} = 2.5."
    (step,) = summary.steps
    assert str(step.command).startswith("gate check ")
    as_written = decide(policy(), evidence(), decided_at="now")
    assert "tried" not in as_written.to_plain()
    assert summarize(as_written, evidence()).warnings == ()
