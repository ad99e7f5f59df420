"""`make ui`: MLflow's user interface on this machine, with links to the last run and version."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
from typing import NoReturn

import psutil

from gate.commands.status import Status
from gate.errors import RegistryUnavailable
from gate.registry.mlflow.process import quiet_process
from gate.storage.redaction import redacted
from gate.tracking.views import ALL, REJECTED, view_address
from pipelines import paths, stage
from pipelines.repro import last_promotion, promotion_is_due
from pipelines.run import known_run, tracking_uri

HOST = "127.0.0.1"
NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Jobs run judges of language models: eight more processes, ready after the pages are."""


def main() -> int:
    """Print the links, then become `mlflow ui` (Ctrl-C ends it); with a server, only print."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000)
    port = parser.parse_args().port
    quiet_process()
    uri = tracking_uri()
    if not uri.startswith(("http://", "https://")):
        require_free(port, remedy="make ui PORT=5001")
        print("\n".join(links(f"http://{HOST}:{port}")), flush=True)
        _become_server(uri, port)
    print("\n".join(links(redacted(uri).rstrip("/"))))
    return Status.DONE


def _become_server(uri: str, port: int) -> NoReturn:
    artifacts = (paths.project_root() / "mlartifacts").as_uri()
    command = [
        sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port),
        "--default-artifact-root", artifacts, "--workers", "1",
    ]  # fmt: skip
    # Not in the command line, which everybody can read: it may hold a password.
    database = {"MLFLOW_BACKEND_STORE_URI": uri}
    os.execve(sys.executable, command, os.environ | NO_JOBS | database)


def links(base: str) -> list[str]:
    """Where to look, as whole addresses below `base`."""
    report = last_promotion()
    if report is None:
        run = known_run("parity") or known_run("export")
        page = f"{base}/#/experiments/{run.experiment_id}/runs/{run.run_id}" if run else base
        return [
            f"run:     {page}",
            *(_lists(base, run.experiment_id) if run else []),
            "version: nothing was promoted yet; make repro",
        ]
    due = promotion_is_due()
    return [
        report.sentence(),
        f"run:     {base}/{report.run_address}",
        *_lists(base, report.experiment_id),
        f"version: {base}/{report.version_address or f'#/models/{report.model_name}'}",
        *([f"But {due}: make repro"] if due else []),
    ]


def _lists(base: str, experiment_id: str) -> list[str]:
    """All runs with their headlines, and the rejected ones."""
    return [
        f"runs:    {base}/{view_address(experiment_id, ALL)}",
        f"refused: {base}/{view_address(experiment_id, REJECTED)}",
    ]


def require_free(port: int, *, remedy: str) -> None:
    """Raise RegistryUnavailable if something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RegistryUnavailable(
                f"port {port} of {HOST} is taken{_holder(port)} ({error.strerror}). "
                f"Choose another: {remedy}"
            ) from error


def _holder(port: int) -> str:
    """Who listens there, where this user may know it."""
    with contextlib.suppress(psutil.Error):
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return f" by process {found.pid}, {psutil.Process(found.pid).name()}"
    return ""


if __name__ == "__main__":
    stage.run(main)
