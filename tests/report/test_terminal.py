from __future__ import annotations

import io

import pytest
from rich.console import Console

from gate.decision.decision import Decision
from gate.records.evidence import Evidence
from gate.report.terminal import print_decision
from gate.story.wording import folded_groups
from tests.report.samples import HOSTILE, failed, passed


def _printed(judged: tuple[Decision, Evidence], *, width: int = 10_000) -> str:
    stream = io.StringIO()
    print_decision(*judged, Console(file=stream, width=width))
    return stream.getvalue()


def test_a_pass_shows_every_check_the_waived_ones_and_the_lower_bound() -> None:
    decision, evidence = passed()
    text = _printed((decision, evidence))
    for _, checks in folded_groups(decision):
        assert all(check.name in text for check in checks)
    assert text.count("WAIVED") == len(decision.waived) == 3
    assert "waived  torch-cuda, ort-cuda, ort-cuda-optimized: was not measured; the policy" in text
    assert "no CUDA device" in text
    assert "top-1 agrees on 400 of 400 samples" in text
    assert text.rstrip().splitlines()[-1].startswith("Passed: ")


def test_a_problem_is_shown_with_amount_bound_and_remedy() -> None:
    text = _printed(failed())
    assert "FAIL  ort-cpu / logits / max_abs_diff: max_abs_diff is 0.66, allowed <= 0.0001" in text
    assert "    try: Export in eval mode" in text
    assert text.rstrip().splitlines()[-1].startswith("Rejected: ")


def test_a_remedy_that_several_checks_share_is_told_once() -> None:
    assert _printed(failed()).count("try: Export in eval mode") == 1


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_narrow_terminal_folds_and_cuts_nothing(width: int) -> None:
    decision, evidence = failed()
    text = _printed((decision, evidence), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_names_from_the_file_cannot_steer_the_terminal() -> None:
    text = _printed(failed(HOSTILE))
    assert "\x1b" not in text
    assert "[red]" in text
