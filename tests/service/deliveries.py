"""Webhook deliveries as MLflow sends them, and services that receive them."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from gate.service.app import (
    DELIVERY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    WEBHOOK_PATH,
    create_app,
    listening,
    server,
    sign_delivery,
)
from gate.service.monitoring import StepResult
from gate.service.reconcile_loop import ReconcileLoop
from gate.service.settings import ServiceSettings, write_secrets
from tests import plain_http

SECRET = "the-first-secret-of-the-tests"
OLD_SECRET = "an-older-secret-of-the-tests"
MODEL = "digits"


def event_body(
    kind: str = "model_version_alias.created", *, model: str = MODEL, **data: Any
) -> dict[str, Any]:
    """Return the body of an event as MLflow sends it."""
    entity, action = kind.split(".")
    detail: dict[str, Any] = {"name": model, "version": "3"}
    if entity == "model_version_alias":
        detail["alias"] = "champion"
    if entity == "model_version_tag":
        detail |= {"key": "gate.review", "value": "approved"}
    return {
        "entity": entity,
        "action": action,
        "timestamp": "2026-01-02T03:04:05+00:00",
        "data": detail | data,
    }


def signed_headers(
    raw: bytes, *, secret: str = SECRET, delivery: str | None = None, age_s: float = 0
) -> dict[str, str]:
    delivery = delivery or str(uuid.uuid4())
    timestamp = str(int(time.time() - age_s))
    return {
        "Content-Type": "application/json",
        DELIVERY_HEADER: delivery,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: sign_delivery(
            secret, delivery_id=delivery, timestamp=timestamp, body=raw
        ),
    }


@dataclass
class Recorder:
    """A `Reconcile` that records its calls."""

    effect: Callable[[str, str], None] = lambda _model, _cause: None
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, model: str, *, cause: str) -> list[StepResult]:
        self.calls.append((model, cause))
        self.effect(model, cause)
        self.ended.append((model, cause))
        return [StepResult("review", "promoted", "3", "approved by a test")]

    @property
    def causes(self) -> list[str]:
        """Return the causes of the calls that the timer did not make."""
        return [cause for _model, cause in self.calls if cause != "timer"]


@dataclass(frozen=True)
class Service:
    address: str
    worker: ReconcileLoop
    recorder: Recorder

    def send(self, event: Mapping[str, Any] | bytes, **options: Any) -> httpx.Response:
        raw = event if isinstance(event, bytes) else json.dumps(event).encode()
        return self.post(raw, signed_headers(raw, **options))

    def post(self, raw: bytes, request_headers: Any) -> httpx.Response:
        return plain_http.post(
            self.address + WEBHOOK_PATH, content=raw, headers=request_headers, timeout=30
        )

    def get(self, path: str) -> httpx.Response:
        return plain_http.get(self.address + path, timeout=30)


def settings(folder: Path, **options: Any) -> ServiceSettings:
    secrets = folder / "secrets"
    if not secrets.exists():
        write_secrets(secrets, [SECRET, OLD_SECRET])
    defaults = {
        "models": (MODEL, "letters"),
        "port": 0,
        "tracking_uri": "http://127.0.0.1:1",
        "secret_file": secrets,
        "state": f"sqlite:///{folder}/state.db",
        "store": folder / "store",
        "interval_s": 3600.0,
    }
    return ServiceSettings.from_options(**(defaults | options))


@contextmanager
def run_service(
    service_settings: ServiceSettings,
    recorder: Recorder | None = None,
    *,
    reach: Callable[[], None] = lambda: None,
) -> Iterator[Service]:
    """Run the complete service in this process, with a real socket."""
    recorder = recorder or Recorder()
    worker = ReconcileLoop(
        recorder, models=service_settings.models, interval_s=service_settings.interval_s
    )
    listener = listening(service_settings.host, service_settings.port)
    app = create_app(service_settings, worker, service_settings.keyring(), reach=reach)
    runner = server(app)
    thread = threading.Thread(target=lambda: runner.run(sockets=[listener]))
    thread.start()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        wait_until(lambda: runner.started)
        yield Service(address, worker, recorder)
    finally:
        runner.should_exit = True
        thread.join(60)


def wait_until(condition: Callable[[], Any], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)
