"""Real DVC, real MLflow, real processes, in a clone of the repository with a tiny network.

One project for all tests of this file; each leaves it as it found it: a champion, all up to date.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from mlflow import MlflowClient
from onnx import numpy_helper

from gate.mlflow_client.registry import MlflowRegistry
from gate.storage.digest import Digest
from tests.exhaustive import exhaustive
from tests.pipelines.conftest import clean_environment, clone, run

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
        return Digest.of_file(self.folder / "models/model.onnx")

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
    assert "Where to look: make ui" in printed
    yield opened
    assert opened.running() == []


def test_one_digest_from_file_to_registry(project: Project, tmp_path: Path) -> None:
    digest, version = project.digest(), project.champion()
    registry = MlflowRegistry(f"sqlite:///{project.folder}/mlflow.db")
    downloaded = registry.download("tiny", str(version.version), tmp_path)
    assert Digest.of_file(downloaded) == digest
    assert version.tags["gate.sha256"] == digest.hex
    assert project.run_of("promote").data.tags["gate.sha256"] == digest.hex
    assert version.run_id == project.run_of("export").info.run_id


def test_a_second_time_nothing_runs(project: Project) -> None:
    before = {p: p.stat().st_mtime_ns for p in (project.folder / "reports").rglob("*")}
    assert UP_TO_DATE in project.dvc("repro")
    assert UP_TO_DATE in project.repro()
    assert {p: p.stat().st_mtime_ns for p in (project.folder / "reports").rglob("*")} == before
    assert len(project.client.search_model_versions("name = 'tiny'")) == 1


@exhaustive
def test_dvc_shows_metrics_parameters_and_plots(project: Project) -> None:
    metrics = json.loads(project.dvc("metrics", "show", "--json"))[""]["data"]
    parity, train = (metrics[f"reports/{name}.json"]["data"] for name in ("parity", "train"))
    assert parity["top1_agreement"] == 1.0
    assert len(str(parity["noise_ratio"])) > 10  # not rounded
    assert train["eval_accuracy"] > 0.8
    assert len(parity) + len(train) <= 12
    assert not [name for name in (*parity, *train) if "latency" in name]
    ignored = run(project.folder, "dvc", "check-ignore", "reports/parity.json")
    assert ignored.returncode == 1
    kept = subprocess.run(
        ["git", "check-ignore", "reports/parity.json", "reports/train.json"],
        cwd=project.folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert kept.stdout == ""
    params = project.folder / "params.yaml"
    text = params.read_text()
    params.write_text(text.replace("momentum: 0.9", "momentum: 0.8"))
    assert "train.momentum" in project.dvc("params", "diff")
    params.write_text(text)
    project.dvc("plots", "show")
    page = (project.folder / "dvc_plots/index.html").read_text()
    assert "training loss" in page
    assert "held-out accuracy" in page


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
def test_a_weight_changed_before_parity_is_refused_and_made_anew_in_spite_of_a_kill(
    project: Project,
) -> None:
    """kill -9 of DVC and its stage, while the stage writes into its MLflow run."""
    path = project.folder / "models/model.onnx"
    good, serving = project.digest(), project.champion().version
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4)
    tensor.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.5), tensor.name)
    )
    onnx.save(model, path)
    project.dvc("commit", "-f", "export")  # else DVC exports again, because the output changed
    printed = project.repro(code=1)
    assert "Refused" in printed
    assert "max_abs_diff" in printed
    assert project.champion().version == serving
    tags = project.run_of("promote").data.tags
    assert tags["gate.verdict"] == "FAIL"
    assert "max_abs_diff" in tags["gate.failed_checks"]
    assert tags["gate.sha256"] != good.hex

    path.unlink()
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro"], cwd=project.folder, env=clean_environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    killed = wait_for_run_of(project, "parity", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert project.running() == [killed]
    assert f"Unchanged: champion is version {serving}" in project.repro()
    assert project.digest() == good
    assert project.client.get_run(killed).info.status in ("KILLED", "FINISHED")
    assert project.running() == []
    assert UP_TO_DATE in project.dvc("repro")


def wait_for_run_of(project: Project, stage: str, process: subprocess.Popen[bytes]) -> str:
    """The id of the run that `stage` has just begun to write."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        for run_id in project.running():
            tags = project.client.get_run(run_id).data.tags
            if tags.get(f"gate.stage.{stage}") == "started":
                return run_id
        time.sleep(0.02)
    raise AssertionError(f"{stage} never ran")


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
    code = {"tests.pipelines.tiny": str(Digest.of_file(source))}
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
