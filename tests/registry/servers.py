"""Real MLflow servers on 127.0.0.1, and runs for releases."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gate.mlflow_client.connection import quiet_process, using_tracking_uri
from pipelines.ui import NO_JOBS
from tests.free_ports import free_port
from tests.once import once

ADMIN = ("admin", "password-of-the-test-admin")

# MLflow's defaults, except for the cache: checking a password takes half a second.
_AUTH = """[mlflow]
default_permission = READ
database_uri = sqlite:///users.db
admin_username = admin
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
grant_default_workspace_access = false
auth_cache_ttl_seconds = 600
"""


@dataclass(frozen=True)
class Server:
    uri: str
    artifacts: Path
    start: Callable[[], None]
    """Restart the server after `kill`."""
    kill: Callable[[], None]


@contextmanager
def run_mlflow_server(
    folder: Path,
    *,
    guarded: bool = False,
    environment: Mapping[str, str] | None = None,
    app: str | None = None,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Run a server with one worker.

    `guarded`: with MLflow's basic-auth users and permissions. `app`: the name of a server plug-in.
    """
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts"), *options]
    environment = (
        os.environ | NO_JOBS | {"MLFLOW_DISABLE_TELEMETRY": "true"} | dict(environment or {})
    )
    environment.pop("MLFLOW_TRACKING_URI", None)
    empty_database(folder / "mlflow.db")
    environment["GATE_REGISTRY"] = f"http://127.0.0.1:{port}"
    if app is not None or guarded:
        command += ["--app-name", app or "basic-auth"]
    if guarded:
        environment |= {
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "only for this test",
            "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN[1],
            "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        }
        (folder / "auth.ini").write_text(_AUTH)
    processes: list[subprocess.Popen[bytes]] = []
    uri = f"http://127.0.0.1:{port}"

    def start() -> None:
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        processes.append(process)
        _wait_until_healthy(f"{uri}/health", process, folder / "log")

    def kill() -> None:
        while processes:
            process = processes.pop()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    try:
        start()
        yield Server(uri, folder / "artifacts", start, kill)
    finally:
        kill()


def empty_database(path: Path) -> None:
    """Copy a database that has MLflow's tables and no rows."""
    shutil.copy(_template_database(), path)


def _template_database() -> Path:
    """Create the database once for all workers, because the migrations take seconds."""

    def fill(folder: Path) -> None:
        uri = f"sqlite:///{folder}/mlflow.db"
        quiet_process()
        with using_tracking_uri(uri):
            from mlflow import MlflowClient

            MlflowClient(tracking_uri=uri).search_experiments()

    return once("tables", fill) / "mlflow.db"


def make_run(uri: str, *, artifacts: Path | None = None) -> str:
    """Create a finished run and return its id.

    `artifacts`: the artifact folder, for a database without a server.
    """
    database = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not database.exists():
        empty_database(database)
    quiet_process()
    with using_tracking_uri(uri):
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        result = client.get_experiment_by_name("tests")
        if result is None:
            location = artifacts.as_uri() if artifacts else None
            experiment = client.create_experiment("tests", artifact_location=location)
        else:
            experiment = result.experiment_id
        run_id = str(client.create_run(experiment).info.run_id)
        client.set_terminated(run_id)
    return run_id


def add_user(uri: str, name: str, password: str) -> None:
    """Create a user with read permission only."""
    _post_as_admin(f"{uri}/api/2.0/mlflow/users/create", username=name, password=password)


def grant_edit(uri: str, user: str, *, model: str) -> None:
    """Grant the user EDIT on the registered model: versions, tags and aliases."""
    about = {"resource_type": "registered_model", "resource_id": model}
    path = f"{uri}/api/3.0/mlflow/users/permissions/grant"
    _post_as_admin(path, username=user, permission="EDIT", **about)


def _post_as_admin(url: str, **fields: str) -> None:
    data, kind = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, kind)
    credentials = base64.b64encode(":".join(ADMIN).encode()).decode()
    request.add_header("Authorization", f"Basic {credentials}")
    with urllib.request.urlopen(request, timeout=60):
        pass


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
