"""The comparison of a release with the champion: as recorded, and with the current one."""

from __future__ import annotations

from gate.decision.decide import Decision
from gate.errors import DigestMismatch
from gate.ledger.entry import ComparedWith, LedgerEntry
from gate.ledger.history import ModelHistory


# The decision contains the comparison with the champion. Every writer to the registry can edit the
# decision, so the ledger has the comparison's digest.
def verify_comparison(decision: Decision, expected: ComparedWith | None) -> None:
    """Verify that a downloaded decision has the comparison that the ledger recorded.

    Raises DigestMismatch."""
    compared = ComparedWith.from_decision(decision)
    if compared != expected:
        raise DigestMismatch(
            f"the version's decision has a comparison with version {_named(compared)}, the ledger "
            f"has one with version {_named(expected)}. The decision was edited. Promote the file "
            "again."
        )


def comparison_in(entry: LedgerEntry | None) -> ComparedWith | None:
    """Return the comparison with the champion in a ledger entry.

    It was made together with the decision, or by the service.
    """
    if entry is None:
        return None
    record = entry.incumbent
    return entry.compared_with if record is None else ComparedWith.from_record(record)


def version_to_compare(champion: str | None, history: ModelHistory) -> str | None:
    """Return the version to compare a new one with: the champion, or None.

    Without a champion it is the last version that served and may serve again, so that deleting the
    alias does not avoid the comparison.
    """
    if champion is not None:
        return champion
    sound = history.sound
    return next((v for v in history.served if v in sound and history.rollback_of(v) is None), None)


def outdated(
    compared: ComparedWith | None, champion: str | None, history: ModelHistory
) -> str | None:
    """Return why a comparison was not made with the current champion, or None.

    champion: the version at which the alias points."""
    current = version_to_compare(champion, history)
    entry = None if current is None else history.approving_entry(current)
    sha256 = None if entry is None else entry.sha256
    if compared is not None and (compared.version, compared.sha256) == (current, sha256):
        return None
    return (
        f"champion is version {current or 'none'} now, but the comparison was made with version "
        f"{_named(compared)}: decide again (make repro, or gate check --against NAME --report)"
    )


def _named(compared: ComparedWith | None) -> str:
    if compared is None or compared.version is None:
        return "none"
    digest = "" if compared.sha256 is None else f" ({compared.sha256.short})"
    return f"{compared.version}{digest}"
