"""Rollback: `champion` goes back to the version of `previous`, if the ledger vouches for it.

Where somebody moved `champion` by hand, `previous` did not follow: then it goes back to what served
before that. Where he had pointed it at the version of `previous` itself, he rolled back by hand:
what serves stays, and is written down.
"""

from __future__ import annotations

import contextlib
from typing import NoReturn

from gate.errors import EvidenceError, GateError, RegistryError, ResourceGone
from gate.ledger.entry import LedgerEntry, now
from gate.ledger.history import History
from gate.ledger.ledger import Ledger
from gate.registry.champion import alone, move
from gate.registry.may_serve import veto
from gate.registry.page.reviewer import ReviewRule
from gate.registry.page.version_page import refresh
from gate.registry.port import CHAMPION, PREVIOUS, Registry, Tag
from gate.registry.proof import ExpectedFiles
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Promotion


def rollback(
    registry: Registry,
    model_name: str,
    *,
    ledger: Ledger,
    reason: str,
    reviews: ReviewRule | None = None,
) -> Promotion:
    """Point `champion` at the version of `previous`, and `previous` at the old champion. `reviews`:
    by which tag reviewers say no; None: by the gate's own.

    The target's bytes are downloaded and must have the digest that the ledger recorded when they
    were promoted. The line in the ledger keeps the old champion from serving, with or without a
    tag; its tag `gate.rolled_back` keeps its bytes from being handed in again until it is deleted.

    A move by hand counts, whether the guard has accepted it yet or not: what served before it is
    gone back to. One to the version of `previous` was itself a rollback, which is written down.

    Raises RegistryError where there is nothing to go back to, EvidenceError without a line in the
    ledger, DigestMismatch on other bytes, PromotionConflict where another promotion is under way.
    An interrupted rollback is finished by calling again.
    """
    model = RegisteredModel(registry, ledger, model_name, reviews=reviews or ReviewRule())
    with alone(model) as finished:
        if finished is not None and finished.action == "rolled_back":
            return _resumed(model, finished)
        return _rollback(model, reason)


def _rollback(model: RegisteredModel, reason: str) -> Promotion:
    history = model.history()
    champion, previous = model.alias(CHAMPION), model.alias(PREVIOUS)
    if champion is None:
        _refuse(model, _nothing_serves(model, history))
    last = history.last_move
    rolled_back = last is not None and (last.action, last.version) == ("rolled_back", champion)
    if champion == previous and last is not None and rolled_back:
        return _resumed(model, last)
    left = _left_by_hand(history, champion)
    if left is not None and champion == previous and history.served_before(champion, left):
        return _rolled_back_by_hand(model, left, champion=champion, reason=reason)
    target = _target(model, history, champion=champion, preferred=(left, previous))
    if target is None:
        _refuse(
            model,
            f"{model.name} can't be rolled back: '{CHAMPION}' points at version {champion}, "
            f"'{PREVIOUS}' at {previous or 'none'}, and the ledger knows no other version that "
            "served and may serve again. There must have been two promotions.",
        )
    vouched = _checked(model, target, history)
    _mark(model, champion, reason)
    if champion != history.serving:
        reason = f"{reason} ({_by_hand(history, champion)})"
    entry = model.entry("rolled_back", reason, version=target, previous=champion, about=vouched)
    return _outcome(move(model, entry))


def _left_by_hand(history: History, champion: str) -> str | None:
    """What served before somebody pointed `champion` elsewhere by hand; None: nobody did."""
    last = history.last_move
    if last is None:
        return None
    if last.version != champion:
        return last.version
    # The gate's own moves have the id of an operation; what the guard accepted has none.
    accepted = last.action == "promoted" and last.operation is None
    return last.previous_version if accepted else None


