"""A complete installation on this machine: MLflow server, webhook, `gate serve`, releases."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from gate import Policy, cli
from gate.deploy.store import EXACT, ModelStore
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.mlflow_client.connection import using_tracking_uri
from gate.mlflow_client.registry import MlflowRegistry
from gate.registry.interface import CANDIDATE, CHAMPION, Tag
from gate.registry.release import GoldenFolder, PromotionResult
from gate.service import settings
from pipelines.stack import encryption_key
from tests import builders, plain_http
from tests.golden_vectors import vectors
from tests.registry.promoting import promote
from tests.registry.releases import NAME, evidence, onnx_file, release
from tests.registry.servers import Server, make_run, run_mlflow_server

ROOT = Path(__file__).parents[2]
THIS_INSTALLATION = (sys.executable, "-m", "gate")
POLICY = builders.policy(review="required")
TIMEOUT_S = 120.0
"""Timeout for the effect of an event on a busy machine; the periodic pass comes after 300 s only.
"""
START_S = 300.0
"""Timeout for the imports of a process on a busy machine."""


def webhook_environment(folder: Path) -> dict[str, str]:
    """Return the environment that an MLflow server needs to send webhooks to this machine."""
    return {
        "MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http,https",
        "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true",
        "MLFLOW_WEBHOOK_CACHE_TTL": "0",
        "MLFLOW_WEBHOOK_SECRET_ENCRYPTION_KEY": encryption_key(folder / "key"),
    }


@dataclass
class Stack:
    """Paths and addresses of an installation, and the process of its service."""

    folder: Path
    server: Server
    model: str = NAME
    address: str = ""
    service: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    gate: tuple[str, ...] = THIS_INSTALLATION
    """The command that starts gate; another installation may replace it."""

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.folder / "state.db")

    @property
    def registry(self) -> MlflowRegistry:
        return MlflowRegistry(self.server.uri)

    @property
    def store(self) -> ModelStore:
        return ModelStore(self.folder / "store")

    def lines(self) -> list[tuple[str, str | None]]:
        return [(e.action, e.version) for e in self.entries()]

    def entries(self) -> list[LedgerEntry]:
        return [entry for entry in self.ledger.entries() if entry.model == self.model]

    def promote_release(self, seed: int) -> PromotionResult:
        """Measure, decide and promote with golden vectors, as a pipeline does."""
        folder = self.folder / f"release-{self.model}-{seed}"
        path = onnx_file(folder / "model.onnx", seed=seed)
        origin = vectors.origin().model_copy(update={"policy_sha256": POLICY.digest()})
        vectors.write_model_vectors(folder / "golden", path, origin=origin)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        new_release = release(
            path,
            evidence=evidence(path, measured_at=at),
            policy=POLICY,
            golden=GoldenFolder.open(folder / "golden"),
        )
        new_release = dataclasses.replace(
            new_release, model_name=self.model, run_id=make_run(self.server.uri)
        )
        return promote(self.registry, new_release, policy=POLICY, ledger=self.ledger)

    def approve(self, number: str) -> None:
        self.registry.set_tag(self.model, number, key=Tag.REVIEW, value="approved")

    def move_champion(self, number: str) -> None:
        self.registry.set_alias(self.model, CHAMPION, number)

    def champion(self) -> str | None:
        return self.registry.alias(self.model, CHAMPION)

    def candidate(self) -> str | None:
        return self.registry.alias(self.model, CANDIDATE)

    def deployed(self) -> str | None:
        """Return the deployed digest from the service's HTTP API."""
        response = plain_http.get(f"{self.address}/models/{self.model}/manifest.json", timeout=10)
        if response.status_code == 404:
            return None
        slots = response.raise_for_status().json()["slots"]
        return str(slots[EXACT]["sha256"]).removeprefix("sha256:")

    def digest(self, number: str) -> str:
        """Return the measured digest of a version."""
        lines = [e for e in self.entries() if e.version == number and e.sha256 is not None]
        assert lines[0].sha256 is not None
        return lines[0].sha256.hex

    def launch(self, *options: str, wrapper: Path | None = None, interval: float = 300) -> None:
        """Start the service; `wrapper`: a Python program that starts it."""
        program = (sys.executable, str(wrapper)) if wrapper else self.gate
        command = [
            *program, "serve", "--model", self.model, "--port", "0",
            "--tracking-uri", self.server.uri, "--secret-file", str(self.folder / "secrets"),
            "--policy", str(self.folder / "policy.yaml"), "--interval", str(interval),
            "--state", str(self.folder / "state.db"), "--store", str(self.folder / "store"),
            "--log-format", "json", "--confirm-after", "0.5", *options,
        ]  # fmt: skip
        log = self.folder / "service.log"
        # In a separate folder, because the policy of `make repro` in the repository trusts one key
        # only.
        environment = dict(os.environ)
        if self.gate == THIS_INSTALLATION:
            environment["PYTHONPATH"] = str(ROOT)
        with log.open("ab") as stream:
            start = stream.tell()
            self.service = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=stream, stderr=stream
            )
        self.address = self._read_address(log, start)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.service is not None
        self.service.send_signal(number)
        return self.service.wait(60)

    def register(self) -> None:
        """Register the current address of the service as a webhook of the server."""
        code = cli.main(
            ["webhooks", "register", "--tracking-uri", self.server.uri, "--url",
             f"{self.address}/webhooks/mlflow", "--name", self.model, "--secret-file",
             str(self.folder / "secrets")],
        )  # fmt: skip
        assert code == 0

    def unregister(self) -> None:
        """Delete the webhook, so that the server does not retry deliveries to an ended service."""
        with using_tracking_uri(self.server.uri):
            from mlflow import MlflowClient

            client = MlflowClient(tracking_uri=self.server.uri, registry_uri=self.server.uri)
            for webhook in client.list_webhooks():
                if webhook.name == self.model:
                    client.delete_webhook(webhook.webhook_id)

    def _read_address(self, log: Path, start: int) -> str:
        def read_address() -> str | None:
            assert self.service is not None
            assert self.service.poll() is None, log.read_text()[-3000:]
            for line in log.read_bytes()[start:].decode().splitlines():
                if '"listening"' in line:
                    return str(json.loads(line)["address"])
            return None

        address = wait_for(read_address, START_S)
        assert address is not None
        return address


