"""Acceptance: a person says that a shorter, or another, past of the ledger is meant.

It leaves a line in the ledger that names what was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gate.errors import EvidenceError
from gate.registry.champion import PATIENCE_S, promotion_lock
from gate.registry.head import Keeper
from gate.registry.ledger import Ledger, LedgerEntry


def accept(path: Path, keepers: Sequence[Keeper], *, reason: str) -> tuple[str, ...]:
    """Have all keepers keep where this ledger ends now, whatever they kept. Gives what some of
    them had kept that is not in it; nothing: all agreed, and nothing was changed.

    Raises EvidenceError where its own chain is broken, StorageError and InboxUnavailable where a
    keeper can't be asked now, PromotionConflict while a promotion is under way.
    """
    ledger = Ledger(path)
    with promotion_lock(ledger, patience_s=PATIENCE_S):
        lost = tuple(filter(None, (_contradiction(ledger, keeper) for keeper in keepers)))
        if not lost:
            return ()
        count = len(ledger.entries())
        why = f"{reason} (the ledger ended at line {count}; {'; '.join(lost)})"
        ledger.append(LedgerEntry(action="ledger_accepted", registry="", model="", reason=why))
        for keeper in keepers:
            keeper.replace(ledger.head())
    return lost


def _contradiction(ledger: Ledger, keeper: Keeper) -> str | None:
    try:
        kept = keeper.head()
    except EvidenceError as error:
        return str(error)
    ledger.entries()  # after the answer: what a running service added until then is no loss
    if kept is None or ledger.digest(kept.lines) == kept.sha256:
        return None
    return f"{keeper.place} saw {kept.lines} lines on {kept.at}, the last with {kept.sha256}"
