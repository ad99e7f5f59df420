from __future__ import annotations

import io
import math

from rich.console import Console

from gate.records.localization import Explanation, LayerRow, Localization
from gate.report import markdown, terminal
from gate.report.folder import write_report
from gate.report.html_page import Report, render_page
from gate.summary.summarize import summarize
from tests.builders import digest
from tests.report.samples import HOSTILE, failed, passed


def row(module: str, verdict: str = "ok", **fields: object) -> LayerRow:
    numbers = {
        "max_abs_diff": 1e-6, "mean_abs_diff": 1e-7, "noise_ratio": 1.1, "local_ratio": 1.0,
        "amplification": 1.0, "tensor": f"/{module}/Conv_output_0",
    }  # fmt: skip
    return LayerRow.model_validate(
        {"module": module, "kind": "Conv2d", "verdict": verdict, **numbers, **fields}
    )


def found(module: str = "layer1.0.conv1") -> Localization:
    return Localization(
        subject_sha256=digest("model.onnx"),
        runtime="ort-cpu",
        samples=8,
        layers=(
            row("conv1"),
            row(module, "source", noise_ratio=420.0, local_ratio=400.0, detail="3 weights differ"),
            row("fc", "propagated", noise_ratio=math.inf, call=1),
            row("drop", "unmapped", noise_ratio=None, tensor=None),
        ),
        first_divergence=module,
        cause="The weight of layer1.0.conv1 differs in 3 of 36 864 elements.",
        remedy="Export again from the checkpoint.",
    )


def test_the_record_comes_back_and_says_whether_anything_diverges() -> None:
    record = found()
    assert Localization.from_json(record.to_json()) == record
    assert record.diverges
    assert record.unmapped == ("drop",)
    assert [layer.title for layer in record.layers][2] == "fc#1"
    clean = record.model_copy(update={"layers": (row("a"),), "first_divergence": None})
    assert not clean.diverges


def test_the_table_shows_every_layer_and_the_sentences_follow() -> None:
    stream = io.StringIO()
    terminal.print_layers(found(), Console(file=stream, width=200))
    text = stream.getvalue()
    for shown in ("conv1", "layer1.0.conv1", "fc#1", "drop", "source: 3 weights differ", "inf"):
        assert shown in text
    assert "First diverging layer: layer1.0.conv1 (ort-cpu)." in text
    assert "Try: Export again from the checkpoint." in text


def test_every_report_tells_of_the_layer(tmp_path) -> None:
    decision, evidence = failed()
    explanation = Explanation(localisation=found())
    write_report(
        tmp_path,
        decision,
        evidence,
        story=summarize(decision, evidence, explanation=explanation),
        explanation=explanation,
    )
    assert (tmp_path / "localisation.json").is_file()
    assert (tmp_path / "plots/localisation.svg").is_file()
    assert "layer1.0.conv1" in (tmp_path / "report.md").read_text().splitlines()[0]
    shown = (tmp_path / "report.html").read_text()
    assert f"<p>{found().cause}</p>" in shown
    assert "All 4 layers" in shown
    write_report(tmp_path, *passed(), story=summarize(*passed()))
    assert not (tmp_path / "localisation.json").exists()
    assert not (tmp_path / "plots/localisation.svg").exists()
    assert "diverging" not in (tmp_path / "report.html").read_text()


def test_a_localisation_that_broke_is_told() -> None:
    decision, evidence = failed()
    explanation = Explanation(failure="mapped 0 of 60 modules")
    story = summarize(decision, evidence, explanation=explanation)
    for text in (
        markdown.summary_markdown(story, {}),
        render_page(Report(story, evidence, decision, explanation)),
    ):
        assert "not known: mapped 0 of 60 modules" in text


def test_names_from_the_file_cannot_steer_a_report() -> None:
    record = found(HOSTILE)
    stream = io.StringIO()
    terminal.print_layers(record, Console(file=stream, width=200))
    assert "\x1b" not in stream.getvalue()
