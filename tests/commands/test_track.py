"""gate check --track records the result in a run of a real MLflow store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate import Decision, GateError, Policy, cli
from tests.small_project import create_project


def _check(file: str, *more: str) -> list[str]:
    project = create_project()
    arguments = ["check", str(project / file), "--reference", "small_models:build"]
    return [*arguments, "--inputs", str(project / "images.npy"), *more]


def _client(work_folder: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{work_folder}/mlflow.db")


def _runs(work_folder: Path, experiment: str) -> list[Any]:
    client = _client(work_folder)
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


@pytest.mark.further
def test_rejected_file_has_a_run_named_in_the_report(work_folder: Path, capsys) -> None:
    options = ("--track", "--experiment", "mine", "--report", "report", "--json")
    assert cli.main(_check("bad.onnx", *options)) == 1
    printed = json.loads(capsys.readouterr().out)["run"]
    (run,) = _runs(work_folder, "mine")
    assert (printed["run_id"], printed["error"]) == (run.info.run_id, None)
    assert f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}" in printed["address"]
    reference = json.loads((work_folder / "report" / "run.json").read_text())
    assert reference["run_id"] == run.info.run_id
    decision = Decision.load(work_folder / "report" / "decision.json")
    assert run.info.run_name.startswith(f"gate FAIL {decision.subject_sha256.hex[:6]} ")
    assert run.info.status == "FAILED"
    assert run.data.metrics["ort-cpu/noise_ratio"] > 1
    (dataset,) = run.inputs.dataset_inputs
    assert json.loads(dataset.dataset.source) == {"uri": str(create_project() / "images.npy")}


@pytest.mark.proof
def test_suggested_commands_have_options_and_no_password(work_folder: Path, capsys) -> None:
    (work_folder / "policy.json").write_text(Policy.default().to_json())
    uri = f"sqlite:///{work_folder}/mlflow.db?password=geheim1234"
    options = ("--policy", "policy.json", "--state", "my state", "--against", "small")
    where = ("--tracking-uri", uri, "--report", "report", "--json")
    assert cli.main(_check("good.onnx", *options, *where)) == 0
    (step,) = json.loads(capsys.readouterr().out)["story"]["steps"]
    assert step["command"].startswith(
        f"gate promote {create_project()}/good.onnx --name small --report report"
    )
    assert "--policy policy.json" in step["command"]
    assert "--state 'my state'" in step["command"]
    assert "geheim1234" not in step["command"]
    assert cli.main(_check("bad.onnx", *options, *where, "--overwrite")) == 1
    printed = json.loads(capsys.readouterr().out)["story"]
    assert printed["steps"][-1]["command"].startswith("gate check ")
    everything = json.dumps(printed) + (work_folder / "report/report.html").read_text()
    assert "geheim1234" not in everything
    assert cli.main(_check("good.onnx", "--policy", "policy.json", "--track")) == 0
    (run,) = _runs(work_folder, "parity-gate")
    assert "--policy policy.json" in run.data.tags["mlflow.note.content"]


def test_run_has_the_report_when_none_is_written(work_folder: Path, capsys) -> None:
    assert cli.main(_check("good.onnx", "--track")) == 0
    (run,) = _runs(work_folder, "parity-gate")
    assert run.info.run_id in capsys.readouterr().out
    names = {entry.path for entry in _client(work_folder).list_artifacts(run.info.run_id)}
    assert {"report.html", "decision.json", "evidence.json", "plots"} <= names
    assert {path.name for path in work_folder.iterdir()} == {"mlflow.db", "mlartifacts"}


def test_unreachable_server_is_reported_before_measuring(work_folder: Path, capsys) -> None:
    options = ("--track", "--tracking-uri", "http://127.0.0.1:1", "--report", "report")
    assert cli.main(_check("good.onnx", *options)) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert not (work_folder / "report").exists()


def test_verdict_stands_when_tracking_fails_afterwards(
    work_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def raise_unavailable(*_: object, **__: object) -> None:
        raise GateError("the server went away")

    monkeypatch.setattr("gate.mlflow_client.runs.RunLogger.table", raise_unavailable)
    assert cli.main(_check("good.onnx", "--track", "--report", "report")) == 0
    text = capsys.readouterr().out
    assert "PASS" in text
    assert "not written; the verdict is not affected: the server went away" in text
    assert (work_folder / "report" / "decision.json").is_file()
    assert not (work_folder / "report" / "run.json").exists()
    (run,) = _runs(work_folder, "parity-gate")
    assert run.info.status == "FAILED"


def test_tracking_uri_without_track_is_wrong_usage(work_folder: Path, capsys) -> None:
    assert cli.main(_check("good.onnx", "--tracking-uri", "http://127.0.0.1:1")) == 2
    assert "--track" in capsys.readouterr().err
