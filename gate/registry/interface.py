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

# Implementations of `Registry` raise only these errors of `gate.errors`: RegistryUnavailable,
# RegistryDenied, ArtifactMissing, ResourceGone, StorageError, DigestMismatch (the download is not a
# model), and RegistryError.
Alias = Literal["candidate", "champion", "previous"]


CANDIDATE: Alias = "candidate"
"""Alias of the version that was submitted last."""

CHAMPION: Alias = "champion"
"""Alias of the version that serves."""

PREVIOUS: Alias = "previous"
"""Alias of the version that a rollback restores."""


class Tag:
    """Keys of a version's tags."""

    VERDICT = "gate.verdict"
    SHA256 = "gate.sha256"
    POLICY = "gate.policy_sha256"
    EVIDENCE = "gate.evidence_sha256"
    RUNTIMES = "gate.runtimes"
    WAIVED = "gate.waived"
    GOLDEN = "gate.golden_sha256"
    """Digest of golden.json, if the version has golden vectors."""
    TWIN = "gate.twin_sha256"
    """Digest of the quantized twin, if the version has one."""
    PREPROCESS = "gate.preprocess_sha256"
    """Digest of the preprocessing spec, if the version has one."""
    COMPARED_WITH = "gate.compared_with_sha256"
    """Digest of the comparison with the champion at the time of the decision, if the policy
    requires a comparison."""
    REVIEW = REVIEW_TAG
    """Review of a version that passed, unless the policy names another tag
    (`gate.registry.reviews` reads it)."""
    REVIEW_COMMENT = "gate.review_comment"
    """The reviewer's comment, which is copied into the ledger entry of the review."""
    REVIEW_RESULT = "gate.review_result"
    """Result of the review, for the reviewer. The gate never reads it."""
    REFUSED = "gate.refused"
    """Time and reason of a refusal, set by the service on a submitted version. If the same release
    is submitted again, it becomes a new version."""
    REVERTED = "gate.reverted"
    """Time and reason, set on a version from which the guard moved `champion` away."""
    ROLLED_BACK = "gate.rolled_back"
    """Set on a version that a rollback took out of service. While the tag and the rollback's ledger
    entry both exist, the bytes can't be promoted again. The tag alone has no effect."""


@dataclass(frozen=True)
class Draft:
    """A version to be created: the file, its tags, its description and further folders."""

    path: Path
    subject: Subject
    run_id: str
    tags: Mapping[str, str]
    description: str
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Folders that are uploaded with the file, by their artifact names."""


@dataclass(frozen=True)
class Version:
    """A version as the registry describes it. Any user can edit tags and description."""

    number: str
    run_id: str | None
    tags: Mapping[str, str]
    description: str
    created_at: str | None = None
    """Creation time by the registry's clock (UTC, ISO 8601), not editable; None if unknown."""


class Registry(Protocol):
    """A registry of models, their numbered versions, and aliases that point at versions."""

    @property
    def identity(self) -> str:
        """The address of this registry without credentials. Version numbers belong to it."""

    def in_workspace(self, workspace: str) -> Registry:
        """Return the registry of another workspace of the same server."""

    def ensure_model(self, name: str) -> None:
        """Create the registered model if it does not exist."""

    def has_model(self, name: str) -> bool:
        """Return whether the registered model exists."""

    def find(self, name: str, sha256: Digest) -> tuple[Version, ...]:
        """Return the versions whose tag `gate.sha256` is this digest, newest first.

        Tags are editable, so the result does not prove which bytes the versions have.
        """

    def create_version(self, name: str, draft: Draft) -> str:
        """Upload the file under the draft's run, create a version, and return its number."""

    def version(self, name: str, number: str) -> Version:
        """Return one version."""

    def download(
        self, name: str, number: str, folder: Path, *, extent: VersionSize = MAX_EXTENT
    ) -> Path:
        """Download a version's artifact into `folder`; return the path of its ONNX file.

        The draft's `folders` are next to the file. extent: the version's size when it
        was promoted. Raises DigestMismatch before the download if the artifact is far larger.
        """

    def fetch(self, name: str, number: str, folder: Path, *, most_bytes: Mapping[str, int]) -> None:
        """Download single files of a version into `folder`. Missing files are skipped.

        most_bytes: the largest allowed size of each file, by its path relative to the ONNX file.
        Raises DigestMismatch if a file is larger.
        """

    def alias(self, name: str, alias: Alias) -> str | None:
        """Return the version that an alias points at, or None."""

    def set_alias(self, name: str, alias: Alias, number: str) -> None:
        """Point an alias at a version."""

    def delete_alias(self, name: str, alias: Alias) -> None:
        """Delete an alias, if it exists."""

    def set_tag(self, name: str, number: str, *, key: str, value: str) -> None:
        """Set a tag on a version."""

    def set_description(self, name: str, number: str, text: str) -> None:
        """Replace a version's description."""
