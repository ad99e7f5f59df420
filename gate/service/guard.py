"""Guard: `champion` stays on a version that may serve, whoever points it elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from gate.errors import ArtifactMissing, DigestMismatch, RegistryError, RegistryUnavailable
from gate.policy.policy import Policy
from gate.registry.ledger import LedgerEntry, now
from gate.registry.may_serve import (
    SERVED,
    VOUCHING,
    Examined,
    examine,
    since_passed,
    veto,
    vouching,
)
from gate.registry.port import APPROVED, CHAMPION, PREVIOUS, REJECTED, TAG_REVERTED, TAG_REVIEW
from gate.registry.proof import Beside
from gate.registry.registered_model import Desk
from gate.service.port import Taken

_TAIL = 4000
"""Characters of a tag's value; databases other than SQLite refuse more than 5000."""


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
    if not any(entry.action in VOUCHING for entry in history):
        raise RegistryError(
            f"'{CHAMPION}' of {desk.model} points at version {champion}, and the ledger "
            f"{desk.ledger.path} has no line that anything of {desk.model} in "
            f"{desk.registry.identity} ever passed. Name the right ledger with --ledger, or the "
            "registry's other address with --same-registry; nothing was changed."
        )
    moved = champion != known
    seen = _examined(desk, champion, policy, moved=moved) if moved or thoroughly else None
    seen = seen or veto(desk, history, champion)
    problem = seen.problem or (_unreviewed(seen, policy) if moved else None)
    if problem is not None:
        return [_revert(desk, seen, problem)]
    return [_accept(desk, seen, known)] if moved else []


def _examined(desk: Desk, champion: str, policy: Policy, *, moved: bool) -> Examined:
    """A file that is away for a while condemns nothing that serves rightly; but what somebody
    pointed at has to be there."""
    try:
        return examine(desk, champion, policy, anew=moved)
    except ArtifactMissing as error:
        if not moved:
            raise
        return replace(veto(desk, desk.history(), champion), problem=str(error))


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


def _revert(desk: Desk, seen: Examined, problem: str) -> Taken:
    champion, tags = seen.version.number, seen.version.tags
    target = _last_good(desk, champion)
    goes = f"went back to version {target.version}" if target else "was taken away"
    reason = f"{problem}; '{CHAMPION}' {goes}"
    told = since_passed(desk.history(), champion)
    if tags.get(TAG_REVIEW) == REJECTED and seen.vouched and "rejected" not in told:
        desk.write("rejected", problem, version=champion, about=seen.vouched)
    # Before the alias moves, so that whoever looks at the version finds out why.
    if not tags.get(TAG_REVERTED, "").endswith(problem[-_TAIL:]):
        note = f"{now()}: {problem}" if len(problem) <= _TAIL else f"{now()}: …{problem[-_TAIL:]}"
        desk.registry.set_tag(desk.model, champion, (TAG_REVERTED, note))
    entry = desk.entry(
        "reverted",
        reason,
        version=target.version if target else None,
        previous=champion,
        about=target,
    )
    desk.move_champion(target.version if target else None, seen=champion, entry=entry)
    if target is not None and desk.alias(PREVIOUS) == target.version:
        before = _served_before(desk, {champion, target.version})
        if before is not None:
            desk.point(PREVIOUS, before)
    return Taken("guard", "reverted", target.version if target else None, reason)


def _last_good(desk: Desk, but: str) -> LedgerEntry | None:
    """The line of the version that served last and still may, with proven bytes.

    Raises the trouble where none can be proven and one of them only could not be had now.
    """
    history = desk.history()
    trouble: RegistryError | None = None
    for number in _served(history):
        vouched = vouching(history, number)
        if number == but or vouched is None or vouched.sha256 is None:
            continue
        try:
            if veto(desk, history, number).problem is None:
                desk.prove(number, vouched.sha256, beside=Beside.needed(vouched))
                return vouched
        except DigestMismatch:
            continue
        except RegistryUnavailable:
            raise
        except RegistryError as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return None


def _served_before(desk: Desk, but: set[str | None]) -> str | None:
    """A version to roll back to; a rollback proves its bytes."""
    history = desk.history()
    for number in _served(history):
        with contextlib.suppress(RegistryError):
            if number not in but and veto(desk, history, number).problem is None:
                return number
    return None


def _served(history: Sequence[LedgerEntry]) -> list[str]:
    """All versions that served, the last one first."""
    served = [entry.version for entry in history if entry.action in SERVED]
    return list(dict.fromkeys(number for number in reversed(served) if number is not None))
