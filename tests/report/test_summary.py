from __future__ import annotations

import re

import pytest

from gate.report.ci_formats import CiResult
from gate.report.markdown import LIMIT, pull_request_comment, summary_markdown
from tests.report.ci_results import RESULTS


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("passed", "## ✅ parity-gate: PASS (torchvision:resnet18)"),
        ("rejected", "## ❌ parity-gate: FAIL (torchvision:resnet18)"),
        ("unjudged", "## ⚠️ parity-gate: ERROR (torchvision:resnet18)"),
        ("nothing", "## ⚠️ parity-gate: could not judge (m:build)"),
        ("bare", "## ⚠️ parity-gate: could not judge"),
        ("unexported", "## ❌ parity-gate: rejected"),
        ("refused", "## ❌ parity-gate: rejected, the verdict is PASS (digits)"),
        ("promoted", "## ✅ parity-gate: PASS (digits)"),
    ],
)
def test_the_heading_has_the_colour_and_the_verdict(name: str, heading: str) -> None:
    assert pull_request_comment(RESULTS[name]()).splitlines()[0] == heading


@pytest.mark.parametrize("name", ["passed", "rejected", "unjudged", "refused", "promoted"])
def test_it_tells_the_story_as_the_version_page_does(name: str) -> None:
    result = RESULTS[name]()
    assert result.story is not None
    text = pull_request_comment(result)
    assert text.endswith(summary_markdown(result.story, result.links))
    order = [text.index(words) for words in (f"{result.verdict}: ", "Comparison with the champion", "| runtime")]  # fmt: skip
    assert order == sorted(order)


def test_what_the_command_came_to_is_there() -> None:
    assert "`gate promote`: **refused: version 7 was taken back**" in pull_request_comment(
        RESULTS["refused"]()
    )
    assert "[Model version](<http://127.0.0.1:5000/" in pull_request_comment(RESULTS["promoted"]())
    nothing = pull_request_comment(RESULTS["nothing"]())
    assert "`gate check`: model.onnx does not exist." in nothing
    assert "neither a pass nor a rejection" in nothing
    rejected = pull_request_comment(RESULTS["unexported"]())
    assert "`stage export`: the model's source forbids every strategy" in rejected
    assert "rejected before anything was measured (exit code 1)" in rejected


def test_names_that_attack_stay_text() -> None:
    text = pull_request_comment(RESULTS["hostile"]())
    assert not re.search(r"(?<!\\)<script", text)
    assert "\x1b" not in text


@pytest.mark.parametrize("letter", ["x", "ü", "🙂"])
def test_what_is_too_long_is_cut_after_a_whole_line(letter: str) -> None:
    story = RESULTS["passed"]().story
    assert story is not None
    note = letter * 200
    long = story.model_copy(update={"notes": (note,) * 2000})
    text = pull_request_comment(CiResult(command="check", exit_code=0, story=long))
    assert 0.9 * LIMIT < len(text.encode()) <= LIMIT
    *lines, last = text.rstrip().splitlines()
    assert last == "(Truncated: the report has the rest.)"
    assert lines[-2:] == [f"- {note}", ""]
