"""`make stack`: run MLflow's server and the service with its webhook on this machine.

Persistent files are in `.gate/`: the database of the ledger, deployed files, secrets, the service's
key and its trust file.
"""

from __future__ import annotations

import argparse
import base64
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from gate.commands.result import ExitCode
from gate.errors import RegistryUnavailable
from gate.mlflow_client.connection import quiet_process
from gate.policy.policy import Policy
from gate.storage import files
from pipelines import paths, stage
from pipelines.children import Child, alone, started
from pipelines.params import RegistryParams
from pipelines.run import tracking_uri
from pipelines.service_trust import ServiceTrust
from pipelines.ui import HOST, NO_JOBS, require_free

_TIMEOUT_S = 120.0
_POLL_S = 0.5


def main() -> int:
    """Start both servers, register the webhook, print the addresses, and wait.

    Returns exit code 2 if a server ends.
    """
    parser = argparse.ArgumentParser(prog="python -m pipelines.stack", description=__doc__)
    parser.add_argument("--port", type=int, default=5000, help="of MLflow")
    parser.add_argument("--service-port", type=int, default=8400)
    arguments = parser.parse_args()
    quiet_process()
    # A shell that starts this process in the background makes it ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # except under nohup
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    _end_with_make()
    ports = arguments.port, arguments.service_port
    try:
        with alone() as left:
            if left:
                print(f"Ended processes left by a killed make stack: {', '.join(left)}", flush=True)
            for port in ports:
                require_free(port, remedy="make stack PORT=5001 SERVICE_PORT=8401")
            run(*ports, model=RegistryParams.load().model_name)
    except (KeyboardInterrupt, stage.Stopped):
        print("Stopped. Promoted and deployed models are kept; make stack continues with them.")
    return ExitCode.DONE


def run(port: int, service_port: int, *, model: str) -> None:
    """Run until Ctrl-C or SIGTERM. Raises RegistryUnavailable if a process ends."""
    database = tracking_uri()
    if not database.startswith("sqlite:///"):
        raise RegistryUnavailable(
            f"MLFLOW_TRACKING_URI names a server already ({database}); make stack starts its own "
            "on the database here. Unset it; for a server of yours see docs/production.md."
        )
    registry, service = f"http://{HOST}:{port}", f"http://{HOST}:{service_port}"
    secret_file, trust = paths.state() / "webhook-secrets", ServiceTrust.from_project()
    _print_now(f"Starting MLflow at {registry} …")
    with started("mlflow", mlflow_command(port, database), mlflow_environment()) as mlflow:
        wait_for(f"{registry}/health", mlflow)
        _print_now("Registering the webhook …")
        _gate(["webhooks", "register", "--url", f"{service}/webhooks/mlflow",
               "--secret-file", str(secret_file), "--tracking-uri", registry])  # fmt: skip
        _print_now(f"Starting the service at {service} …")
        command = [
            *serve_command(service_port, (registry, database), model, secret_file),
            "--key", str(trust.key), "--trust", str(trust.trust),
        ]  # fmt: skip
        with started("gate serve", command, dict(os.environ)) as served:
            wait_for(f"{service}/readyz", served)
            print("\n".join(instructions(registry, service, model)), flush=True)
            _check_children([mlflow, served])


def mlflow_command(port: int, database: str) -> list[str]:
    """Return the command of MLflow's server, which uses the database that `make repro` writes."""
    artifacts = (paths.project_root() / "mlartifacts").as_uri()
    return [
        sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port),
        "--backend-store-uri", database, "--default-artifact-root", artifacts, "--workers", "1",
    ]  # fmt: skip


def mlflow_environment() -> dict[str, str]:
    """Return the server's environment: webhooks over plain HTTP, a persistent key for their
    secrets."""
    return os.environ | {
        **NO_JOBS,
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_CACHE_TTL": "2",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": encryption_key(paths.state() / "mlflow-key"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def serve_command(port: int, registry: tuple[str, str], model: str, secret_file: Path) -> list[str]:
    """Return the command of the service. `registry`: the addresses of the server and of its
    database."""
    address, database = registry
    return [
        sys.executable, "-m", "gate", "serve", "--model", model, "--port", str(port),
        "--tracking-uri", address, "--same-registry", database,
        "--secret-file", str(secret_file), "--policy", str(paths.PARAMS),
        "--state", str(paths.database()), "--store", str(paths.state() / "store"),
    ]  # fmt: skip


def encryption_key(path: Path) -> str:
    """Return a Fernet key, created on first use and readable only by this user. Raises
    StorageError."""
    if not path.is_file():
        key = base64.urlsafe_b64encode(secrets.token_bytes(32))
        files.write_bytes(path, key, mode=files.MODE)
    return files.read_private(path, kind="key of MLflow's webhooks", missing="Fix its permissions.")


def instructions(registry: str, service: str, model: str) -> list[str]:
    """Return the printed lines: addresses, and the steps of a promotion."""
    page = f"{registry}/#/models/{model}"
    tag = Policy.from_file(paths.PARAMS).review_tag
    return [
        f"MLflow:   {page}",
        f"service:  {service}/readyz, {service}/metrics",
        f"deployed: {service}/models/{model}/manifest.json",
        "",
        "Submit a model from another terminal:",
        f"  MLFLOW_TRACKING_URI={registry} make repro SET=gate.promotion=by_service",
        "Then, by itself:",
        "  1. make repro measures, decides, signs, creates a version, points 'candidate' at it.",
        "     Evidence and statements are stored with it: see Artifacts on the version's page.",
        "  2. The service verifies signatures and bytes by its trust (.gate/service-trust.yaml),",
        "     and decides by its own policy. The first line of the page shows the result.",
        "  3. With review: required in params.yaml (then restart make stack) it waits for a",
        "     reviewer. On that page, under Tags, add",
        f"     {tag.name}, {tag.approved} or {tag.rejected}; with review: signed, gate approve.",
        "  4. It becomes 'champion', and its file is deployed (see above). gate history lists",
        "     each step, signed by the service.",
        "params.yaml keeps this setting; make repro SET=gate.promotion=direct reverts it.",
        "Ctrl-C stops everything.",
    ]


def wait_for(url: str, child: Child) -> None:
    """Wait until a URL answers 200. Raises RegistryUnavailable if the process ends or is too
    slow."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        child.check()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise RegistryUnavailable(f"{child.name} did not answer at {url} in {_TIMEOUT_S:.0f} s.")


def _print_now(text: str) -> None:
    print(text, flush=True)


def _check_children(children: Sequence[Child]) -> None:
    while True:
        for child in children:
            child.check()
        time.sleep(_POLL_S)


def _gate(arguments: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "gate", *arguments], check=False, capture_output=True, text=True
    )
    if result.returncode:
        raise RegistryUnavailable(f"gate {' '.join(arguments[:2])} failed: {result.stderr.strip()}")


def _end_with_make() -> None:
    """End this process if `make` dies, because a killed `make` sends no signal."""
    parent = psutil.Process().parent()
    if parent is not None and parent.name() in ("make", "gmake"):

        def watch() -> None:
            while os.getppid() == parent.pid:
                time.sleep(_POLL_S)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="gate-make", daemon=True).start()


if __name__ == "__main__":
    stage.run(main)
