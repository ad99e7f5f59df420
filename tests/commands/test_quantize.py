"""gate quantize: the twin is created, checked, promoted and deployed with its exact file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gate import cli
from tests.exhaustive import exhaustive
from tests.small_project import create_project

TWIN = """
precision: quantized
instruments: {noise_samples: 0, stability_samples: 0, search_inputs: 0, probe_relative_diff: 0.5}
runtimes:
  ort-cpu-optimized:
    required: always
    bounds:
      top1_agreement: 0.8
      confidence_bands: {over_1_percent: 1.0, over_5_percent: 0.5, over_10_percent: 0.3}
"""
EXACT = """
runtimes:
  ort-cpu: {required: always, bounds: {noise_ratio: 1.5, top1_agreement: 1.0}}
twin:
""" + TWIN.replace("\n", "\n  ")


@pytest.fixture
def twin_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both policies and a checked twin."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("exact.yaml").write_text(EXACT)
    Path("twin.yaml").write_text(TWIN)
    return tmp_path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = cli.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, {**json.loads(out), "stderr": err}


def check(capsys, file: Path, policy: str, report: str) -> tuple[int, dict[str, Any]]:
    return run_json(
        capsys, "check", file, "--reference", "small_models:build", "--inputs",
        create_project() / "images.npy", "--policy", policy, "--report", report,
    )  # fmt: skip


def quantize(capsys, *more: object) -> tuple[int, dict[str, Any]]:
    return run_json(
        capsys, "quantize", create_project() / "good.onnx", "--calibration", create_project() / "images.npy",
        "--output", "twin/model.onnx", "--samples", 32, *more,
    )  # fmt: skip


@exhaustive
@pytest.mark.proof
def test_twin_is_promoted_and_deployed_with_its_exact_file(twin_project: Path, capsys) -> None:
    code, printed = quantize(capsys)
    assert code == 0
    assert printed["export"]["settings"]["of_sha256"] == printed["of"]["sha256"]
    assert check(capsys, create_project() / "good.onnx", "exact.yaml", "report")[0] == 0
    code, printed = check(capsys, twin_project / "twin" / "model.onnx", "twin.yaml", "twin/report")
    assert code == 0, printed

    promote = ("promote", create_project() / "good.onnx", "--name", "small", "--report", "report")
    code, printed = run_json(capsys, *promote, "--policy", "exact.yaml")
    assert code == 2
    assert "both or neither" in printed["error"]["message"]
    with_twin = ("--policy", "exact.yaml", "--twin", "twin/model.onnx")
    assert run_json(capsys, *promote, *with_twin)[0] == 2  # without the twin's report
    with_twin = (*with_twin, "--twin-report", "twin/report")
    code, printed = run_json(capsys, *promote, *with_twin)
    assert (code, printed["outcome"]) == (0, "promoted")
    code, printed = run_json(capsys, *promote, *with_twin)
    assert (code, printed["outcome"]) == (0, "unchanged")

    without_exact_file = (
        "promote",
        "twin/model.onnx",
        "--name",
        "small",
        "--report",
        "twin/report",
    )
    code, printed = run_json(capsys, *without_exact_file, "--policy", "twin.yaml")
    assert (code, printed["outcome"]) == (1, "refused")
    assert "only as the twin of its exact file" in printed["reason"]
    deploy = (
        "deploy", "small", "--store", "store", "--file", create_project() / "good.onnx",
        "--golden", "report/golden", "--twin", "twin/model.onnx",
    )  # fmt: skip
    code, printed = run_json(capsys, *deploy, "--twin-golden", "twin/report/golden")
    assert (code, printed["outcome"]) == (0, "deployed")
    assert set(printed["manifest"]["slots"]) == {"exact", "quantized"}
    code, printed = run_json(capsys, *deploy, "--twin-golden", "report/golden")
    assert (code, printed["outcome"]) == (1, "refused")
    code, printed = run_json(capsys, "deploy", "small", "--store", "store", "--file", "x", "--twin-golden",
                      "report/golden")  # fmt: skip
    assert code == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--calibration", "nowhere.npy"), "nowhere.npy"),
        (("--calibration", create_project() / "nan.npy", "--samples", 64), "NaN"),
        (("--calibration", create_project() / "size.npy"), "7"),
        (("--samples", 0), "samples"),
    ],
)
def test_invalid_calibration_is_reported(twin_project: Path, capsys, more, says: str) -> None:
    code, printed = quantize(capsys, *more)
    assert code == 2
    assert says in printed["error"]["message"]
    assert not (twin_project / "twin" / "model.onnx").exists()


@pytest.mark.proof
def test_deploy_with_a_preprocessing_spec(twin_project, capsys) -> None:
    Path("spec.yaml").write_text("resize: {size: [8, 8]}\n")
    deploy = ("deploy", "small", "--store", "store", "--file", create_project() / "good.onnx")
    code, printed = run_json(capsys, *deploy, "--preprocessing", "spec.yaml")
    assert code == 0
    spec = printed["manifest"]["slots"]["exact"]["preprocessing"]
    assert spec["resize"]["size"] == [8, 8]
    code, printed = run_json(capsys, *deploy)
    assert (code, printed["outcome"]) == (0, "deployed")
    assert "preprocessing" not in printed["manifest"]["slots"]["exact"]


def test_promote_requires_the_spec_named_in_the_evidence(twin_project: Path, capsys) -> None:
    Path("spec.yaml").write_text("resize: {size: [8, 8]}\n")
    check = ("check", create_project() / "good.onnx", "--reference", "small_models:build", "--inputs",
             create_project() / "images.npy", "--report", "report")  # fmt: skip
    assert run_json(capsys, *check, "--preprocessing", "spec.yaml")[0] == 0
    promote = ("promote", create_project() / "good.onnx", "--name", "small", "--report", "report")
    code, printed = run_json(capsys, *promote)
    assert code == 2
    assert "name it with --preprocessing" in printed["error"]["message"]
