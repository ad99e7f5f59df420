"""Acceptance: a person says that a shorter, or another, past of the ledger is meant, or that lines
are right that no trusted writer signed.

It leaves a line in the ledger that names what was lost, or not believed. Signed by a trusted
writer, it vouches for all lines before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gate.errors import EvidenceError, Untrusted
from gate.ledger.audit import audit
from gate.ledger.entry import LedgerEntry
from gate.ledger.head import Keeper
from gate.ledger.ledger import Ledger
from gate.ledger.lock import PATIENCE_S, promotion_lock
from gate.ledger.signature import check_writer


def accept(ledger: Ledger, keepers: Sequence[Keeper], *, reason: str) -> tuple[str, ...]:
    """Have all keepers keep where this ledger, which has none of its own, ends now, whatever they
    kept. Gives what some of them had kept that is not in it, and why one of its lines was not
    believed; nothing: all agreed, and nothing was changed.

    Raises EvidenceError where its own chain is broken, Untrusted and KeyUnusable where its key is
    no trusted writer's, StorageError and StateUnavailable where it, or a keeper, can't be asked
    now, PromotionConflict while a promotion is under way.
    """
    check_writer(ledger.key, ledger.trust, place=ledger.place)
    believing = Ledger(ledger.state, key=ledger.key)
    with promotion_lock(believing, patience_s=PATIENCE_S):
        found = (_doubt(ledger), *(_contradiction(believing, keeper) for keeper in keepers))
        lost = tuple(filter(None, found))
        if not lost:
            return ()
        count = len(believing.entries())
        why = f"{reason} (the ledger ended at line {count}; {'; '.join(lost)})"
        believing.append(LedgerEntry(action="ledger_accepted", registry="", model="", reason=why))
        for keeper in keepers:
            keeper.replace(believing.head())
    return lost


def _doubt(ledger: Ledger) -> str | None:
    """Why its lines are not believed; None: they are."""
    try:
        audit(ledger)
    except Untrusted as error:
        return str(error)
    return None


def _contradiction(ledger: Ledger, keeper: Keeper) -> str | None:
    try:
        kept = keeper.head()
    except EvidenceError as error:
        return str(error)
    ledger.entries()  # after the answer: what a running service added until then is no loss
    if kept is None or ledger.digest(kept.lines) == kept.sha256:
        return None
    return f"{keeper.place} saw {kept.lines} lines on {kept.at}, the last with {kept.sha256}"
