"""Review: a reviewer's word on the candidate, given as a tag in the registry's pages.

Approval can veto, never waive: what is approved is examined as if it were promoted now.
"""

from __future__ import annotations

from gate.policy.policy import Policy
from gate.registry.ledger import LedgerEntry
from gate.registry.may_serve import examine
from gate.registry.port import APPROVED, CANDIDATE, CHAMPION, PREVIOUS, REJECTED, TAG_REVIEW
from gate.registry.registered_model import Desk
from gate.service.port import Taken

_WORDS = ("passed", "promoted", "unchanged", "refused", "rejected", "rolled_back", "violation")


def review(desk: Desk, policy: Policy) -> list[Taken]:
    """Act on what reviewers said of the versions that wait for it. Only the candidate is promoted;
    the others may be rejected, and an approval of them is answered with the reason."""
    candidate = desk.alias(CANDIDATE)
    taken = []
    for number, waiting in _waiting(desk.history()).items():
        said = desk.registry.version(desk.model, number).tags.get(TAG_REVIEW)
        if said == REJECTED:
            reason = f"a reviewer rejected version {number} ({TAG_REVIEW}={REJECTED})"
            desk.write("rejected", reason, version=number, about=waiting)
            taken.append(Taken("review", "rejected", number, reason))
        elif said == APPROVED and number == candidate:
            taken.append(_approved(desk, policy, number, waiting))
        elif said == APPROVED:
            reason = (
                f"version {number} was approved, but version {candidate or 'none'} is the "
                "candidate now: approve that, or hand this one in again"
            )
            taken.append(_refuse(desk, number, waiting, reason))
    return taken


def _waiting(history: tuple[LedgerEntry, ...]) -> dict[str, LedgerEntry]:
    """Versions of which the last word is that they passed, with that line."""
    last: dict[str, LedgerEntry] = {}
    for entry in history:
        if entry.version is not None and entry.action in _WORDS:
            last[entry.version] = entry
    return {number: entry for number, entry in last.items() if entry.action == "passed"}


def _approved(desk: Desk, policy: Policy, number: str, waiting: LedgerEntry) -> Taken:
    problem = examine(desk, number, policy, anew=True).problem
    if problem is None:
        return _promote(desk, number, waiting)
    reason = f"version {number} was approved and is not promoted: {problem}"
    return _refuse(desk, number, waiting, reason)


def _refuse(desk: Desk, number: str, waiting: LedgerEntry, reason: str) -> Taken:
    desk.write("refused", reason, version=number, about=waiting)
    return Taken("review", "refused", number, reason)


def _promote(desk: Desk, number: str, waiting: LedgerEntry) -> Taken:
    champion = desk.alias(CHAMPION)
    if champion is not None and champion != number:
        desk.point(PREVIOUS, champion)
    reason = f"version {number} passed and was approved in review"
    entry = desk.entry("promoted", reason, version=number, previous=champion, about=waiting)
    desk.move_champion(number, seen=champion, entry=entry)
    return Taken("review", "promoted", number, reason)