def wait_for(condition: Callable[[], object], seconds: float = TIMEOUT_S) -> object:
    """Return the result of `condition` once it is true, or the last result after the timeout."""
    deadline = time.monotonic() + seconds
    while True:
        observed = condition()
        if observed or time.monotonic() > deadline:
            return observed
        time.sleep(0.2)  # each call sends several requests to the server


def deploy_approved_version(system: Stack, seed: int = 1) -> str:
    """Approve a version, wait until it is deployed, and return its number."""
    number = system.promote_release(seed).version
    assert number is not None
    system.approve(number)
    assert wait_for(lambda: system.deployed() == system.digest(number))
    return number


@contextmanager
def run_stack(
    folder: Path, server: Server, model: str = NAME, *, policy: Policy = POLICY, **given: Any
) -> Iterator[Stack]:
    """Run a service for one model with a registered webhook and no version.

    `given`: fields of Stack.
    """
    created = Stack(folder, server, model, **given)
    YAML(typ="safe").dump({"gate": policy.to_plain()}, folder / "policy.yaml")
    settings.write_secrets(folder / "secrets", ["s" * 40])
    created.registry.ensure_model(model)
    created.launch()
    try:
        created.register()
        yield created
    finally:
        created.unregister()
        if created.service is not None and created.service.poll() is None:
            created.stop(signal.SIGKILL)


@contextmanager
def run_mlflow_server_with_webhooks(folder: Path) -> Iterator[Server]:
    """Run a server that may send webhooks to this machine."""
    with run_mlflow_server(folder, environment=webhook_environment(folder)) as server:
        yield server
