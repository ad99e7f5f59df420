"""Readiness: what a delivery needs is tried, by one thread at a time and not for long.

What came of it counts for a moment, so that whoever asks often costs little. A disk or a database
that hangs holds one thread, and never one of those that take deliveries.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gate.errors import (
    EvidenceError,
    PastChanged,
    StateUnavailable,
    StorageError,
    Untrusted,
)
from gate.ledger.ledger import Ledger
from gate.registry.trusted import TrustFile
from gate.service.inbox import Inbox

_FRESH_S = 2.0
_PATIENCE_S = 3.0
"""Load balancers wait for few seconds."""
_log = logging.getLogger(__name__)


class Need:
    """One thing that a delivery needs. `attempt` blocks, and gives what is wrong, or None."""

    def __init__(self, attempt: Callable[[], str | None]) -> None:
        self._attempt = attempt
        self._begun = 0.0
        self._running: asyncio.Task[str | None] | None = None

    async def trouble(self) -> str | None:
        """What is wrong now, or was a moment ago; or None."""
        now = time.monotonic()
        running = self._running
        if running is None or (running.done() and now - self._begun > _FRESH_S):
            self._begun = now
            running = self._running = asyncio.create_task(asyncio.to_thread(self._attempt))
        await asyncio.wait({running}, timeout=max(0.0, self._begun + _PATIENCE_S - now))
        if running.done():
            return running.result()
        return f"has not answered for {time.monotonic() - self._begun:.0f} s"


def inbox_trouble(inbox: Inbox) -> str | None:
    """Why no delivery can be kept now; the log says more than strangers may read."""
    try:
        inbox.probe()
    except StateUnavailable as error:
        _log.warning("not ready: %s", error)
        return "can't be written"
    return None


def ledger_trouble(ledger: Ledger, trust: TrustFile) -> str | None:
    """Why nothing can be decided by the ledger now."""
    trust.follow(ledger)
    try:
        ledger.verify()
    except (EvidenceError, StorageError, Untrusted) as error:
        _log.warning("not ready: %s", error)
        if isinstance(error, PastChanged):
            return "is not the one it was"
        if isinstance(error, Untrusted):
            return "is not signed by a trusted writer"
        return "is broken" if isinstance(error, EvidenceError) else "can't be read"
    return None
