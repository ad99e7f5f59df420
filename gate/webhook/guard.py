"""Guard: `champion` stays on a version that may serve, whoever points it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from gate.errors import DigestMismatch
from gate.policy import Policy
from gate.registry.desk import Desk
from gate.registry.examination import Examined, examine, veto, vouching
from gate.registry.ledger import LedgerEntry, now
from gate.registry.port import APPROVED, CHAMPION, TAG_REVERTED, TAG_REVIEW
from gate.webhook.port import Taken

SERVED = ("promoted", "unchanged", "rolled_back", "reverted")
"""Lines that say which version serves from then on."""


def serving(history: Sequence[LedgerEntry]) -> str | None:
    """The version that serves by the ledger."""
    served = [entry.version for entry in history if entry.action in SERVED]
    return served[-1] if served else None


def guard(desk: Desk, policy: Policy, *, thoroughly: bool) -> list[Taken]:
    """Take `champion` back from a version that must not serve.

    Where the ledger put it, only its own lines, tags and (`thoroughly`) bytes are looked at: a
    policy that changed does not take a model out of service. Where somebody else put it, the
    version must be as good as one that is promoted now.
    """
    history = desk.history()
    champion, known = desk.alias(CHAMPION), serving(history)
    if champion is None:
        return []
    moved = champion != known
    seen = examine(desk, champion, policy, anew=moved) if moved or thoroughly else None
    seen = seen or veto(desk, history, champion)
    problem = seen.problem or (_unreviewed(seen, policy) if moved else None)
    if problem is not None:
        return [_revert(desk, champion, problem)]
    return [_accept(desk, seen, known)] if moved else []


def _unreviewed(seen: Examined, policy: Policy) -> str | None:
    number, tags = seen.version.number, seen.version.tags
    served = seen.vouched is not None and seen.vouched.action != "passed"
    if policy.review == "automatic" or served or tags.get(TAG_REVIEW) == APPROVED:
        return None
    return f"version {number} waits for review: no tag {TAG_REVIEW}={APPROVED}"


def _accept(desk: Desk, seen: Examined, known: str | None) -> Taken:
    """Somebody pointed at a version that may serve: write down that it does."""
    number = seen.version.number
    reason = f"'{CHAMPION}' was pointed at version {number} by hand; it may serve"
    desk.write("promoted", reason, version=number, previous=known, about=seen.vouched)
    return Taken("guard", "accepted", number, reason)


def _revert(desk: Desk, champion: str, problem: str) -> Taken:
    target = _last_good(desk, champion)
    goes = f"went back to version {target.version}" if target else "was taken away"
    reason = f"{problem}; '{CHAMPION}' {goes}"
    # Before the alias moves, so that whoever looks at the version finds out why.
    desk.registry.set_tag(desk.model, champion, (TAG_REVERTED, f"{now()}: {problem}"[:5000]))
    entry = desk.entry(
        "reverted",
        reason,
        version=target.version if target else None,
        previous=champion,
        about=target,
    )
    desk.move_champion(target.version if target else None, seen=champion, entry=entry)
    return Taken("guard", "reverted", target.version if target else None, reason)


def _last_good(desk: Desk, but: str) -> LedgerEntry | None:
    """The line of the version that served last and still may, with proven bytes."""
    history = desk.history()
    served = [e.version for e in history if e.action in SERVED and e.version not in (None, but)]
    for number in dict.fromkeys(reversed(served)):
        assert number is not None
        vouched = vouching(history, number)
        if vouched is None or veto(desk, history, number).problem is not None:
            continue
        try:
            assert vouched.sha256 is not None
            desk.prove(number, vouched.sha256)
        except DigestMismatch:
            continue
        return vouched
    return None
