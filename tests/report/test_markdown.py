from __future__ import annotations

import re

from gate.report.markdown import describe
from gate.story.wording import folded_groups
from tests.report.samples import HOSTILE, failed, passed

LINKS = {"run": "http://127.0.0.1:5000/#/experiments/1/runs/a b"}


def test_the_first_line_is_one_plain_sentence() -> None:
    for judged in (passed(), failed(), failed(HOSTILE)):
        first, second, *_ = describe(*judged, LINKS).split("\n")
        assert first.endswith(".")
        assert not re.search(r"[|`*<>#\[\]\\]", first)
        assert second == ""


def test_every_check_is_a_row_with_all_its_cells() -> None:
    decision, evidence = failed(HOSTILE)
    rows = [row for row in describe(decision, evidence, LINKS).split("\n") if row.startswith("|")]
    shown = [check for _, checks in folded_groups(decision) for check in checks]
    assert len(rows) == len(shown) + 2
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) == 7


def test_problems_come_with_remedies_and_waived_checks_are_shown() -> None:
    text = describe(*failed(), {})
    assert "max_abs_diff is 0.66, allowed \\<= 0.0001" in text
    assert "Try: Export in eval mode" in text
    assert text.count("**WAIVED** torch-cuda, ort-cuda, ort-cuda-optimized: ") == 1


def test_hostile_names_stay_text() -> None:
    text = describe(*failed(HOSTILE), {})
    assert not re.search(r"(?<!\\)<script", text)
    assert "\x1b" not in text


def test_what_the_decision_is_bound_to_is_there() -> None:
    decision, evidence = passed()
    text = describe(decision, evidence, LINKS)
    for digest in (decision.subject_sha256, decision.policy_sha256, decision.evidence_sha256):
        assert str(digest) in text
    assert "[run](<http://127.0.0.1:5000/#/experiments/1/runs/a%20b>)" in text
