from __future__ import annotations

import io
import math

from rich.console import Console

from gate.records.export import ExportTrialRecord, TrialParity, Trials
from gate.report.comparisons import markdown, print_trials, trials_chart, trials_sentences


def parity(runtime: str, verdict: str = "PASS", ratio: float = 1.1) -> TrialParity:
    return TrialParity.model_validate(
        {
            "runtime": runtime, "verdict": verdict, "max_abs_diff": 1e-6, "l2_logits": 2e-6,
            "l2_probabilities": 1e-7, "noise_ratio": ratio, "top1_agreement": 1.0,
            "latency_ms": 3.25,
        }
    )  # fmt: skip


def trial(*parities: TrialParity, **fields) -> ExportTrialRecord:
    return ExportTrialRecord.model_validate(
        {
            "strategy": "traced", "opset_asked": 13, "constant_folding": True, "seconds": 1.25,
            "opset": 13, "nodes": 65, "size_bytes": 46_700_000, "parities": parities, **fields,
        }
    )  # fmt: skip


FOUND = Trials(
    factory="pkg.$mod:<b>|build",
    samples=8,
    batch_size=8,
    bound=1.5,
    trials=(
        trial(parity("ort-cpu"), parity("ort-cpu-optimized")),
        trial(parity("ort-cpu", "FAIL", 1e4), parity("ort-cpu-optimized", "ERROR", math.nan),
              constant_folding=False, warnings=("x.py:3: a tracer\x1b[31m warning",)),
        trial(strategy="dynamo", opset=None, nodes=None, size_bytes=None,
              failure="the file is written in opset 18 | expected 13"),
        trial(parity("ort-cpu"), strategy="dynamo", opset_asked=17, opset=18),
    ),
)  # fmt: skip


def text(width: int = 160) -> str:
    stream = io.StringIO()
    print_trials(FOUND, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_table_has_a_row_for_each_runtime_of_each_export() -> None:
    shown = text()
    rows = [line for line in shown.splitlines() if "ort-cpu" in line and "3.2" in line]
    assert len(rows) == 5
    assert "17, got 18" in shown
    assert "not exported: dynamo, opset 13, folded" in shown
    assert "\x1b" not in shown


def test_the_sentences_name_what_is_wrong() -> None:
    told = list(trials_sentences(FOUND))
    assert told[0].startswith("2 of 4 exports compute what the model computes")
    assert any("FAIL" in t or "ERROR" in t for t in told if "not folded" in t)
    assert any("noise_ratio 1e+04" in t for t in told)
    assert sum(t.startswith("warned: ") for t in told) == 1


def test_markdown_keeps_its_columns() -> None:
    table = [line for line in markdown(FOUND).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert len(table) == 2 + 6
    assert r"opset 18 \| expected" in markdown(FOUND)


def test_the_chart_is_drawn_for_nan_and_for_no_file_at_all() -> None:
    drawn = trials_chart(FOUND)
    assert drawn is not None
    assert "<b>" not in drawn.svg
    assert drawn == trials_chart(FOUND)
    assert trials_chart(FOUND.model_copy(update={"trials": FOUND.trials[2:3]})) is None
