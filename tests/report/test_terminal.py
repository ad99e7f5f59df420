"""Terminal output: verdicts, tables, layers, and trials of exports."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console
from rich.text import Text

from gate.records.export import ExportTrialRecord, TrialParity, Trials
from gate.records.localization import Explanation
from gate.report import terminal
from gate.report.comparisons import markdown, print_trials
from gate.report.folder import write_report
from gate.report.html_page import Report, render_page
from gate.report.markdown import summary_markdown
from gate.report.terminal import add_row, build_table, print_summary
from gate.summary.render import render_explanation
from gate.summary.summarize import summarize
from gate.summary.summary import Summary
from tests.report import report_records
from tests.report.samples import HOSTILE, failed, passed


def print_text(summary: Summary, *, width: int = 10_000, verbose: bool = False) -> str:
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=width), verbose=verbose)
    return stream.getvalue()


@pytest.mark.parametrize("width", [45, 80, 200])
def test_narrow_terminal_wraps_all_but_commands(width):
    summary = summarize(*failed()).with_files({"MODEL.onnx": "my model.onnx"})
    assert "gate check 'my model.onnx' --reference" in print_text(summary, width=width)
    for judged, most in ((passed(), 20), (failed(), 30)):
        lines = print_text(summarize(*judged), width=width).splitlines()
        reported = [line for line in lines if not line.startswith("next")]
        assert max(map(len, reported)) <= width
        assert len(lines) <= most if width >= 80 else 2 * most


def test_verbose_shows_each_check_and_repeats_the_verdict():
    summary = summarize(*failed())
    text = print_text(summary, verbose=True)
    for word in summary.check_rows:
        assert word.check.name in text
        assert word.meaning.split()[0] in text
    assert "top-1 agrees on 400 of 400 samples" in text
    assert text.splitlines()[-1] == text.splitlines()[0]


def test_long_output_repeats_the_verdict():
    summary = summarize(*failed())
    for height, twice in ((5, True), (60, False)):
        stream = io.StringIO()
        console = Console(file=stream, width=80, height=height, force_terminal=True)
        print_summary(summary, console)
        assert (stream.getvalue().count(summary.headline.sentence[:20]) >= 2) == twice


def test_names_have_no_control_characters():
    text = print_text(summarize(*failed(HOSTILE)))
    assert "\x1b" not in text
    assert "[red]" in text


def test_table_cells_have_no_control_characters():
    shown = build_table(
        ("name", "n"), [("a\x1b[31m\nb", Text("two  spaces"))], right=("n",), title="of"
    )
    add_row(shown, ("c", "1"))
    stream = io.StringIO()
    Console(file=stream, width=60).print(shown)
    lines = [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]
    assert lines[0] == "of"
    assert lines[1].split() == ["name", "n"]
    assert [line.strip() for line in lines[3:]] == [
        "a�[31m b   two  spaces",
        "c                    1",
    ]


def test_layer_table_is_printed():
    layers = report_records.rejected().explanation.localisation
    assert layers is not None
    layers = render_explanation(Explanation(localisation=layers)).localisation
    assert layers is not None
    head = layers.layers[6]
    hostile = {"module": HOSTILE, "verdict": "unmapped", "noise_ratio": None}
    more = [head.model_copy(update=u) for u in ({"call": 1, "noise_ratio": math.inf}, hostile)]
    stream = io.StringIO()
    console = Console(file=stream, width=200)
    terminal.print_layers(layers.model_copy(update={"layers": (*layers.layers, *more)}), console)
    text = stream.getvalue()
    for shown in ("stem.0", "head", "head#1", "unmapped", "inf", "Try: ", "\nhead"):
        assert shown in text
    assert "First diverging layer: head (ort-cpu)." in text
    assert "\x1b" not in text


def test_each_report_names_the_layer(tmp_path):
    case = report_records.rejected()
    write_report(tmp_path, case.decision, case.evidence, summary=case.summary,
                 explanation=case.explanation)  # fmt: skip
    assert (tmp_path / "localisation.json").is_file()
    assert (tmp_path / "plots/localisation.svg").is_file()
    assert "head.weight" in (tmp_path / "report.md").read_text().splitlines()[0]
    assert "All 9 layers" in (tmp_path / "report.html").read_text()
    write_report(tmp_path, *passed(), summary=summarize(*passed()))
    assert not (tmp_path / "localisation.json").exists()
    assert not (tmp_path / "plots/localisation.svg").exists()
    assert "diverging" not in (tmp_path / "report.html").read_text()


def test_failed_localization_is_shown():
    decision, evidence = failed()
    explanation = Explanation(failure="mapped 0 of 60 modules")
    summary = summarize(decision, evidence, explanation=explanation)
    for text in (
        summary_markdown(summary, {}),
        render_page(Report(summary, evidence, decision, explanation)),
    ):
        assert "not known: mapped 0 of 60 modules" in text


def parity(runtime: str, verdict: str = "PASS", ratio: float = 1.1) -> TrialParity:
    numbers = {"max_abs_diff": 1e-6, "l2_logits": 2e-6, "l2_probabilities": 1e-7,
               "noise_ratio": ratio, "top1_agreement": 1.0, "latency_ms": 3.25}  # fmt: skip
    return TrialParity.model_validate({"runtime": runtime, "verdict": verdict, **numbers})


def trial(*parities: TrialParity, **fields: object) -> ExportTrialRecord:
    values = {"strategy": "traced", "opset_asked": 13, "constant_folding": True, "seconds": 1.25,
              "opset": 13, "nodes": 65, "size_bytes": 46_700_000, "parities": parities}  # fmt: skip
    return ExportTrialRecord.model_validate(values | fields)


def test_trial_tables_have_a_row_per_runtime_and_export():
    trials = Trials(
        factory="pkg.$mod:<b>|build", samples=8, batch_size=8, bound=1.5,
        trials=(
            trial(parity("ort-cpu"), parity("ort-cpu-optimized")),
            trial(parity("ort-cpu", "FAIL", 1e4), parity("ort-cpu-optimized", "ERROR", math.nan),
                  constant_folding=False, warnings=("x.py:3: a tracer\x1b[31m warning",)),
            trial(strategy="dynamo", opset=None, nodes=None, size_bytes=None,
                  failure="the file is written in opset 18 | expected 13"),
            trial(parity("ort-cpu"), strategy="dynamo", opset_asked=17, opset=18),
        ),
    )  # fmt: skip
    stream = io.StringIO()
    print_trials(trials, Console(file=stream, width=160))
    shown = stream.getvalue()
    rows = [line for line in shown.splitlines() if "ort-cpu" in line and "3.2" in line]
    assert len(rows) == 5
    assert "17, got 18" in shown
    assert "not exported: dynamo, opset 13, folded" in shown
    text = markdown(trials)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 6
    assert r"opset 18 \| expected" in text
    assert "\x1b" not in shown + text
