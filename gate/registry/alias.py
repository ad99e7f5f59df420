"""Move the alias `champion`. No other module does."""

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
from gate.ledger.lock import PATIENCE_S, FencingToken
from gate.registry.eligibility import veto
from gate.registry.interface import CHAMPION, PREVIOUS
from gate.registry.registered_model import RegisteredModel
from gate.registry.version_page import write_status


# The ledger says which version serves, and the alias follows it. One transaction writes the entry
# and the id of the pending move; then the alias moves; then the id is cleared. A crash before the
# transaction changes nothing. After it, the next owner of the lock finishes the move, once.
@contextlib.contextmanager
def model_lock(model: RegisteredModel, *, quietly: bool = False) -> Iterator[LedgerEntry | None]:
    """Hold the promotion lock, and finish the pending move of this model; yield its entry.

    Raises PromotionConflict where another process holds it for too long, after recording that in
    the ledger; `quietly`: without a record, because the caller retries. Raises the RegistryErrors,
    EvidenceError and StorageError where the move can't be finished now.
    """
    with contextlib.ExitStack() as stack:
        try:
            token = stack.enter_context(promotion_lock(model.ledger, patience_s=PATIENCE_S))
        except PromotionConflict as error:
            if not quietly:
                model.write("conflict", str(error))
            raise
        yield _finish_pending(model, token)


def move_alias(model: RegisteredModel, entry: LedgerEntry) -> LedgerEntry:
    """Move `champion` and `previous` as an entry says, and return the entry in the ledger.

    `champion` moves from the entry's `previous_version` to its `version` (None: delete the alias).
    Takes the `model_lock`, unless the caller holds it.

    `previous` moves to the version that a rollback may restore: the old champion, if that may serve
    again. After a rollback it is always the version that was rolled back. The pages of both
    versions are updated last; a failure there undoes nothing.

    Raises PromotionConflict where `champion` is not where it was, or the lock was lost: before the
    entry nothing was changed; after it `champion` is where the ledger says. Raises the other
    RegistryErrors and StorageError: then the next owner of the lock finishes the move.
    """
    if model.ledger.lease is None:
        with model_lock(model):
            return move_alias(model, entry)
    token = model.ledger.lease
    previous = _previous(model, entry)
    model.expect(CHAMPION, entry.previous_version)
    entry = entry.model_copy(update={"operation": secrets.token_hex(8)})
    entry = model.ledger.append(entry)
    assert entry.operation is not None
    try:
        _follow(model, entry, previous)
    except PromotionConflict:  # another host moved an alias meanwhile, and that is written down
        token.clear_pending(entry.operation)
        raise
    except (RegistryError, StorageError) as error:
        error.add_note(_STANDS)
        raise
    try:
        token.clear_pending(entry.operation)
    except PromotionConflict:
        # This process was stopped for longer than the lease, and its move of the alias may have
        # come after that of the next owner. The ledger says where it belongs, under the lock.
        with promotion_lock(model.ledger, patience_s=PATIENCE_S):
            serving = model.history().serving
            _point_champion(model, serving)
        if serving != entry.version:
            raise
    write_status(model, (entry.version, entry.previous_version))
    return entry


_STANDS = (
    "The ledger has this move already: the next command or the service finishes it. "
    "gate history shows it."
)


def _finish_pending(model: RegisteredModel, token: FencingToken) -> LedgerEntry | None:
    """Have `champion` follow a move that a crash left, and give its entry; None: there is none.

    Whoever may write the database may write any id there. So only the model's last signed move is
    finished, and only while `champion` is at its old or its new version. A version that was
    deployed after its move had moved: who moved `champion` back since did so by hand.
    """
    finished, pending = None, token.pending()
    entries = {e.operation: e for e in model.ledger.entries() if e.action != "conflict"}
    for operation in pending:
        entry = entries.get(operation)
        names = model.identities()
        if entry and (entry.model != model.name or plain(entry.registry) not in names):
            continue  # its next owner finishes it
        history = model.history()
        last = history.last_move
        is_last = entry is not None and last is not None and last.operation == operation
        if entry is not None and is_last and not _was_deployed(history, entry):
            try:
                if model.alias(CHAMPION) in (entry.version, entry.previous_version):
                    _follow(model, entry, _previous(model, entry))
                    finished = entry
            except (RegistryUnavailable, RegistryDenied):  # the next owner tries again
                raise
            except RegistryError:  # tried once, so as not to delay other commands
                token.clear_pending(operation)
                raise
        token.clear_pending(operation)
        if finished is not None:
            write_status(model, (finished.version, finished.previous_version))
    return finished


def _was_deployed(history: ModelHistory, move: LedgerEntry) -> bool:
    later = itertools.dropwhile(lambda e: e.operation != move.operation, history.entries)
    return any(e.action == "deployed" and e.version == move.version for e in later)


def _follow(model: RegisteredModel, entry: LedgerEntry, previous: str | None) -> None:
    """Move both aliases to where an entry says; `champion` last, also where another client moves
    `previous` meanwhile. `previous`: None leaves that."""
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


def _previous(model: RegisteredModel, entry: LedgerEntry) -> str | None:
    """Return the version to which a move sets `previous`; None if it stays as it is.

    Also valid for a move that was only partly completed.
    """
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
