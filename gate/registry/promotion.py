"""Handing in: a version with all that proves it is made, and becomes `candidate`; the service
decides about the rest.

It takes neither the ledger nor the right to move `champion`, so that whoever measures can be
another machine than the one that decides.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gate.attestation.envelope import SignedStatement
from gate.attestation.trust import Trust
from gate.errors import (
    ArtifactMissing,
    DigestMismatch,
    MismatchUnconfirmed,
    PromotionConflict,
    Untrusted,
)
from gate.ledger.addresses import plain
from gate.policy.policy import Policy
from gate.registry.creation import Creation
from gate.registry.doubts import Doubts
from gate.registry.download import Download
from gate.registry.page.status_line import WAITS_FOR_SERVICE, outcome_on, way_back
from gate.registry.port import CANDIDATE, CHAMPION, Registry, Tag, Version
from gate.registry.records import statements_beside
from gate.registry.release import Promotion, Release
from gate.registry.vouching import named_beside, verify_statements
from gate.storage.temporary import temporary_folder

__all__ = ["hand_in"]


def hand_in(
    registry: Registry, release: Release, *, policy: Policy, trust: Trust | None = None
) -> Promotion:
    """Make a version of the release and point `candidate` at it, if its decision is a PASS. The
    same release handed in again finds its version, unless the service refused that.

    `trust`: whose statements are believed here; None: the service alone looks whose they are.

    Refused (a returned outcome): the service judged it before, as its page says; the decision is
    not PASS, the model's source files changed since it was measured, its evidence is too old, or
    it has no statements, or such that the trust does not believe. `dry_run`: within `dvc exp run`.
    `unchanged`: it is champion already.

    Raises DigestMismatch or EvidenceError where file, evidence, policy and decision do not belong
    together; MismatchUnconfirmed where the registry does not give back what was sent;
    PromotionConflict where another version became the candidate meanwhile; the other RegistryErrors
    and StorageError as they come. After any of them nothing else than a version without an alias
    was made, and the next call finishes the job.
    """
    release.verify(policy)
    refusal = _refusal(registry, release, policy, trust=trust)
    if refusal is not None:
        return Promotion("refused", None, None, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment decides and reports only; run `make repro` to hand it in"
        return Promotion("dry_run", None, None, reason)
    return _HandingIn(Creation(registry, release, policy), trust, Doubts()).run()


def _refusal(
    registry: Registry, release: Release, policy: Policy, *, trust: Trust | None
) -> str | None:
    """What the service would say, as far as it can be told from here."""
    now = datetime.now(UTC)
    if policy.precision == "quantized":
        return (
            "a quantized file is handed in beside the exact one, as its twin, never in its place: "
            "hand in the exact file, with a policy whose section twin is this one"
        )
    why_not = release.refusal or release.outdated() or release.untimely(policy, at=now)
    if why_not is not None:
        return why_not
    twin = release.twin
    if release.statements is None or (twin is not None and twin.statements is None):
        return (
            "nobody vouches for it: the service takes only what has signed statements. Measure and "
            "sign it: gate check --report --key"
        )
    if trust is None:
        return None
    registries = frozenset({plain(registry.identity)})
    try:
        verify_statements(
            release, files=named_beside(release), trust=trust, registries=registries, now=now
        )
    except Untrusted as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _HandingIn:
    """One release on its way to `candidate`."""

    creation: Creation
    trust: Trust | None
    doubts: Doubts

    def run(self) -> Promotion:
        registry, release = self.creation.registry, self.creation.release
        name = release.model_name
        registry.ensure_model(name)
        champion, found = registry.alias(name, CHAMPION), self._found()
        closed = None if found is None or found.number == champion else _closed(found)
        if found is not None and closed is not None:
            reason = (
                f"it was handed in before as version {found.number}, and {closed}. "
                f"{way_back(name, found.number)}."
            )
            return Promotion("refused", found.number, champion, reason)
        if found is None:
            number = self.creation.make(status=WAITS_FOR_SERVICE)
            self._prove(number)
        else:
            number = found.number
        if registry.alias(name, CANDIDATE) != number:  # again would fire an event of nothing
            registry.set_alias(name, CANDIDATE, number)
            self._expect(number)
        if number == champion:
            reason = f"version {number} is champion already, with these bytes and this verdict"
            return Promotion("unchanged", number, champion, reason)
        compared = ""
        if self.creation.policy.incumbent is not None and release.decision.incumbent is None:
            compared = ", not compared with what serves, which the service does"
        reason = (
            f"PASS on {', '.join(release.decision.runtimes)}{compared}, handed in: now the "
            "service decides (gate serve). What came of it is said on the page of version "
            f"{number}, in the first line"
        )
        return Promotion("handed_in", number, champion, reason)

    def _found(self) -> Version | None:
        """A whole version of this very release with this very word; None: there is
        none that the service did not refuse."""
        for version in self._candidates():
            try:
                with temporary_folder() as folder:
                    path = self._download(version, into=folder).proven()
                    if self._is_same_word(path):
                        return version
            except (DigestMismatch, ArtifactMissing):  # another is made: it could be so for good
                continue
        return None

    def _candidates(self) -> Iterator[Version]:
        release, registry = self.creation.release, self.creation.registry
        wanted = release.draft().tags.items()
        for version in registry.find(release.model_name, release.decision.subject_sha256):
            if wanted <= version.tags.items() and Tag.REFUSED not in version.tags:
                yield version

    def _prove(self, number: str) -> None:
        """Read a version back that was just made; once more, if it comes otherwise."""
        version = self.creation.registry.version(self.creation.release.model_name, number)
        for last in (False, True):
            with temporary_folder() as folder:
                try:
                    path = self._download(version, into=folder).proven()
                    if not self._is_same_word(path):
                        raise DigestMismatch("Its statements are others than those that were sent.")
                except DigestMismatch as error:
                    if last or not self.doubts.waits():
                        raise MismatchUnconfirmed(
                            f"version {number} of {self.creation.release.model_name} was made, and "
                            f"the registry gives back something else: {error} '{CANDIDATE}' was "
                            "not moved. Look at the artifact store, then repeat."
                        ) from error
                else:
                    return

    def _download(self, version: Version, *, into: Path) -> Download:
        name, expected = self.creation.release.model_name, self.creation.expected(version.tags)
        return Download.into(into, self.creation.registry, of=(name, version.number, expected))

    def _is_same_word(self, path: Path) -> bool:
        """Whether the statements beside a file are the release's: signed by the same keys."""
        try:
            there = statements_beside(path)
        except Untrusted:
            return False
        ours = self.creation.release.statements
        if there is None or ours is None:
            return False
        pairs = ((there.evidence, ours.evidence), (there.decision, ours.decision))
        return all(self._are_alike(one, other) for one, other in pairs)

    def _are_alike(self, one: SignedStatement, other: SignedStatement) -> bool:
        """ECDSA signs the same otherwise each time."""
        if one.data == other.data:
            return True
        if self.trust is None or one.statement != other.statement:
            return False
        signers, wanted = (each.signers(self.trust.measurers) for each in (one, other))
        return {key.key_id for key in signers} == {key.key_id for key in wanted}

    def _expect(self, number: str) -> None:
        name = self.creation.release.model_name
        candidate = self.creation.registry.alias(name, CANDIDATE)
        if candidate != number:
            raise PromotionConflict(
                f"'{CANDIDATE}' of {name} points at version {candidate or 'none'}, this hand-in "
                f"left it at {number}: another one was handed in meanwhile. Look at the registry; "
                "if this one is meant, repeat."
            )


def _closed(version: Version) -> str | None:
    """What the registry says that became of a version; None: nothing yet."""
    outcome, tag = outcome_on(version.description), version.tags.get(Tag.REVERTED)
    if outcome is not None:
        return f"its page says: {outcome}"
    return None if tag is None else f"it has the tag {Tag.REVERTED}: {tag.rstrip('.')}"
