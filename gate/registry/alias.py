"""Move the alias `champion`. No other module does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gate.errors import EvidenceError, PromotionConflict, RegistryError, RegistryUnavailable
from gate.ledger.entry import LedgerEntry, plain
from gate.ledger.history import ModelHistory
from gate.ledger.journal import Journal, Move
from gate.ledger.ledger import promotion_lock
from gate.ledger.lock import PATIENCE_S
from gate.registry.eligibility import veto
from gate.registry.interface import CHAMPION, PREVIOUS
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_page import write_status

# A move is an alias in the registry and a line in the ledger; the journal makes them one. A crash
# at any point leaves the old champion, or a move that whoever is alone next finishes exactly once.


@contextlib.contextmanager
def model_lock(model: RegisteredModel, *, quietly: bool = False) -> Iterator[LedgerEntry | None]:
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
        names = model.identities()
        journals = [
            Journal(model.ledger, model=model.name, registry=name, others=names)
            for name in sorted(names)
        ]
        finished = [line for journal in journals if (line := _finish(model, journal)) is not None]
        yield finished[-1] if finished else None


def move_alias(model: RegisteredModel, entry: LedgerEntry) -> LedgerEntry:
    """Move `champion` from the line's `previous_version` to its `version` (None: take it away),
    `previous` with it, and write the line; gives it as it is in the ledger. The caller is alone.

    `previous` goes where a rollback may go: to the old champion, if that may serve again. After a
    rollback it is the version that was come from, whatever is said of it. An alias that is where
    it should be is left alone, so that no event tells of nothing. The pages of both versions follow
    at last; that they can't be written undoes nothing.

    A registry without compare-and-swap leaves a gap between the look and the move; the look
    afterwards sees most of what slips through it. Raises PromotionConflict where `champion` is not
    where it was, or not where it was put, or the lock was lost: then what was moved without it is
    taken back; the other RegistryErrors and StorageError as they come.
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
            model.point(CHAMPION, entry.version, operation=begun.operation)
        elif entry.previous_version is not None:
            model.registry.delete_alias(model.name, CHAMPION)
            model.expect(CHAMPION, None, operation=begun.operation)
    except PromotionConflict:  # which is written down
        journal.end()
        raise
    try:
        line = model.ledger.append(begun.entry)
    except PromotionConflict:  # whoever has the lock now went on without this move
        _take_back(model, begun)
        raise
    _end(model, journal, begun)
    write_status(model, (line.version, line.previous_version))
    return line


def _take_back(model: RegisteredModel, begun: Move) -> None:
    """Undo a move that came late: this process was stopped for longer than its lease just before
    it, and the registry has nothing that would have refused it. Else the guard would take it for
    somebody's own will."""
    with promotion_lock(model.ledger, patience_s=PATIENCE_S):
        history, target = model.history(), begun.target
        if history.has_operation(begun.operation) or model.alias(CHAMPION) != target:
            return
        serving = history.serving
        if serving is None or serving == target:
            return
        reason = (
            f"a move of '{CHAMPION}' to version {target or 'none'} came when another process had "
            f"taken the lock and gone on; it goes back to version {serving}"
        )
        model.write("conflict", reason, version=target)
        model.point(CHAMPION, serving)


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


def _served_before(
    model: RegisteredModel, history: ModelHistory, *, but: set[str | None]
) -> str | None:
    """A version to roll back to; a rollback proves its bytes."""
    for version in history.served:
        with contextlib.suppress(RegistryError):
            if version not in but and veto(model, version, history=history).problem is None:
                return version
    return None


def _finish(model: RegisteredModel, journal: Journal) -> LedgerEntry | None:
    """Do what is left of a move that happened, and give its line; drop one that did not happen.
    None: nothing was left to do."""
    history = model.history()
    try:
        begun = journal.pending()
    except EvidenceError as error:
        champion = model.alias(CHAMPION)
        # At worst the move happened and has no line: then `champion` is judged as if somebody had
        # pointed it there. Whatever was in this journal until now is over.
        reason = f"{error}; '{CHAMPION}' points at {champion or 'none'} now"
        model.write("conflict", reason, version=champion, operation=journal.name)
        journal.set_aside()
        return None
    if begun is None:
        return None
    champion = model.alias(CHAMPION)
    written = history.has_operation(begun.operation)
    if champion != begun.target or history.dropped(begun.operation):
        if not written and not history.dropped(begun.operation):
            # Else whoever puts its note back has it finished at a time of his own.
            reason = _dropped(begun, champion)
            model.write("conflict", reason, version=champion, operation=begun.operation)
        journal.end()
        return None
    whole = written and begun.previous in (None, model.alias(PREVIOUS))
    if not written:
        model.ledger.append(begun.entry)
    _end(model, journal, begun)
    write_status(model, (begun.target, begun.seen))
    return None if whole else begun.entry


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


def _dropped(begun: Move, champion: str | None) -> str:
    move = f"a move of '{CHAMPION}' from version {begun.seen or 'none'} to {begun.target or 'none'}"
    if champion == begun.seen:
        return f"{move} was interrupted before it happened, and is dropped"
    return (
        f"{move} was interrupted, and now it points at {champion or 'none'}: nobody knows whether "
        "the move happened. It is dropped"
    )
