"""`make stack`: MLflow's server, the service with its webhook, all on this machine, until Ctrl-C.

What they need to keep lies in `.gate/`: the database of the ledger, deployed files, secrets,
the service's key and whom it trusts.
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

_PATIENCE_S = 120.0
_LOOK_S = 0.5


def main() -> int:
    """Start both, register the webhook, say where to look, wait. Exit code 2 where one ends."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.stack", description=__doc__)
    parser.add_argument("--port", type=int, default=5000, help="of MLflow")
    parser.add_argument("--service-port", type=int, default=8400)
    arguments = parser.parse_args()
    quiet_process()
    # A shell that starts us in the background has us ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup wants it so
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    _end_with_make()
    ports = arguments.port, arguments.service_port
    try:
        with alone() as left:
            if left:
                print(f"Ended what a killed make stack had left: {', '.join(left)}", flush=True)
            for port in ports:
                require_free(port, remedy="make stack PORT=5001 SERVICE_PORT=8401")
            run(*ports, model=RegistryParams.load().model_name)
    except (KeyboardInterrupt, stage.Stopped):
        print("Stopped. What was promoted and deployed is kept; make stack goes on with it.")
    return ExitCode.DONE


def run(port: int, service_port: int, *, model: str) -> None:
    """Until Ctrl-C or SIGTERM; or until one of them ends: RegistryUnavailable."""
    database = tracking_uri()
    if not database.startswith("sqlite:///"):
        raise RegistryUnavailable(
            f"MLFLOW_TRACKING_URI names a server already ({database}); make stack starts its own "
            "on the database here. Unset it; for a server of yours see docs/production.md."
        )
    registry, service = f"http://{HOST}:{port}", f"http://{HOST}:{service_port}"
    secret_file, trust = paths.state() / "webhook-secrets", ServiceTrust.from_project()
    _say(f"Starting MLflow at {registry} …")
    with started("mlflow", mlflow_command(port, database), mlflow_environment()) as mlflow:
        wait_for(f"{registry}/health", mlflow)
        _say("Registering the webhook …")
        _gate(["webhooks", "register", "--url", f"{service}/webhooks/mlflow",
               "--secret-file", str(secret_file), "--tracking-uri", registry])  # fmt: skip
        _say(f"Starting the service at {service} …")
        command = [
            *serve_command(service_port, (registry, database), model, secret_file),
            "--key", str(trust.key), "--trust", str(trust.trust),
        ]  # fmt: skip
        with started("gate serve", command, dict(os.environ)) as served:
            wait_for(f"{service}/readyz", served)
            print("\n".join(told(registry, service, model)), flush=True)
            _watch([mlflow, served])


def mlflow_command(port: int, database: str) -> list[str]:
    """The server on the database that `make repro` writes to."""
    artifacts = (paths.project_root() / "mlartifacts").as_uri()
    return [
        sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port),
        "--backend-store-uri", database, "--default-artifact-root", artifacts, "--workers", "1",
    ]  # fmt: skip


def mlflow_environment() -> dict[str, str]:
    """Webhooks to this machine over plain http; the key that keeps their secrets stays the same."""
    return os.environ | {
        **NO_JOBS,
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_CACHE_TTL": "2",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": encryption_key(paths.state() / "mlflow-key"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def serve_command(port: int, registry: tuple[str, str], model: str, secret_file: Path) -> list[str]:
    """The service; `registry`: the server's address, and that of its database."""
    address, database = registry
    return [
        sys.executable, "-m", "gate", "serve", "--model", model, "--port", str(port),
        "--tracking-uri", address, "--same-registry", database,
        "--secret-file", str(secret_file), "--policy", str(paths.PARAMS),
        "--state", str(paths.database()), "--store", str(paths.state() / "store"),
    ]  # fmt: skip


def encryption_key(path: Path) -> str:
    """A Fernet key, made once, for our eyes only. Raises StorageError."""
    if not path.is_file():
        key = base64.urlsafe_b64encode(secrets.token_bytes(32))
        files.write_bytes(path, key, mode=files.MODE)
    return files.read_private(path, what="key of MLflow's webhooks", missing="Fix its permissions.")


def told(registry: str, service: str, model: str) -> list[str]:
    """Where to look, and the way of a model, step by step."""
    page = f"{registry}/#/models/{model}"
    tag = Policy.from_file(paths.PARAMS).review_tag
    return [
        f"MLflow:   {page}",
        f"service:  {service}/readyz, {service}/metrics",
        f"deployed: {service}/models/{model}/manifest.json",
        "",
        "Hand in, from another terminal:",
        f"  MLFLOW_TRACKING_URI={registry} make repro SET=gate.promotion=by_service",
        "Then, by itself:",
        "  1. make repro measures, decides, signs, makes a version, and points 'candidate' at it.",
        "     All that proves it lies beside the file: on the version's page, under Artifacts.",
        "  2. The service checks signatures and bytes by its own trust (.gate/service-trust.yaml),",
        "     and decides anew by its own policy. The first line of the page says what came of it.",
        "  3. With review: required in params.yaml (then start make stack anew) it waits for a",
        "     reviewer. On that page, under Tags, add",
        f"     {tag.name}, {tag.approved} or {tag.rejected}; with review: signed, gate approve.",
        "  4. It becomes 'champion', and its file is deployed (see above). gate history has a line",
        "     for each step, signed by the service.",
        "params.yaml keeps it so; make repro SET=gate.promotion=direct does without the service.",
        "Ctrl-C stops it all.",
    ]


def wait_for(url: str, child: Child) -> None:
    """Until it answers 200. Raises RegistryUnavailable where the process ends or is too slow."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        child.check()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise RegistryUnavailable(f"{child.name} did not answer at {url} in {_PATIENCE_S:.0f} s.")


def _say(text: str) -> None:
    print(text, flush=True)


def _watch(children: Sequence[Child]) -> None:
    while True:
        for child in children:
            child.check()
        time.sleep(_LOOK_S)


def _gate(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gate", *arguments], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RegistryUnavailable(f"gate {' '.join(arguments[:2])} failed: {done.stderr.strip()}")


def _end_with_make() -> None:
    """Where `make` is killed, we would not notice: it can't pass that on."""
    parent = psutil.Process().parent()
    if parent is not None and parent.name() in ("make", "gmake"):

        def watch() -> None:
            while os.getppid() == parent.pid:
                time.sleep(_LOOK_S)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="gate-make", daemon=True).start()


if __name__ == "__main__":
    stage.run(main)
