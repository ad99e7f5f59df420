"""One model's place in a registry together with the ledger: look, prove bytes, move, write down."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gate.digest import Digest
from gate.errors import DigestMismatch, PromotionConflict
from gate.registry.ledger import Action, Ledger, LedgerEntry
from gate.registry.lock import promotion_lock
from gate.registry.port import CHAMPION, Alias, Registry
from gate.registry.release import Release, digest_of_model


@dataclass(frozen=True)
class Desk:
    """Everything that promotion and rollback do with one registered model."""

    registry: Registry
    ledger: Ledger
    model: str

    def history(self) -> tuple[LedgerEntry, ...]:
        """The ledger's lines about this model in this registry, oldest first."""
        return tuple(
            entry
            for entry in self.ledger.entries()
            if (entry.registry, entry.model) == (self.registry.identity, self.model)
        )

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
        digests: dict[str, Digest | str | None] = {}
        if isinstance(about, Digest):
            digests = {"sha256": about}
        elif isinstance(about, LedgerEntry):
            shared = ("sha256", "policy_sha256", "evidence_sha256", "run_id")
            digests = {field: getattr(about, field) for field in shared}
        elif about is not None:
            digests = {
                "sha256": about.decision.subject_sha256,
                "policy_sha256": about.decision.policy_sha256,
                "evidence_sha256": about.decision.evidence_sha256,
                "run_id": about.run_id,
            }
        entry = LedgerEntry.model_validate(
            {
                "action": action,
                "registry": self.registry.identity,
                "model": self.model,
                "version": version,
                "previous_version": previous,
                "reason": reason,
                **digests,
            }
        )
        return self.ledger.append(entry)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the promotion lock. Raises PromotionConflict, after writing it down."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(promotion_lock(self.ledger))
            except PromotionConflict as error:
                self.write("conflict", str(error))
                raise
            yield

    def alias(self, alias: Alias) -> str | None:
        """The version that an alias points at, or None."""
        return self.registry.alias(self.model, alias)

    def prove(self, number: str, expected: Digest) -> None:
        """Download a version and hash it. Raises DigestMismatch, after writing a violation down."""
        try:
            with tempfile.TemporaryDirectory(prefix="gate-") as folder:
                path = self.registry.download(self.model, number, Path(folder))
                seen = digest_of_model(path, expected=expected)
                expected.verify(seen, what=f"version {number} of {self.model} in the registry")
        except DigestMismatch as error:
            self.write("violation", str(error), version=number, about=expected)
            raise

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

    def move_champion(self, number: str, *, seen: str | None) -> None:
        """Move `champion` from `seen` to a version, and read it back.

        A registry without compare-and-swap leaves a gap between the look and the move; the look
        afterwards sees most of what slips through it.
        """
        self.expect(CHAMPION, seen)
        self.point(CHAMPION, number)
