"""Rollback: `champion` goes back to the version of `previous`, if the ledger vouches for it."""

from __future__ import annotations

from typing import NoReturn

from gate.errors import EvidenceError, GateError, RegistryError
from gate.registry.champion import alone, move
from gate.registry.history import History
from gate.registry.ledger import Ledger, LedgerEntry, now
from gate.registry.may_serve import veto
from gate.registry.port import CHAMPION, PREVIOUS, Registry, Tag
from gate.registry.proof import ExpectedFiles
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Promotion


def rollback(registry: Registry, model_name: str, *, ledger: Ledger, reason: str) -> Promotion:
    """Point `champion` at the version of `previous`, and `previous` at the old champion.

    The target's bytes are downloaded and must have the digest that the ledger recorded when they
    were promoted. The line in the ledger keeps the old champion from serving, with or without a
    tag; its tag `gate.rolled_back` keeps its bytes from being handed in again until it is deleted.

    Raises RegistryError where there is nothing to go back to, EvidenceError without a line in the
    ledger, DigestMismatch on other bytes, PromotionConflict where another promotion is under way.
    An interrupted rollback is finished by calling again.
    """
    model = RegisteredModel(registry, ledger, model_name)
    with alone(model) as finished:
        if finished is not None and finished.action == "rolled_back":
            return _resumed(model, finished)
        return _rollback(model, reason)


def _rollback(model: RegisteredModel, reason: str) -> Promotion:
    history = model.history()
    champion, target = model.alias(CHAMPION), model.alias(PREVIOUS)
    if champion is None or target is None:
        missing = CHAMPION if champion is None else PREVIOUS
        _refuse(
            model,
            f"{model.name} can't be rolled back: the alias '{missing}' points at no version. "
            "There must have been two promotions.",
        )
    if champion == target:
        change = history.change
        if change is not None and (change.action, change.version) == ("rolled_back", champion):
            return _resumed(model, change)
        _refuse(
            model,
            f"{model.name} can't be rolled back: '{CHAMPION}' and '{PREVIOUS}' both point at "
            f"version {target}. Set '{PREVIOUS}' to the version to go back to, then repeat.",
        )
    vouched = _checked(model, target, history)
    if Tag.ROLLED_BACK not in model.registry.version(model.name, champion).tags:
        # Before the alias moves: a crash in between must not leave the bad bytes promotable.
        note = f"{now()}: {reason}"
        model.registry.set_tag(model.name, champion, key=Tag.ROLLED_BACK, value=note)
    entry = model.entry("rolled_back", reason, version=target, previous=champion, about=vouched)
    return _outcome(move(model, entry))


def _resumed(model: RegisteredModel, line: LedgerEntry) -> Promotion:
    """The rollback of this line was interrupted. Where an older version of the gate began it, or
    the registry refused, `previous` still has to follow."""
    if line.previous_version is not None:
        model.point(PREVIOUS, line.previous_version)
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
            f"the ledger {model.ledger.path} has no line that version {target} of {model.name} was "
            "ever promoted, so nothing says which bytes it should hold. Roll back where the "
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
