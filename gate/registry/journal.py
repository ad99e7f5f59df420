"""The journal: what is about to happen to `champion`, kept until the ledger tells of it.

A move is two writes in two places, the registry's alias and the ledger's line. The journal makes
them one: it is written before the first and removed after the second. Whoever holds the promotion
lock next finishes what a crash left: exactly one line for a move that happened, none for one that
did not.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from gate.errors import EvidenceError, StorageError, first_line
from gate.registry.ledger import Ledger, LedgerEntry
from gate.storage.atomic import sync, write_text
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
        """The move that was begun and not ended. Raises EvidenceError where the file is damaged
        (`set_aside` takes it out of the way), StorageError where it can't be read."""
        data = self._read()
        if data is None:
            return None
        try:
            return Move.model_validate_json(data)
        except ValueError as error:
            raise EvidenceError(
                f"the journal {self.path} is damaged: {first_line(error)}. Nobody knows whether a "
                f"move was under way. It is moved to {self.aside}"
            ) from error

    def set_aside(self) -> Path:
        """Give a damaged file another name, so that it is in nobody's way and can be looked at.
        Raises StorageError."""
        aside = self.aside
        try:
            self.path.replace(aside)
            sync(aside.parent)
        except OSError as error:
            raise StorageError(
                f"cannot rename {self.path} to {aside}: {error.strerror}. Fix its permissions."
            ) from error
        return aside

    @property
    def aside(self) -> Path:
        """Where a damaged file goes. Raises StorageError."""
        digest = Digest.of_bytes(self._read() or b"").short
        return self.path.with_name(f"{self.path.name}.damaged-{digest}")

    def _read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(
                f"cannot read the journal {self.path}: {error.strerror}. Fix its permissions, or "
                "move it away."
            ) from error

    def end(self) -> None:
        """The ledger tells of it, or it never happened."""
        self.path.unlink(missing_ok=True)
