"""One registered model: aliases, tags, ledger history."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

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
from gate.ledger.entry import Action, ComparedWith, LedgerEntry, TwinDigests
from gate.ledger.history import SERVING, HistoryCache, ModelHistory
from gate.ledger.ledger import Ledger
from gate.ledger.maintenance import same
from gate.records.layout import VersionSize
from gate.registry.answers import answer_of, received_digest
from gate.registry.doubts import MismatchMemory
from gate.registry.interface import Alias, Registry
from gate.registry.release import Release
from gate.registry.reviews import ReviewSettings
from gate.registry.version_files import Download, Expected, ExpectedDigests
from gate.sandbox.limits import SandboxLimits
from gate.storage.digest import Digest
from gate.storage.files import temporary_folder
from gate.storage.safe_text import check_model_name
from gate.storage.workspace import key_in

# One wrong answer of a store is weather. The same wrong bytes again, in a fresh download after a
# pause, are somebody's doing. What differs each time, or is no file of ours at all but a page that
# tells of an error, is never confirmed.


@dataclass(frozen=True)
class Reading:
    """How the versions of a model are read: within which limits, and what is remembered of it. Of
    one command; of a service it is the same in each look."""

    limits: SandboxLimits = field(default_factory=SandboxLimits.of_service)
    """Within which a child process reads and runs the files of versions."""
    doubts: MismatchMemory = field(default_factory=MismatchMemory)
    """Downloads that were not what they should be, and that nothing confirmed yet."""
    histories: HistoryCache = field(default_factory=HistoryCache)
    """Of whoever looks again and again."""


T = TypeVar("T")

_DIGESTS = (
    "sha256", "policy_sha256", "evidence_sha256", "golden_sha256", "preprocess_sha256", "twin",
    "compared_with", "incumbent", "extent", "run_id", "made_at", "signers",
    "measured_by",
)  # fmt: skip
"""Fields that one line takes over from another about the same version."""


class Details(TypedDict, total=False):
    """What a line may say besides action and reason."""

    version: str | None
    previous: str | None
    about: Release | LedgerEntry | Digest | None
    """Gives the digests."""
    comment: str | None
    """A reviewer's."""
    approvers: tuple[str, ...]
    """Ids of the keys that signed an approval; else those of the line that it is about, where the
    version goes on serving by them."""
    operation: str | None
    """Of a conflict: the move of `champion` that is over by it."""


@dataclass(frozen=True)
class RegisteredModel:
    """Everything that promotion, rollback and the service look at of one registered model."""

    registry: Registry
    ledger: Ledger
    name: str
    cause: str | None = None
    """What made us look, for the ledger; None: somebody called."""
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
        """What the ledger says of this model in this registry now.

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
                "operation": details.get("operation"),
                "approvers": details.get("approvers") or _approvers(action, details.get("about")),
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

    def prove(self, number: str, expected: ExpectedDigests) -> None:
        """Download a version and hash it, and what is to be beside it.

        Raises DigestMismatch, after writing a violation down; MismatchUnconfirmed, the
        RegistryErrors, StorageError.
        """
        with temporary_folder() as folder:
            self.read(number, expected, _nothing, into=folder)

    def read(self, number: str, expected: Expected, use: Callable[[Path], T], *, into: Path) -> T:
        """What `use` makes of the proven file of a version, with all that is beside it, below a
        folder. Of its errors DigestMismatch, EvidenceError, LimitExceeded and OnnxFileError are
        mismatches, too.

        Raises a mismatch where a second, fresh download says the same; one of bytes that passed is
        written down as a violation before. MismatchUnconfirmed where nothing says so yet; the
        RegistryErrors, StorageError.
        """
        key = (self.key, number, expected)
        for first in (True, False):
            download = Download.into(into, self.registry, of=(self.name, number, expected))
            try:
                used = use(download.proven())
            except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
                if self.reading.doubts.confirms(key, received_digest(download)):
                    self._check_store(download, error)
                    self.reading.doubts.forget(key)  # the next time two downloads are needed again
                    if not download.is_proven and isinstance(expected, ExpectedDigests):
                        self.write("violation", str(error), version=number, about=expected.sha256)
                    raise
                if not (first and self.reading.doubts.waits()):
                    raise _doubt(download, error, self.reading.doubts.duration(key)) from error
            else:
                self.reading.doubts.forget(key)
                return used
            shutil.rmtree(download.folder)
        raise AssertionError("the second download ends it")

    def _check_store(self, download: Download, mismatch: GateError) -> None:
        """Look whether the store gives what it should of another version, and of all that are in
        doubt. Raises MismatchUnconfirmed where it does not: then it is no witness against this one;
        the RegistryErrors, StorageError."""
        history, doubtful = self.history(), self.reading.doubts.about(self.key)
        is_witness = False
        for other in sorted(history.sound, key=lambda version: version not in doubtful):
            vouched = history.vouching_for(other)
            if other == download.number or vouched is None:
                continue
            if is_witness and other not in doubtful:
                return
            with temporary_folder() as folder:
                of = (self.name, other, ExpectedDigests.needed(vouched))
                try:
                    Download.into(folder, self.registry, of=of).proven()
                except (ArtifactMissing, ResourceGone):
                    continue
                except DigestMismatch as error:
                    raise MismatchUnconfirmed(
                        f"{download.what} came otherwise than it should twice, and so does version "
                        f"{other}: the artifact store counts as unavailable, and nothing is "
                        f"condemned. {mismatch} Look at the store."
                    ) from error
            is_witness = True

    def point(self, alias: Alias, number: str, *, operation: str | None = None) -> None:
        """Move an alias and read it back; one that is there already is left alone.

        (Setting it again would fire an event.) Raises as `expect`.
        """
        if self.alias(alias) != number:
            self.registry.set_alias(self.name, alias, number)
            self.expect(alias, number, operation=operation)

    def expect(self, alias: Alias, number: str | None, *, operation: str | None = None) -> None:
        """Raise PromotionConflict, after writing it down, if an alias is not where we left it; and
        the RegistryErrors. `operation`: the move that is over then."""
        version = self.alias(alias)
        if version == number:
            return
        reason = (
            f"the alias '{alias}' of {self.name} points at version {version or 'none'}, this "
            f"promotion left it at {number or 'none'}: another host moved it in the meantime. "
            f"Look at the registry; if '{alias}' must change again, repeat."
        )
        self.write("conflict", reason, version=version, operation=operation)
        raise PromotionConflict(reason)


def _doubt(download: Download, mismatch: GateError, duration: str) -> MismatchUnconfirmed:
    answer = answer_of(download)
    why = (
        "nothing says yet that somebody changed it"
        if answer is None
        else f"{answer}, as a store in trouble answers"
    )
    return MismatchUnconfirmed(
        f"{download.what} did not come as it should: {why}. Nothing is condemned. {mismatch} "
        f"Repeat in a while.{duration}"
    )


def _nothing(_path: Path) -> None:
    """The proof is all."""


def _approvers(action: Action, about: Release | LedgerEntry | Digest | None) -> tuple[str, ...]:
    """An approval counts for as long as the version serves, or did; what waits has none."""
    return about.approvers if isinstance(about, LedgerEntry) and action in SERVING else ()


def _digests(
    about: Release | LedgerEntry | Digest | None,
) -> dict[str, ComparedWith | Digest | TwinDigests | VersionSize | tuple[str, ...] | str | None]:
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
        "compared_with": about.compared_with,
        "extent": about.extent,
        "run_id": about.run_id,
        "signers": about.signers,
        "measured_by": about.measured_by,
    }
