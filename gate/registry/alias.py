"""Move the alias `champion`. No other module moves it."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator

from gate.errors import (
    PromotionConflict,
    RegistryDenied,
    RegistryError,
    RegistryUnavailable,
    StorageError,
)
from gate.ledger.entry import LedgerEntry, plain
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import promotion_lock
from gate.ledger.lock import LOCK_TIMEOUT_S, FencingToken
from gate.registry.eligibility import veto
from gate.registry.interface import CHAMPION, PREVIOUS
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_page import write_status


# The ledger determines which version serves; the alias follows it. One transaction writes the entry
# and the id of the pending move; then the alias moves; then the id is cleared. A crash before the
# transaction changes nothing. After it, the next owner of the lock finishes the move, once.
@contextlib.contextmanager
def model_lock(model: RegisteredModel, *, quietly: bool = False) -> Iterator[LedgerEntry | None]:
    """Hold the promotion lock, finish a pending move of this model, and yield the move's entry.

    quietly: do not record a conflict in the ledger, because the caller retries.
    Raises PromotionConflict if another process holds the lock for too long. Raises the
    RegistryErrors, EvidenceError and StorageError if the move can't be finished now.
    """
    with contextlib.ExitStack() as stack:
        try:
            token = stack.enter_context(promotion_lock(model.ledger, timeout_s=LOCK_TIMEOUT_S))
        except PromotionConflict as error:
            if not quietly:
                model.write("conflict", str(error))
            raise
        yield _finish_pending(model, token)


def move_alias(model: RegisteredModel, entry: LedgerEntry) -> LedgerEntry:
    """Append an entry to the ledger, move `champion` and `previous`, and return the entry.

    `champion` moves from the entry's `previous_version` to its `version` (None: delete the alias).
    The function takes the `model_lock` unless the caller already holds it.

    `previous` moves to the version that a rollback may restore: the old champion, if that may serve
    again. After a rollback it is always the version that was rolled back. The pages of both
    versions are updated last; a failure there does not undo the move.

    Raises PromotionConflict if another client moved `champion` or the lock was lost. Before the
    entry is written nothing changes; afterwards `champion` matches the ledger. Raises the other
    RegistryErrors and StorageError; then the next owner of the lock finishes the move.
    """
    if model.ledger.lease is None:
        with model_lock(model):
            return move_alias(model, entry)
    token = model.ledger.lease
    previous = _new_previous(model, entry)
    model.expect(CHAMPION, entry.previous_version)
    entry = entry.model_copy(update={"operation": secrets.token_hex(8)})
    entry = model.ledger.append(entry)
    assert entry.operation is not None
    try:
        _move_aliases(model, entry, previous)
    except PromotionConflict:  # another host moved an alias, and `expect` has recorded it
        token.clear_pending(entry.operation)
        raise
    except (RegistryError, StorageError) as error:
        error.add_note(_MOVE_PENDING)
        raise
    try:
        token.clear_pending(entry.operation)
    except PromotionConflict:
        # This process was suspended for longer than its lease, so it may have moved the alias after
        # the next owner did. Take the lock again and point the alias at the ledger's version.
        with promotion_lock(model.ledger, timeout_s=LOCK_TIMEOUT_S):
            serving = model.history().serving
            _point_champion(model, serving)
        if serving != entry.version:
            raise
    write_status(model, (entry.version, entry.previous_version))
    return entry


_MOVE_PENDING = (
    "The ledger already contains this move. The next command or the service finishes it. "
    "To see the move, run gate history."
)


def _finish_pending(model: RegisteredModel, token: FencingToken) -> LedgerEntry | None:
    """Finish a move of `champion` that a crash interrupted, and return its entry, or None.

    Every user with write access to the database can write any operation ID there. Therefore only
    the model's last signed move is finished, and only while `champion` points at its old or new
    version. If the new version was deployed, the move was complete: if `champion` points at the old
    version again, a user moved it by hand.
    """
    finished, pending = None, token.pending()
    entries = {e.operation: e for e in model.ledger.entries() if e.action != "conflict"}
    for operation in pending:
        entry = entries.get(operation)
        names = model.identities()
        if entry and (entry.model != model.name or plain(entry.registry) not in names):
            continue  # the next owner of that model's lock finishes it
        history = model.history()
        last = history.last_move
        is_last = entry is not None and last is not None and last.operation == operation
        if entry is not None and is_last and not _was_deployed(history, entry):
            try:
                if model.alias(CHAMPION) in (entry.version, entry.previous_version):
                    _move_aliases(model, entry, _new_previous(model, entry))
                    finished = entry
            except (RegistryUnavailable, RegistryDenied):  # the next owner tries again
                raise
            except RegistryError:  # no retry, which would delay other commands
                token.clear_pending(operation)
                raise
        token.clear_pending(operation)
        if finished is not None:
            write_status(model, (finished.version, finished.previous_version))
    return finished


def _was_deployed(history: ModelHistory, move: LedgerEntry) -> bool:
    later = itertools.dropwhile(lambda e: e.operation != move.operation, history.entries)
    return any(e.action == "deployed" and e.version == move.version for e in later)


def _move_aliases(model: RegisteredModel, entry: LedgerEntry, previous: str | None) -> None:
    """Move `previous` (unless None) and then `champion`, even if another client moves `previous`
    at the same time."""
    try:
        if previous is not None:
            model.point(PREVIOUS, previous)
    except PromotionConflict:
        _point_champion(model, entry.version)
        raise
    _point_champion(model, entry.version)


def _point_champion(model: RegisteredModel, version: str | None) -> None:
    if version is not None:
        model.point(CHAMPION, version)
    elif model.alias(CHAMPION) is not None:
        model.registry.delete_alias(model.name, CHAMPION)
        model.expect(CHAMPION, None)


def _new_previous(model: RegisteredModel, entry: LedgerEntry) -> str | None:
    """Return the version to which a move sets `previous`; None if `previous` does not change.

    The result is also valid for a move that was only partly completed.
    """
    history, old, new = model.history(), entry.previous_version, entry.version
    if old == new:
        return None
    if entry.action == "rolled_back":
        return old
    if entry.action == "reverted":
        # If `champion` goes to the version of `previous`, `previous` must move to another version,
        # but never to the bad one.
        is_restored = new is not None and model.alias(PREVIOUS) == new
        return _rollback_target(model, history, exclude={old, new}) if is_restored else None
    if old is None:
        return None
    return old if veto(model, old, history=history).problem is None else None


def _rollback_target(
    model: RegisteredModel, history: ModelHistory, *, exclude: set[str | None]
) -> str | None:
    """Return a version to roll back to, or None. The rollback itself verifies its bytes."""
    for version in history.served:
        with contextlib.suppress(RegistryError):
            if version not in exclude and veto(model, version, history=history).problem is None:
                return version
    return None
