"""`make repro` in a clone of the repository with a tiny network. The last test changes the
clone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate import Digest
from gate.mlflow_client.registry import MlflowRegistry
from tests.exhaustive import exhaustive
from tests.pipelines.conftest import clone, run

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]

UP_TO_DATE = "Data and pipelines are up to date."


class Project:
    """A clone with its MLflow store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = MlflowClient(f"sqlite:///{folder}/mlflow.db", f"sqlite:///{folder}/mlflow.db")

    def repro(self, *arguments: str, code: int = 0, **environment: str) -> str:
        result = run(self.folder, "pipelines.repro", *arguments, **environment)
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout

    def dvc(self, *arguments: str) -> str:
        result = run(self.folder, "dvc", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def champion(self) -> Any:
        return self.client.get_model_version_by_alias("tiny", "champion")

    def digest(self) -> Digest:
        return Digest.from_file(self.folder / "models/model.onnx")

    def run_of(self, stage: str) -> Any:
        reference = json.loads((self.folder / f"reports/runs/{stage}.json").read_text())
        return self.client.get_run(reference["run_id"])

    def running(self) -> list[str]:
        ids = [e.experiment_id for e in self.client.search_experiments()]
        result = self.client.search_runs(ids, "attributes.status = 'RUNNING'")
        return [r.info.run_id for r in result]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    # A path with a space, as in many home folders.
    opened = Project(clone(tmp_path_factory.mktemp("a clone")))
    printed = opened.repro()
    assert "Promoted: champion is version 1 of tiny" in printed
    assert "Next: make ui" in printed
    yield opened
    assert opened.running() == []


def test_one_digest_from_file_to_registry(project: Project, tmp_path: Path) -> None:
    digest, version = project.digest(), project.champion()
    registry = MlflowRegistry(f"sqlite:///{project.folder}/mlflow.db")
    downloaded = registry.download("tiny", str(version.version), tmp_path)
    assert Digest.from_file(downloaded) == digest
    assert version.tags["gate.sha256"] == digest.hex
    assert project.run_of("promote").data.tags["gate.sha256"] == digest.hex
    assert version.run_id == project.run_of("export").info.run_id
    before = {p: p.stat().st_mtime_ns for p in (project.folder / "reports").rglob("*")}
    assert UP_TO_DATE in project.repro()  # nothing runs a second time
    assert {p: p.stat().st_mtime_ns for p in (project.folder / "reports").rglob("*")} == before
    assert len(project.client.search_model_versions("name = 'tiny'")) == 1


@exhaustive
def test_changed_bound_decides_again_and_changed_runtime_measures_again(project: Project) -> None:
    """Read the stages that DVC would run; nothing is measured."""
    params = project.folder / "params.yaml"
    text = params.read_text()
    assert "noise_ratio: 1.5 " in text
    params.write_text(text.replace("noise_ratio: 1.5 ", "noise_ratio: 1.6 "))
    assert "Running stage 'plan'" in project.dvc("repro", "plan")
    assert UP_TO_DATE in project.dvc("status", "parity")
    assert "modified:           gate" in project.dvc("status", "promote")

    last = text.index("    ort-cuda-optimized:")  # remove a runtime, and add another
    params.write_text(
        f"{text[:last]}    mine:\n      kind: ort\n      required: always\n"
        "      options: {providers: [CPUExecutionProvider]}\n      bounds: *cpu\n"
    )
    project.dvc("repro", "plan")
    assert "modified:           reports/plan.json" in project.dvc("status", "parity")
