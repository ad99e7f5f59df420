"""Audit: everything that the ledger's rows can prove is proven anew, each signature included.

Law: each line is signed by a writer who was trusted at its time and is not revoked; or a later line
of such a writer says that the past is right (`ledger_accepted`, `ledger_imported`). So lines of
before there were keys, lines of a revoked key, and lines whose signature was lost count once a
person has vouched for them, and not before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gate.errors import Untrusted
from gate.ledger.entry import Action
from gate.ledger.ledger import UNVOUCHED, Ledger, proven
from gate.ledger.signature import verify
from gate.storage.digest import Digest

_VOUCHING: tuple[Action, ...] = ("ledger_accepted", "ledger_imported")


@dataclass(frozen=True)
class Audit:
    """What was proven."""

    lines: int
    head: Digest | None
    """Of the last line; None: there is no line."""
    by_key: dict[str, int]
    """By the id of a trusted writer: how many lines it signed; nothing where nobody is trusted."""
    accepted: tuple[int, ...]
    """Numbers of the lines that only a later line vouches for."""


def audit(ledger: Ledger) -> Audit:
    """Prove chain and signatures of all lines, and that the keepers saw no other past.

    Raises as `Ledger.verify`; Untrusted for the first line that nobody vouches for.
    """
    ledger.verify()
    rows = ledger.rows()
    chain, entries = proven(rows, place=ledger.place)
    by_key: Counter[str] = Counter()
    accepted: list[int] = []
    doubtful: dict[int, Untrusted] = {}
    trust = ledger.trust
    for row, entry in zip(rows, entries, strict=True):
        if trust is None or not trust.writers:
            break
        try:
            key = verify(row.line, row.signature, trust=trust, at=entry.at)
        except Untrusted as error:
            doubtful[row.number] = error
            continue
        by_key[key.key_id] += 1
        if entry.action in _VOUCHING:
            accepted += doubtful
            doubtful.clear()
    for number, doubt in doubtful.items():
        raise Untrusted(f"{ledger.place}:{number}: this line {doubt}. {UNVOUCHED}") from doubt
    return Audit(chain.lines, chain.digest(chain.lines), dict(by_key), tuple(accepted))
