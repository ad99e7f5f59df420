"""The outgoing webhook is signed, ordered, and delivered at least once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gate.errors import EvidenceError, ServiceError, Untrusted
from gate.ledger.entry import LedgerEntry
from gate.ledger.ledger import Ledger
from gate.service.notifications import (
    CURSOR,
    MAX_TRIES,
    SENT,
    NotificationCursor,
    Notifier,
    notifying,
)
from gate.service.settings import ServiceSettings, write_secrets
from gate.signing.keys import SigningKey
from tests.registry.signed import save_trust, trust_in
from tests.service.deliveries import MODEL, OLD_SECRET, SECRET, settings, wait_until


@dataclass
class Receiver:
    url: str = ""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next responses; then 200."""
    location: str = "/elsewhere"
    """Location header of a redirect."""
    slow_bytes: int = 0
    """Number of bytes of a header name that are sent one by one."""
    received: list[tuple[Message, bytes]] = field(default_factory=list)

    @property
    def accepted(self) -> list[tuple[str, str | None]]:
        return [
            (
                json.loads(body)["type"].removeprefix("parity_gate."),
                json.loads(body)["data"]["version"],
            )
            for _, body in self.received
        ]

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.received]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    created = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            created.received.append((self.headers, body))
            self.send_response(created.statuses.pop(0) if created.statuses else 200)
            self.send_header("Location", created.location)
            self.send_header("Content-Length", "0")
            self.flush_headers()
            with suppress(OSError):  # the client gave up
                for _ in range(created.slow_bytes):
                    self.wfile.write(b"x")
                    time.sleep(0.02)
                self.wfile.write(b": 1\r\n" if created.slow_bytes else b"")
                self.end_headers()

        def do_GET(self) -> None:
            raise AssertionError("a redirect was followed")

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        created.url = f"http://127.0.0.1:{server.server_port}/hook"
        yield created
        server.shutdown()


def write_entry(ledger: Ledger, action: str, version: str = "1", **fields: str) -> None:
    entry = {"action": action, "registry": "http://r", "model": MODEL, "version": version}
    ledger.append(LedgerEntry.model_validate(entry | {"reason": "of a test"} | fields))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    created = Ledger(tmp_path / "state.db")
    write_entry(created, "promoted", "0")  # before notifications were configured
    return created


def notification_settings(receiver: Receiver, folder: Path, **changes: Any) -> ServiceSettings:
    write_secrets(folder / "notify", [SECRET, OLD_SECRET])
    target = {"notify_url": receiver.url, "notify_secret_file": folder / "notify"}
    fixed = {"models": (MODEL,), "tracking_uri": "http://r"}
    return settings(folder, **target, **fixed, **changes)


def make_notifier(receiver: Receiver, ledger: Ledger, folder: Path, **changes: Any) -> Notifier:
    return Notifier(notification_settings(receiver, folder, **changes), ledger=Ledger(ledger.state))


def test_each_notified_action_is_sent_once_and_signed_with_all_secrets(
    receiver: Receiver, ledger: Ledger, tmp_path: Path
) -> None:
    sender = make_notifier(receiver, ledger, tmp_path)
    sender.send_new()
    assert receiver.received == []
    for action in SENT:
        write_entry(ledger, action)
    write_entry(ledger, "deployed")
    write_entry(ledger, "promoted", model="letters")
    sender.send_new()
    sender.send_new()
    assert receiver.accepted == [(action, "1") for action in SENT]
    headers, body = receiver.received[0]
    # Format of https://www.standardwebhooks.com, keyed with the bytes of the secret.
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = [
        "v1," + base64.b64encode(hmac.digest(key.encode(), signed, hashlib.sha256)).decode()
        for key in (SECRET, OLD_SECRET)
    ]
    assert headers["webhook-signature"].split() == expected


def test_entries_of_another_registry_are_not_sent(
    receiver: Receiver, ledger: Ledger, tmp_path: Path
) -> None:
    sender = make_notifier(receiver, ledger, tmp_path)
    sender.send_new()
    write_entry(ledger, "promoted", "1", registry="http://staging")
    write_entry(ledger, "promoted", "2", registry="http://r#/workspaces/team-a")
    write_entry(ledger, "promoted", "3", registry="http://R/")
    sender.send_new()
    assert receiver.accepted == [("promoted", "3")]


def test_newly_trusted_writer_key_needs_no_restart(receiver: Receiver, tmp_path: Path) -> None:
    first, second = (SigningKey.make(tmp_path / f"{name}.pem") for name in ("first", "second"))
    trust = tmp_path / "trust.yaml"
    save_trust(trust_in(first, writers=trust_in(first).measurers), trust)
    ledger = Ledger(tmp_path / "state.db", key=first)
    write_entry(ledger, "promoted", "1")
    sender = make_notifier(receiver, ledger, tmp_path, trust=trust)
    sender.send_new()
    ledger.key = second
    write_entry(ledger, "promoted", "2")
    with pytest.raises(Untrusted):
        sender.send_new()
    save_trust(trust_in(second, writers=trust_in(second).measurers), trust)
    sender.send_new()
    assert receiver.accepted == [("promoted", "2")]


