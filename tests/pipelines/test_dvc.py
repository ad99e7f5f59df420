"""Real DVC, real MLflow, real processes, in a clone of the repository with a tiny network.

One project for all tests of this file; each leaves it as it found it: a champion, all up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from gate.mlflow_client.registry import MlflowRegistry
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.pipelines.conftest import clone, run

pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.timeout(1800)]

UP_TO_DATE = "Data and pipelines are up to date."


class Project:
    """A clone with its MLflow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = MlflowClient(f"sqlite:///{folder}/mlflow.db", f"sqlite:///{folder}/mlflow.db")

    def repro(self, *arguments: str, code: int = 0, **environment: str) -> str:
        done = run(self.folder, "pipelines.repro", *arguments, **environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def dvc(self, *arguments: str) -> str:
        done = run(self.folder, "dvc", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def champion(self) -> Any:
        return self.client.get_model_version_by_alias("tiny", "champion")

    def digest(self) -> Digest:
        return Digest.from_file(self.folder / "models/model.onnx")

    def run_of(self, stage: str) -> Any:
        reference = json.loads((self.folder / f"reports/runs/{stage}.json").read_text())
        return self.client.get_run(reference["run_id"])

    def running(self) -> list[str]:
        ids = [e.experiment_id for e in self.client.search_experiments()]
        found = self.client.search_runs(ids, "attributes.status = 'RUNNING'")
        return [r.info.run_id for r in found]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    # A space in the path, as in many a home folder.
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
    assert UP_TO_DATE in project.repro()  # a second time nothing runs
    assert {p: p.stat().st_mtime_ns for p in (project.folder / "reports").rglob("*")} == before
    assert len(project.client.search_model_versions("name = 'tiny'")) == 1


def test_another_bound_decides_anew_and_another_runtime_measures_anew(project: Project) -> None:
    """By what DVC says it would run: nothing is measured here."""
    params = project.folder / "params.yaml"
    text = params.read_text()
    assert "noise_ratio: 1.5 " in text
    params.write_text(text.replace("noise_ratio: 1.5 ", "noise_ratio: 1.6 "))
    assert "Running stage 'plan'" in project.dvc("repro", "plan")
    assert UP_TO_DATE in project.dvc("status", "parity")
    assert "modified:           gate" in project.dvc("status", "promote")

    last = text.index("    ort-cuda-optimized:")  # deleted; and one of the user's own
    params.write_text(
        f"{text[:last]}    mine:\n      kind: ort\n      required: always\n"
        "      options: {providers: [CPUExecutionProvider]}\n      bounds: *cpu\n"
    )
    project.dvc("repro", "plan")
    assert "modified:           reports/plan.json" in project.dvc("status", "parity")

    params.write_text(text)
    project.dvc("repro", "plan")
    assert UP_TO_DATE in project.dvc("repro")


@exhaustive
def test_an_edited_factory_is_measured_anew(project: Project) -> None:
    """As the issue of it was: relu becomes sigmoid in the model's own file. By dvc alone; and back
    by `mlflow run`, whose runs land in one experiment."""
    source = project.folder / "tests/pipelines/tiny.py"
    relu, before = source.read_text(), project.digest()
    source.write_text(relu.replace("nn.ReLU()", "nn.Sigmoid()"))
    assert "models/code" in project.dvc("status")
    project.dvc("repro")
    assert str(project.champion().version) == "2"
    assert project.champion().tags["gate.sha256"] == project.digest().hex != before.hex
    evidence = json.loads((project.folder / "reports/evidence.json").read_text())
    code = {"tests.pipelines.tiny": str(Digest.from_file(source))}
    assert evidence["source"]["code"]["files"] == code
    assert UP_TO_DATE in project.repro()

    source.write_text(relu)
    done = run(
        project.folder, "mlflow", "run", ".", "--env-manager", "local",
        "--experiment-name", "launched", "-P", "batch_size=16",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert project.champion().tags["gate.sha256"] == before.hex
    experiment = project.client.get_experiment_by_name("launched").experiment_id
    runs = project.client.search_runs([experiment])
    launcher = next(r for r in runs if "mlflow.project.entryPoint" in r.data.tags)
    shared = project.run_of("promote")
    assert {r.info.run_id for r in runs} >= {launcher.info.run_id, shared.info.run_id}
    assert shared.info.experiment_id == experiment
    assert shared.data.tags["mlflow.parentRunId"] == launcher.info.run_id
    assert "batch_size: 16  " in (project.folder / "params.yaml").read_text()
    assert {r.info.status for r in runs} == {"FINISHED"}
    assert "gate.verdict" not in launcher.data.tags  # the trap: writing into the launcher's run
    assert project.running() == []


@exhaustive
def test_an_experiment_does_not_promote_and_make_repro_then_does(project: Project) -> None:
    """Into another registry, which knows nothing of the runs so far."""
    versions = len(project.client.search_model_versions("name = 'tiny'"))
    project.dvc("exp", "run", "-S", "gate.min_samples=399")
    assert len(project.client.search_model_versions("name = 'tiny'")) == versions
    assert '"dry_run"' in (project.folder / "reports/promotion.json").read_text()
    uri = f"sqlite:///{project.folder}/other.db"
    printed = project.repro(MLFLOW_TRACKING_URI=uri)
    assert "promote runs again" in printed
    assert "Promoted: champion is version 1 of tiny" in printed
    other = MlflowClient(uri, uri)
    version = other.get_model_version_by_alias("tiny", "champion")
    assert version.tags["gate.sha256"] == project.digest().hex
    params = other.get_run(version.run_id).data.params
    assert params["export.opset_in_file"] == "13"
    assert params["gate.determinism.tf32"] == "False"


def test_a_dead_server_ends_make_repro_at_once(project: Project) -> None:
    done = run(project.folder, "pipelines.repro", MLFLOW_TRACKING_URI="http://127.0.0.1:1")
    assert done.returncode == 2
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
