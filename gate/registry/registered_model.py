"""One model's place in a registry together with the ledger: look, prove bytes, move, write down."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gate.errors import DigestMismatch, PromotionConflict
from gate.registry.addresses import plain, same
from gate.registry.journal import Journal
from gate.registry.ledger import Action, Ledger, LedgerEntry
from gate.registry.lock import promotion_lock
from gate.registry.port import CHAMPION, Alias, Registry
from gate.registry.proof import Beside, prove
from gate.registry.release import Release
from gate.registry.twin import TwinDigests
from gate.storage.digest import Digest
from gate.storage.quota import MAX_BYTES, TooLarge, limited

PATIENCE_S = 30.0
"""How long another promotion, or the service's look, is waited for."""


@dataclass(frozen=True)
class Desk:
    """Everything that promotion and rollback do with one registered model."""

    registry: Registry
    ledger: Ledger
    model: str
    cause: str | None = None
    """What made us look, for the ledger; None: somebody called."""

    def history(self) -> tuple[LedgerEntry, ...]:
        """The ledger's lines about this model in this registry, oldest first."""
        names = self._identities
        return tuple(
            entry
            for entry in self.ledger.entries()
            if entry.model == self.model and plain(entry.registry) in names
        )

    @property
    def _identities(self) -> frozenset[str]:
        return same(self.ledger, self.registry.identity)

    def write(
        self,
        action: Action,
        reason: str,
        *,
        version: str | None = None,
        previous: str | None = None,
        about: Release | LedgerEntry | Digest | None = None,
    ) -> LedgerEntry:
        """Append a line; `about` gives the digests."""
        return self.ledger.append(
            self.entry(action, reason, version=version, previous=previous, about=about)
        )

    def entry(
        self,
        action: Action,
        reason: str,
        *,
        version: str | None = None,
        previous: str | None = None,
        about: Release | LedgerEntry | Digest | None = None,
    ) -> LedgerEntry:
        """A line that is not in the ledger yet."""
        digests: dict[str, Digest | TwinDigests | str | None] = {}
        if isinstance(about, Digest):
            digests = {"sha256": about}
        elif isinstance(about, LedgerEntry):
            shared = ("sha256", "policy_sha256", "evidence_sha256", "golden_sha256",
                      "preprocess_sha256", "twin", "run_id")  # fmt: skip
            digests = {field: getattr(about, field) for field in shared}
        elif about is not None:
            digests = {
                "sha256": about.decision.subject_sha256,
                "policy_sha256": about.decision.policy_sha256,
                "evidence_sha256": about.decision.evidence_sha256,
                "golden_sha256": about.golden_sha256,
                "preprocess_sha256": about.preprocess_sha256,
                "twin": about.twin_digests,
                "run_id": about.run_id,
            }
        return LedgerEntry.model_validate(
            {
                "action": action,
                "registry": self.registry.identity,
                "model": self.model,
                "version": version,
                "previous_version": previous,
                "reason": reason,
                "cause": self.cause,
                **digests,
            }
        )

    @contextlib.contextmanager
    def alone(self, *, quietly: bool = False) -> Iterator[None]:
        """Hold the promotion lock, and finish the move of `champion` that a crash left.

        Raises PromotionConflict where another process holds it for too long, after writing it
        down; `quietly`: without, because we come again.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(promotion_lock(self.ledger, patience_s=PATIENCE_S))
            except PromotionConflict as error:
                if not quietly:
                    self.write("conflict", str(error))
                raise
            self._finish_moves()
            yield

    def alias(self, alias: Alias) -> str | None:
        """The version that an alias points at, or None."""
        return self.registry.alias(self.model, alias)

    def prove(self, number: str, expected: Digest, *, beside: Beside | None = None) -> None:
        """Download a version and hash it, and what is to be beside it.

        Raises DigestMismatch, after writing a violation down.
        """
        with tempfile.TemporaryDirectory(prefix="gate-") as folder:
            self.download(number, expected, Path(folder), beside=beside)

    def download(
        self, number: str, expected: Digest, folder: Path, *, beside: Beside | None = None
    ) -> Path:
        """The proven file of a version with all that is beside it, in `folder`; as `prove`."""
        what = f"version {number} of {self.model} in the registry"
        try:
            path = self._fetched(number, folder, what=what)
            prove(path, expected, beside, what=what)
        except DigestMismatch as error:
            self.write("violation", str(error), version=number, about=expected)
            raise
        return path

    def _fetched(self, number: str, folder: Path, *, what: str) -> Path:
        try:
            with limited(folder, MAX_BYTES):
                return self.registry.download(self.model, number, folder)
        except TooLarge as error:
            raise DigestMismatch(f"{what}: {error}. It was exchanged: promote it anew.") from error

    def point(self, alias: Alias, number: str) -> None:
        """Move an alias and read it back; one that is there already is left alone.

        (Setting it again would fire an event.) Raises PromotionConflict.
        """
        if self.alias(alias) != number:
            self.registry.set_alias(self.model, alias, number)
            self.expect(alias, number)

    def expect(self, alias: Alias, number: str | None) -> None:
        """Raise PromotionConflict, after writing it down, if an alias is not where we left it."""
        seen = self.alias(alias)
        if seen == number:
            return
        reason = (
            f"the alias '{alias}' of {self.model} points at version {seen or 'none'}, this "
            f"promotion left it at {number or 'none'}: another host moved it in the meantime. "
            f"Look at the registry; if '{alias}' must change again, repeat."
        )
        self.write("conflict", reason, version=seen)
        raise PromotionConflict(reason)

    def move_champion(
        self, number: str | None, *, seen: str | None, entry: LedgerEntry
    ) -> LedgerEntry:
        """Move `champion` from `seen` to a version (None: take it away), read it back, and tell
        the ledger; all of it or, after a crash, as soon as the lock is held again.

        A registry without compare-and-swap leaves a gap between the look and the move; the look
        afterwards sees most of what slips through it.
        """
        self.expect(CHAMPION, seen)
        journal = Journal(self.ledger, self.model, plain(self.registry.identity))
        move = journal.begin(entry, seen=seen, target=number)
        try:
            if number is not None:
                self.point(CHAMPION, number)
            elif seen is not None:
                self.registry.delete_alias(self.model, CHAMPION)
                self.expect(CHAMPION, None)
        except PromotionConflict:  # which is written down
            journal.end()
            raise
        told = self.ledger.append(move.entry)
        journal.end()
        return told

    def _finish_moves(self) -> None:
        """Under whichever address they were begun."""
        for identity in sorted(self._identities):
            self._finish(Journal(self.ledger, self.model, identity))

    def _finish(self, journal: Journal) -> None:
        """Tell of a move that happened and was not told of; forget one that did not happen."""
        move = journal.pending()
        if move is None:
            return
        champion = self.alias(CHAMPION)
        told = any(entry.operation == move.operation for entry in self.history())
        if not told and champion == move.target:
            self.ledger.append(move.entry)
        elif not told and champion != move.seen:
            reason = (
                f"a move of '{CHAMPION}' from version {move.seen or 'none'} to "
                f"{move.target or 'none'} was interrupted, and now it points at "
                f"{champion or 'none'}: nobody knows whether the move happened"
            )
            self.write("conflict", reason, version=champion)
        journal.end()
