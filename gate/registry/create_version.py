"""Upload a new version, download it again, compare."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gate.errors import ArtifactMissing, DigestMismatch, MismatchUnconfirmed, RegistryError
from gate.ledger.history import ModelHistory
from gate.policy.policy import Policy
from gate.preprocess.spec import PreprocessSpec
from gate.records.layout import POLICY, PREPROCESSING, QUANTIZED, RECORDS, SPEC, TREND
from gate.registry.interface import Registry, Tag, Version
from gate.registry.quantized_twin import write_twin
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.version_files import ExpectedDigests, Records
from gate.registry.version_page import HANDED_IN, refused_as, with_status
from gate.storage.files import temporary_folder

# Tags only help to find it; its bytes are hashed again.


@dataclass(frozen=True)
class Creation:
    """How a release becomes a version."""

    registry: Registry
    release: Release
    policy: Policy

    def make(self, *, status: str) -> str:
        """Make a version and read its tags back; gives its number. `status`: the first line of its
        description. Its bytes are to be proven by the caller.

        Raises RegistryError where it reads back otherwise, the other RegistryErrors, StorageError.
        """
        registry, name, draft = self.registry, self.release.model_name, self.release.draft()
        draft = replace(draft, description=with_status(draft.description, status))
        with temporary_folder() as folder:
            beside = {**draft.beside, **self._lay_out(folder)}
            number = registry.create_version(name, replace(draft, beside=beside))
        made = registry.version(name, number)
        if not draft.tags.items() <= made.tags.items() or made.description != draft.description:
            raise RegistryError(
                f"version {number} of {name} reads back with other tags or another "
                f"description than it was made with: {dict(made.tags)}. It was not promoted; "
                "repeat."
            )
        return number

    def expected(self, tags: Mapping[str, str]) -> ExpectedDigests:
        """Return the digests of the release, with the golden vectors that a version's tags name."""
        return ExpectedDigests(
            sha256=self.release.decision.subject_sha256,
            golden=tags.get(Tag.GOLDEN),
            twin=self.release.twin_digests,
            preprocessing=self.release.preprocess_sha256,
            evidence=self.release.decision.evidence_sha256,
            extent=self.release.extent,
        )

    def _lay_out(self, folder: Path) -> dict[str, Path]:
        """Write the folders that are uploaded with the file; return them by their names there."""
        release, folders = self.release, {RECORDS: folder / RECORDS}
        Records(release.evidence, release.decision, release.statements).write(folders[RECORDS])
        self.policy.save(folders[RECORDS] / POLICY)
        release.trend.followed_by(release.evidence).save(folders[RECORDS] / TREND)
        if release.preprocessing is not None:
            folders[PREPROCESSING] = folder / PREPROCESSING
            PreprocessSpec.from_file(release.preprocessing).save(folders[PREPROCESSING] / SPEC)
        if release.twin is not None:
            folders[QUANTIZED] = folder / QUANTIZED
            write_twin(release.twin, folders[QUANTIZED])
            if self.policy.twin is not None:
                self.policy.twin.save(folders[QUANTIZED] / RECORDS / POLICY)
        return folders


@dataclass(frozen=True)
class ReleaseVersions:
    """The registered versions of one release, with the model's history as first read."""

    model: RegisteredModel
    release: Release
    policy: Policy
    history: ModelHistory

    def serves_already(self, champion: Version) -> bool:
        """Return whether the champion is this release. Raises what `left_behind` raises."""
        release, vouched = self.release, self.history.approving_entry(champion.number)
        if vouched is not None:
            policy, spec = release.decision.policy_sha256, release.preprocess_sha256
            same = (vouched.policy_sha256, vouched.preprocess_sha256) == (policy, spec)
            twins = [twin and twin.sha256 for twin in (vouched.twin, release.twin_digests)]
            return same and twins[0] == twins[1] and self._is_whole(champion)
        # If the champion came from elsewhere, only its tags list the files that belong to it.
        tags = release.draft().tags
        names = {*tags, Tag.TWIN, Tag.PREPROCESS} - {Tag.COMPARED_WITH}
        same = all(champion.tags.get(name) == tags.get(name) for name in names)
        return same and self._is_whole(champion)

    def left_behind(self, versions: Sequence[Version]) -> str | None:
        """The number of a whole version of this very release, or None. Raises the RegistryErrors,
        EvidenceError, StorageError."""
        tags = self.release.draft().tags
        refused = {**tags, Tag.VERDICT: refused_as(tags[Tag.VERDICT])}  # it may come again
        for version in versions:
            # Of one that can't be proven now another is made: it could be so for good.
            with contextlib.suppress(MismatchUnconfirmed):
                is_alike = any(all_of.items() <= version.tags.items() for all_of in (tags, refused))
                if is_alike and self._is_whole(version):
                    return version.number
        return None

    def create(self) -> str:
        """Make a version, read it back and prove it; gives its number. Raises as `Creation.make`
        and `RegisteredModel.prove`."""
        number = self._creation.make(status=HANDED_IN)
        self.model.prove(number, self._creation.expected(self.release.draft().tags))
        return number

    def _is_whole(self, version: Version) -> bool:
        """Return True if a version's bytes are the release's."""
        vouched, expected = (
            self.history.approving_entry(version.number),
            self._creation.expected(version.tags),
        )
        if vouched is not None:
            expected = replace(ExpectedDigests.from_entry(vouched), sha256=expected.sha256)
        try:
            self.model.prove(version.number, expected)
        except (DigestMismatch, ArtifactMissing):
            return False
        return True

    @property
    def _creation(self) -> Creation:
        return Creation(self.model.registry, self.release, self.policy)
