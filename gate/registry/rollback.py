"""Rollback: `champion` goes back to the version of `previous`, if the ledger vouches for it."""

from __future__ import annotations

from gate.errors import EvidenceError, RegistryError
from gate.registry.ledger import Ledger, LedgerEntry, now
from gate.registry.may_serve import SERVED, veto
from gate.registry.port import CHAMPION, PREVIOUS, TAG_ROLLED_BACK, Registry
from gate.registry.proof import Beside
from gate.registry.registered_model import Desk
from gate.registry.release import Promotion


def rollback(registry: Registry, model_name: str, *, ledger: Ledger, reason: str) -> Promotion:
    """Point `champion` at the version of `previous`, and `previous` at the old champion.

    The target's bytes are downloaded and must have the digest that the ledger recorded when they
    were promoted. The old champion gets the tag `gate.rolled_back`, which keeps its bytes from
    being promoted again until somebody deletes the tag.

    Raises RegistryError where there is nothing to go back to, EvidenceError without a line in the
    ledger, DigestMismatch on other bytes, PromotionConflict where another promotion is under way.
    An interrupted rollback is finished by calling again.
    """
    desk = Desk(registry, ledger, model_name)
    with desk.alone():
        return _rollback(desk, reason)


def _rollback(desk: Desk, reason: str) -> Promotion:
    history = desk.history()
    champion, target = desk.alias(CHAMPION), desk.alias(PREVIOUS)
    if champion is None or target is None:
        raise _refusal(
            desk,
            RegistryError(
                f"{desk.model} can't be rolled back: the alias "
                f"'{CHAMPION if champion is None else PREVIOUS}' points at no version. "
                "There must have been two promotions."
            ),
        )
    unfinished = _unfinished(history, champion, target)
    if unfinished is not None and unfinished.previous_version is not None:
        desk.point(PREVIOUS, unfinished.previous_version)
        return Promotion("rolled_back", champion, unfinished.previous_version, unfinished.reason)
    if champion == target:
        error = RegistryError(
            f"{desk.model} can't be rolled back: '{CHAMPION}' and '{PREVIOUS}' both point at "
            f"version {target}. Set '{PREVIOUS}' to the version to go back to, then repeat."
        )
        raise _refusal(desk, error)
    _check_target(desk, history, target)
    if TAG_ROLLED_BACK not in desk.registry.version(desk.model, champion).tags:
        # Before the alias moves: a crash in between must not leave the bad bytes promotable.
        desk.registry.set_tag(desk.model, champion, (TAG_ROLLED_BACK, f"{now()}: {reason}"))
    vouched = _vouching(history, target)
    entry = desk.entry("rolled_back", reason, version=target, previous=champion, about=vouched)
    desk.move_champion(target, seen=champion, entry=entry)
    # After champion: until then `previous` is the only word on where to go back to.
    desk.point(PREVIOUS, champion)
    return Promotion("rolled_back", target, champion, reason)


def _unfinished(
    history: tuple[LedgerEntry, ...], champion: str, previous: str
) -> LedgerEntry | None:
    """The line of a rollback that was interrupted before it moved `previous`, or None."""
    served = [entry for entry in history if entry.action in SERVED and entry.version]
    if not served or champion != previous:
        return None
    last = served[-1]
    return last if last.action == "rolled_back" and last.version == champion else None


def _check_target(desk: Desk, history: tuple[LedgerEntry, ...], target: str) -> None:
    tags = desk.registry.version(desk.model, target).tags
    if TAG_ROLLED_BACK in tags:
        error: RegistryError | EvidenceError = RegistryError(
            f"version {target} of {desk.model} was itself rolled back ({tags[TAG_ROLLED_BACK]}). "
            f"To return to it, delete its tag {TAG_ROLLED_BACK}, then repeat."
        )
        raise _refusal(desk, error)
    vouched = _vouching(history, target)
    if vouched is None or vouched.sha256 is None:
        error = EvidenceError(
            f"the ledger {desk.ledger.path} has no line that version {target} of {desk.model} was "
            "ever promoted, so nothing says which bytes it should hold. Roll back where the "
            "ledger is, or promote a measured file."
        )
        raise _refusal(desk, error)
    problem = veto(desk, history, target).problem
    if problem is not None:
        error = RegistryError(f"{desk.model} can't be rolled back to version {target}: {problem}.")
        raise _refusal(desk, error)
    desk.prove(target, vouched.sha256, beside=Beside.needed(vouched))


def _vouching(history: tuple[LedgerEntry, ...], target: str) -> LedgerEntry | None:
    """The last line that says that a version served."""
    lines = [e for e in history if e.version == target and e.action in SERVED]
    return lines[-1] if lines else None


def _refusal(desk: Desk, error: RegistryError | EvidenceError) -> RegistryError | EvidenceError:
    desk.write("refused", str(error))
    return error
