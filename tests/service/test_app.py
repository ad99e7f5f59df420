"""The webhook endpoint over real HTTP: the answer and the effect of each kind of request."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gate.mlflow_client.webhooks import EVENTS
from gate.service import app
from gate.service.app import DELIVERY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, WEBHOOK_PATH
from gate.storage.safe_text import EXAMPLE_MODEL
from tests import plain_http
from tests.service.deliveries import (
    MODEL,
    OLD_SECRET,
    SECRET,
    Service,
    event_body,
    run_service,
    settings,
    signed_headers,
    wait_until,
)
from tests.service.registry_setup import failing

EVENT = json.dumps(event_body()).encode()


def headers_without(name: str) -> Callable[[bytes], dict[str, str]]:
    return lambda raw: {key: value for key, value in signed_headers(raw).items() if key != name}


def headers_with(**changes: str) -> Callable[[bytes], dict[str, str]]:
    return lambda raw: signed_headers(raw) | {key.replace("_", "-"): value for key, value in changes.items()}  # fmt: skip


def old_headers(age_s: float) -> Callable[[bytes], dict[str, str]]:
    return lambda raw: signed_headers(raw, age_s=age_s)


def make_event(**event: Any) -> bytes:
    return json.dumps(event_body() | event).encode()


REQUESTS: list[tuple[str, bytes, Callable[[bytes], dict[str, str]], int, str]] = [
    ("unsigned", EVENT, headers_without(SIGNATURE_HEADER), 401, "unsigned"),
    ("without a type", EVENT, headers_without("Content-Type"), 415, "wrong_type"),
    ("a form", EVENT, headers_with(Content_Type="application/x-www-form-urlencoded"), 415, "wrong_type"),
    ("unknown secret", EVENT, lambda raw: signed_headers(raw, secret="a secret of another sender"), 401, "forged"),
    ("old", EVENT, old_headers(302), 401, "stale"),
    ("no JSON", b"{", signed_headers, 400, "malformed"),
    ("too large", b" " * (1 << 20) + EVENT, signed_headers, 413, "too_large"),
    ("of another model", json.dumps(event_body(model="another")).encode(), signed_headers, 403, "foreign"),
    ("of the workspace default", json.dumps(event_body(model="another") | {"workspace": "default"}).encode(), signed_headers, 403, "foreign"),
    ("of another workspace", make_event(workspace="team-a"), signed_headers, 403, "foreign"),
    ("of a workspace that is no text", make_event(workspace=1), signed_headers, 400, "malformed"),
    ("MLflow's test in a workspace", json.dumps(event_body(model=EXAMPLE_MODEL) | {"workspace": "team-a"}).encode(), signed_headers, 200, "test"),
    ("an unknown entity", make_event(entity="prompt"), signed_headers, 200, "ignored"),
    ("MLflow's test", json.dumps(event_body(model=EXAMPLE_MODEL)).encode(), signed_headers, 200, "test"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with run_service(settings(tmp_path_factory.mktemp("shared"))) as started:
        yield started


def count_deliveries(service: Service, outcome: str) -> float:
    lines = service.get("/metrics").text.splitlines()
    start = f'parity_gate_deliveries_total{{outcome="{outcome}"}} '
    return next((float(line.split()[-1]) for line in lines if line.startswith(start)), 0.0)


@pytest.mark.parametrize(
    ("raw", "sent", "status", "outcome"),
    [row[1:] for row in REQUESTS],
    ids=[row[0] for row in REQUESTS],
)
def test_request_without_effect_is_answered_and_counted(
    shared_service: Service,
    raw: bytes,
    sent: Callable[[bytes], dict[str, str]],
    status: int,
    outcome: str,
) -> None:
    service, before = shared_service, count_deliveries(shared_service, outcome)
    observed = len(service.recorder.causes)
    response = service.post(raw, sent(raw))
    assert (response.status_code, response.json()) == (status, {"outcome": outcome})
    assert "server" not in response.headers
    assert count_deliveries(service, outcome) == before + 1
    service.send(event_body(model="letters") | {"workspace": "default"})
    wait_until(lambda: len(service.recorder.causes) > observed)
    assert service.recorder.calls[-1] == ("letters", "webhook")
    assert len(service.recorder.causes) == observed + 1


MALFORMED = [
    b"", b"\xff\xfe{}", '{"entity": "model_version"}'.encode("utf-16"), b"\xef\xbb\xbf{}", b"null",
    b"[" * 60_000, b'{"a":' * 12_000, b'{"entity": NaN}', b"9" * 10_000, make_event(entity=1),
    make_event(action=None), make_event(data=None), make_event(data={}),
    make_event(data={"name": ""}), make_event(data={"name": 3}), make_event(data={"name": "\ud800"}),
]  # fmt: skip


def test_malformed_events_are_refused(shared_service: Service) -> None:
    for raw in MALFORMED:
        response = shared_service.send(raw)
        assert (response.status_code, response.json()["outcome"]) == (400, "malformed"), raw[:40]


def test_example_payloads_of_mlflow_are_read(shared_service: Service) -> None:
    from mlflow.entities.webhook import WebhookEvent
    from mlflow.webhooks.types import get_example_payload_for_event

    for kind in EVENTS:
        data = get_example_payload_for_event(WebhookEvent.from_str(kind))
        entity, action = kind.split(".")
        response = shared_service.send({"entity": entity, "action": action, "data": data})
        assert response.json() == {"outcome": "test"}


def test_each_subscribed_event_triggers_a_reconcile(shared_service: Service) -> None:
    wait_until(lambda: ("letters", "timer") in shared_service.recorder.ended)
    for number, kind in enumerate(EVENTS):
        count = shared_service.recorder.ended.count((MODEL, "webhook"))
        response = shared_service.send(event_body(kind), secret=(SECRET, OLD_SECRET)[number % 2])
        assert (response.status_code, response.json()) == (202, {"outcome": "accepted"})
        wait_until(
            lambda count=count: shared_service.recorder.ended.count((MODEL, "webhook")) > count
        )


def test_repeated_delivery_triggers_another_reconcile(service: Service) -> None:
    sent = signed_headers(EVENT, delivery="d-1")
    for number in (1, 2):
        assert service.post(EVENT, sent).status_code == 202
        wait_until(lambda number=number: len(service.recorder.causes) == number)


def test_events_are_accepted_while_the_database_is_unavailable(tmp_path: Path) -> None:
    service_settings = settings(tmp_path, state="postgresql://nobody@127.0.0.1:1/none")
    with run_service(service_settings) as service:
        assert service.send(event_body()).status_code == 202
        wait_until(lambda: service.recorder.causes)


def test_other_methods_and_paths_are_refused(shared_service: Service) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        response = plain_http.request(method, shared_service.address + WEBHOOK_PATH)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
    for path in ("/", "/webhooks/mlflow/", "/webhooks", "/docs", "/openapi.json"):
        response = plain_http.post(
            shared_service.address + path, content=EVENT, headers=signed_headers(EVENT)
        )
        assert response.status_code == 404


def test_duplicate_headers_are_refused(service: Service) -> None:
    sent = signed_headers(EVENT)
    for name in (SIGNATURE_HEADER, TIMESTAMP_HEADER, DELIVERY_HEADER):
        duplicate_headers = [*sent.items(), (name, sent[name])]
        assert service.post(EVENT, duplicate_headers).status_code == 401
    charset = sent | {"Content-Type": "Application/JSON; charset=utf-8"}
    assert service.post(EVENT, charset).status_code == 202


def test_streamed_body_is_cut_off_at_the_size_limit(service: Service) -> None:
    sent = signed_headers(b"whatever")
    pieces = 0

    def stream() -> Any:
        nonlocal pieces
        for _ in range(4096):
            pieces += 1
            yield b" " * 65_536

    try:
        response = plain_http.post(
            service.address + WEBHOOK_PATH, content=stream(), headers=sent, timeout=30
        )
        assert response.status_code == 413
    except httpx.WriteError:  # the connection was closed during the upload
        pass
    assert pieces < 1000
    assert 'outcome="too_large"} 1.0' in service.get("/metrics").text


def test_incomplete_body_times_out(tmp_path: Path) -> None:
    with run_service(settings(tmp_path, body_timeout_s=0.3)) as service:
        url = httpx.URL(service.address)
        connection = http.client.HTTPConnection(url.host, url.port, timeout=10)
        connection.putrequest("POST", WEBHOOK_PATH)
        for name, value in (signed_headers(EVENT) | {"Content-Length": str(len(EVENT))}).items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(EVENT[:5])
        assert connection.getresponse().status == 408
        connection.close()


def test_disconnect_during_upload_is_counted(service: Service) -> None:
    url = httpx.URL(service.address)
    with socket.create_connection((url.host, url.port)) as sender:
        head = "".join(f"{name}: {value}\r\n" for name, value in signed_headers(EVENT).items())
        sender.sendall(
            f"POST {WEBHOOK_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n{head}\r\nabc".encode()
        )
    wait_until(lambda: 'outcome="gone"} 1.0' in service.get("/metrics").text)


def test_internal_error_does_not_leak_to_the_sender(service: Service, monkeypatch, caplog) -> None:
    error = RuntimeError("a fault with internals in /srv/gate")
    monkeypatch.setattr("gate.service.app.read_event", failing(error))
    response = service.send(event_body())
    assert (response.status_code, response.json()) == (500, {"outcome": "fault"})
    wait_until(lambda: "internals" in caplog.text)  # it is logged after the response


class TestReadiness:
    def test_ready_when_all_checks_pass(self, service: Service) -> None:
        wait_until(lambda: service.get("/readyz").status_code == 200)
        assert service.get("/readyz").json() == {
            "ready": True, "ledger": "ok", "worker": "ok", "registry": "ok",
            "trust": "ok", "store": "ok",
        }  # fmt: skip

    def test_not_ready_when_the_worker_stopped(self, service: Service) -> None:
        service.worker.stop(timeout_s=10)
        assert service.get("/readyz").json()["worker"] == "is not running"
        assert service.get("/healthz").json() == {"status": "alive"}


def test_metrics_count_deliveries_and_reconciles(service: Service) -> None:
    service.send(event_body(), delivery="d-1")
    wait_until(lambda: service.recorder.causes)
    wait_until(lambda: (MODEL, "webhook") in service.recorder.ended)
    wait_until(
        lambda: 'reconcile_seconds_count{cause="webhook"} 1.0' in service.get("/metrics").text
    )
    text = service.get("/metrics").text
    for line in (
        'parity_gate_deliveries_total{outcome="accepted"} 1.0',
        'parity_gate_actions_total{kind="review",outcome="promoted"}',
        'parity_gate_reconcile_seconds_count{cause="webhook"} 1.0',
        'parity_gate_reconcile_seconds_count{cause="timer"}',
    ):
        assert line in text


def test_idle_connections_are_closed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_IDLE_S", 0.3)
    monkeypatch.setattr(app, "_CONNECTIONS", 2)
    with run_service(settings(tmp_path)) as service:
        port = httpx.URL(service.address).port
        with contextlib.ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                for _ in range(3)
            ]
            connections[0].sendall(b"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\n")
            assert [receive(item) for item in connections] == [b"", b"", b""]
        assert service.get("/healthz").status_code == 200


def receive(connection: socket.socket) -> bytes:
    """Return what the service sends before it closes the connection."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1)
    return b""
