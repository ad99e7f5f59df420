"""Send ledger entries to an outgoing webhook."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal
from urllib.parse import urlsplit

from gate.errors import EvidenceError, GateError
from gate.ledger.entry import Action, LedgerEntry, plain
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import registry_identities
from gate.registry.eligibility import TrustFile
from gate.service.app import sign_delivery
from gate.service.settings import ServiceSettings, WebhookSecrets
from gate.storage.bounded_http import BoundedHttp
from gate.storage.digest import Digest
from gate.storage.record import Count, Record, added_field
from gate.storage.safe_text import redacted
from gate.storage.workspace import ModelKey, in_workspace

# The ledger is the queue. The number of sent entries on disk is increased only after an answer 2xx,
# so that nothing is lost in a crash, but an entry may be sent twice with the same ID. Entries that
# gate promote wrote on another machine are also sent.

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
"""Within which the status and headers of an answer must arrive."""
_MAX_PAUSE_S = 300.0

MAX_TRIES = 6
"""Number of tries for an entry that the receiver refuses, within two minutes in total."""

_TEMPORARY = (408, 425, 429)
"""Status codes 4xx that permit a retry."""

_log = logging.getLogger(__name__)


class UndeliveredEntry(Record):
    """An entry of the ledger that the receiver refused permanently."""

    entry: Count
    """Number in the ledger, from 1."""
    status: int
    """Status of the last answer: 3xx or 4xx."""


class NotificationCursor(Record):
    """The number of processed entries of the ledger."""

    schema_version: Literal[1] = 1
    entries: Count
    undelivered: tuple[UndeliveredEntry, ...] = added_field(())
    """Processed entries that the receiver refused; sent again when the service starts."""


class Notifier:
    """Sends new ledger entries about the service's models, in order, in one thread."""

    def __init__(self, settings: ServiceSettings, *, ledger: Ledger) -> None:
        """`settings`: with `notify_url` and a secret file. `ledger`: used only by this thread.

        Raises ServiceError for an unusable secret file, PolicyError for an invalid policy.
        """
        assert settings.notify_url is not None
        assert settings.notify_secret_file is not None
        self._url = settings.notify_url
        self._secrets = WebhookSecrets.from_file(settings.notify_secret_file)
        self._ledger, self._settings = ledger, settings
        self._trust = TrustFile.named(settings.trust, policy=settings.policy)
        self._path = settings.store / CURSOR
        self._tries: Counter[int] = Counter()
        self._has_tried_undelivered = False

    def send_new(self) -> None:
        """Send all unsent entries; without a cursor, start after the existing entries.

        An entry that the receiver refuses repeatedly is recorded as undelivered and skipped. Raises
        OSError if an entry can't be sent now, GateError if the ledger or the cursor can't be read
        or written; then nothing is skipped.
        """
        self._trust.follow(self._ledger)
        entries = self._ledger.entries()
        registries = {
            key: registry_identities(
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
            # A ledger may be about several registries with models of the same name.
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
        """Send undelivered entries again; return the cursor without the accepted ones.

        Raises OSError if the receiver is not ready; then retry.
        """
        for each in cursor.undelivered:
            status = self._post(each.entry, entries[each.entry - 1])
            if status is not None:
                _log.warning("entry %d is still not delivered: HTTP %d", each.entry, status)
                continue
            remaining = tuple(entry for entry in cursor.undelivered if entry != each)
            cursor = cursor.model_copy(update={"undelivered": remaining})
            cursor.save(self._path)
        return cursor

    def _refusal(self, number: int, entry: LedgerEntry) -> int | None:
        """Send an entry; return None, or the status if the receiver refused it permanently.

        Raises OSError if the entry must be sent again.
        """
        status = self._post(number, entry)
        if status is None:
            return None
        self._tries[number] += 1
        if self._tries[number] < MAX_TRIES:
            raise OSError(f"HTTP {status}")
        _log.error(
            "not delivered: the receiver refused entry %d %d times (HTTP %d). It is listed in "
            "%s and is sent again when the service starts",
            number, MAX_TRIES, status, self._path,
        )  # fmt: skip
        return status

    def _post(self, number: int, entry: LedgerEntry) -> int | None:
        """Send an entry; return None, or the status if a retry is pointless: of a redirect, which
        is not followed, or of a client error. Raises OSError if the receiver is not ready."""
        import httpx

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
        # The ID is the same for each try, so that the receiver can detect duplicates.
        delivery = f"{number}-{Digest.from_json(entry.to_plain()).hex[:16]}"
        timestamp = str(int(time.time()))
        signatures = [
            sign_delivery(secret, delivery_id=delivery, timestamp=timestamp, body=body)
            for secret in self._secrets.secrets
        ]
        headers = {
            "Content-Type": "application/json",
            "webhook-id": delivery,
            "webhook-timestamp": timestamp,
            "webhook-signature": " ".join(signatures),
        }
        target = urlsplit(self._url)
        proxies = urllib.request.getproxies()
        is_direct = urllib.request.proxy_bypass(target.netloc)
        proxy = None if is_direct else proxies.get(target.scheme)
        try:
            with (
                contextlib.closing(BoundedHttp(_TIMEOUT_S, proxy=proxy)) as client,
                client.exchange("POST", self._url, body, headers) as response,
            ):
                status = int(response.status_code)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if 200 <= status < 300:
            _log.info("notified", extra={"fields": {"model": entry.key, "entry": number}})
            return None
        if status < 500 and status not in _TEMPORARY:
            return status
        raise OSError(f"HTTP {status}")

    def run(self, stopping: threading.Event) -> None:
        """Send new entries, with growing pauses after failures, until `stopping` is set."""
        failures = 0
        while not stopping.is_set():
            try:
                self.send_new()
                failures = 0
            except Exception as error:
                failures += 1
                is_expected = isinstance(error, OSError | GateError)
                text = "notification failed, will retry: %s"
                _log.warning(text, error, exc_info=not is_expected)
            stopping.wait(min(_MAX_PAUSE_S, _POLL_S * 2.0 ** min(failures, 10)))


@contextlib.contextmanager
def notifying(settings: ServiceSettings, ledger: Ledger) -> Iterator[None]:
    """Send notifications while the context is open, if the settings have `notify_url`.

    `ledger`: an object that only the notifier's thread uses. Raises ServiceError for an unusable
    secret file, EvidenceError for an invalid cursor.
    """
    if settings.notify_url is None:
        yield
        return
    notifier = Notifier(settings, ledger=ledger)
    try:
        notifier._cursor()
    except EvidenceError as error:
        raise EvidenceError(f"{error} Remove the file to start with new entries.") from error
    stopping = threading.Event()
    thread = threading.Thread(
        target=notifier.run, args=(stopping,), name="gate-notifier", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_TIMEOUT_S)
