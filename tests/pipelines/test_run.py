from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from gate import GateError
from pipelines import paths
from pipelines.run import PARENT_TAG, RunReference, Tracker, recorded_run, tracking_uri
from pipelines.stage import Stopped


def client() -> MlflowClient:
    return MlflowClient(tracking_uri())


def status(run_id: str) -> str:
    return str(client().get_run(run_id).info.status)


def first_run(stage: str = "export") -> str:
    with Tracker("test").new_run(stage) as page:
        return page.run_id


def continue_run(stage: str = "parity", *, earlier: str = "export", **settings: object) -> str:
    with Tracker("test").shared_run(
        stage,
        earlier=earlier,
        settings=settings,
        replay=lambda page: page.tags({"replayed": "yes"}),
    ) as page:
        page.params(settings)
        return page.run_id


def test_stages_share_one_run(project: Path) -> None:
    first = first_run()
    assert continue_run() == first
    assert continue_run("promote", earlier="parity") == first
    assert "replayed" not in client().get_run(first).data.tags
    assert status(first) == "FINISHED"


def test_run_of_a_rejection_is_failed_and_not_continued(project: Path) -> None:
    """The run contains the stage's results, and a complete run is never changed."""
    first_run()
    with Tracker("test").shared_run(
        "parity", earlier="export", settings={}, replay=lambda page: None
    ) as page:
        page.ends = "FAILED"
    assert status(page.run_id) == "FAILED"
    assert continue_run() != page.run_id


def test_failed_run_is_continued_when_its_stage_did_not_finish(project: Path) -> None:
    first = first_run()
    with (
        pytest.raises(ValueError),
        Tracker("test").shared_run(
            "parity", earlier="export", settings={}, replay=lambda page: None
        ),
    ):
        raise ValueError
    assert status(first) == "FAILED"
    assert continue_run() == first
    assert status(first) == "FINISHED"


def test_database_is_in_the_project_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_ROOT", str(project))
    monkeypatch.chdir(project.parent)
    assert tracking_uri() == f"sqlite:///{project.resolve()}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:1")
    assert tracking_uri() == "http://user:secret@127.0.0.1:1"


def delete_run(run_id: str) -> None:
    client().delete_run(run_id)


def refer_to_unknown_run(run_id: str) -> None:
    change_reference(run_id="0" * 32)


def refer_to_other_server(run_id: str) -> None:
    change_reference(tracking_uri="http://127.0.0.1:1")


def refer_to_other_experiment(run_id: str) -> None:
    second = client().create_experiment("other")
    change_reference(run_id=client().create_run(second).info.run_id)


def complete_run(run_id: str) -> None:
    continue_run()


def change_settings(run_id: str) -> None:
    client().log_param(run_id, "tf32", "True")


def change_reference(**fields: str) -> None:
    path = paths.run_reference("export")
    RunReference.load(path).model_copy(update=fields).save(path)


@pytest.mark.rows(4)
@pytest.mark.parametrize(
    "tamper",
    [
        delete_run,
        refer_to_unknown_run,
        refer_to_other_server,
        refer_to_other_experiment,
        complete_run,
        change_settings,
    ],
)
def test_unusable_run_is_replaced_and_replayed(project: Path, tamper: object) -> None:
    first = first_run()
    tamper(first)  # type: ignore[operator]
    second = continue_run(tf32=False)
    assert second != first
    assert client().get_run(second).data.tags["replayed"] == "yes"
    assert recorded_run("parity").run_id == second  # type: ignore[union-attr]
    assert recorded_run("export").run_id != second  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError(), "FAILED"), (KeyboardInterrupt(), "KILLED"), (Stopped(), "KILLED")],
)
def test_run_ends_with_its_stage(project: Path, error: BaseException, expected: str) -> None:
    run_id = ""
    with pytest.raises(type(error)), Tracker("test").new_run("export") as page:
        run_id = page.run_id
        raise error
    assert status(run_id) == expected
    assert recorded_run("export") is None


ABANDON = """
import os
from pipelines.run import Tracker
with Tracker("test").new_run("export") as page:
    print(page.run_id, flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.proof
def test_killed_run_is_ended_by_the_next_stage(project: Path) -> None:
    repository = Path(__file__).resolve().parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", ABANDON], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )  # fmt: skip
    assert killed.returncode == -9
    run_id = killed.stdout.strip()
    assert status(run_id) == "RUNNING"
    with Tracker("test").new_run("export") as living:
        assert status(run_id) == "KILLED"
        Tracker("test")  # must not end a run that is being written
        assert status(living.run_id) == "RUNNING"


def test_mlflow_run_becomes_the_parent_and_is_not_resumed(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = client().create_experiment("launched")
    parent = client().create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", parent)
    run = client().get_run(first_run())
    assert run.info.run_id != parent
    assert run.info.experiment_id == experiment
    assert run.data.tags[PARENT_TAG] == parent
    assert "MLFLOW_RUN_ID" not in os.environ
    assert status(parent) == "RUNNING"  # its launcher ends it


def test_deleted_experiment_is_reported(project: Path) -> None:
    Tracker("test")
    client().delete_experiment(client().get_experiment_by_name("test").experiment_id)
    with pytest.raises(GateError, match="mlflow experiments restore"):
        Tracker("test")
