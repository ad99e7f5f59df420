"""One model's place in a registry together with the ledger: look, prove bytes, write down."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

from gate.bounded.limits import ChildLimits
from gate.errors import DigestMismatch, PromotionConflict, ResourceGone, StorageError
from gate.registry.addresses import plain, same
from gate.registry.history import History
from gate.registry.ledger import Action, Ledger, LedgerEntry
from gate.registry.port import Alias, Registry
from gate.registry.proof import ExpectedFiles, prove
from gate.registry.release import Release
from gate.registry.twin import TwinDigests
from gate.storage.digest import Digest
from gate.storage.quota import MAX_BYTES, TooLarge, limited

_DIGESTS = (
    "sha256", "policy_sha256", "evidence_sha256", "golden_sha256", "preprocess_sha256", "twin",
    "run_id",
)  # fmt: skip
"""Fields that one line takes over from another about the same version."""


class Details(TypedDict, total=False):
    """What a line may say besides action and reason."""

    version: str | None
    previous: str | None
    about: Release | LedgerEntry | Digest | None
    """Gives the digests."""


@dataclass(frozen=True)
class RegisteredModel:
    """Everything that promotion, rollback and the service look at of one registered model."""

    registry: Registry
    ledger: Ledger
    name: str
    cause: str | None = None
    """What made us look, for the ledger; None: somebody called."""
    limits: ChildLimits | None = field(default_factory=ChildLimits.of_service)
    """Within which a child process reads and runs the files of its versions; None: they are our
    own, and are read and run in this process."""

    def history(self) -> History:
        """What the ledger says of this model in this registry now.

        Raises EvidenceError where its chain is broken, StorageError.
        """
        names = self.identities()
        return History(
            tuple(
                entry
                for entry in self.ledger.entries()
                if entry.model == self.name and plain(entry.registry) in names
            )
        )

    def identities(self) -> frozenset[str]:
        """All addresses of this registry. Raises EvidenceError, StorageError."""
        return same(self.ledger, self.registry.identity)

    def write(self, action: Action, reason: str, **details: Unpack[Details]) -> LedgerEntry:
        """Append a line. Raises EvidenceError, StorageError."""
        return self.ledger.append(self.entry(action, reason, **details))

    def entry(self, action: Action, reason: str, **details: Unpack[Details]) -> LedgerEntry:
        """A line that is not in the ledger yet."""
        return LedgerEntry.model_validate(
            {
                "action": action,
                "registry": self.registry.identity,
                "model": self.name,
                "version": details.get("version"),
                "previous_version": details.get("previous"),
                "reason": reason,
                "cause": self.cause,
                **_digests(details.get("about")),
            }
        )

    def alias(self, alias: Alias) -> str | None:
        """The version that an alias points at, or None. Raises the RegistryErrors."""
        return self.registry.alias(self.name, alias)

    def tags(self, number: str) -> Mapping[str, str]:
        """A version's tags; none where it is gone. Raises the other RegistryErrors."""
        try:
            return self.registry.version(self.name, number).tags
        except ResourceGone:
            return {}

    def prove(self, number: str, expected: ExpectedFiles) -> None:
        """Download a version and hash it, and what is to be beside it.

        Raises DigestMismatch, after writing a violation down; the RegistryErrors, StorageError.
        """
        with temporary_folder() as folder:
            self.download(number, expected, into=folder)

    def download(self, number: str, expected: ExpectedFiles, *, into: Path) -> Path:
        """The proven file of a version with all that is beside it, in a folder; as `prove`."""
        what = f"version {number} of {self.name} in the registry"
        try:
            path = self._fetched(number, into, what=what)
            prove(path, expected, what=what)
        except DigestMismatch as error:
            self.write("violation", str(error), version=number, about=expected.sha256)
            raise
        return path

    def point(self, alias: Alias, number: str) -> None:
        """Move an alias and read it back; one that is there already is left alone.

        (Setting it again would fire an event.) Raises PromotionConflict, the RegistryErrors.
        """
        if self.alias(alias) != number:
            self.registry.set_alias(self.name, alias, number)
            self.expect(alias, number)

    def expect(self, alias: Alias, number: str | None) -> None:
        """Raise PromotionConflict, after writing it down, if an alias is not where we left it."""
        version = self.alias(alias)
        if version == number:
            return
        reason = (
            f"the alias '{alias}' of {self.name} points at version {version or 'none'}, this "
            f"promotion left it at {number or 'none'}: another host moved it in the meantime. "
            f"Look at the registry; if '{alias}' must change again, repeat."
        )
        self.write("conflict", reason, version=version)
        raise PromotionConflict(reason)

    def _fetched(self, number: str, folder: Path, *, what: str) -> Path:
        try:
            with limited(folder, MAX_BYTES):
                return self.registry.download(self.name, number, folder)
        except TooLarge as error:
            raise DigestMismatch(f"{what}: {error}. It was exchanged: promote it anew.") from error


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """An empty folder that is gone afterwards. Raises StorageError where none can be made."""
    try:
        made = tempfile.TemporaryDirectory(prefix="gate-")
    except OSError as error:
        raise StorageError(
            f"cannot make a temporary folder: {error.strerror or error}. Free space or fix "
            "permissions there, or name another place with TMPDIR."
        ) from error
    with made as folder:
        yield Path(folder)


def _digests(
    about: Release | LedgerEntry | Digest | None,
) -> dict[str, Digest | TwinDigests | str | None]:
    if about is None:
        return {}
    if isinstance(about, Digest):
        return {"sha256": about}
    if isinstance(about, LedgerEntry):
        return {field: getattr(about, field) for field in _DIGESTS}
    return {
        "sha256": about.decision.subject_sha256,
        "policy_sha256": about.decision.policy_sha256,
        "evidence_sha256": about.decision.evidence_sha256,
        "golden_sha256": about.golden_sha256,
        "preprocess_sha256": about.preprocess_sha256,
        "twin": about.twin_digests,
        "run_id": about.run_id,
    }
