"""Tell another system what happened: one outgoing webhook."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any, Literal

from gate.errors import EvidenceError, GateError
from gate.ledger.entry import Action, LedgerEntry, plain
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import same
from gate.registry.eligibility import TrustFile
from gate.service.app import sign
from gate.service.settings import ServiceSettings, WebhookSecrets
from gate.storage.digest import Digest
from gate.storage.record import Count, Record, added_field
from gate.storage.safe_text import redacted
from gate.storage.workspace import ModelKey, in_workspace

# The ledger is the queue: an entry counts as sent after an answer 2xx, and only then the number of
# sent entries grows, on disk. So nothing is lost in a crash, and an entry may be sent twice, with
# the same id. What gate promote wrote on another machine is sent, too.

SENT: tuple[Action, ...] = (
    "passed",
    "promoted",
    "refused",
    "rejected",
    "rolled_back",
    "reverted",
    "not_deployed",
    "replay_failed",
    "overridden",
)
"""Actions that are sent: verdicts, promotions, reverts, reviews."""

CURSOR = "notified.json"
"""The file in the service's store."""

_POLL_S = 2.0
_TIMEOUT_S = 10.0
"""Within which the receiver must be connected, have taken the request, and have answered: each."""
_LONGEST_PAUSE_S = 300.0

MOST_TRIES = 6
"""Of an entry that the receiver refuses for good; the pauses between them are two minutes."""

_TEMPORARY = (408, 425, 429)
"""Answers 4xx that ask to send again later."""

_log = logging.getLogger(__name__)


class UndeliveredEntry(Record):
    """An entry of the ledger that the receiver refused for good."""

    entry: Count
    """Number in the ledger, from 1."""
    status: int
    """Of the last answer: 3xx or 4xx."""


class NotificationCursor(Record):
    """How many entries of the ledger are done."""

    schema_version: Literal[1] = 1
    entries: Count
    undelivered: tuple[UndeliveredEntry, ...] = added_field(())
    """Of these, the ones that the receiver refused. They are sent again when the service starts."""


