"""A registered model: aliases, tags, ledger history."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    EvidenceError,
    GateError,
    LimitExceeded,
    MismatchUnconfirmed,
    OnnxFileError,
    PromotionConflict,
    ResourceGone,
)
from gate.ledger.entry import Action, LedgerEntry, now
from gate.ledger.history import SERVING, HistoryCache, ModelHistory
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import registry_identities
from gate.registry.interface import Alias, Registry, Version
from gate.registry.release import Release
from gate.registry.reviews import ReviewSettings
from gate.registry.version_files import (
    Expected,
    ExpectedDigests,
    download_version,
    make_download_folder,
    received_digest,
    version_label,
)
from gate.sandbox.limits import SandboxLimits
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.safe_text import check_model_name
from gate.storage.workspace import key_in

# An artifact store may return wrong bytes once. Only the same wrong bytes in a second, fresh
# download after a pause count as a mismatch; bytes that differ each time never do.
PAUSE_S = 5.0
"""Seconds that a command waits before the second download."""

_MAX_PAUSES = 3
"""Number of mismatches for which one command waits, because other commands wait for its lock."""

MismatchKey = tuple[str, str, Expected]
"""Model with its workspace, version, and expected digests."""


class MismatchMemory:
    """Downloads with wrong bytes that no second download has confirmed, kept in memory."""

    def __init__(
        self,
        pause_s: float | None = None,
        *,
        wait: Callable[[float], None] | None = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pause_s: minimum number of seconds between two downloads (None: PAUSE_S). wait: None for
        a caller that retries by itself instead of waiting with the lock."""
        self.pause_s = PAUSE_S if pause_s is None else pause_s
        self._wait = wait
        self.clock = clock
        self._waits_left = _MAX_PAUSES
        self._first: dict[MismatchKey, tuple[Digest, float]] = {}

    def confirms(self, key: MismatchKey, digest: Digest) -> bool:
        """Return whether a download at least `pause_s` ago had the same bytes; if not, store this
        one."""
        now, before = self.clock(), self._first.get(key)
        if before is None or before[0] != digest:
            self._first[key] = (digest, now)
            return False
        return now - before[1] >= self.pause_s

    def forget(self, key: MismatchKey) -> None:
        """Remove a mismatch, because the right bytes arrived or the mismatch was handled."""
        self._first.pop(key, None)

    def waits(self) -> bool:
        """Wait for the pause and return True; return False if the caller should retry later."""
        if self._wait is None or self._waits_left == 0:
            return False
        self._waits_left -= 1
        self._wait(self.pause_s)
        return True

    def unconfirmed(self, model: str) -> frozenset[str]:
        """Return the versions of a model with an unconfirmed mismatch."""
        return frozenset(version for name, version, _ in self._first if name == model)


@dataclass(frozen=True)
class Reading:
    """The limits and caches for reading the versions of a model.

    Each command creates one; a service keeps one for all reconciliations.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits.for_service)
    """Limits of the child process that reads and runs the files of versions."""
    mismatches: MismatchMemory = field(default_factory=MismatchMemory)
    histories: HistoryCache = field(default_factory=HistoryCache)
    """Cached ledger histories, for a service that reads the same ledger repeatedly."""


T = TypeVar("T")

_TAIL = 4000
"""Maximum number of characters in a tag's value; some databases reject more than 5000."""

_DIGESTS = (
    "sha256", "policy_sha256", "evidence_sha256", "golden_sha256", "preprocess_sha256", "twin",
    "compared_with", "incumbent", "extent", "run_id", "made_at", "signers",
    "measured_by",
)  # fmt: skip
"""Fields that an entry copies from an earlier entry about the same version."""


