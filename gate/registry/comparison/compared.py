"""What a release was compared with, and whether that is still what serves.

The decision holds the comparison, and lies where anybody may write who may write to the registry:
the ledger has its digest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gate.decision.decision import Decision
from gate.errors import DigestMismatch
from gate.ledger.entry import ComparedWith, LedgerEntry

if TYPE_CHECKING:
    from gate.ledger.history import History


def verify_comparison(decision: Decision, expected: ComparedWith | None) -> None:
    """Prove that the comparison in a decision that lay in the registry is the one that the ledger
    noted. Raises DigestMismatch."""
    found = ComparedWith.of(decision)
    if found != expected:
        raise DigestMismatch(
            "the decision beside the version tells of a comparison with version "
            f"{_named(found)}, the ledger notes one with version {_named(expected)}. It was "
            "edited: promote the file anew."
        )


def comparison_in(line: LedgerEntry | None) -> ComparedWith | None:
    """What the version of a line was compared with, by whoever decided, or by the service."""
    if line is None:
        return None
    return line.compared_with if line.incumbent is None else ComparedWith.of_record(line.incumbent)


def standard(champion: str | None, history: History) -> str | None:
    """The version that a new one is compared with: the one at which `champion` points; where it
    points at none, the one that served last and would be served again. None: there is none.

    Whoever takes the alias away does not take the comparison away with it.
    """
    if champion is not None:
        return champion
    sound = history.sound
    return next((v for v in history.served if v in sound and history.rollback_of(v) is None), None)


def outdated(compared: ComparedWith | None, champion: str | None, history: History) -> str | None:
    """Why a comparison is not one with what serves at this moment, where `champion` points at that
    version; None where it is."""
    current = standard(champion, history)
    vouched = None if current is None else history.vouching_for(current)
    sha256 = None if vouched is None else vouched.sha256
    if compared is not None and (compared.version, compared.sha256) == (current, sha256):
        return None
    return (
        f"champion is version {current or 'none'} now, this was compared with version "
        f"{_named(compared)}: decide again (make repro, or gate check --against NAME --report)"
    )


def _named(compared: ComparedWith | None) -> str:
    if compared is None or compared.version is None:
        return "none"
    digest = "" if compared.sha256 is None else f" ({compared.sha256.short})"
    return f"{compared.version}{digest}"