class _TimedReader(io.RawIOBase):
    """Reads from a socket until a deadline: its timeout is that of each read alone, and a receiver
    may send one byte of a header after the other."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        self._sock, self._raw, self._end = sock, raw, time.monotonic() + _TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer came within {_TIMEOUT_S:g} s")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp = io.BufferedReader(_TimedReader(sock, self.fp.detach()))


class _HttpConnection(http.client.HTTPConnection):
    response_class = _TimedResponse


class _HttpsConnection(http.client.HTTPSConnection):
    response_class = _TimedResponse


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpConnection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HttpsConnection, req)


# Without urllib's handler of redirects: a redirected POST would arrive as a GET without its body,
# and an invalid Location would raise ValueError. So a redirect is an HTTPError like any other.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler(),
    urllib.request.UnknownHandler(),
    _HttpHandler(),
    _HttpsHandler(),
    urllib.request.HTTPDefaultErrorHandler(),
    urllib.request.HTTPErrorProcessor(),
):
    _OPENER.add_handler(_handler)


class Notifier:
    """Sends the ledger's new entries about the service's models, in their order, in one thread."""

    def __init__(self, settings: ServiceSettings, *, ledger: Ledger) -> None:
        """`settings`: with an address and a secret file. `ledger`: of this thread alone.

        Raises ServiceError for a secret file that can't be used, PolicyError for a damaged policy.
        """
        assert settings.notify_url is not None
        assert settings.notify_secret_file is not None
        self._url = settings.notify_url
        self._secrets = WebhookSecrets.of_file(settings.notify_secret_file)
        self._ledger, self._settings = ledger, settings
        self._trust = TrustFile.named(settings.trust, policy=settings.policy)
        self._path = settings.store / CURSOR
        self._tries: Counter[int] = Counter()
        self._has_tried_undelivered = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-notifier", daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send in the background meanwhile."""
        self._thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._thread.join(_TIMEOUT_S)

    def send_new(self) -> None:
        """Send the entries that are not sent yet. Without a cursor the past is not sent.

        An entry that the receiver refuses for good again and again is kept as undelivered, so that
        the next ones are sent. Raises OSError where the receiver does not take one, GateError where
        the ledger or the cursor can't be read or written: nothing is skipped then.
        """
        self._trust.follow(self._ledger)
        entries = self._ledger.entries()
        registries = {
            key: same(
                self._ledger,
                in_workspace(self._settings.tracking_uri, ModelKey.parse(key).workspace),
            )
            for key in self._settings.models
        }
        cursor = self._cursor()
        if cursor is None or cursor.entries > len(entries):
            cursor = NotificationCursor(entries=len(entries))
            cursor.save(self._path)
        if not self._has_tried_undelivered:
            cursor = self._send_undelivered(cursor, entries)
            self._has_tried_undelivered = True
        undelivered = cursor.undelivered
        for number, entry in enumerate(entries[cursor.entries :], start=cursor.entries + 1):
            # A ledger may serve several registries, with models of the same name.
            if entry.action in SENT and plain(entry.registry) in registries.get(entry.key, ()):
                status = self._refusal(number, entry)
                if status is not None:
                    undelivered = (*undelivered, UndeliveredEntry(entry=number, status=status))
            NotificationCursor(entries=number, undelivered=undelivered).save(self._path)

    def _cursor(self) -> NotificationCursor | None:
        return NotificationCursor.load(self._path) if self._path.exists() else None

    def _send_undelivered(
        self, cursor: NotificationCursor, entries: Sequence[LedgerEntry]
    ) -> NotificationCursor:
        """Send each once more, and return the cursor without those that were taken. Raises OSError
        where the receiver is not ready: then this is repeated."""
        for each in cursor.undelivered:
            try:
                self._post(each.entry, entries[each.entry - 1])
            except urllib.error.HTTPError as error:
                if not _is_final(error):
                    raise
                _log.warning("entry %d is still not delivered: %s", each.entry, error)
                continue
            left = tuple(one for one in cursor.undelivered if one != each)
            cursor = cursor.model_copy(update={"undelivered": left})
            cursor.save(self._path)
        return cursor

    def _refusal(self, number: int, entry: LedgerEntry) -> int | None:
        """Send an entry. Return the status of the last answer if the receiver refused it for good;
        None: it took it. Raises OSError where it is to be tried again."""
        try:
            self._post(number, entry)
        except urllib.error.HTTPError as error:
            if not _is_final(error):
                raise
            self._tries[number] += 1
            if self._tries[number] < MOST_TRIES:
                raise
            _log.error(
                "not delivered: the receiver refused entry %d %d times (HTTP %d). It is listed in "
                "%s and is sent again when the service starts",
                number, MOST_TRIES, error.code, self._path,
            )  # fmt: skip
            return error.code
        return None

    def _post(self, number: int, entry: LedgerEntry) -> None:
        content = {
            "type": f"parity_gate.{entry.action}",
            "timestamp": entry.at,
            "data": {
                "entry": number,
                "model": entry.key,
                "registry": redacted(entry.registry),
                "version": entry.version,
                "previous_version": entry.previous_version,
                "sha256": None if entry.sha256 is None else str(entry.sha256),
                "reason": redacted(entry.reason),
                "comment": entry.comment,
                "actor": entry.actor,
                "approvers": list(entry.approvers),
            },
        }
        body = json.dumps(content).encode()
        # The same for each try, so that the receiver can detect a repetition.
        delivery = f"{number}-{Digest.of_json(entry.to_plain()).hex[:16]}"
        timestamp = str(int(time.time()))
        signatures = [
            sign(secret, delivery_id=delivery, timestamp=timestamp, body=body)
            for secret in self._secrets.secrets
        ]
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"parity-gate/{metadata.version('parity-gate')}",
            "webhook-id": delivery,
            "webhook-timestamp": timestamp,
            "webhook-signature": " ".join(signatures),
        }
        request = urllib.request.Request(self._url, body, headers, method="POST")
        with _OPENER.open(request, timeout=_TIMEOUT_S):
            _log.info("notified", extra={"fields": {"model": entry.key, "entry": number}})

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self.send_new()
                failures = 0
            except (OSError, GateError) as error:
                failures += 1
                _log.warning("not notified, it is tried again: %s", error)
            except Exception:
                failures += 1
                _log.exception("not notified, it is tried again")
            pause = min(_LONGEST_PAUSE_S, _POLL_S * 2.0 ** min(failures, 10))
            self._stopping.wait(pause if failures else _POLL_S)


def _is_final(error: urllib.error.HTTPError) -> bool:
    """Return True for an answer that the same request gets again: a redirect, which is not
    followed, or an error of the client."""
    return 300 <= error.code < 500 and error.code not in _TEMPORARY


@contextlib.contextmanager
def notifying(settings: ServiceSettings, ledger: Ledger) -> Iterator[None]:
    """Notify while the service runs, if the settings name an address.

    ledger: another object than the service's, for this thread. Raises ServiceError for a secret
    file that can't be used, EvidenceError for a damaged cursor.
    """
    if settings.notify_url is None:
        yield
        return
    notifier = Notifier(settings, ledger=ledger)
    try:
        notifier._cursor()
    except EvidenceError as error:
        raise EvidenceError(
            f"{error} Remove the file to go on with what happens from now on."
        ) from error
    with notifier.running():
        yield
