"""The journal: what is about to happen to `champion`, kept until the ledger tells of it.

A move is two writes in two places, the registry's alias and the ledger's line. The journal makes
them one: it is written before the first and removed after the second. Whoever holds the promotion
lock next finishes what a crash left: exactly one line for a move that happened, none for one that
did not.
"""

from __future__ import annotations

import secrets

from gate.errors import StorageError
from gate.registry.ledger import Ledger, LedgerEntry
from gate.storage.atomic import write_text
from gate.storage.digest import Digest
from gate.storage.record import Record, later


class Move(Record):
    """A move of `champion` that was begun."""

    operation: str
    seen: str | None
    """The version that it pointed at."""
    target: str | None
    """Where it goes; None: nowhere."""
    entry: LedgerEntry
    """The line that tells of it."""
    previous: str | None = later(None)
    """Where the alias `previous` goes afterwards; None: it stays."""


class Journal:
    """The move of one model that is under way, in a file beside the ledger."""

    def __init__(self, ledger: Ledger, *, model: str, registry: str) -> None:
        name = Digest.of_bytes(f"{registry}\n{model}".encode()).short
        self.path = ledger.path.with_name(f"{ledger.path.name}.{name}.move.json")

    def begin(self, entry: LedgerEntry, *, previous: str | None = None) -> Move:
        """Keep the move that a line tells of before it happens: from its `previous_version` to its
        `version`; the kept line has the operation's id. Raises StorageError."""
        operation = secrets.token_hex(8)
        move = Move(
            operation=operation,
            seen=entry.previous_version,
            target=entry.version,
            entry=entry.model_copy(update={"operation": operation}),
            previous=previous,
        )
        write_text(self.path, move.to_json(indent=1) + "\n")
        return move

    def pending(self) -> Move | None:
        """The move that was begun and not ended. Raises EvidenceError, StorageError."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"cannot read {self.path}: {error.strerror}. Fix its permissions."
            ) from error
        return Move.from_json(text)

    def end(self) -> None:
        """The ledger tells of it, or it never happened."""
        self.path.unlink(missing_ok=True)
