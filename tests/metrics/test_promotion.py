"""A text classifier and a detector are promoted to a real MLflow store by custom metrics and
slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate import cli
from tests.metrics.detector import Detector, detector
from tests.metrics.project import Project, project
from tests.registry.servers import empty_database
from tests.reused_charts import reused_charts

__all__ = ["detector", "project", "reused_charts"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
]


def gate(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    code = cli.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def read_checks(report: str) -> list[dict[str, Any]]:
    return json.loads((Path(report) / "decision.json").read_text())["checks"]


def failures(report: str) -> set[tuple[str, str]]:
    return {
        (each["name"], each["point"]) for each in read_checks(report) if each["verdict"] == "FAIL"
    }


def test_a_text_classifier_is_refused_for_one_slice(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    empty_database(Path("mlflow.db"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    policy = str(
        project.policy(
            "name: hit, function: 'mymetrics:hit', slices: [language], max_drop: 0.3, "
            "max_drop_from_champion: 0.0",
            more="incumbent: {first_release: allow}\n",
        )
    )

    def promote(file: str, report: str) -> tuple[int, dict]:
        gate(
            capsys, "check", file, "--reference", "textnet:build", "--inputs", "ids.npy", "--labels",
            "labels.jsonl", "--policy", policy, "--report", report, "--track", "--against", "text",
        )  # fmt: skip
        return gate(
            capsys, "promote", file, "--name", "text", "--report", report, "--policy", policy
        )

    code, answer = promote("model.onnx", "first")
    assert (code, answer["outcome"]) == (0, "promoted")

    code, answer = promote("worse.onnx", "second")
    assert (code, answer["outcome"]) == (1, "refused")
    failed = failures("second")
    assert ("metric_drop", "hit, language=b") in failed
    assert ("metric_champion_drop", "hit, language=b") in failed
    assert ("metric_drop", "hit") not in failed
    assert ("metric_drop", "hit, language=a") not in failed

    code, answer = gate(capsys, "history", "--model", "text", "--metric", "hit")
    assert code == 0
    assert [row["value"] for row in answer["versions"]] == [1.0]


def test_a_detector_is_refused_for_one_slice_and_promoted_within_the_bound(
    detector: Detector, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    empty_database(Path("mlflow.db"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def promote(file: str, report: str) -> tuple[int, str]:
        gate(
            capsys, "check", file, "--reference", "squares:build", "--inputs", "images.npy",
            "--labels", "labels.jsonl", "--policy", "policy.yaml", "--report", report, "--track",
            "--against", "squares",
        )  # fmt: skip
        code, answer = gate(
            capsys, "promote", file, "--name", "squares", "--report", report, "--policy",
            "policy.yaml",
        )  # fmt: skip
        return code, answer["outcome"]

    assert promote("model.onnx", "first") == (0, "promoted")
    assert (Path("first") / "metrics.safetensors").exists()
    assert "metric-map50" in (Path("first") / "report.html").read_text()
    assert promote("misses-dim.onnx", "second") == (1, "refused")
    assert failures("second") == {
        (name, "map50, camera=rear") for name in ("metric_drop", "metric_champion_drop")
    }
    assert promote("misses-few.onnx", "third") == (0, "promoted")
    for file, report in (("misses-dim.onnx", "second"), ("misses-few.onnx", "third")):
        drops = {c["point"]: c["params"]["drop"] for c in read_checks(report)
                 if c["name"] == "metric_drop"}  # fmt: skip
        for camera, point in ((None, "map50"), ("rear", "map50, camera=rear")):
            peer = detector.map50_of("model.onnx", camera) - detector.map50_of(file, camera)
            assert 0 < peer == pytest.approx(drops[point], abs=1e-9)
    code, answer = gate(capsys, "history", "--model", "squares", "--metric", "map50")
    assert code == 0
    assert [row["value"] for row in answer["versions"]] == pytest.approx(
        [detector.map50_of("model.onnx"), detector.map50_of("misses-few.onnx")], abs=1e-9
    )
    # MLflow caches engines by URI; a relative one may refer to another folder.
    tracking_uri = f"sqlite:///{Path('mlflow.db').resolve()}"
    runs = MlflowClient(tracking_uri).search_runs(["1"])
    logged = {run.data.metrics.get("ort-cpu/metric/map50", -1.0) for run in runs}
    assert any(value == pytest.approx(detector.map50_of("model.onnx")) for value in logged)