@pytest.mark.parametrize("status", [503, 302])
def test_rejected_notification_is_sent_again_with_the_same_id(
    receiver: Receiver, ledger: Ledger, tmp_path: Path, status: int
) -> None:
    sender = make_notifier(receiver, ledger, tmp_path)
    sender.send_new()
    write_entry(ledger, "promoted", "1")
    write_entry(ledger, "reverted", "2")
    receiver.statuses = [200, status]
    with pytest.raises(OSError, match=str(status)):
        sender.send_new()
    again = make_notifier(receiver, ledger, tmp_path)  # after a crash
    again.send_new()
    assert receiver.accepted == [("promoted", "1"), ("reverted", "2"), ("reverted", "2")]
    assert len(set(receiver.ids)) == 2
    assert receiver.ids[1] == receiver.ids[2]


@pytest.mark.further
@pytest.mark.parametrize(
    ("status", "location"), [(410, "/elsewhere"), (302, "/elsewhere"), (308, "http://[")]
)
def test_permanently_rejected_entry_does_not_block_others(
    receiver: Receiver, ledger: Ledger, tmp_path: Path, status: int, location: str
) -> None:
    receiver.location = location
    sender = make_notifier(receiver, ledger, tmp_path)
    sender.send_new()
    write_entry(ledger, "refused", "1")
    write_entry(ledger, "promoted", "2")
    receiver.statuses = [429, 503, *[status] * MAX_TRIES]
    for _ in range(MAX_TRIES + 1):
        with pytest.raises(OSError):
            sender.send_new()
    sender.send_new()
    assert receiver.accepted == [("refused", "1")] * (MAX_TRIES + 2) + [("promoted", "2")]
    path = tmp_path / "store" / CURSOR
    cursor = NotificationCursor.load(path)
    assert [(each.entry, each.status) for each in cursor.undelivered] == [(2, status)]
    receiver.received.clear()
    receiver.statuses = [status]
    again = make_notifier(receiver, ledger, tmp_path)  # a restarted sender tries once
    again.send_new()
    again.send_new()
    assert (receiver.accepted, NotificationCursor.load(path)) == ([("refused", "1")], cursor)
    make_notifier(receiver, ledger, tmp_path).send_new()  # the receiver accepts the entry now
    assert receiver.accepted == [("refused", "1")] * 2
    assert NotificationCursor.load(path).undelivered == ()


def test_crash_after_sending_repeats_the_same_id(
    receiver: Receiver, ledger: Ledger, tmp_path: Path
) -> None:
    sender = make_notifier(receiver, ledger, tmp_path)
    sender.send_new()
    cursor = (tmp_path / "store" / CURSOR).read_bytes()
    write_entry(ledger, "promoted")
    sender.send_new()
    (tmp_path / "store" / CURSOR).write_bytes(cursor)
    sender.send_new()
    assert receiver.ids[0] == receiver.ids[1]


def test_slow_answer_is_cut_off(
    receiver: Receiver, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make_notifier(receiver, ledger, tmp_path)
    sender.send_new()
    write_entry(ledger, "promoted")
    receiver.slow_bytes = 2  # within the time limit
    sender.send_new()
    write_entry(ledger, "reverted")
    receiver.slow_bytes = 2000
    with monkeypatch.context() as limited, pytest.raises(TimeoutError):
        limited.setattr("gate.service.notifications._TIMEOUT_S", 0.3)
        sender.send_new()
    receiver.slow_bytes = 0
    sender.send_new()
    assert receiver.accepted == [("promoted", "1"), ("reverted", "1"), ("reverted", "1")]


def test_running_service_notifies_with_backoff(
    receiver: Receiver, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gate.service.notifications._POLL_S", 0.01)
    receiver.statuses = [503, 503]
    with notifying(notification_settings(receiver, tmp_path), Ledger(ledger.state)):
        wait_until((tmp_path / "store" / CURSOR).exists)
        write_entry(ledger, "promoted")
        wait_until(lambda: len(receiver.received) == 3)
    assert len(set(receiver.ids)) == 1


def test_invalid_notification_settings_are_refused(
    receiver: Receiver, ledger: Ledger, tmp_path: Path
) -> None:
    with (
        pytest.raises(ServiceError),
        notifying(
            settings(tmp_path, notify_url=receiver.url, notify_secret_file=tmp_path / "none"),
            ledger,
        ),
    ):
        pass
    service_settings = notification_settings(receiver, tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / CURSOR).write_text("{}")
    with pytest.raises(EvidenceError), notifying(service_settings, ledger):
        pass
    with notifying(settings(tmp_path), ledger):  # notifications are not configured
        pass
