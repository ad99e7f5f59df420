from __future__ import annotations

import re

from gate.records.champion_comparison import TrendRow
from gate.report.markdown import summary_markdown
from gate.summary.summarize import summarize
from gate.summary.summary import Change, ChangeRow, Summary
from tests.builders import digest
from tests.report.samples import HOSTILE, failed, passed

LINKS = {"run": "http://127.0.0.1:5000/#/experiments/1/runs/a b"}


def stories() -> list[Summary]:
    return [summarize(*judged) for judged in (passed(), failed(), failed(HOSTILE))]


def test_the_first_line_is_one_plain_sentence() -> None:
    for story in stories():
        first, second, *_ = summary_markdown(story, LINKS).split("\n")
        assert first.startswith(f"{story.headline.verdict}: ")
        assert first.endswith(".")
        assert not re.search(r"[|`*<>#\[\]\\]", first)
        assert second == ""


def test_a_runtime_is_a_row_with_all_its_cells() -> None:
    for story in stories():
        rows = [row for row in summary_markdown(story, LINKS).split("\n") if row.startswith("|")]
        assert len(rows) == len(story.proof) + 2
        for row in rows:
            assert len(re.findall(r"(?<!\\)\|", row)) == 8


def test_findings_come_with_the_remedy_and_waived_checks_are_shown() -> None:
    text = summary_markdown(summarize(*failed()), {})
    assert "max_abs_diff: 0.66, allowed 0.0001" in text
    assert "**Try:** " in text
    assert (
        text.count("**WAIVED** Skipped, as the policy allows: torch-cuda, ort-cuda, ort-cuda-opt")
        == 1
    )
    assert "no CUDA device" in text


def test_hostile_names_stay_text() -> None:
    text = summary_markdown(summarize(*failed(HOSTILE)), {})
    assert not re.search(r"(?<!\\)<script", text)
    assert "\x1b" not in text


def test_what_the_decision_is_bound_to_is_there() -> None:
    decision, evidence = passed()
    text = summary_markdown(summarize(decision, evidence), LINKS)
    for sha256 in (decision.subject_sha256, decision.policy_sha256, decision.evidence_sha256):
        assert str(sha256) in text
    assert "[run](<http://127.0.0.1:5000/#/experiments/1/runs/a%20b>)" in text


def test_what_changed_against_the_champion_is_there_and_what_did_not_is_not() -> None:
    rows = (
        ChangeRow(name="accuracy", before="97 %", now="96 %", changed=True, sense="worse"),
        ChangeRow(name="opset", before="13", now="13", changed=False),
    )
    story = summarize(*passed(), change=Change(version="3", rows=rows))
    text = summary_markdown(story, {})
    assert "- accuracy: 97 % → 96 % (worse)" in text
    assert "opset: 13" not in text
    assert "--against was not given" in summary_markdown(
        summarize(*passed()), {}
    )


def test_the_last_releases_are_a_table() -> None:
    rows = tuple(
        TrendRow(
            sha256=digest(str(release)),
            measured_at="now",
            noise_ratio=1.0 + release / 10,
            agreement=1.0,
            accuracy=None,
            latency_ms=2.5,
        )
        for release in range(7)
    )
    change = Change(absent="it is this very file", trend=rows)
    text = summary_markdown(summarize(*passed(), change=change), {}).replace(
        "\N{NO-BREAK SPACE}", ""
    )
    assert f"| {digest('6').short} | 1.6 | 1 |  | 2.5 |" in text
    assert digest("1").short not in text
    alone = Change(absent="it is this very file", trend=rows[:1])
    assert "| file |" not in summary_markdown(summarize(*passed(), change=alone), {})
