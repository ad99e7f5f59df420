"""Promotion: verify, make a version, read it back, move the aliases last. Idempotent.

What serves is decided by the local records alone. Tags only help to find a version that an
interrupted promotion left behind (its bytes are hashed again); a reviewer's tag may veto.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    EvidenceError,
    MismatchUnconfirmed,
    RegistryError,
)
from gate.policy.policy import Policy
from gate.preprocess.beside import PREPROCESSING, SPEC
from gate.preprocess.spec import PreprocessSpec
from gate.records.names import TREND
from gate.registry.champion import alone, move
from gate.registry.comparison.compared import outdated
from gate.registry.history import History
from gate.registry.ledger import Ledger
from gate.registry.page import reviewer
from gate.registry.page.status_line import HANDED_IN, with_status
from gate.registry.page.version_page import refresh
from gate.registry.port import CANDIDATE, CHAMPION, PREVIOUS, Registry, Tag, Version
from gate.registry.proof import ExpectedFiles
from gate.registry.records import RECORDS, Records
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Promotion, Release
from gate.registry.rollback import rollback
from gate.registry.twin import QUANTIZED, lay_out
from gate.storage.temporary import temporary_folder

__all__ = ["Promotion", "Release", "promote", "rollback"]


def promote(registry: Registry, release: Release, *, policy: Policy, ledger: Ledger) -> Promotion:
    """Make the release's file the champion, if the decision on it is a PASS.

    Refused (a returned outcome): the decision is not PASS, the model's source files changed since
    it was measured, its evidence is older than the policy allows or of the future, or these bytes
    were rolled back or rejected in review. `passed`: the policy asks for a review, and the version
    waits for it. `dry_run`: within `dvc exp run`, which never promotes. `unchanged`: it serves
    already, whatever its age.

    Raises DigestMismatch or EvidenceError where file, evidence, policy and decision do not belong
    together, or what the registry gives back is not what was sent; PromotionConflict where
    another promotion is under way; the other RegistryErrors and StorageError as they come. After
    any of them the old champion serves, and the next call finishes the job.
    """
    model = RegisteredModel(registry, ledger, release.model_name)
    try:
        release.verify(policy)
    except (DigestMismatch, EvidenceError) as error:
        model.write("refused", str(error), about=release)
        raise
    if policy.precision == "quantized":
        reason = (
            "a quantized file is promoted beside the exact one, as its twin, never in its place: "
            "hand in the exact file, with a policy whose section twin is this one"
        )
        return _refuse(model, release, reason)
    refusal = release.refusal or release.outdated()
    if refusal is not None:
        return _refuse(model, release, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment decides and reports only; run `make repro` to promote"
        return Promotion("dry_run", None, None, reason)
    with alone(model):
        # A broken ledger must stop the promotion before it touches the registry.
        return _Attempt(model, release, policy, model.history()).promote()


@dataclass(frozen=True)
class _Attempt:
    """One release on its way to `champion`, and the model's history as it was at first."""

    model: RegisteredModel
    release: Release
    policy: Policy
    history: History

    def promote(self) -> Promotion:
        model, history = self.model, self.history
        model.registry.ensure_model(model.name)
        champion = model.alias(CHAMPION)
        sha256 = self.release.decision.subject_sha256
        found = model.registry.find(model.name, sha256)
        tags = {version.number: version.tags for version in found}
        for number in dict.fromkeys((*tags, *history.holding(sha256))):
            objection = self._objection(number, tags.get(number))
            if objection is not None:
                return _refuse(model, self.release, objection, version=number)
        there = [version for version in found if version.number == champion]
        serving = next((v.number for v in there if self._serves_already(v)), None)
        if serving is not None and self._served_rightly(serving):
            return self._unchanged(serving)
        late = self._too_late(champion, serving)
        if late is not None:
            return _refuse(model, self.release, late)
        required = self.policy.review == "required"
        if serving is not None and not required:
            return self._unchanged(serving)
        others = [version for version in found if version.number != champion]
        number = serving or self._left_behind(others) or self._create()
        if serving is None:
            model.expect(CHAMPION, champion)
            model.point(CANDIDATE, number)
        if required:
            return self._hand_in(number, champion)
        why, about = _why(self.release), self.release
        move(model, model.entry("promoted", why, version=number, previous=champion, about=about))
        return Promotion("promoted", number, champion, why)

    def _too_late(self, champion: str | None, serving: str | None) -> str | None:
        """Why what was measured and decided holds no more at this moment, or None. `serving`: the
        champion, where that is this release already."""
        untimely = self.release.untimely(self.policy, at=datetime.now(UTC))
        if untimely is not None or serving is not None or self.policy.incumbent is None:
            return untimely
        return outdated(self.release.compared_with, champion, self.history)

    def _objection(self, number: str, tags: Mapping[str, str] | None) -> str | None:
        """What was said against these bytes that keeps them out for good, or None. `tags`: of the
        version, None where the registry did not find these bytes under its number.

        A rollback is taken back by two: whoever deletes the tag in the registry, and whoever then
        hands the file in again where the ledger is."""
        name, rolled_back = self.model.name, self.history.rollback_of(number)
        if rolled_back is not None and tags is None:
            tags = self.model.tags(number)
        tags = tags or {}
        if rolled_back is not None and Tag.ROLLED_BACK in tags:
            return (
                f"these bytes were rolled back as version {number} ({rolled_back.at}: "
                f"{rolled_back.reason}). To promote them all the same, delete the tag "
                f"{Tag.ROLLED_BACK} of version {number} of {name}, then repeat."
            )
        if "rejected" in self.history.since_passed(number) or reviewer.rejects(tags):
            return (
                f"a reviewer rejected these bytes as version {number} of {name}. Train or export "
                "anew, and hand that in."
            )
        return None

    def _served_rightly(self, number: str) -> bool:
        history = self.history
        return history.was_served(number) and history.rollback_of(number) is None

    def _serves_already(self, champion: Version) -> bool:
        release, vouched = self.release, self.history.vouching_for(champion.number)
        if vouched is not None:
            policy, spec = release.decision.policy_sha256, release.preprocess_sha256
            same = (vouched.policy_sha256, vouched.preprocess_sha256) == (policy, spec)
            twins = [twin and twin.sha256 for twin in (vouched.twin, release.twin_digests)]
            return same and twins[0] == twins[1] and self._is_whole(champion)
        # Of a champion that came from elsewhere only its tags say what is beside its file.
        tags = release.draft().tags
        names = {*tags, Tag.TWIN, Tag.PREPROCESS} - {Tag.COMPARED_WITH}
        same = all(champion.tags.get(name) == tags.get(name) for name in names)
        return same and self._is_whole(champion)

    def _unchanged(self, champion: str) -> Promotion:
        model, previous = self.model, self.model.alias(PREVIOUS)
        if self._served_rightly(champion):
            reason = f"version {champion} serves these bytes already, under the same policy"
            # What is beside its file is what was promoted, whatever was handed in now.
            about = self.history.vouching_for(champion) or self.release
            model.write("unchanged", reason, version=champion, previous=previous, about=about)
        else:
            # A crash between the alias and the ledger's line, or a promotion from elsewhere.
            reason = f"version {champion} was champion already, without a line in this ledger"
            model.write("promoted", reason, version=champion, previous=previous, about=self.release)
        refresh(model, (champion, previous))
        return Promotion("unchanged", champion, previous, reason)

    def _hand_in(self, number: str, champion: str | None) -> Promotion:
        """Have the version wait for its review."""
        waits = f"waits for review: set the tag {Tag.REVIEW} to approved or rejected"
        reason = f"{_why(self.release)}; {waits}"
        standing = self.history.standing(number)
        if standing is None or standing.action != "passed":
            self.model.write(
                "passed", reason, version=number, previous=champion, about=self.release
            )
        refresh(self.model, (number,))
        return Promotion("passed", number, champion, reason)

    def _left_behind(self, versions: Sequence[Version]) -> str | None:
        """The number of a whole version of this very release, or None."""
        wanted = self.release.draft().tags.items()
        for version in versions:
            # Of one that can't be proven now another is made: it could be so for good.
            with contextlib.suppress(MismatchUnconfirmed):
                if wanted <= version.tags.items() and self._is_whole(version):
                    return version.number
        return None

    def _create(self) -> str:
        """Make a version, read it back and prove it; gives its number."""
        model, release, draft = self.model, self.release, self.release.draft()
        draft = replace(draft, description=with_status(draft.description, HANDED_IN))
        with temporary_folder() as folder:
            folders = {**draft.beside, RECORDS: Path(folder, RECORDS)}
            Records(release.evidence, release.decision).write(folders[RECORDS])
            release.trend.followed_by(release.evidence).save(folders[RECORDS] / TREND)
            if release.preprocessing is not None:
                folders[PREPROCESSING] = Path(folder, PREPROCESSING)
                PreprocessSpec.of_file(release.preprocessing).save(folders[PREPROCESSING] / SPEC)
            if release.twin is not None:
                folders[QUANTIZED] = Path(folder, QUANTIZED)
                lay_out(release.twin, folders[QUANTIZED])
            number = model.registry.create_version(model.name, replace(draft, beside=folders))
        made = model.registry.version(model.name, number)
        if not draft.tags.items() <= made.tags.items() or made.description != draft.description:
            raise RegistryError(
                f"version {number} of {model.name} reads back with other tags or another "
                f"description than it was made with: {dict(made.tags)}. It was not promoted; "
                "repeat."
            )
        model.prove(number, self._handed_in(draft.tags))
        return number

    def _is_whole(self, version: Version) -> bool:
        """True if a version's bytes are the release's. A violation is written down once."""
        if "violation" in self.history.since_passed(version.number):
            return False
        vouched, expected = self.history.vouching_for(version.number), self._handed_in(version.tags)
        if vouched is not None:
            expected = replace(ExpectedFiles.of(vouched), sha256=expected.sha256)
        try:
            self.model.prove(version.number, expected)
        except (DigestMismatch, ArtifactMissing):
            return False
        return True

    def _handed_in(self, tags: Mapping[str, str]) -> ExpectedFiles:
        """What the release holds, with the golden vectors that the version's tags name."""
        return ExpectedFiles(
            sha256=self.release.decision.subject_sha256,
            golden=tags.get(Tag.GOLDEN),
            twin=self.release.twin_digests,
            preprocessing=self.release.preprocess_sha256,
            evidence=self.release.decision.evidence_sha256,
            extent=self.release.extent,
        )


def _why(release: Release) -> str:
    reason = f"PASS on {', '.join(release.decision.runtimes)}"
    if release.decision.waived:
        reason += f"; waived: {', '.join(check.title for check in release.decision.waived)}"
    return reason


def _refuse(
    model: RegisteredModel, release: Release, reason: str, *, version: str | None = None
) -> Promotion:
    model.write("refused", reason, version=version, about=release)
    return Promotion("refused", version, None, reason)
