from __future__ import annotations

import io

import pytest
from PIL import Image

from gate.decision.checks import Verdict
from gate.decision.decision import decide
from gate.records.evidence import Confidence, ConfidenceOfClass, Evidence
from gate.report import bounds, plots
from gate.report.figure import BLUE, RED
from gate.report.plots import draw
from tests.builders import absent, class_parity, evidence, output_parity, policy, runtime_evidence
from tests.report.samples import HOSTILE, failed, passed

PROBLEMS = [float("nan"), float("inf"), 1.7e308, 0.0]


def _of(output: object) -> Evidence:
    return evidence(runtimes=(runtime_evidence(outputs=(output,)),))


def test_a_decision_gives_all_figures() -> None:
    decision, seen = passed()
    drawn = draw(seen, decision)
    assert set(drawn) >= set(plots.NAMES) - {"noise"}
    for png in drawn.values():
        image = Image.open(io.BytesIO(png))
        image.load()
        assert image.width > 600


def test_the_same_evidence_gives_the_same_bytes() -> None:
    assert draw(*reversed(failed())) == draw(*reversed(failed()))


def test_what_has_no_data_is_left_out() -> None:
    assert draw(evidence(runtimes=(absent("ort-cuda"),))) == {}
    tensors = _of(output_parity(classification=None))
    assert set(draw(tensors)) == {"latency"}


@pytest.mark.parametrize("value", PROBLEMS)
def test_spoilt_numbers_are_drawn(value: float) -> None:
    confidence = Confidence(
        mean=value,
        min=value,
        max=value,
        bands=(0.0, 0.0, 0.0, 1.0),
        per_class=(ConfidenceOfClass(label=3, samples=1, mean=value, max=value),),
    )
    seen = _of(
        output_parity(
            max_abs_diff=value,
            l2_max=value,
            classification=class_parity(confidence=confidence),
        )
    )
    drawn = draw(seen, decide(policy(), seen, decided_at="now"))
    assert set(drawn) >= set(plots.NAMES) - {"noise"}


@pytest.mark.parametrize("name", [HOSTILE, "$\\frac$", "日本語", "x" * 5000])
def test_any_name_can_be_drawn(name: str) -> None:
    decision, seen = failed(name)
    assert "differences" in draw(seen, decision)


def test_a_failed_check_is_drawn_otherwise_than_a_passed_one() -> None:
    decision, _ = failed()
    figure = bounds.differences(decision)
    assert figure is not None
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    drawn = {line.get_ydata()[0]: line for line in lines if line.get_marker() in ("o", "X")}
    in_units = ("noise_", "repeatability_ratio", "batch_invariance_ratio", "probe_")
    checks = [
        check
        for check in decision.checks
        if check.relation == "<=" and check.runtime and not check.name.startswith(in_units)
    ]
    assert len(drawn) == len(checks)
    assert {check.verdict for check in checks} == {Verdict.PASS, Verdict.FAIL}
    for place, check in enumerate(checks):
        looks = (drawn[place].get_marker(), drawn[place].get_color())
        passed_ = check.verdict is Verdict.PASS
        assert looks == (("o", BLUE) if passed_ else ("X", RED))
        assert (drawn[place].get_xdata()[0] > check.bound) is not passed_
