"""`make ui`: MLflow's user interface on this machine, with links to the last run and version."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from typing import NoReturn

import psutil

from gate.commands.result import ExitCode
from gate.errors import RegistryUnavailable
from gate.mlflow_client.connection import quiet_process
from gate.storage.safe_text import redacted
from pipelines import paths, stage
from pipelines.repro import last_promotion, promotion_is_due
from pipelines.run import recorded_run, tracking_uri

HOST = "127.0.0.1"
NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
"""Jobs evaluate language models: eight more processes that start after the pages."""

_POLL_S = 0.2


def main() -> int:
    """Start `mlflow ui` in place of this process, and print the links when it answers.

    If MLFLOW_TRACKING_URI names a server, only print the links. Ctrl-C ends it.
    """
    parser = argparse.ArgumentParser(prog="python -m pipelines.ui", description=__doc__)
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--links-when-ready", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    port = arguments.port
    quiet_process()
    if arguments.links_when_ready:
        return _print_when_ready(port)
    uri = tracking_uri()
    if not uri.startswith(("http://", "https://")):
        require_free(port, remedy="make ui PORT=5001")
        _start_link_printer(port)
        _become_server(uri, port)
    print("\n".join(links(redacted(uri).rstrip("/"))))
    return ExitCode.DONE


def _start_link_printer(port: int) -> None:
    """Start a process that prints the links when the server answers; this process becomes the
    server."""
    print(f"Starting MLflow on port {port} …", flush=True)
    command = [sys.executable, "-m", "pipelines.ui", "--port", str(port), "--links-when-ready"]
    subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _print_when_ready(port: int) -> int:
    """Print the links when the server answers; give up if the server, the parent process, ends."""
    base, server = f"http://{HOST}:{port}", os.getppid()
    shown = links(base)
    while os.getppid() == server:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=2):
            print("\n".join(["", *shown, "Ctrl-C stops it."]), flush=True)
            return ExitCode.DONE
        time.sleep(_POLL_S)
    return ExitCode.NOT_JUDGED


def _become_server(uri: str, port: int) -> NoReturn:
    artifacts = (paths.project_root() / "mlartifacts").as_uri()
    command = [
        sys.executable, "-m", "mlflow", "ui", "--host", HOST, "--port", str(port),
        "--default-artifact-root", artifacts, "--workers", "1",
    ]  # fmt: skip
    # Pass the address in the environment: other users can read command lines, and it may contain a
    # password.
    database = {"MLFLOW_BACKEND_STORE_URI": uri}
    os.execve(sys.executable, command, os.environ | NO_JOBS | database)


def links(base: str) -> list[str]:
    """Return lines with links below `base`."""
    report = last_promotion()
    if report is None:
        run = recorded_run("parity") or recorded_run("export")
        page = f"{base}/#/experiments/{run.experiment_id}/runs/{run.run_id}" if run else base
        return [
            f"run:     {page}",
            *([_address_of_runs(base, run.experiment_id)] if run else []),
            "version: nothing was promoted yet; make repro",
        ]
    due = promotion_is_due()
    return [
        report.sentence(),
        f"run:     {base}/{report.run_address}",
        _address_of_runs(base, report.experiment_id),
        f"version: {base}/{report.version_address or f'#/models/{report.model_name}'}",
        *([f"But {due}: make repro"] if due else []),
    ]


def _address_of_runs(base: str, experiment_id: str) -> str:
    """Return the line with the address of the list of runs."""
    return f"runs:    {base}/#/experiments/{experiment_id}/runs"


def require_free(port: int, *, remedy: str) -> None:
    """Raise RegistryUnavailable if a process already listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise RegistryUnavailable(
                f"port {port} of {HOST} is taken{_describe_listener(port)} ({error.strerror}). "
                f"Choose another: {remedy}"
            ) from error


def _describe_listener(port: int) -> str:
    """Describe the process that listens on the port, if this user may read it."""
    with contextlib.suppress(psutil.Error):
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid:
                return f" by process {each.pid}, {psutil.Process(each.pid).name()}"
    return ""


if __name__ == "__main__":
    stage.run(main)
