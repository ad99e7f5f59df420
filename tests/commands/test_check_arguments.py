"""Invalid arguments of gate check are errors before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gate import cli

CHECK = ["check", "good.onnx", "--reference", "small_models:build", "--inputs", "images.npy"]


@pytest.fixture
def project(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr("gate.api.MeasurementRun.open", never)
    return project


def check_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main([*arguments, "--json"]) == 2
    return str(json.loads(capsys.readouterr().out)["error"])


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--runtime", "nosuch"], "ort-cpu"),
        (["--set", "noise_ratio=2"], "runtimes.ort-cpu.bounds.noise_ratio"),
        (["--set", "runtimes.ort-cpu.bounds.noise_rato=2"], "runtimes.ort-cpu.bounds.noise_ratio"),
        (["--set", "min_sample=2"], "min_samples"),
        (["--set", "nothing.like=it"], "gate policy show"),
        (["--role", "logit=logits"], "Did you mean 'logits'?"),
        (["--role", "nosuch=scores"], "the file has 'logits'"),
        (["--against", "nosuch"], "no registered model of this name"),
        (["--workers", "2"], "--workers requires --engine ray."),
        (["--address", "auto"], "--address requires --engine ray"),
        (["--gpus-per-worker", "1"], "--gpus-per-worker requires --engine ray"),
        (["--engine", "ray", "--jobs", "2"], "With --engine ray use --workers N."),
        (["--engine", "slurm"], "is not one of 'processes', 'ray'"),
    ],
)
def test_invalid_argument_is_named(project, tmp_path, monkeypatch, capsys, options, shown) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert shown in check_error(capsys, *CHECK, *options)


def test_existing_report_is_not_replaced(project, tmp_path, capsys) -> None:
    (tmp_path / "decision.json").write_text("{}")
    assert "--overwrite" in check_error(capsys, *CHECK, "--report", str(tmp_path))
    assert (tmp_path / "decision.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [tmp_path / "decision.json"]


def test_unwritable_folder_is_refused(project, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    assert "no permission" in check_error(capsys, *CHECK, "--report", str(tmp_path / "report"))