def _target(
    model: RegisteredModel, history: History, *, champion: str, preferred: tuple[str | None, ...]
) -> str | None:
    """Where to go back to: the first of these, if it may serve; else what `previous` says, whose
    trouble is told; without that, what served last by the ledger and may serve."""
    left, previous = preferred
    if left not in (None, champion) and _may_serve(model, left, history):
        return left
    if previous not in (None, champion):
        return previous
    others = (version for version in history.served if version != champion)
    return next((version for version in others if _may_serve(model, version, history)), None)


def _may_serve(model: RegisteredModel, version: str | None, history: History) -> bool:
    try:
        return version is not None and veto(model, version, history=history).problem is None
    except ResourceGone:
        return False


def _rolled_back_by_hand(
    model: RegisteredModel, left: str, *, champion: str, reason: str
) -> Promotion:
    history = model.history()
    vouched = _checked(model, champion, history)
    why = f"{reason} ('{CHAMPION}' had been pointed back at version {champion} by hand)"
    with contextlib.suppress(ResourceGone):
        _mark(model, left, reason)
    line = model.write("rolled_back", why, version=champion, previous=left, about=vouched)
    with contextlib.suppress(ResourceGone):
        model.registry.version(model.name, left)
        model.point(PREVIOUS, left)
    refresh(model, (champion, left))
    return _outcome(line)


def _mark(model: RegisteredModel, version: str, reason: str) -> None:
    """Before the alias moves: a crash in between must not leave the bad bytes promotable."""
    if Tag.ROLLED_BACK not in model.registry.version(model.name, version).tags:
        note = f"{now()}: {reason}"
        model.registry.set_tag(model.name, version, key=Tag.ROLLED_BACK, value=note)


def _by_hand(history: History, champion: str) -> str:
    return (
        f"'{CHAMPION}' had been pointed at version {champion} by hand; by the ledger version "
        f"{history.serving or 'none'} served"
    )


def _nothing_serves(model: RegisteredModel, history: History) -> str:
    text = f"{model.name} can't be rolled back: the alias '{CHAMPION}' points at no version. "
    if history.serving is None:
        return f"{text}There must have been two promotions."
    return (
        f"{text}Somebody took it away: by the ledger version {history.serving} served. Point "
        f"'{CHAMPION}' at that or at another version that passed, then repeat."
    )


def _resumed(model: RegisteredModel, line: LedgerEntry) -> Promotion:
    """The rollback of this line was interrupted. Where an older version of the gate began it, or
    the registry refused, `previous` still has to follow."""
    if line.previous_version is not None:
        model.point(PREVIOUS, line.previous_version)
    refresh(model, (line.version, line.previous_version))
    return _outcome(line)


def _outcome(line: LedgerEntry) -> Promotion:
    return Promotion("rolled_back", line.version, line.previous_version, line.reason)


def _checked(model: RegisteredModel, target: str, history: History) -> LedgerEntry:
    """The line that vouches for the version to go back to, with proven bytes."""
    line = history.rollback_of(target)
    if line is not None and Tag.ROLLED_BACK in model.registry.version(model.name, target).tags:
        _refuse(
            model,
            f"version {target} of {model.name} was itself rolled back ({line.at}: {line.reason}). "
            f"To return to it, delete its tag {Tag.ROLLED_BACK}, then repeat.",
        )
    if line is not None:
        history = history.without(line)
    vouched = history.vouching_for(target) if history.was_served(target) else None
    if vouched is None:
        _refuse(
            model,
            f"the ledger {model.ledger.place} has no line that version {target} of {model.name} "
            "was ever promoted, so nothing says which bytes it should hold. Roll back where the "
            "ledger is, or promote a measured file.",
            error=EvidenceError,
        )
    problem = veto(model, target, history=history).problem
    if problem is not None:
        _refuse(model, f"{model.name} can't be rolled back to version {target}: {problem}.")
    model.prove(target, ExpectedFiles.needed(vouched))
    return vouched


def _refuse(
    model: RegisteredModel, reason: str, *, error: type[GateError] = RegistryError
) -> NoReturn:
    model.write("refused", reason)
    raise error(reason)
