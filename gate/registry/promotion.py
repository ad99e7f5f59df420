"""Promotion: verify, make a version, read it back, move the aliases last. Idempotent.

What serves is decided by the local records alone. Tags only help to find a version that an
interrupted promotion left behind (its bytes are hashed again), and may veto, never allow.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from gate.errors import ArtifactMissing, DigestMismatch, EvidenceError, RegistryError
from gate.policy.policy import Policy
from gate.preprocess.beside import PREPROCESSING, SPEC
from gate.preprocess.spec import PreprocessSpec
from gate.registry.ledger import Ledger
from gate.registry.may_serve import since_passed, veto, vouching
from gate.registry.port import (
    CANDIDATE,
    CHAMPION,
    PREVIOUS,
    REJECTED,
    TAG_GOLDEN,
    TAG_POLICY,
    TAG_PREPROCESS,
    TAG_REVIEW,
    TAG_ROLLED_BACK,
    TAG_TWIN,
    Registry,
    Version,
)
from gate.registry.proof import Beside
from gate.registry.records import RECORDS, Records
from gate.registry.registered_model import Desk
from gate.registry.release import Promotion, Release
from gate.registry.rollback import rollback
from gate.registry.twin import QUANTIZED, lay_out

_WORDS = ("passed", "promoted", "refused", "rejected", "rolled_back", "violation")

__all__ = ["Promotion", "Release", "promote", "rollback"]


def promote(registry: Registry, release: Release, *, policy: Policy, ledger: Ledger) -> Promotion:
    """Make the release's file the champion, if the decision on it is a PASS.

    Refused (a returned outcome): the decision is not PASS, the model's source files changed since
    it was measured, or these bytes were rolled back or rejected in review. `passed`: the policy
    asks for a review, and the version waits for it. `dry_run`: within `dvc exp run`, which never
    promotes. `unchanged`: it serves already.

    Raises DigestMismatch or EvidenceError where file, evidence, policy and decision do not belong
    together, or what the registry gives back is not what was sent; PromotionConflict where
    another promotion is under way; the other RegistryErrors and StorageError as they come. After
    any of them the old champion serves, and the next call finishes the job.
    """
    desk = Desk(registry, ledger, release.model_name)
    try:
        release.verify(policy)
    except (DigestMismatch, EvidenceError) as error:
        desk.write("refused", str(error), about=release)
        raise
    if policy.precision == "quantized":
        reason = (
            "a quantized file is promoted beside the exact one, as its twin, never in its place: "
            "hand in the exact file, with a policy whose section twin is this one"
        )
        return _refuse(desk, release, reason)
    refusal = release.refusal or release.outdated
    if refusal is not None:
        return _refuse(desk, release, refusal)
    if "DVC_EXP_NAME" in os.environ:
        reason = "a DVC experiment decides and reports only; run `make repro` to promote"
        return Promotion("dry_run", None, None, reason)
    with desk.alone():
        return _promote(desk, release, policy)


def _promote(desk: Desk, release: Release, policy: Policy) -> Promotion:
    # A broken ledger must stop the promotion before it touches the registry.
    desk.history()
    desk.registry.ensure_model(desk.model)
    champion = desk.alias(CHAMPION)
    found = desk.registry.find(desk.model, release.decision.subject_sha256)
    for version in found:
        veto = _veto(desk, version)
        if veto is not None:
            return _refuse(desk, release, veto, version=version.number)
    if champion is not None and _serves_already(desk, release, champion, found):
        if policy.review == "automatic" or _served(desk, champion):
            return _unchanged(desk, release, champion)
        return _hand_in(desk, release, champion, champion)
    number = _left_behind(desk, release, champion, found) or _create(desk, release)
    desk.expect(CHAMPION, champion)
    desk.point(CANDIDATE, number)
    if policy.review == "required":
        return _hand_in(desk, release, number, champion)
    if champion is not None and _may_serve_again(desk, champion):
        desk.point(PREVIOUS, champion)
    reason = _why(release)
    entry = desk.entry("promoted", reason, version=number, previous=champion, about=release)
    desk.move_champion(number, seen=champion, entry=entry)
    return Promotion("promoted", number, champion, reason)


def _why(release: Release) -> str:
    reason = f"PASS on {', '.join(release.decision.runtimes)}"
    if release.decision.waived:
        reason += f"; waived: {', '.join(check.title for check in release.decision.waived)}"
    return reason


def _hand_in(desk: Desk, release: Release, number: str, champion: str | None) -> Promotion:
    """Have the version wait for its review."""
    reason = f"{_why(release)}; waits for review: set the tag {TAG_REVIEW} to approved or rejected"
    said = [e.action for e in desk.history() if e.version == number and e.action in _WORDS]
    if not said or said[-1] != "passed":
        desk.write("passed", reason, version=number, previous=champion, about=release)
    return Promotion("passed", number, champion, reason)


def _veto(desk: Desk, version: Version) -> str | None:
    if TAG_ROLLED_BACK in version.tags:
        return (
            f"these bytes were rolled back as version {version.number} "
            f"({version.tags[TAG_ROLLED_BACK]}). To promote them all the same, delete the tag "
            f"{TAG_ROLLED_BACK} of version {version.number} of {desk.model}, then repeat."
        )
    said = version.tags.get(TAG_REVIEW) == REJECTED
    told = since_passed(desk.history(), version.number)
    if said or "rejected" in told:
        return (
            f"a reviewer rejected these bytes as version {version.number} of {desk.model}. Train "
            "or export anew, and hand that in."
        )
    return None


def _refuse(desk: Desk, release: Release, reason: str, *, version: str | None = None) -> Promotion:
    desk.write("refused", reason, version=version, about=release)
    return Promotion("refused", version, None, reason)


def _serves_already(
    desk: Desk, release: Release, champion: str, found: tuple[Version, ...]
) -> bool:
    tags = release.draft().tags
    known = vouching(desk.history(), champion) is not None
    # Of a champion that came from elsewhere only its tags say what is beside its file.
    names = (TAG_POLICY, TAG_TWIN, TAG_PREPROCESS) if known else (*tags, TAG_TWIN, TAG_PREPROCESS)
    wanted = {tag: tags.get(tag) for tag in names}
    same = [
        v
        for v in found
        if v.number == champion and all(v.tags.get(tag) == value for tag, value in wanted.items())
    ]
    return bool(same) and _whole(desk, release, same[0])


def _unchanged(desk: Desk, release: Release, champion: str) -> Promotion:
    previous = desk.alias(PREVIOUS)
    if _served(desk, champion):
        reason = f"version {champion} serves these bytes already, under the same policy"
        # What is beside its file is what was promoted, whatever was handed in now.
        about = vouching(desk.history(), champion) or release
        desk.write("unchanged", reason, version=champion, previous=previous, about=about)
    else:
        # A crash between the alias and the ledger's line, or a promotion from elsewhere.
        reason = f"version {champion} was champion already, without a line in this ledger"
        desk.write("promoted", reason, version=champion, previous=previous, about=release)
    return Promotion("unchanged", champion, previous, reason)


def _served(desk: Desk, number: str) -> bool:
    return any(e.action == "promoted" and e.version == number for e in desk.history())


def _left_behind(
    desk: Desk, release: Release, champion: str | None, found: tuple[Version, ...]
) -> str | None:
    """A whole version of this very release that is not champion, or None."""
    wanted = release.draft().tags.items()
    for version in found:
        fits = version.number != champion and wanted <= version.tags.items()
        if fits and _whole(desk, release, version):
            return version.number
    return None


def _create(desk: Desk, release: Release) -> str:
    draft = release.draft()
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        folders = {**draft.beside, RECORDS: Path(folder, RECORDS)}
        Records(release.evidence, release.decision).write(folders[RECORDS])
        if release.preprocessing is not None:
            folders[PREPROCESSING] = Path(folder, PREPROCESSING)
            PreprocessSpec.of_file(release.preprocessing).save(folders[PREPROCESSING] / SPEC)
        if release.twin is not None:
            folders[QUANTIZED] = Path(folder, QUANTIZED)
            lay_out(release.twin, folders[QUANTIZED])
        whole = replace(draft, beside=folders)
        number = desk.registry.create_version(desk.model, whole)
    seen = desk.registry.version(desk.model, number)
    if not draft.tags.items() <= seen.tags.items() or seen.description != draft.description:
        raise RegistryError(
            f"version {number} of {desk.model} reads back with other tags or another description "
            f"than it was made with: {dict(seen.tags)}. It was not promoted; repeat."
        )
    beside = Beside(draft.tags.get(TAG_GOLDEN), release.twin_digests, release.preprocess_sha256)
    desk.prove(number, release.decision.subject_sha256, beside=beside)
    return number


def _whole(desk: Desk, release: Release, version: Version) -> bool:
    """True if a version's bytes are the release's. A violation is written down once."""
    if _violated(desk, version.number):
        return False
    vouched = vouching(desk.history(), version.number)
    handed_in = Beside(
        version.tags.get(TAG_GOLDEN), release.twin_digests, release.preprocess_sha256
    )
    beside = handed_in if vouched is None else Beside.of(vouched)
    try:
        desk.prove(version.number, release.decision.subject_sha256, beside=beside)
    except (DigestMismatch, ArtifactMissing):
        return False
    return True


def _may_serve_again(desk: Desk, number: str) -> bool:
    """Whether a rollback may go to it: the gate passed it, and nothing was said against it."""
    return veto(desk, desk.history(), number).problem is None


def _violated(desk: Desk, number: str) -> bool:
    return "violation" in since_passed(desk.history(), number)
