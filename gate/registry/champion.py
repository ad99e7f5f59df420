"""Champion: the one place where what serves is moved, by one hand at a time.

A move is an alias in the registry and a line in the ledger; the journal makes them one. A crash at
any point leaves the old champion, or a move that whoever is alone next finishes exactly once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from gate.errors import EvidenceError, PromotionConflict, RegistryError, RegistryUnavailable
from gate.registry.addresses import plain
from gate.registry.history import History
from gate.registry.journal import Journal, Move
from gate.registry.ledger import Ledger, LedgerEntry, locks, now
from gate.registry.may_serve import veto
from gate.registry.page.version_page import refresh
from gate.registry.port import CHAMPION, PREVIOUS
from gate.registry.registered_model import RegisteredModel
from gate.storage.atomic import write_text
from gate.storage.lock import private_lock

PATIENCE_S = 30.0
"""How long another promotion, or the service's look, is waited for."""
_TRIES, _PAUSE_S = 20, 0.05
"""For the name of whoever holds the lock."""


@contextlib.contextmanager
def promotion_lock(ledger: Ledger, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock beside the ledger; the operating system frees it if this process dies.

    Raises PromotionConflict where another process holds it (at once, or after `patience_s`), and
    StorageError where its folder can't be written, or is somebody else's.
    """
    path = locks(ledger.path) / "promotion.lock"
    holder = path.with_suffix(".holder")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(private_lock(path, timeout_s=patience_s))
        except Timeout as error:
            raise PromotionConflict(
                f"another promotion or rollback is under way: {_holder(holder)} holds {path}. "
                "Nothing was changed. Wait until it is done, then repeat."
            ) from error
        try:
            me = {"pid": os.getpid(), "host": socket.gethostname(), "since": now()}
            write_text(holder, json.dumps(me))
            yield
        finally:
            holder.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(model: RegisteredModel, *, quietly: bool = False) -> Iterator[LedgerEntry | None]:
    """Hold the promotion lock, and finish the move of `champion` that a crash left; gives its line.

    Raises PromotionConflict where another process holds it for too long, after writing it
    down; `quietly`: without, because we come again. Raises the RegistryErrors, EvidenceError and
    StorageError where the move can't be finished now.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(promotion_lock(model.ledger, patience_s=PATIENCE_S))
        except PromotionConflict as error:
            if not quietly:
                model.write("conflict", str(error))
            raise
        # Under whichever address it was begun.
        names = sorted(model.identities())
        journals = [Journal(model.ledger, model=model.name, registry=name) for name in names]
        finished = [line for journal in journals if (line := _finish(model, journal)) is not None]
        yield finished[-1] if finished else None


def move(model: RegisteredModel, entry: LedgerEntry) -> LedgerEntry:
    """Move `champion` from the line's `previous_version` to its `version` (None: take it away),
    `previous` with it, and write the line; gives it as it is in the ledger. The caller is alone.

    `previous` goes where a rollback may go: to the old champion, if that may serve again. After a
    rollback it is the version that was come from, whatever is said of it. An alias that is where
    it should be is left alone, so that no event tells of nothing. The pages of both versions follow
    at last; that they can't be written undoes nothing.

    A registry without compare-and-swap leaves a gap between the look and the move; the look
    afterwards sees most of what slips through it. Raises PromotionConflict where `champion` is not
    where it was, or not where it was put; the other RegistryErrors and StorageError as they come.
    """
    previous = _previous(model, entry)
    if previous is not None and entry.action == "promoted":
        model.point(PREVIOUS, previous)  # first, so that `champion` moves last
        previous = None
    model.expect(CHAMPION, entry.previous_version)
    journal = Journal(model.ledger, model=model.name, registry=plain(model.registry.identity))
    begun = journal.begin(entry, previous=previous)
    try:
        if entry.version is not None:
            model.point(CHAMPION, entry.version)
        elif entry.previous_version is not None:
            model.registry.delete_alias(model.name, CHAMPION)
            model.expect(CHAMPION, None)
    except PromotionConflict:  # which is written down
        journal.end()
        raise
    line = model.ledger.append(begun.entry)
    _end(model, journal, begun)
    refresh(model, (line.version, line.previous_version))
    return line


def _previous(model: RegisteredModel, entry: LedgerEntry) -> str | None:
    """Where `previous` goes with a move; None: it stays."""
    history, old, new = model.history(), entry.previous_version, entry.version
    if old == new:
        return None
    if entry.action == "rolled_back":
        return old
    if entry.action == "reverted":
        # To what `previous` says: then it must say something else, and never the bad version.
        follows = new is not None and model.alias(PREVIOUS) == new
        return _served_before(model, history, but={old, new}) if follows else None
    if old is None:
        return None
    return old if veto(model, old, history=history).problem is None else None


def _served_before(model: RegisteredModel, history: History, *, but: set[str | None]) -> str | None:
    """A version to roll back to; a rollback proves its bytes."""
    for version in history.served:
        with contextlib.suppress(RegistryError):
            if version not in but and veto(model, version, history=history).problem is None:
                return version
    return None


def _finish(model: RegisteredModel, journal: Journal) -> LedgerEntry | None:
    """Do what is left of a move that happened, and give its line; forget one that did not happen.
    None: nothing was left to do."""
    try:
        begun = journal.pending()
    except EvidenceError as error:
        _set_aside(model, journal, damage=str(error))
        return None
    if begun is None:
        return None
    champion = model.alias(CHAMPION)
    written = model.history().tells_of(begun.operation)
    if champion != begun.target:
        if not written and champion != begun.seen:
            model.write("conflict", _nobody_knows(begun, champion), version=champion)
        journal.end()
        return None
    whole = written and begun.previous in (None, model.alias(PREVIOUS))
    if not written:
        model.ledger.append(begun.entry)
    _end(model, journal, begun)
    refresh(model, (begun.target, begun.seen))
    return None if whole else begun.entry


def _set_aside(model: RegisteredModel, journal: Journal, *, damage: str) -> None:
    """Go on from what registry and ledger say. At worst the move happened and has no line: then
    `champion` is judged as if somebody had pointed it there."""
    champion = model.alias(CHAMPION)
    reason = f"{damage}; '{CHAMPION}' points at {champion or 'none'} now"
    model.write("conflict", reason, version=champion)
    journal.set_aside()


def _end(model: RegisteredModel, journal: Journal, begun: Move) -> None:
    """`previous` follows. Until then it was the only word on where `champion` was to go."""
    try:
        if begun.previous is not None:
            model.point(PREVIOUS, begun.previous)
    except RegistryUnavailable:  # whoever is alone next tries again
        raise
    except RegistryError:  # no more than once: nobody else shall be kept from his work
        journal.end()
        raise
    journal.end()


def _nobody_knows(begun: Move, champion: str | None) -> str:
    return (
        f"a move of '{CHAMPION}' from version {begun.seen or 'none'} to {begun.target or 'none'} "
        f"was interrupted, and now it points at {champion or 'none'}: nobody knows whether the "
        "move happened"
    )


def _holder(holder: Path) -> str:
    # The winner writes its name just after it has the lock: give it a moment.
    for _ in range(_TRIES):
        try:
            who = json.loads(holder.read_text())
            return f"process {who['pid']} on {who['host']} since {who['since']}"
        except (OSError, ValueError, KeyError):
            time.sleep(_PAUSE_S)
    return "a process that does not say its name"
