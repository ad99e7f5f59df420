"""The registry interface, implemented by `mlflow_client`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from gate.policy.sections import REVIEW_TAG
from gate.records.evidence import Subject
from gate.records.layout import MAX_EXTENT, VersionSize
from gate.storage.digest import Digest

# Whoever implements `Registry` raises the errors of `gate.errors` only: RegistryUnavailable,
# RegistryDenied, ArtifactMissing, ResourceGone, StorageError, DigestMismatch (what came is no
# model), and RegistryError.
Alias = Literal["candidate", "champion", "previous"]


CANDIDATE: Alias = "candidate"
"""Measured and passed."""

CHAMPION: Alias = "champion"
"""Serving."""

PREVIOUS: Alias = "previous"
"""What a rollback goes to."""


class Tag:
    """Keys of the tags on a version."""

    VERDICT = "gate.verdict"
    SHA256 = "gate.sha256"
    POLICY = "gate.policy_sha256"
    EVIDENCE = "gate.evidence_sha256"
    RUNTIMES = "gate.runtimes"
    WAIVED = "gate.waived"
    GOLDEN = "gate.golden_sha256"
    """Digest of golden.json, on versions with golden vectors."""
    TWIN = "gate.twin_sha256"
    """Digest of the quantized twin, on versions that have one."""
    PREPROCESS = "gate.preprocess_sha256"
    """Digest of the preprocessing spec, on versions that have one."""
    COMPARED_WITH = "gate.compared_with_sha256"
    """Digest of the comparison with the version that served when this one was decided, where the
    policy required one."""
    REVIEW = REVIEW_TAG
    """The review of a version that passed, unless the policy names another tag for it
    (`gate.registry.reviews` reads it)."""
    REVIEW_COMMENT = "gate.review_comment"
    """The reviewer's comment; it goes into the ledger's line of the review."""
    REVIEW_RESULT = "gate.review_result"
    """The result of the review, for the reviewer. It decides nothing."""
    REFUSED = "gate.refused"
    """Set by the service on a version that was handed in and that it refused: when, and why. The
    same release handed in again becomes another version."""
    REVERTED = "gate.reverted"
    """Set on a version that the guard took `champion` from: when, and why."""
    ROLLED_BACK = "gate.rolled_back"
    """Set on a version that a rollback took out of service; its line in the ledger is the veto.
    While both are there, the bytes are not taken in again. The tag alone says nothing."""


@dataclass(frozen=True)
class Draft:
    """A version to be created: the file, its description and its further folders."""

    path: Path
    subject: Subject
    run_id: str
    tags: Mapping[str, str]
    description: str
    beside: Mapping[str, Path] = field(default_factory=dict)
    """Folders that are uploaded with the file, by their names there."""


@dataclass(frozen=True)
class Version:
    """A version as the registry describes it. Anyone may have edited tags and description."""

    number: str
    run_id: str | None
    tags: Mapping[str, str]
    description: str
    made_at: str | None = None
    """Creation time by the registry's own clock, UTC, ISO 8601; not editable. None: unknown."""


class Registry(Protocol):
    """A registry of models, their numbered versions, and aliases that point at versions."""

    @property
    def identity(self) -> str:
        """Which registry this is, without credentials: version numbers mean nothing without it."""

    def in_workspace(self, workspace: str) -> Registry:
        """The registry of another workspace of the same server."""

    def ensure_model(self, name: str) -> None:
        """Make the registered model if it is not there."""

    def has_model(self, name: str) -> bool:
        """Return whether the registered model is there."""

    def find(self, name: str, sha256: Digest) -> tuple[Version, ...]:
        """Versions whose tag `gate.sha256` is this digest, newest first. A hint, not a proof."""

    def create_version(self, name: str, draft: Draft) -> str:
        """Upload the file under the draft's run and make a version of it; gives its number."""

    def version(self, name: str, number: str) -> Version:
        """Read one version."""

    def download(
        self, name: str, number: str, folder: Path, *, extent: VersionSize = MAX_EXTENT
    ) -> Path:
        """Download a version's artifact into `folder`; return the path of its ONNX file.

        The draft's `beside` folders lie next to the file again. `extent`: its size when it was
        promoted; raises DigestMismatch where it is far larger, before anything is downloaded.
        """

    def fetch(self, name: str, number: str, folder: Path, *, most_bytes: Mapping[str, int]) -> None:
        """Download single files of a version, by their paths next to its ONNX file.

        They get the same paths in `folder`; missing ones are left out. `most_bytes`: by path, the
        largest allowed size; raises DigestMismatch where a file is larger.
        """

    def alias(self, name: str, alias: Alias) -> str | None:
        """The version that an alias points at, or None."""

    def set_alias(self, name: str, alias: Alias, number: str) -> None:
        """Point an alias at a version."""

    def delete_alias(self, name: str, alias: Alias) -> None:
        """Take an alias away; one that is not there is no error."""

    def set_tag(self, name: str, number: str, *, key: str, value: str) -> None:
        """Set a tag on a version."""

    def set_description(self, name: str, number: str, text: str) -> None:
        """Put another text in the place of a version's description."""
