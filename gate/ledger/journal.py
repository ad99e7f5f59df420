"""The journal: what is about to happen to `champion`, kept until the ledger tells of it.

A move is two writes in two places, the registry's alias and the ledger's line. The journal makes
them one: it is written before the first and removed after the second. Whoever holds the promotion
lock next finishes what a crash left: exactly one line for a move that happened, and one that says
so for a move that did not.

Whoever may write the database can put a signed note back. So it holds where the ledger ended when
it was written: it counts in that ledger alone, and until that tells of a later move, or of its end.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from gate.errors import EvidenceError, Untrusted, first_line
from gate.ledger.entry import Action, LedgerEntry, plain
from gate.ledger.history import MOVING
from gate.ledger.ledger import Ledger
from gate.ledger.notes import Notes
from gate.signing.trust import time_of
from gate.storage.digest import Digest
from gate.storage.record import Record, Sha256, added_field

_AGAINST: tuple[Action, ...] = ("rejected", "refused", "violation")

PREFIX = "move "
"""Before the names of its notes."""


class Move(Record):
    """A move of `champion` that was begun."""

    operation: str
    seen: str | None
    """The version that it pointed at."""
    target: str | None
    """Where it goes; None: nowhere."""
    entry: LedgerEntry
    """The line that tells of it."""
    previous: str | None = added_field(None)
    """Where the alias `previous` goes afterwards; None: it stays."""
    lines: int | None = added_field(None)
    """How many the ledger had when this was written; None: an older version wrote it."""
    head: Sha256 | None = added_field(None)
    """Digest of the last of them; None where there was none."""


class Journal:
    """The move of one model that is under way, in a note beside the ledger.

    All methods raise StateUnavailable; those that write also PromotionConflict where the promotion
    lock was lost that the ledger held: then the move is another's.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        model: str,
        registry: str,
        others: frozenset[str] = frozenset(),
    ) -> None:
        """`others`: further addresses of the registry, under which the model may have moved."""
        self._ledger = ledger
        self._notes = Notes(ledger)
        self._model, self._registries = model, others | {registry}
        self.name = name_of(model=model, registry=registry)
        self.place = f"{ledger.place} ({self.name})"
        """What messages call it."""

    def begin(self, entry: LedgerEntry, *, previous: str | None = None) -> Move:
        """Keep the move that a line tells of before it happens: from its `previous_version` to its
        `version`; the kept line has the operation's id. Raises as `Ledger.entries`, too."""
        operation, lines = secrets.token_hex(8), len(self._ledger.entries())
        move = Move(
            operation=operation,
            seen=entry.previous_version,
            target=entry.version,
            entry=entry.model_copy(update={"operation": operation}),
            previous=previous,
            lines=lines,
            head=self._ledger.digest(lines),
        )
        self._notes.write(self.name, move.to_json(indent=1))
        return move

    def pending(self) -> Move | None:
        """The move that was begun and not ended. Raises EvidenceError where its note is damaged,
        nobody vouches for it, or it is over (`set_aside` takes it out of the way); otherwise as
        `Ledger.entries`."""
        entries = self._ledger.entries()
        try:
            text = self._notes.read(self.name)
            if text is None:
                return None
            move = Move.model_validate_json(text)
        except (ValueError, Untrusted) as error:
            raise EvidenceError(
                f"the journal {self.place} is damaged: {first_line(error)}. Nobody knows whether a "
                f"move was under way. It is renamed to {self.aside}"
            ) from error
        why = self._outdated(move, entries)
        if why is None:
            return move
        raise EvidenceError(
            f"the journal {self.place} tells of a move of {move.entry.at} from version "
            f"{move.seen or 'none'} to {move.target or 'none'}, and {why}. Somebody may have put "
            f"it back: nothing is done by it. It is renamed to {self.aside}"
        )

    def _outdated(self, move: Move, entries: tuple[LedgerEntry, ...]) -> str | None:
        """Why a note that a trusted writer signed counts no more, or not here; or None."""
        if move.lines is None:
            # Of those of an older version nobody knows more than when they were written.
            later_line = next((e for e in self._own(entries, move) if _is_later(e, move)), None)
            if later_line is None:
                return None
            return f"the ledger went on: {later_line.action} ({later_line.at})"
        if move.lines > len(entries) or self._ledger.digest(move.lines) != move.head:
            return (
                f"the ledger ended at line {move.lines} with digest {move.head or 'none'} then, "
                "which is not in this one"
            )
        since = self._own(entries[move.lines :], move)
        return next(filter(None, (self._ending(entry, move) for entry in since)), None)

    def _ending(self, entry: LedgerEntry, move: Move) -> str | None:
        """What a later line says against finishing a move; or None."""
        if entry.action in MOVING:
            return f"the ledger tells of a later one: {entry.action} ({entry.at})"
        if entry.version == move.target and entry.action in _AGAINST:
            return f"version {move.target} was kept out since: {entry.action} ({entry.at})"
        if entry.action == "conflict" and entry.operation == self.name:
            return f"this journal was set aside since ({entry.at})"
        return None

    def _own(self, entries: tuple[LedgerEntry, ...], move: Move) -> Iterator[LedgerEntry]:
        """Lines about the model, but those of the move itself."""
        return (
            entry
            for entry in entries
            if entry.model == self._model
            and plain(entry.registry) in self._registries
            and entry.operation != move.operation
        )

    def set_aside(self) -> str:
        """Give a damaged note another name, so that it is in nobody's way and can be looked at."""
        aside = self.aside
        self._notes.rename(self.name, aside)
        return aside

    @property
    def aside(self) -> str:
        """How a damaged note is called then."""
        return f"{self.name}.damaged-{Digest.of_bytes(self._notes.raw(self.name).encode()).short}"

    def end(self) -> None:
        """The ledger tells of it, or it never happened."""
        self._notes.remove(self.name)


def _is_later(entry: LedgerEntry, move: Move) -> bool:
    written, begun = time_of(entry.at), time_of(move.entry.at)
    return written is None or begun is None or written > begun


def name_of(*, model: str, registry: str) -> str:
    """What the note is called in which the move of this model is kept."""
    return PREFIX + Digest.of_bytes(f"{registry}\n{model}".encode()).short
