"""Promotion: verify, make a version, read it back, move the aliases last. Idempotent.

What serves is decided by the local records alone. Tags only help to find a version that an
interrupted promotion left behind (its bytes are hashed again); a reviewer's tag may veto.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gate.attestation.trust import Trust
from gate.decision.checks import CheckResult
from gate.errors import (
    DigestMismatch,
    EvidenceError,
    Untrusted,
)
from gate.ledger.history import History
from gate.ledger.ledger import Ledger
from gate.policy.policy import Policy
from gate.registry.champion import alone, move
from gate.registry.comparison.compared import outdated
from gate.registry.creation import ReleaseVersions
from gate.registry.objection import objection_to
from gate.registry.page.reviewer import ReviewRule
from gate.registry.page.version_page import refresh
from gate.registry.port import CANDIDATE, CHAMPION, PREVIOUS, Registry
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Promotion, Release
from gate.registry.rollback import rollback
from gate.registry.signatures import verify_signatures
from gate.registry.vouching import others_signing

__all__ = ["Promotion", "Release", "promote", "refuse", "rollback"]

_TITLES = 3
"""Of waived checks in a reason."""


def promote(
    registry: Registry,
    release: Release,
    *,
    policy: Policy,
    ledger: Ledger,
    trust: Trust | None = None,
) -> Promotion:
    """Make the release's file the champion, if the decision on it is a PASS.

    `trust`: whose signatures it needs; None: it needs none.

    Refused (a returned outcome): trusted keys do not vouch for all of it, for this model in this
    registry, at this time; the decision is not PASS, the model's source files changed since
    it was measured, its evidence is older than the policy allows or of the future, or these bytes
    were rolled back or rejected in review. `passed`: the policy asks for a review, and the version
    waits for it. `dry_run`: within `dvc exp run`, which never promotes. `unchanged`: it serves
    already, whatever its age.

    Raises DigestMismatch or EvidenceError where file, evidence, policy and decision do not belong
    together, or what the registry gives back is not what was sent; PromotionConflict where
    another promotion is under way; the other RegistryErrors and StorageError as they come. After
    any of them the old champion serves, and the next call finishes the job.
    """
    rule = ReviewRule.of(policy)
    model = RegisteredModel(registry, ledger, release.model_name, reviews=rule)
    try:
        if trust is not None:
            signers = verify_signatures(release, trust=trust, registries=model.identities())
            by = tuple(key.key_id for key in signers)
            others = others_signing((release, release.twin), trust=trust, but=by)
            release = replace(release, signers=by, measured_by=others)
        release.verify(policy)
    except Untrusted as error:
        return refuse(model, release, str(error))
    except (DigestMismatch, EvidenceError) as error:
        model.write("refused", str(error), about=release)
        raise
    if policy.precision == "quantized":
        reason = (
            "a quantized file is promoted beside the exact one, as its twin, never in its place: "
            "hand in the exact file, with a policy whose section twin is this one"
        )
        return refuse(model, release, reason)
    refusal = release.refusal or release.outdated()
    if refusal is not None:
        return refuse(model, release, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment decides and reports only; run `make repro` to promote"
        return Promotion("dry_run", None, None, reason)
    with alone(model):
        # A broken ledger must stop the promotion before it touches the registry.
        done = _Attempt(model, release, policy, model.history(), trust).promote()
        return replace(done, signers=release.signers)


@dataclass(frozen=True)
class _Attempt:
    """One release on its way to `champion`, and the model's history as it was at first."""

    model: RegisteredModel
    release: Release
    policy: Policy
    history: History
    trust: Trust | None

    def promote(self) -> Promotion:
        model, history = self.model, self.history
        model.registry.ensure_model(model.name)
        champion = model.alias(CHAMPION)
        sha256 = self.release.decision.subject_sha256
        found = model.registry.find(model.name, sha256)
        tags = {version.number: version.tags for version in found}
        for number in dict.fromkeys((*tags, *history.holding(sha256))):
            objection = objection_to(model, history, number, tags=tags.get(number))
            if objection is not None:
                return refuse(model, self.release, objection, version=number)
        there = [version for version in found if version.number == champion]
        versions = ReleaseVersions(model, self.release, self.policy, history)
        serving = next((v.number for v in there if versions.serves_already(v)), None)
        if serving is not None and self._served_rightly(serving):
            return self._unchanged(serving)
        late = self._too_late(champion, serving)
        if late is not None:
            return refuse(model, self.release, late)
        required = self.policy.review != "automatic"
        if serving is not None and not required:
            return self._unchanged(serving)
        others = [version for version in found if version.number != champion]
        number = serving or versions.left_behind(others) or versions.create()
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
        now = datetime.now(UTC)
        untimely = self.release.untimely(self.policy, at=now) or self._expired(now)
        if untimely is not None or serving is not None or self.policy.incumbent is None:
            return untimely
        return outdated(self.release.compared_with, champion, self.history)

    def _expired(self, now: datetime) -> str | None:
        """Why the signatures, which were proven before, count no more at this moment, or None."""
        if self.trust is None:
            return None
        names = self.model.identities()
        try:
            verify_signatures(self.release, trust=self.trust, registries=names, now=now)
        except Untrusted as error:
            return str(error)
        return None

    def _served_rightly(self, number: str) -> bool:
        history = self.history
        return history.was_served(number) and history.rollback_of(number) is None

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
        waits = self.model.reviews.waits(shlex.quote(self.model.name), number)
        reason = f"{_why(self.release)}; {waits}"
        standing = self.history.standing(number)
        if standing is None or standing.action != "passed":
            self.model.write(
                "passed", reason, version=number, previous=champion, about=self.release
            )
        refresh(self.model, (number,))
        return Promotion("passed", number, champion, reason)


def _why(release: Release) -> str:
    reason = f"PASS on {', '.join(release.decision.runtimes)}"
    if release.decision.waived:
        reason += f"; waived: {_titles(release.decision.waived)}"
    return reason


def _titles(checks: Sequence[CheckResult]) -> str:
    """Some of them: a release of several files may waive dozens, which its report lists."""
    titles = [check.title for check in checks[:_TITLES]]
    more = len(checks) - len(titles)
    return ", ".join(titles) + (f" and {more} more" if more else "")


def refuse(
    model: RegisteredModel, release: Release, reason: str, *, version: str | None = None
) -> Promotion:
    """Write down that a release is refused, and why. Raises EvidenceError, StorageError."""
    model.write("refused", reason, version=version, about=release)
    return Promotion("refused", version, None, reason)
