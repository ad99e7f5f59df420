"""The record of a check on a run's page, read back from a real store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gate.decision.check_result import Verdict
from gate.decision.decide import Decision, decide
from gate.mlflow_client import log_evaluation as numbers
from gate.mlflow_client.log_evaluation import log_files, log_numbers, write_promotion, write_twin
from gate.mlflow_client.runs import RunLogger, Runs, run_name, unjudged_name
from gate.records.evidence import Cost, Evidence, Latency
from gate.records.outputs import Crossing
from gate.registry.release import PromotionResult
from gate.report import folder as report_folder
from gate.summary.summarize import SummaryInputs, summarize
from gate.summary.summary import Headline
from tests.builders import (
    class_parity,
    digest,
    evidence,
    output_parity,
    policy,
    probe_parity,
    runtime_evidence,
)
from tests.mlflow_client.conftest import get_run
from tests.report.samples import HOSTILE, failed, passed

SHORT = digest("model.onnx").hex[:6]


def check_result(records: tuple[Decision, Evidence]) -> SummaryInputs:
    return SummaryInputs(decision=records[0], evidence=records[1], policy=policy())


def record_result(runs: Runs, summary_inputs: SummaryInputs, folder: Path) -> RunLogger:
    with runs.new("gate") as page:
        log_numbers(page, summary_inputs, inputs=Path("samples.npy"))
        log_files(page, summary_inputs, folder=folder)
    return page


def list_artifacts(page: RunLogger, folder: str = "") -> set[str]:
    matches = set()
    for entry in page.client.list_artifacts(page.run_id, folder):
        matches |= list_artifacts(page, entry.path) if entry.is_dir else {entry.path}
    return matches


def read_table(page: RunLogger, name: str) -> list[dict[str, Any]]:
    content = json.loads(Path(page.client.download_artifacts(page.run_id, name)).read_text())
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]


def test_pass_is_recorded_completely(runs: Runs, tmp_path: Path) -> None:
    report = tmp_path / "report"
    for name in ("samples.csv", "pictures/3.png", "of somebody else.txt"):
        (report / name).parent.mkdir(parents=True, exist_ok=True)
        (report / name).write_text("x")
    report_folder.write_report(report, *passed(), summary=summarize(*passed()))
    page = record_result(runs, check_result(passed()), report)
    run = get_run(page)
    assert (run.info.run_name, run.info.status) == (f"gate PASS {SHORT}", "FINISHED")
    assert run.data.tags["gate.verdict"] == "PASS"
    assert run.data.tags["gate.blamed"] == "none"
    assert run.data.params["export.strategy"] == "traced"
    assert run.data.params["gate.runtimes.ort-cpu.required"] == "always"
    (dataset,) = run.inputs.dataset_inputs
    assert json.loads(dataset.dataset.source) == {"uri": "samples.npy"}
    assert run.data.tags["mlflow.note.content"].startswith("PASS: ")
    names = list_artifacts(page)
    assert names >= {
        "evidence.json", "decision.json", "report.html", "report.md", "checks.json", "policy.json",
        "numbers.json", "confidence_by_class.json", "samples.csv", "pictures/3.png",
        "plots/bound_usage.svg",
    }  # fmt: skip
    assert "of somebody else.txt" not in names


def test_check_at_two_operating_points_has_two_rows(runs: Runs, tmp_path: Path) -> None:
    decision, evidence = passed()
    first = decision.checks[0]
    points = tuple(first.model_copy(update={"point": point}) for point in ("0.5", "0.9"))
    with_points = decision.model_copy(update={"checks": points})
    page = record_result(runs, check_result((with_points, evidence)), tmp_path / "report")
    names = [row["name"] for row in read_table(page, "checks.json")]
    assert names == [f"{first.name} at 0.5", f"{first.name} at 0.9"]


def test_rejection_is_recorded_as_failed(runs: Runs, tmp_path: Path) -> None:
    page = record_result(runs, check_result(failed(HOSTILE)), tmp_path / "report")
    run = get_run(page)
    assert run.info.status == "FAILED"
    assert run.info.run_name.startswith(f"gate FAIL {SHORT} ")
    assert run.data.tags["gate.headline"]
    assert run.data.tags["gate.cause"] != "passed"
    texts = {*run.data.tags.values(), *run.data.params.values()}
    assert not {"None", "null"} & texts
    for name in ("checks.json", "numbers.json", "confidence_by_class.json"):
        cells = [cell for row in read_table(page, name) for cell in row.values()]
        assert cells
        assert None not in cells
    values = {
        (row["runtime"], row["number"]): row["value"] for row in read_table(page, "numbers.json")
    }
    assert values["ort-cpu", "mean_abs_diff"] == "nan"
    assert values["ort-cpu", "max_abs_diff"] == 0.66


def test_error_is_recorded_as_failed(runs: Runs, tmp_path: Path) -> None:
    observed = evidence(runtimes=())
    decision = decide(policy(), observed, decided_at="2026-01-01T00:00:00+00:00")
    page = record_result(runs, check_result((decision, observed)), tmp_path / "report")
    assert decision.verdict is Verdict.ERROR
    assert get_run(page).info.status == "FAILED"
    assert get_run(page).info.run_name.startswith(f"gate ERROR {SHORT}")


@pytest.mark.parametrize(
    ("headline", "name"),
    [
        ({"verdict": "PASS", "cause": "passed"}, "gate PASS"),
        ({"verdict": "PASS", "cause": "waived", "blamed": "x"}, "gate PASS"),
        ({"verdict": "FAIL", "cause": "layer", "blamed": "layer3.0.conv1"}, "gate FAIL layer3.0.conv1"),
        ({"verdict": "ERROR", "cause": "samples"}, "gate ERROR samples"),
        ({"verdict": "FAIL", "cause": "training_mode"}, "gate FAIL training mode"),
    ],
)  # fmt: skip
def test_run_names(headline: dict[str, Any], name: str) -> None:
    verdict, _, blamed = name.removeprefix("gate ").partition(" ")
    reported = Headline.model_validate({**headline, "sentence": "x"}, strict=False)
    expected = f"gate {verdict} {SHORT} {blamed}".rstrip()
    assert run_name(reported.verdict, digest("model.onnx"), reported) == expected
    assert unjudged_name("exported", digest("model.onnx")) == f"gate exported {SHORT}"


def test_metrics_are_few_and_of_the_worst_output() -> None:
    """There is one set of names for all outputs, and NaN counts as the worst value."""
    crossing = Crossing(
        threshold=0.9, samples=200, reference_above=100, candidate_above=99, crossed=1
    )
    outputs = (
        output_parity(name="a", max_abs_diff=1.0, classification=class_parity(top1_agreement=0.5)),
        output_parity(name="b", max_abs_diff=2.0, classification=class_parity(crossings=(crossing,))),
    )  # fmt: skip
    probes = (probe_parity("zeros", noise_ratio=3.0), probe_parity("ones", noise_ratio=4.0))
    observed = evidence(runtimes=(runtime_evidence(outputs=outputs, probes=probes),))
    result = numbers.comparable_metrics(observed)
    assert result["ort-cpu/max_abs_diff"] == 2.0
    assert result["ort-cpu/top1_agreement"] == 0.5
    assert result["ort-cpu/probe_noise_ratio"] == 4.0
    assert result["ort-cpu/crossed_share"] == 0.005
    assert result["ort-cpu/latency_median_ms"] == 20.0
    assert len(result) <= len(numbers.COMPARED) + 4
    all_metrics = dict(numbers.metrics_from_evidence(observed))
    assert all_metrics["ort-cpu/b/crossed_at_0.9"] == 1.0
    assert all_metrics["ort-cpu/probes/ones/noise_ratio"] == 4.0
    with_nan = (output_parity(name="b"), output_parity(max_abs_diff=float("nan")))
    nan_metrics = numbers.comparable_metrics(
        evidence(runtimes=(runtime_evidence(outputs=with_nan),))
    )
    assert str(nan_metrics["ort-cpu/max_abs_diff"]) == "nan"


def test_costs_are_logged_in_milliseconds_and_megabytes() -> None:
    batch = Latency(batch_size=32, batches=9, median_ms=20.0, p95_ms=25.0)
    single = Latency(batch_size=1, batches=9, median_ms=1.0, p95_ms=2.0)
    cost = Cost(open_ms=40.0, first_ms=5.0, single=single, peak_bytes=800_000_000)
    reference = cost.model_copy(update={"single": single.model_copy(update={"median_ms": 4.0})})
    measured = evidence(
        runtimes=(runtime_evidence(latency=batch, cost=cost, memory_bytes=30_000_000),),
        reference_latency=batch,
        reference_cost=reference,
    )
    result = numbers.comparable_metrics(measured)
    assert (result["ort-cpu/latency_ratio"], result["ort-cpu/memory_mb"]) == (1.0, 30.0)
    all_metrics = dict(numbers.metrics_from_evidence(measured))
    assert {name: all_metrics[f"ort-cpu/{name}"] for name in (
        "open_ms", "first_ms", "latency_single_median_ms", "latency_single_p95_ms", "peak_mb",
        "latency_ratio", "memory_mb",
    )} == {
        "open_ms": 40.0, "first_ms": 5.0, "latency_single_median_ms": 1.0,
        "latency_single_p95_ms": 2.0, "peak_mb": 800.0, "latency_ratio": 1.0, "memory_mb": 30.0,
    }  # fmt: skip
    assert all_metrics["reference/latency_single_median_ms"] == 4.0


def test_each_compared_metric_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    section = page.partition("## In MLflow")[2]
    for name in numbers.COMPARED:
        assert f"`<runtime>/{name}`" in section, name


def test_rejected_twin_rejects_the_release(runs: Runs, tmp_path: Path) -> None:
    exact = check_result(passed())
    page = record_result(runs, exact, tmp_path / "report")
    with runs.again(page):
        write_twin(page, check_result(failed()), exact=exact.decision)
    run = get_run(page)
    assert (run.info.run_name, run.info.status) == (f"gate FAIL {SHORT} twin", "FAILED")
    assert run.data.tags["gate.verdict"] == "FAIL"
    assert run.data.tags["gate.headline"].startswith("The quantized twin: ")
    assert run.data.metrics["twin/ort-cpu/max_abs_diff"] == 0.66


def test_links_to_the_version(runs: Runs, tmp_path: Path) -> None:
    page = record_result(runs, check_result(passed()), tmp_path / "report")
    promotion = PromotionResult("promoted", "3", None, "because")
    write_promotion(page, promotion, model_name="small", note="PASS: promoted")
    tags = get_run(page).data.tags
    assert (tags["gate.promotion"], tags["gate.model_version"]) == ("promoted", "small/3")
    assert tags["mlflow.note.content"].startswith("PASS: ")
