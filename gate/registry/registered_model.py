"""One registered model: aliases, tags, ledger history."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
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
from gate.ledger.maintenance import same
from gate.registry.interface import Alias, Registry, Version
from gate.registry.release import Release
from gate.registry.reviews import ReviewSettings
from gate.registry.version_files import Download, Expected, ExpectedDigests, received_digest
from gate.sandbox.limits import SandboxLimits
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.safe_text import check_model_name
from gate.storage.workspace import key_in

# A store may answer wrongly once. The same wrong bytes in a second, fresh download after a pause
# are a mismatch to act on; bytes that differ each time never are.
PAUSE_S = 5.0
"""How long a command waits before it downloads once more, in seconds."""

_PAUSES = 3
"""For how many mismatches one command waits, because others wait for its lock."""

MismatchKey = tuple[str, str, Expected]
"""Model with its workspace, version, and what was expected of it."""


class MismatchMemory:
    """Downloads with wrong bytes that no second download has confirmed. They are forgotten when the
    process ends."""

    def __init__(
        self,
        pause_s: float | None = None,
        *,
        wait: Callable[[float], None] | None = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pause_s`: seconds between two downloads at least; None: PAUSE_S. `wait`: None for a
        caller that comes again by itself, and does not hold a lock meanwhile."""
        self.pause_s = PAUSE_S if pause_s is None else pause_s
        self._wait = wait
        self.clock = clock
        self._waits_left = _PAUSES
        self._first: dict[MismatchKey, tuple[Digest, float]] = {}

    def confirms(self, key: MismatchKey, digest: Digest) -> bool:
        """Return True if an earlier download, at least a pause ago, had the same bytes; else keep
        this one."""
        now, before = self.clock(), self._first.get(key)
        if before is None or before[0] != digest:
            self._first[key] = (digest, now)
            return False
        return now - before[1] >= self.pause_s

    def forget(self, key: MismatchKey) -> None:
        """Forget a mismatch: the right bytes came, or it was acted on."""
        self._first.pop(key, None)

    def waits(self) -> bool:
        """Wait for the pause; False: the caller comes again later, or has waited often enough."""
        if self._wait is None or self._waits_left == 0:
            return False
        self._waits_left -= 1
        self._wait(self.pause_s)
        return True

    def unconfirmed(self, model: str) -> frozenset[str]:
        """Return the versions of a model of which a download had wrong bytes."""
        return frozenset(version for name, version, _ in self._first if name == model)


@dataclass(frozen=True)
class Reading:
    """The limits and caches for reading the versions of a model.

    A command has its own; a service uses the same one for each reconciliation.
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits.of_service)
    """Within which a child process reads and runs the files of versions."""
    mismatches: MismatchMemory = field(default_factory=MismatchMemory)
    histories: HistoryCache = field(default_factory=HistoryCache)
    """The reading of a service, which reads the same versions repeatedly."""


T = TypeVar("T")

_TAIL = 4000
"""Characters of a tag's value; databases other than SQLite refuse more than 5000."""

_DIGESTS = (
    "sha256", "policy_sha256", "evidence_sha256", "golden_sha256", "preprocess_sha256", "twin",
    "compared_with", "incumbent", "extent", "run_id", "made_at", "signers",
    "measured_by",
)  # fmt: skip
"""Fields that one line takes over from another about the same version."""


