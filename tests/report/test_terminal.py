from __future__ import annotations

import io

import pytest
from rich.console import Console

from gate.report.terminal import print_summary
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.report.samples import HOSTILE, failed, passed


def printed(story: Summary, *, width: int = 10_000, verbose: bool = False) -> str:
    stream = io.StringIO()
    print_summary(story, Console(file=stream, width=width), verbose=verbose)
    return stream.getvalue()


def test_the_verdict_and_its_cause_come_first() -> None:
    text = printed(summarize(*failed()))
    assert text.startswith("FAIL   ")
    first, second, *_ = text.splitlines()
    assert "0.66, allowed 0.0001" in first or "NaN" in first
    assert second.startswith("try    ")


def test_a_pass_has_a_line_a_runtime_and_what_is_waived() -> None:
    text = printed(summarize(*passed()))
    assert text.startswith(
        "PASS   Within every bound on 400 samples, on ort-cpu, ort-cpu-optimized"
    )
    assert "ort-cpu            passed  " in text
    assert "waived torch-cuda, ort-cuda, ort-cuda-optimized: not measured (no CUDA device" in text
    assert "no CUDA device" in text


@pytest.mark.parametrize("width", [45, 80, 200])
def test_a_narrow_terminal_cuts_no_line_but_a_command(width: int) -> None:
    for judged, most in ((passed(), 20), (failed(), 30)):
        lines = printed(summarize(*judged), width=width).splitlines()
        told = [line for line in lines if not line.startswith("next")]
        assert max(map(len, told)) <= width
        assert len(lines) <= most if width >= 80 else 2 * most


def test_verbose_shows_every_check_and_the_verdict_once_more() -> None:
    story = summarize(*failed())
    text = printed(story, verbose=True)
    for word in story.words:
        assert word.check.name in text
        assert word.meaning.split()[0] in text
    assert "top-1 agrees on 400 of 400 samples" in text
    assert text.splitlines()[-1] == text.splitlines()[0]


def test_what_is_longer_than_the_screen_ends_with_the_verdict() -> None:
    story = summarize(*failed())
    for height, twice in ((5, True), (60, False)):
        stream = io.StringIO()
        console = Console(file=stream, width=80, height=height, force_terminal=True)
        print_summary(story, console)
        assert (stream.getvalue().count(story.headline.sentence[:20]) >= 2) == twice


def test_a_command_is_one_line_to_paste() -> None:
    story = summarize(*failed()).with_files({"MODEL.onnx": "my model.onnx"})
    text = printed(story, width=45)
    assert any("gate check 'my model.onnx' --reference" in line for line in text.splitlines())


def test_names_from_the_file_cannot_steer_the_terminal() -> None:
    text = printed(summarize(*failed(HOSTILE)))
    assert "\x1b" not in text
    assert "[red]" in text
