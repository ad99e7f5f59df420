"""Review: a reviewer's word on the candidate, given as a tag in the registry's pages.

Approval can veto, never waive: what is approved is examined as if it were promoted now.
"""

from __future__ import annotations

from gate.policy import Policy
from gate.registry.desk import Desk
from gate.registry.examination import examine
from gate.registry.ledger import LedgerEntry
from gate.registry.port import APPROVED, CANDIDATE, CHAMPION, PREVIOUS, REJECTED, TAG_REVIEW
from gate.webhook.port import Taken


def review(desk: Desk, policy: Policy) -> list[Taken]:
    """Act on the review of the version behind `candidate`, if it waits for one."""
    number = desk.alias(CANDIDATE)
    waiting = _waiting(desk.history(), number)
    if number is None or waiting is None:
        return []
    said = desk.registry.version(desk.model, number).tags.get(TAG_REVIEW)
    if said == REJECTED:
        reason = f"a reviewer rejected version {number} ({TAG_REVIEW}={REJECTED})"
        desk.write("rejected", reason, version=number, about=waiting)
        return [Taken("review", "rejected", number, reason)]
    if said != APPROVED:
        return []
    problem = examine(desk, number, policy, anew=True).problem
    if problem is not None:
        reason = f"version {number} was approved and is not promoted: {problem}"
        desk.write("refused", reason, version=number, about=waiting)
        return [Taken("review", "refused", number, reason)]
    return [_promote(desk, number, waiting)]


def _waiting(history: tuple[LedgerEntry, ...], number: str | None) -> LedgerEntry | None:
    """The line that says that a version waits, if nothing was said about it since."""
    lines = [entry for entry in history if entry.version == number and entry.action != "conflict"]
    return lines[-1] if lines and lines[-1].action == "passed" else None


def _promote(desk: Desk, number: str, waiting: LedgerEntry) -> Taken:
    champion = desk.alias(CHAMPION)
    if champion is not None and champion != number:
        desk.point(PREVIOUS, champion)
    reason = f"version {number} passed and was approved in review"
    entry = desk.entry("promoted", reason, version=number, previous=champion, about=waiting)
    desk.move_champion(number, seen=champion, entry=entry)
    return Taken("review", "promoted", number, reason)
