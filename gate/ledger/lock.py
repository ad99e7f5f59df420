"""The promotion lock: one promotion, rollback or look of the service at a time, on any host."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from gate.errors import PromotionConflict, StateUnavailable
from gate.ledger.lease import LEASE_S, Lease
from gate.ledger.ledger import Ledger

PATIENCE_S = 30.0
"""How long another promotion, or the service's look, is waited for."""
NAME = "promotion"
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def promotion_lock(ledger: Ledger, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock in the ledger's database. Meanwhile what this object writes is written under
    it, or not at all: PromotionConflict where it was lost to another process.

    A holder that died is replaced: at once by a process of its machine, by others when its lease is
    over. Raises PromotionConflict where another process holds it (at once, or after `patience_s`),
    and StateUnavailable where nobody can know.
    """
    lease = Lease(ledger.state, name=NAME)
    holder = lease.take(patience_s=patience_s)
    if holder is not None:
        raise PromotionConflict(
            f"another promotion or rollback is under way: {holder} holds the lock in "
            f"{ledger.place}. Nothing was changed. Wait until it is done, then repeat."
        )
    before, ledger.lease = ledger.lease, lease
    try:
        with _renewing(lease):
            yield
    finally:
        ledger.lease = before
        try:
            lease.free()
        except StateUnavailable as error:
            _log.warning("the promotion lock is free only in %.0f s: %s", LEASE_S, error)


@contextlib.contextmanager
def _renewing(lease: Lease) -> Iterator[None]:
    """Keep the lease while what is done takes long."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(LEASE_S / 5):
            try:
                lease.renew()
            except PromotionConflict:  # whoever writes next is told
                return
            except StateUnavailable as error:  # the next one may succeed in time
                _log.warning("the promotion lock can't be renewed now: %s", error)

    thread = threading.Thread(target=renew, name="gate-promotion-lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
