"""Opening a ledger to go on with it: nothing is forgotten, and a signed one stays signed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gate.attestation.local import LocalKeys
from gate.attestation.trust import Trust
from gate.errors import EvidenceError, KeyUnusable, StorageError
from gate.ledger.ledger import Ledger
from gate.ledger.signature import check_writer

FILE_NAME = "ledger.jsonl"
USUAL = Path(".gate") / FILE_NAME
"""Where the ledger was before it lay in a database, unless somebody said otherwise."""


def believe(ledger: Ledger, keys: LocalKeys, trust: Path | None = None) -> Ledger:
    """Have a ledger be believed by the trust of this file, else of GATE_TRUST, else by the folder's
    own, where there is one (`believe_by_default`). Raises PolicyError, Untrusted."""
    chosen = keys.trust_if_any(trust)
    if chosen is not None and not keys.is_trust_named(trust):
        return believe_by_default(ledger, chosen)
    ledger.trust = chosen
    return ledger


def believe_by_default(ledger: Ledger, trust: Trust) -> Ledger:
    """Have it be believed by a trust that nobody named for it, and that may be younger: a ledger of
    which no line is signed goes on as it began, until a trusted writer signs its first line. Raises
    Untrusted where its key, which would do that, is none of his."""
    ledger.trust = trust
    rows = ledger.rows()
    if rows and not any(row.signature for row in rows):
        if ledger.key is not None:
            check_writer(ledger.key, trust, place=ledger.place)
        ledger.trust = None
    return ledger


def require_imported(ledger: Ledger, *, places: Iterable[Path] = (USUAL,)) -> None:
    """Prove that no ledger is forgotten: that this one has a line, or that none of before lies in
    these places or beside the database, if that is a file.

    Raises EvidenceError where one does, StorageError where nobody can know.
    """
    beside = () if ledger.state.file is None else (ledger.state.file.with_name(FILE_NAME),)
    left = next((path for path in dict.fromkeys((*places, *beside)) if _has_lines(path)), None)
    if left is None or ledger.rows():
        return
    raise EvidenceError(
        f"there is a ledger of an earlier version at {left}, and no line in {ledger.place}: "
        "without it nothing says what was promoted, rolled back or rejected. Import it once: gate "
        f"history import {left} (with the same --state). If it belongs to another state, move it "
        "away."
    )


def require_writable(ledger: Ledger, *, places: Iterable[Path] = (USUAL,)) -> None:
    """Prove, before any work, that what is written into this ledger will be believed: as
    `require_imported`; and a ledger whose last line is signed goes on by a key.

    Raises Untrusted for a key that its own trust does not count as a writer's, and KeyUnusable for
    none, too.
    """
    require_imported(ledger, places=places)
    check_writer(ledger.key, ledger.trust, place=ledger.place)
    if ledger.key is not None:
        return
    rows = ledger.rows()
    if rows and rows[-1].signature is not None:
        raise KeyUnusable(
            f"the lines of the ledger {ledger.place} are signed, and there is no key to sign "
            "another one: whoever trusts its writers would not believe it any more. Name the key "
            "of a writer: --key or GATE_SIGNING_KEY."
        )


def _has_lines(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StorageError(
            f"cannot look at {path}: {error.strerror}. Fix its permissions."
        ) from error
