"""Markdown of a model version and of a pull request."""

from __future__ import annotations

import re

import pytest

from gate.records.champion_comparison import TrendRow
from gate.report.ci_formats import CiResult
from gate.report.markdown import LIMIT, pull_request_comment, summary_markdown
from gate.summary.summarize import summarize
from gate.summary.summary import Change, ChangeRow
from tests.builders import digest
from tests.report.ci_results import RESULTS
from tests.report.samples import HOSTILE, failed, passed

LINKS = {"run": "http://127.0.0.1:5000/#/experiments/1/runs/a b"}


@pytest.mark.parametrize("judged", [passed(), failed(), failed(HOSTILE)])
def test_first_line_is_one_sentence_and_each_runtime_a_row(judged):
    summary = summarize(*judged)
    text = summary_markdown(summary, LINKS)
    assert not re.search(r"(?<!\\)<script|\x1b", text)
    subject = summary.subject
    for sha256 in (subject.sha256, subject.policy_sha256, subject.evidence_sha256):
        assert str(sha256) in text
    assert "[run](<http://127.0.0.1:5000/#/experiments/1/runs/a%20b>)" in text
    first, second, *_ = text.split("\n")
    assert first.startswith(f"{summary.headline.verdict}: ")
    assert first.endswith(".")
    assert not re.search(r"[|`*<>#\[\]\\]", first)
    assert second == ""
    rows = [row for row in text.split("\n") if row.startswith("|")]
    assert len(rows) == len(summary.proof) + 2
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {8}


def test_only_changes_against_the_champion_are_shown():
    rows = (
        ChangeRow(name="accuracy", before="97 %", now="96 %", changed=True, sense="worse"),
        ChangeRow(name="opset", before="13", now="13", changed=False),
    )
    summary = summarize(*passed(), change=Change(version="3", rows=rows))
    text = summary_markdown(summary, {})
    assert "- accuracy: 97 % → 96 % (worse)" in text
    assert "opset: 13" not in text
    assert "--against was not given" in summary_markdown(summarize(*passed()), {})


def test_last_releases_are_a_table():
    rows = tuple(
        TrendRow(sha256=digest(str(n)), measured_at="now", noise_ratio=1.0 + n / 10, agreement=1.0,
                 accuracy=None, latency_ms=2.5)
        for n in range(7)
    )  # fmt: skip
    change = Change(absent="it is this very file", trend=rows)
    text = summary_markdown(summarize(*passed(), change=change), {}).replace(
        "\N{NO-BREAK SPACE}", ""
    )
    assert f"| {digest('6').short} | 1.6 | 1 |  | 2.5 |" in text
    assert digest("1").short not in text
    own_trend = Change(absent="it is this very file", trend=rows[:1])
    assert "Over versions" not in summary_markdown(summarize(*passed(), change=own_trend), {})


@pytest.mark.parametrize(("name", "heading"), [
    ("passed", "## ✅ parity-gate: PASS (faults:model)"),
    ("rejected", "## ❌ parity-gate: FAIL (faults:model)"),
    ("unjudged", "## ⚠️ parity-gate: ERROR (faults:model)"),
    ("nothing", "## ⚠️ parity-gate: could not judge (m:build)"),
    ("bare", "## ⚠️ parity-gate: could not judge"),
    ("unexported", "## ❌ parity-gate: rejected"),
    ("refused", "## ❌ parity-gate: rejected, the verdict is PASS (digits)"),
    ("promoted", "## ✅ parity-gate: PASS (digits)"),
])  # fmt: skip
def test_heading_has_icon_and_verdict(name, heading):
    assert pull_request_comment(RESULTS[name]()).splitlines()[0] == heading


@pytest.mark.parametrize("name", ["rejected", "unjudged", "promoted", "hostile"])
def test_comment_contains_the_version_summary(name):
    result = RESULTS[name]()
    assert result.summary is not None
    text = pull_request_comment(result)
    assert text.endswith(summary_markdown(result.summary, result.links))
    assert not re.search(r"(?<!\\)<script|\x1b", text)
    order = [text.index(words) for words in (f"{result.verdict}: ", "Comparison with the champion", "| runtime")]  # fmt: skip
    assert order == sorted(order)


@pytest.mark.parametrize("letter", ["x", "🙂"])
def test_long_comment_is_truncated_after_a_line(letter):
    summary = RESULTS["passed"]().summary
    assert summary is not None
    note = letter * 200
    long = summary.model_copy(update={"notes": (note,) * 2000})
    text = pull_request_comment(CiResult(command="check", exit_code=0, summary=long))
    assert 0.9 * LIMIT < len(text.encode()) <= LIMIT
    *lines, last = text.rstrip().splitlines()
    assert last == "(Truncated: the report has the rest.)"
    assert lines[-2:] == [f"- {note}", ""]
