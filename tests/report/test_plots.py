from __future__ import annotations

import io

import pytest
from PIL import Image

from gate.decision import decide
from gate.evidence import Confidence, ConfidenceOfClass, Evidence
from gate.report import plots
from gate.report.plots import draw
from tests.builders import absent, class_parity, evidence, output_parity, policy, runtime_evidence
from tests.report.samples import HOSTILE, failed, passed

PROBLEMS = [float("nan"), float("inf"), 1.7e308, 0.0]


def _of(output: object) -> Evidence:
    return evidence(runtimes=(runtime_evidence(outputs=(output,)),))


def test_a_decision_gives_all_figures() -> None:
    decision, seen = passed()
    drawn = draw(seen, decision)
    assert tuple(drawn) == plots.NAMES
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
    assert tuple(drawn) == plots.NAMES


@pytest.mark.parametrize("name", [HOSTILE, "$\\frac$", "日本語", "x" * 5000])
def test_any_name_can_be_drawn(name: str) -> None:
    decision, seen = failed(name)
    assert "differences" in draw(seen, decision)


def test_a_failed_check_is_drawn_otherwise_than_a_passed_one() -> None:
    good, bad = draw(*reversed(passed())), draw(*reversed(failed()))
    assert _orange_red(bad["differences"]) > 2 * _orange_red(good["differences"])


def _orange_red(png: bytes) -> int:
    """Pixels in the colour of failure; the legend always has some."""
    colours = Image.open(io.BytesIO(png)).convert("RGB").getcolors(1 << 24) or []
    return sum(count for count, colour in colours if colour == (0xD5, 0x5E, 0x00))