class Details(TypedDict, total=False):
    """The optional fields of a ledger line, besides action and reason."""

    version: str | None
    previous: str | None
    about: Release | LedgerEntry | None
    """Gives the digests."""
    comment: str | None
    """A reviewer's."""
    approvers: tuple[str, ...]
    """IDs of the keys that signed an approval; else those of the line that it is about, where the
    version goes on serving by them."""


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model with the ledger, for promotion, rollback and the service."""

    registry: Registry
    ledger: Ledger
    name: str
    cause: str | None = None
    """Cause of the operation, for the ledger; None: a user's command."""
    reviews: ReviewSettings = field(default_factory=ReviewSettings)
    """By which tag reviewers speak, and whether they sign."""
    reading: Reading = field(default_factory=Reading, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_model_name(self.name)

    @property
    def key(self) -> str:
        """The name with the workspace, as commands take it."""
        return key_in(self.registry.identity, self.name)

    def history(self) -> ModelHistory:
        """Return the current ledger history of this model in this registry.

        Raises EvidenceError where its chain is broken, StorageError.
        """
        names, entries = self.identities(), self.ledger.entries()
        return self.reading.histories.of(entries, self.name, registries=names)

    def identities(self) -> frozenset[str]:
        """All addresses of this registry. Raises EvidenceError, StorageError."""
        return same(self.ledger, self.registry.identity)

    def write(self, action: Action, reason: str, **details: Unpack[Details]) -> LedgerEntry:
        """Append a line. Raises EvidenceError, StorageError."""
        return self.ledger.append(self.entry(action, reason, **details))

    def entry(self, action: Action, reason: str, **details: Unpack[Details]) -> LedgerEntry:
        """A line that is not in the ledger yet."""
        about, approvers = details.get("about"), details.get("approvers", ())
        if not approvers and isinstance(about, LedgerEntry) and action in SERVING:
            # An approval counts for as long as the version serves, or did; what waits has none.
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
        """The version that an alias points at, or None. Raises the RegistryErrors."""
        return self.registry.alias(self.name, alias)

    def tags(self, number: str) -> Mapping[str, str]:
        """A version's tags; none where it is gone. Raises the other RegistryErrors."""
        try:
            return self.registry.version(self.name, number).tags
        except ResourceGone:
            return {}

    def prove(self, number: str, expected: ExpectedDigests) -> None:
        """Download a version and verify the digests of its files.

        Raises DigestMismatch where a second download gives the same result; MismatchUnconfirmed,
        the RegistryErrors, StorageError.
        """
        with temporary_folder() as folder:
            self.read(number, expected, lambda _path: None, into=folder)

    def read(self, number: str, expected: Expected, use: Callable[[Path], T], *, into: Path) -> T:
        """Download a version below a folder, verify its digests, and return what `use` makes of it.

        `use` gets the path of the verified file, with its other files in the same folder. If it
        raises DigestMismatch, EvidenceError, LimitExceeded or OnnxFileError, that is a mismatch,
        too.

        Raises a mismatch where a second, fresh download gives the same result. Nothing is written
        into the ledger: the next call downloads again. Raises MismatchUnconfirmed where no second
        download has confirmed it yet; the RegistryErrors, StorageError.
        """
        key, mismatches = (self.key, number, expected), self.reading.mismatches
        for first in (True, False):
            download = Download.into(into, self.registry, of=(self.name, number, expected))
            try:
                used = use(download.proven())
            except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
                if mismatches.confirms(key, received_digest(download)):
                    self._check_store(download, error)
                    mismatches.forget(key)  # the next time two downloads are needed again
                    raise
                if not (first and mismatches.waits()):
                    raise MismatchUnconfirmed(
                        f"{download.what} has wrong bytes in one download. It is not flagged: a "
                        f"second download has to confirm that. {error} Retry later. If it lasts, "
                        "look at the artifact store."
                    ) from error
            else:
                mismatches.forget(key)
                return used
            shutil.rmtree(download.folder)
        raise AssertionError("the second download ends it")

    def _check_store(self, download: Download, mismatch: GateError) -> None:
        """Download one other version, and all that have an unconfirmed mismatch. Raises
        MismatchUnconfirmed where one of them has wrong bytes, too: then the store is in trouble;
        the RegistryErrors, StorageError."""
        history, unconfirmed = self.history(), self.reading.mismatches.unconfirmed(self.key)
        is_sound = False
        for other in sorted(history.sound, key=lambda version: version not in unconfirmed):
            vouched = history.approving_entry(other)
            if other == download.number or vouched is None:
                continue
            if is_sound and other not in unconfirmed:
                return
            with temporary_folder() as folder:
                of = (self.name, other, ExpectedDigests.needed(vouched))
                try:
                    Download.into(folder, self.registry, of=of).proven()
                except (ArtifactMissing, ResourceGone):
                    continue
                except DigestMismatch as error:
                    raise MismatchUnconfirmed(
                        f"{download.what} has wrong bytes in two downloads, and so has version "
                        f"{other}: the artifact store counts as unavailable. No version is "
                        f"flagged. {mismatch} Look at the store."
                    ) from error
            is_sound = True

    def note(self, version: Version, key: str, reason: str) -> None:
        """Write into a tag of a version when and why, unless it ends with this reason already.
        Raises the RegistryErrors."""
        if version.tags.get(key, "").endswith(reason[-_TAIL:]):
            return
        text = reason if len(reason) <= _TAIL else f"…{reason[-_TAIL:]}"
        self.registry.set_tag(self.name, version.number, key=key, value=f"{now()}: {text}")

    def point(self, alias: Alias, number: str) -> None:
        """Move an alias and read it back; one that is there already is left alone.

        (Setting it again would fire an event.) Raises what `expect` raises.
        """
        if self.alias(alias) != number:
            self.registry.set_alias(self.name, alias, number)
            self.expect(alias, number)

    def expect(self, alias: Alias, number: str | None) -> None:
        """Raise PromotionConflict, after writing it down, if an alias is not where we left it; and
        the RegistryErrors."""
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
