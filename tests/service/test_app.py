"""The webhook endpoint over real HTTP: the answer and the effect of each kind of request."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from gate.errors import RegistryUnavailable
from gate.mlflow_client.webhooks import EVENTS
from gate.service import app
from gate.service.app import DELIVERY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, WEBHOOK_PATH
from gate.storage.safe_text import EXAMPLE_MODEL
from tests import plain_http
from tests.service.deliveries import (
    MODEL,
    OLD_SECRET,
    SECRET,
    Recorder,
    Service,
    body,
    headers,
    running,
    settings,
    until,
)

GOOD = json.dumps(body()).encode()


def without(name: str) -> Callable[[bytes], dict[str, str]]:
    return lambda raw: {key: value for key, value in headers(raw).items() if key != name}


def changed(**changes: str) -> Callable[[bytes], dict[str, str]]:
    return lambda raw: headers(raw) | {key.replace("_", "-"): value for key, value in changes.items()}  # fmt: skip


def old(age_s: float) -> Callable[[bytes], dict[str, str]]:
    return lambda raw: headers(raw, age_s=age_s)


def plain(**event: Any) -> bytes:
    return json.dumps(body() | event).encode()


REQUESTS: list[tuple[str, bytes, Callable[[bytes], dict[str, str]], int, str]] = [
    ("unsigned", GOOD, without(SIGNATURE_HEADER), 401, "unsigned"),
    ("without a type", GOOD, without("Content-Type"), 415, "wrong_type"),
    ("a form", GOOD, changed(Content_Type="application/x-www-form-urlencoded"), 415, "wrong_type"),
    ("unknown secret", GOOD, lambda raw: headers(raw, secret="a secret of another sender"), 401, "forged"),
    ("old", GOOD, old(302), 401, "stale"),
    ("no JSON", b"{", headers, 400, "malformed"),
    ("too large", b" " * (1 << 20) + GOOD, headers, 413, "too_large"),
    ("of another model", json.dumps(body(model="another")).encode(), headers, 403, "foreign"),
    ("of a model with a lone surrogate", plain(data={"name": "\ud800", "alias": "champion"}), headers, 403, "foreign"),
    ("of another workspace", plain(workspace="team-a"), headers, 403, "foreign"),
    ("of a workspace that is no text", plain(workspace=1), headers, 400, "malformed"),
    ("MLflow's test in a workspace", json.dumps(body(model=EXAMPLE_MODEL) | {"workspace": "team-a"}).encode(), headers, 200, "test"),
    ("an unknown entity", plain(entity="prompt"), headers, 200, "ignored"),
    ("another alias", json.dumps(body(alias="shadow")).encode(), headers, 200, "ignored"),
    ("MLflow's test", json.dumps(body(model=EXAMPLE_MODEL)).encode(), headers, 200, "test"),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(settings(tmp_path_factory.mktemp("shared"))) as started:
        yield started


def counted(service: Service, outcome: str) -> float:
    lines = service.get("/metrics").text.splitlines()
    start = f'parity_gate_deliveries_total{{outcome="{outcome}"}} '
    return next((float(line.split()[-1]) for line in lines if line.startswith(start)), 0.0)


@pytest.mark.rows(5)
@pytest.mark.parametrize(
    ("raw", "sent", "status", "outcome"),
    [row[1:] for row in REQUESTS],
    ids=[row[0] for row in REQUESTS],
)
def test_request_without_effect_is_answered_and_counted(
    shared: Service, raw: bytes, sent: Callable[[bytes], dict[str, str]], status: int, outcome: str
) -> None:
    service, before = shared, counted(shared, outcome)
    observed = len(service.recorder.causes)
    answer = service.post(raw, sent(raw))
    assert (answer.status_code, answer.json()) == (status, {"outcome": outcome})
    assert "server" not in answer.headers
    assert counted(service, outcome) == before + 1
    service.send(body(model="letters"))
    until(lambda: len(service.recorder.causes) > observed)
    assert service.recorder.calls[-1] == ("letters", "webhook")
    assert len(service.recorder.causes) == observed + 1


def test_each_subscribed_event_triggers_a_reconcile(shared: Service) -> None:
    until(lambda: ("letters", "timer") in shared.recorder.ended)
    for number, kind in enumerate(EVENTS):
        seen = shared.recorder.ended.count((MODEL, "webhook"))
        answer = shared.send(body(kind), secret=(SECRET, OLD_SECRET)[number % 2])
        assert (answer.status_code, answer.json()) == (202, {"outcome": "accepted"})
        until(lambda seen=seen: shared.recorder.ended.count((MODEL, "webhook")) > seen)


def test_repeated_delivery_triggers_another_reconcile(service: Service) -> None:
    sent = headers(GOOD, delivery="d-1")
    for number in (1, 2):
        assert service.post(GOOD, sent).status_code == 202
        until(lambda number=number: len(service.recorder.causes) == number)


def test_events_are_accepted_while_the_database_is_unavailable(tmp_path: Path) -> None:
    chosen = settings(tmp_path, state="postgresql://nobody@127.0.0.1:1/none")
    with running(chosen) as service:
        assert service.send(body()).status_code == 202
        until(lambda: service.recorder.causes)


def test_other_methods_and_paths_are_refused(shared: Service) -> None:
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        answer = plain_http.request(method, shared.address + WEBHOOK_PATH)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    for path in ("/", "/webhooks/mlflow/", "/webhooks", "/docs", "/openapi.json"):
        answer = plain_http.post(shared.address + path, content=GOOD, headers=headers(GOOD))
        assert answer.status_code == 404


def test_duplicate_headers_are_refused(service: Service) -> None:
    sent = headers(GOOD)
    for name in (SIGNATURE_HEADER, TIMESTAMP_HEADER, DELIVERY_HEADER):
        doubled = [*sent.items(), (name, sent[name])]
        assert service.post(GOOD, doubled).status_code == 401
    charset = sent | {"Content-Type": "Application/JSON; charset=utf-8"}
    assert service.post(GOOD, charset).status_code == 202


def test_streamed_body_is_cut_off_at_the_size_limit(service: Service) -> None:
    sent = headers(b"whatever")
    pieces = 0

    def stream() -> Any:
        nonlocal pieces
        for _ in range(4096):
            pieces += 1
            yield b" " * 65_536

    try:
        answer = plain_http.post(
            service.address + WEBHOOK_PATH, content=stream(), headers=sent, timeout=30
        )
        assert answer.status_code == 413
    except httpx.WriteError:  # the connection was closed while we were writing
        pass
    assert pieces < 1000
    assert 'outcome="too_large"} 1.0' in service.get("/metrics").text


def test_incomplete_body_times_out(tmp_path: Path) -> None:
    with running(settings(tmp_path, body_timeout_s=0.3)) as service:
        url = httpx.URL(service.address)
        connection = http.client.HTTPConnection(url.host, url.port, timeout=10)
        connection.putrequest("POST", WEBHOOK_PATH)
        for name, value in (headers(GOOD) | {"Content-Length": str(len(GOOD))}).items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(GOOD[:5])
        assert connection.getresponse().status == 408
        connection.close()


def test_disconnect_during_upload_is_counted(service: Service) -> None:
    url = httpx.URL(service.address)
    with socket.create_connection((url.host, url.port)) as sender:
        head = "".join(f"{name}: {value}\r\n" for name, value in headers(GOOD).items())
        sender.sendall(
            f"POST {WEBHOOK_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n{head}\r\nabc".encode()
        )
    until(lambda: 'outcome="gone"} 1.0' in service.get("/metrics").text)


def test_mistyped_review_value_is_logged_as_a_warning(service: Service, caplog) -> None:
    event = body("model_version_tag.set", key="gate.review", value="aproved")
    assert service.send(event).status_code == 202
    (record,) = [record for record in caplog.records if "aproved" in record.getMessage()]
    assert record.levelname == "WARNING"


def test_internal_error_does_not_leak_to_the_sender(service: Service, monkeypatch, caplog) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault with internals in /srv/gate")

    monkeypatch.setattr("gate.service.app.events.read", broken)
    answer = service.send(body())
    assert (answer.status_code, answer.json()) == (500, {"outcome": "fault"})
    until(lambda: "internals" in caplog.text)  # is logged after the answer


class TestReadiness:
    def test_ready_when_all_checks_pass(self, service: Service) -> None:
        until(lambda: service.get("/readyz").status_code == 200)
        assert service.get("/readyz").json() == {
            "ready": True, "ledger": "ok", "worker": "ok", "registry": "ok",
            "trust": "ok", "store": "ok",
        }  # fmt: skip

    def test_not_ready_while_the_registry_does_not_answer(self, tmp_path: Path) -> None:
        down = threading.Event()

        def effect(_model: str, _cause: str) -> None:
            if down.is_set():
                raise RegistryUnavailable("no server answers")

        recorder = Recorder(effect)
        down.set()
        with running(settings(tmp_path, interval_s=0.1), recorder) as service:
            until(lambda: len(recorder.calls) > 2)
            answer = service.get("/readyz")
            assert (answer.status_code, answer.json()["registry"]) == (503, "has not answered yet")
            down.clear()
            until(lambda: service.get("/readyz").status_code == 200)
            down.set()
            until(lambda: "has not answered for" in service.get("/readyz").json()["registry"])

    def test_not_ready_when_the_worker_stopped(self, service: Service) -> None:
        service.parts.worker.stop(timeout_s=10)
        assert service.get("/readyz").json()["worker"] == "is not running"
        assert service.get("/healthz").json() == {"status": "alive"}


def test_metrics_count_deliveries_and_reconciles(service: Service) -> None:
    service.send(body(), delivery="d-1")
    until(lambda: service.recorder.causes)
    until(lambda: (MODEL, "webhook") in service.recorder.ended)
    until(lambda: 'reconcile_seconds_count{cause="webhook"} 1.0' in service.get("/metrics").text)
    text = service.get("/metrics").text
    for line in (
        'parity_gate_deliveries_total{outcome="accepted"} 1.0',
        'parity_gate_actions_total{kind="review",outcome="promoted"}',
        'parity_gate_reconcile_seconds_count{cause="webhook"} 1.0',
        'parity_gate_reconcile_seconds_count{cause="timer"}',
        "parity_gate_accept_seconds_bucket",
    ):
        assert line in text


def test_other_applications_can_be_mounted(tmp_path: Path) -> None:
    mounts = {"/models": PlainTextResponse("the store")}
    with running(settings(tmp_path), mounts=mounts) as service:
        assert service.get("/models/digits/manifest.json").text == "the store"


@pytest.mark.proof
def test_two_hundred_concurrent_events_need_one_reconcile(tmp_path: Path) -> None:
    """All are taken at once, and a look that begins after the last one sees what it was about."""
    go_on = threading.Event()
    recorder = Recorder(lambda _model, _cause: go_on.wait(60) and None)
    with running(settings(tmp_path), recorder) as service:
        until(lambda: recorder.calls)
        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(lambda _: service.send(body()).status_code, range(200)))
        assert set(answers) == {202}
        assert recorder.causes == []  # the first look, which is the timer's, lasts
        go_on.set()
        until(lambda: recorder.ended.count((MODEL, "webhook")) == 1)
        assert recorder.causes == ["webhook"]  # one look serves all that came before it


def test_idle_connections_are_closed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_IDLE_S", 0.3)
    monkeypatch.setattr(app, "_CONNECTIONS", 2)
    with running(settings(tmp_path)) as service:
        port = httpx.URL(service.address).port
        with contextlib.ExitStack() as stack:
            connections = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
                for _ in range(3)
            ]
            connections[0].sendall(b"POST /webhooks/mlflow HTTP/1.1\r\nHost: x\r\n")
            assert [received(item) for item in connections] == [b"", b"", b""]
        assert service.get("/healthz").status_code == 200


def received(connection: socket.socket) -> bytes:
    """What comes until the service closes a connection."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1)
    return b""