class Details(TypedDict, total=False):
    """The optional fields of a ledger entry."""

    version: str | None
    previous: str | None
    about: Release | LedgerEntry | None
    """The source of the digests."""
    comment: str | None
    """The reviewer's comment."""
    approvers: tuple[str, ...]
    """IDs of the keys that signed an approval. By default, those of the entry `about` if the
    version keeps serving."""


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model with the ledger, for promotion, rollback and the service."""

    registry: Registry
    ledger: Ledger
    name: str
    cause: str | None = None
    """Cause of the operation for the ledger; None for a user's command."""
    reviews: ReviewSettings = field(default_factory=ReviewSettings)
    """The review tag, and whether approvals must be signed."""
    reading: Reading = field(default_factory=Reading, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_model_name(self.name)

    @property
    def key(self) -> str:
        """The name with the workspace, as used on the command line."""
        return key_in(self.registry.identity, self.name)

    def history(self) -> ModelHistory:
        """Return the current ledger history of this model in this registry.

        Raises EvidenceError if the ledger's chain is broken, StorageError.
        """
        names, entries = self.identities(), self.ledger.entries()
        return self.reading.histories.history(entries, self.name, registries=names)

    def identities(self) -> frozenset[str]:
        """Return all addresses of this registry. Raises EvidenceError, StorageError."""
        return registry_identities(self.ledger, self.registry.identity)

    def write(self, action: Action, reason: str, **details: Unpack[Details]) -> LedgerEntry:
        """Append a ledger entry and return it. Raises EvidenceError, StorageError."""
        return self.ledger.append(self.entry(action, reason, **details))

    def entry(self, action: Action, reason: str, **details: Unpack[Details]) -> LedgerEntry:
        """Create a ledger entry without appending it."""
        about, approvers = details.get("about"), details.get("approvers", ())
        if not approvers and isinstance(about, LedgerEntry) and action in SERVING:
            # An approval counts as long as the version serves. A waiting version has none.
            approvers = about.approvers
        return LedgerEntry.model_validate(
            {
                "action": action,
                "registry": self.registry.identity,
                "model": self.name,
                "version": details.get("version"),
                "previous_version": details.get("previous"),
                "reason": reason,
                "cause": self.cause,
                "comment": details.get("comment"),
                "approvers": approvers,
                **_digests(about),
            }
        )

    def alias(self, alias: Alias) -> str | None:
        """Return the version that an alias points at, or None. Raises the RegistryErrors."""
        return self.registry.alias(self.name, alias)

    def verify_version(self, number: str, expected: ExpectedDigests) -> None:
        """Download a version and verify the digests of its files.

        Raises DigestMismatch if a second download confirms it; MismatchUnconfirmed, the
        RegistryErrors, StorageError.
        """
        with temporary_folder() as folder:
            self.read(number, expected, lambda _path: None, into=folder)

    def read(self, number: str, expected: Expected, use: Callable[[Path], T], *, into: Path) -> T:
        """Download a version below a folder, verify its digests, and return `use(path)`.

        use: a function of the path of the verified file; the version's other files are in the same
        folder. DigestMismatch, EvidenceError, LimitExceeded and OnnxFileError from `use` also count
        as mismatches.

        Raises a mismatch if a second, fresh download gives the same result. The ledger does not
        change, so the next call downloads again. Raises MismatchUnconfirmed if no second download
        has confirmed a mismatch yet; the RegistryErrors, StorageError.
        """
        key, mismatches = (self.key, number, expected), self.reading.mismatches
        for first in (True, False):
            folder = make_download_folder(into)
            try:
                result = use(
                    download_version(self.registry, self.name, number, expected, folder=folder)
                )
            except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
                if mismatches.confirms(key, received_digest(folder)):
                    self._check_store(number, error)
                    mismatches.forget(key)  # the next mismatch needs two downloads again
                    raise
                if not (first and mismatches.waits()):
                    raise MismatchUnconfirmed(
                        f"{version_label(self.name, number)} has wrong bytes in one download. It "
                        f"is not flagged until a second download confirms that. {error} Retry "
                        "later. If the error persists, check the artifact store."
                    ) from error
            else:
                mismatches.forget(key)
                return result
            shutil.rmtree(folder)
        raise AssertionError("unreachable: the second iteration returns or raises")

    def _check_store(self, mismatched: str, mismatch: GateError) -> None:
        """Download another version and all versions with an unconfirmed mismatch.

        Raises MismatchUnconfirmed if one of them has wrong bytes too, which indicates a failure of
        the artifact store; the RegistryErrors, StorageError."""
        history, unconfirmed = self.history(), self.reading.mismatches.unconfirmed(self.key)
        is_sound = False
        for number in sorted(history.sound, key=lambda version: version not in unconfirmed):
            entry = history.approving_entry(number)
            if number == mismatched or entry is None:
                continue
            if is_sound and number not in unconfirmed:
                return
            with temporary_folder() as folder:
                expected = ExpectedDigests.needed(entry)
                try:
                    download_version(self.registry, self.name, number, expected, folder=folder)
                except (ArtifactMissing, ResourceGone):
                    continue
                except DigestMismatch as error:
                    raise MismatchUnconfirmed(
                        f"{version_label(self.name, mismatched)} and version {number} have wrong "
                        "bytes. The artifact store is considered unavailable, and no version is "
                        f"flagged. {mismatch} Check the artifact store, then retry."
                    ) from error
            is_sound = True

    def note(self, version: Version, key: str, reason: str) -> None:
        """Write the time and a reason into a tag, unless it already ends with this reason.

        Raises the RegistryErrors."""
        if version.tags.get(key, "").endswith(reason[-_TAIL:]):
            return
        text = reason if len(reason) <= _TAIL else f"…{reason[-_TAIL:]}"
        self.registry.set_tag(self.name, version.number, key=key, value=f"{now()}: {text}")

    def point(self, alias: Alias, number: str) -> None:
        """Move an alias and read it back. Raises the exceptions of `expect`.

        An alias that already points there is not set again, because that would fire an event.
        """
        if self.alias(alias) != number:
            self.registry.set_alias(self.name, alias, number)
            self.expect(alias, number)

    def expect(self, alias: Alias, number: str | None) -> None:
        """Record and raise PromotionConflict if an alias does not point at a version.

        Raises the RegistryErrors."""
        version = self.alias(alias)
        if version == number:
            return
        reason = (
            f"the alias '{alias}' of {self.name} points at version {version or 'none'} instead of "
            f"{number or 'none'}: another client moved it during this operation. Check the "
            f"registry; if '{alias}' has to change again, retry."
        )
        self.write("conflict", reason, version=version)
        raise PromotionConflict(reason)


def _digests(about: Release | LedgerEntry | None) -> dict[str, Any]:
    if about is None:
        return {}
    if isinstance(about, LedgerEntry):
        return {field: getattr(about, field) for field in _DIGESTS}
    return {
        "sha256": about.decision.subject_sha256,
        "policy_sha256": about.decision.policy_sha256,
        "evidence_sha256": about.decision.evidence_sha256,
        "golden_sha256": about.golden_sha256,
        "preprocess_sha256": about.preprocess_sha256,
        "twin": about.twin_digests,
        "compared_with": about.compared_with,
        "extent": about.extent,
        "run_id": about.run_id,
        "signers": about.signers,
        "measured_by": about.measured_by,
    }
