"""A project folder for each test: small images, a tiny network, its own MLflow store."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from pipelines import export, parity, prepare, promote, train
from pipelines.override import override
from pipelines.run import RunReference, tracking_uri
from tests.once import once
from tests.reused_charts import reused_charts

__all__ = ["reused_charts"]

REPOSITORY = Path(__file__).resolve().parents[2]
ONNX = Path("models/model.onnx")
"""The path in params.yaml."""
TINY_SETTINGS = (
    "prepare.preprocessing.resize.size=[16, 16]",
    "model.architecture=null",
    "model.factory=tests.pipelines.tiny:network",
    "train.epochs=1",
    "train.threads=1",
    "registry.model_name=tiny",
    "gate.runtimes.browser-wasm.required=never",
)
FEW_SAMPLES = ("gate.min_samples=2", "model.num_classes=null")
"""Settings for a test's own data: any number of samples and classes."""


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove MLflow's and DVC's variables; restore the settings of torch and MLflow afterwards."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_", "DVC_")):
            monkeypatch.delenv(name)
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    if torch.are_deterministic_algorithms_enabled() != before[0]:
        torch.use_deterministic_algorithms(before[0])
    torch.set_num_threads(before[1])


@pytest.fixture(scope="session")
def empty_database() -> Path:
    """MLflow's tables: making them takes a second."""

    def fill(folder: Path) -> None:
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()

    return once("database", fill) / "mlflow.db"


@pytest.fixture(scope="session")
def tiny_params() -> Path:
    """The project's params.yaml with tiny settings: writing it takes a second."""

    def fill(folder: Path) -> None:
        shutil.copy(REPOSITORY / "params.yaml", folder)
        override(TINY_SETTINGS)

    return once("tiny", fill) / "params.yaml"


@pytest.fixture
def project(
    tmp_path: Path, empty_database: Path, tiny_params: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty project with tiny settings as the current folder."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(empty_database, folder)
    shutil.copy(tiny_params, folder)
    (folder / "data" / "raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def trained_files(tiny_params: Path) -> Path:
    """data/, models/ and reports/ after prepare and train."""

    def fill(folder: Path) -> None:
        shutil.copy(tiny_params, folder)
        assert prepare.main() == 0
        assert train.main() == 0

    return once("trained", fill)


@pytest.fixture
def trained(project: Path, trained_files: Path) -> Path:
    """A project after prepare and train; their MLflow run is in another store."""
    for name in ("data", "models", "reports"):
        shutil.copytree(trained_files / name, project / name, dirs_exist_ok=True)
    return project


@pytest.fixture(scope="session")
def measured_files(trained_files: Path, empty_database: Path) -> Path:
    """All files after export and parity, with their MLflow."""

    def fill(folder: Path) -> None:
        shutil.copytree(trained_files, folder, dirs_exist_ok=True)
        shutil.copy(empty_database, folder)
        assert export.main() == 0
        assert parity.main() == 0

    return once("measured", fill)


@pytest.fixture
def measured(project: Path, measured_files: Path) -> Path:
    """A project after export and parity."""
    return _copy_files(measured_files, project)


@pytest.fixture(scope="session")
def promoted_files(measured_files: Path) -> Path:
    """All files after promote, with the registry, of which only the database moves on."""

    def fill(folder: Path) -> None:
        _copy_files(measured_files, folder)
        assert promote.main() == 0

    return once("promoted", fill)


@pytest.fixture
def promoted_project(project: Path, promoted_files: Path) -> Path:
    """A project after promote."""
    return _copy_files(promoted_files, project)


def _copy_files(files: Path, project: Path) -> Path:
    """Copy the files to the current folder, and let its run references name the MLflow store
    there."""
    shutil.copytree(files, project, dirs_exist_ok=True)
    for path in (project / "reports" / "runs").iterdir():
        reference = RunReference.load(path)
        reference.model_copy(update={"tracking_uri": tracking_uri()}).save(path)
    return project


def clone(folder: Path) -> Path:
    """Copy the repository's files into a new Git repository with tiny settings committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source = REPOSITORY / name
        if source.is_file() and name != "dvc.lock":
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        override(TINY_SETTINGS)
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "clone"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m …` in a clone, with this Python first on the path."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder, env=clean_environment() | environment, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip


def clean_environment() -> dict[str, str]:
    """Return this process's environment without variables that affect a stage."""
    custom = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "DVC_", "COV_"))}
    bin_folder = str(Path(sys.executable).parent)
    return custom | {
        "PATH": f"{bin_folder}{os.pathsep}{custom['PATH']}",
        "VIRTUAL_ENV": str(Path(bin_folder).parent),
    }
