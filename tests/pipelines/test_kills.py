"""kill -9 in every stage, between writing a file and putting it in place: the next run finishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate.commands.result import ExitCode
from pipelines import export, parity, prepare, promote, train
from pipelines.run import tracking_uri
from tests.exhaustive import exhaustive
from tests.pipelines.conftest import REPOSITORY, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.proof]

STAGES = {m.__name__.rpartition(".")[2]: m.main for m in (prepare, train, export, parity, promote)}

KILLED_BEFORE = """
import os, runpy, signal, sys
from pathlib import Path
stage, name = sys.argv[1:]
replace = Path.replace
def killing(self, target):
    if Path(target).name == name:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
Path.replace = killing
runpy.run_module(f"pipelines.{stage}", run_name="__main__")
"""


@exhaustive
@pytest.mark.parametrize(
    ("stage", "file"),
    [
        ("prepare", "data/manifest.json"),
        ("train", "models/model.safetensors"),
        ("export", "models/model.onnx"),
        ("export", "reports/export.json"),
        ("parity", "reports/evidence.json"),
        ("promote", "reports/promotion.json"),
    ],
)
def test_nothing_half_written_is_taken_for_whole(
    promoted_project: Path, stage: str, file: str
) -> None:
    project = promoted_project
    before = _champion().version
    old = (project / file).read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE, stage, Path(file).name],
        cwd=project,
        env=clean_environment() | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -9, done.stderr.decode()
    assert not (project / file).exists() or (project / file).read_bytes() == old
    assert _champion().version == before
    names = list(STAGES)
    for later in names[names.index(stage) :]:
        assert STAGES[later]() == ExitCode.DONE
    assert (project / file).exists()
    assert not list(project.rglob(".*.tmp"))
    runs = _client().search_runs([e.experiment_id for e in _client().search_experiments()])
    assert {run.info.status for run in runs} <= {"FINISHED", "KILLED"}
    assert _champion().tags["gate.verdict"] == "PASS"


def _client() -> MlflowClient:
    return MlflowClient(tracking_uri(), tracking_uri())


def _champion():
    return _client().get_model_version_by_alias("tiny", "champion")
