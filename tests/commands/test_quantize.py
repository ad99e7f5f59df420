"""A quantized twin by the command line: made, judged, promoted and deployed with its exact file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gate import cli
from tests.small_project import made

# SQLAlchemy, about MLflow's own tables.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder with the two policies and a twin that was judged."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("DVC_EXP_NAME", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("exact.yaml").write_text(EXACT)
    Path("twin.yaml").write_text(TWIN)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code = cli.main([*map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, {**json.loads(out), "stderr": err}


def judge(capsys, file: Path, policy: str, report: str) -> tuple[int, dict[str, Any]]:
    return said(
        capsys, "check", file, "--reference", "small_models:build", "--inputs",
        made() / "images.npy", "--policy", policy, "--report", report,
    )  # fmt: skip


def test_a_folder_is_no_place_for_a_twin(place: Path, capsys) -> None:
    code, plain = said(
        capsys, "quantize", made() / "good.onnx", "--calibration", made() / "images.npy",
        "--output", ".",
    )  # fmt: skip
    assert code == 2
    assert "it is a folder" in plain["error"]["message"]


def quantize(capsys, *more: object) -> tuple[int, dict[str, Any]]:
    return said(
        capsys, "quantize", made() / "good.onnx", "--calibration", made() / "images.npy",
        "--output", "twin/model.onnx", "--samples", 32, *more,
    )  # fmt: skip


@pytest.mark.proof
def test_from_the_exact_file_to_a_release_of_two(place: Path, capsys) -> None:
    code, told = quantize(capsys)
    assert code == 0
    assert told["export"]["settings"]["of_sha256"] == told["of"]["sha256"]
    assert judge(capsys, made() / "good.onnx", "exact.yaml", "report")[0] == 0
    code, told = judge(capsys, place / "twin" / "model.onnx", "twin.yaml", "twin/report")
    assert code == 0, told

    promote = ("promote", made() / "good.onnx", "--name", "small", "--report", "report")
    code, told = said(capsys, *promote, "--policy", "exact.yaml")
    assert code == 2
    assert "both or neither" in told["error"]["message"]
    with_twin = ("--policy", "exact.yaml", "--twin", "twin/model.onnx")
    assert said(capsys, *promote, *with_twin)[0] == 2  # without its report
    with_twin = (*with_twin, "--twin-report", "twin/report")
    code, told = said(capsys, *promote, *with_twin)
    assert (code, told["outcome"]) == (0, "promoted")
    code, told = said(capsys, *promote, *with_twin)
    assert (code, told["outcome"]) == (0, "unchanged")

    alone = ("promote", "twin/model.onnx", "--name", "small", "--report", "twin/report")
    code, told = said(capsys, *alone, "--policy", "twin.yaml")
    assert (code, told["outcome"]) == (1, "refused")
    assert "only as the twin of its exact file" in told["reason"]


@pytest.mark.proof
def test_both_are_deployed_together(place: Path, capsys) -> None:
    quantize(capsys)
    judge(capsys, made() / "good.onnx", "exact.yaml", "report")
    judge(capsys, place / "twin" / "model.onnx", "twin.yaml", "twin/report")
    deploy = (
        "deploy", "small", "--store", "store", "--file", made() / "good.onnx",
        "--golden", "report/golden", "--twin", "twin/model.onnx",
    )  # fmt: skip
    code, told = said(capsys, *deploy, "--twin-golden", "twin/report/golden")
    assert (code, told["outcome"]) == (0, "deployed")
    assert set(told["manifest"]["slots"]) == {"exact", "quantized"}
    code, told = said(capsys, *deploy, "--twin-golden", "report/golden")
    assert (code, told["outcome"]) == (1, "refused")
    code, told = said(capsys, "deploy", "small", "--store", "store", "--file", "x", "--twin-golden",
                      "report/golden")  # fmt: skip
    assert code == 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--calibration", "nowhere.npy"), "nowhere.npy"),
        (("--calibration", made() / "nan.npy", "--samples", 64), "NaN"),
        (("--calibration", made() / "size.npy"), "7"),
        (("--samples", 0), "samples"),
    ],
)
def test_what_cant_be_quantized_is_told(place: Path, capsys, more, says: str) -> None:
    code, told = quantize(capsys, *more)
    assert code == 2
    assert says in told["error"]["message"]
    assert not (place / "twin" / "model.onnx").exists()


def test_people_are_told_too(place: Path, capsys) -> None:
    arguments = ["quantize", made() / "good.onnx", "--calibration", made() / "images.npy"]
    assert cli.main([*map(str, arguments), "--output", "model.onnx"]) == 0
    out = capsys.readouterr().out
    assert "calibrated on 64 samples" in out
    assert "precision: quantized" in out


@pytest.mark.proof
def test_what_is_deployed_by_hand_may_say_how_pictures_become_its_input(place, capsys) -> None:
    Path("spec.yaml").write_text("resize: {size: [8, 8]}\n")
    deploy = ("deploy", "small", "--store", "store", "--file", made() / "good.onnx")
    code, told = said(capsys, *deploy, "--preprocessing", "spec.yaml")
    assert code == 0
    spec = told["manifest"]["slots"]["exact"]["preprocessing"]
    assert spec["resize"]["size"] == [8, 8]
    code, told = said(capsys, *deploy)
    assert (code, told["outcome"]) == (0, "deployed")
    assert "preprocessing" not in told["manifest"]["slots"]["exact"]


def test_a_spec_that_the_evidence_names_goes_with_the_file(place: Path, capsys) -> None:
    Path("spec.yaml").write_text("resize: {size: [8, 8]}\n")
    check = ("check", made() / "good.onnx", "--reference", "small_models:build", "--inputs",
             made() / "images.npy", "--report", "report")  # fmt: skip
    assert said(capsys, *check, "--preprocessing", "spec.yaml")[0] == 0
    promote = ("promote", made() / "good.onnx", "--name", "small", "--report", "report")
    code, told = said(capsys, *promote)
    assert code == 2
    assert "name it with --preprocessing" in told["error"]["message"]
