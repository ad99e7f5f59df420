"""Promotion: verify, make a version, read it back, move the aliases last. Idempotent.

What serves is decided by the local records alone. Tags only help to find a version that an
interrupted promotion left behind (its bytes are hashed again), and may veto, never allow.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gate.errors import ArtifactMissing, DigestMismatch, EvidenceError, RegistryError
from gate.policy.policy import Policy
from gate.preprocess.beside import PREPROCESSING, SPEC
from gate.preprocess.spec import PreprocessSpec
from gate.registry.champion import alone, move
from gate.registry.history import History
from gate.registry.ledger import Ledger
from gate.registry.port import CANDIDATE, CHAMPION, PREVIOUS, REJECTED, Registry, Tag, Version
from gate.registry.proof import Beside
from gate.registry.records import RECORDS, Records
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Promotion, Release
from gate.registry.rollback import rollback
from gate.registry.twin import QUANTIZED, lay_out

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
        return _promote(model, release, policy)


def _promote(model: RegisteredModel, release: Release, policy: Policy) -> Promotion:
    # A broken ledger must stop the promotion before it touches the registry.
    history = model.history()
    model.registry.ensure_model(model.name)
    champion = model.alias(CHAMPION)
    found = model.registry.find(model.name, release.decision.subject_sha256)
    for version in found:
        objection = _objection(model, version, history)
        if objection is not None:
            return _refuse(model, release, objection, version=version.number)
    serving = next((version for version in found if version.number == champion), None)
    if serving is not None and _serves_already(model, release, serving, history):
        if policy.review == "automatic" or history.was_served(serving.number):
            return _unchanged(model, release, serving.number, history)
        return _hand_in(model, release, serving.number, champion=champion, history=history)
    others = [version for version in found if version.number != champion]
    number = _left_behind(model, release, others, history) or _create(model, release)
    model.expect(CHAMPION, champion)
    model.point(CANDIDATE, number)
    if policy.review == "required":
        return _hand_in(model, release, number, champion=champion, history=history)
    reason = _why(release)
    entry = model.entry("promoted", reason, version=number, previous=champion, about=release)
    move(model, entry)
    return Promotion("promoted", number, champion, reason)


def _why(release: Release) -> str:
    reason = f"PASS on {', '.join(release.decision.runtimes)}"
    if release.decision.waived:
        reason += f"; waived: {', '.join(check.title for check in release.decision.waived)}"
    return reason


def _hand_in(
    model: RegisteredModel,
    release: Release,
    number: str,
    *,
    champion: str | None,
    history: History,
) -> Promotion:
    """Have the version wait for its review."""
    reason = f"{_why(release)}; waits for review: set the tag {Tag.REVIEW} to approved or rejected"
    standing = history.standing(number)
    if standing is None or standing.action != "passed":
        model.write("passed", reason, version=number, previous=champion, about=release)
    return Promotion("passed", number, champion, reason)


def _objection(model: RegisteredModel, version: Version, history: History) -> str | None:
    """What was said against these bytes that keeps them out for good, or None."""
    if Tag.ROLLED_BACK in version.tags:
        return (
            f"these bytes were rolled back as version {version.number} "
            f"({version.tags[Tag.ROLLED_BACK]}). To promote them all the same, delete the tag "
            f"{Tag.ROLLED_BACK} of version {version.number} of {model.name}, then repeat."
        )
    rejected = "rejected" in history.since_passed(version.number)
    if rejected or version.tags.get(Tag.REVIEW) == REJECTED:
        return (
            f"a reviewer rejected these bytes as version {version.number} of {model.name}. Train "
            "or export anew, and hand that in."
        )
    return None


def _refuse(
    model: RegisteredModel, release: Release, reason: str, *, version: str | None = None
) -> Promotion:
    model.write("refused", reason, version=version, about=release)
    return Promotion("refused", version, None, reason)


def _serves_already(
    model: RegisteredModel, release: Release, champion: Version, history: History
) -> bool:
    tags = release.draft().tags
    names: tuple[str, ...] = (Tag.POLICY, Tag.TWIN, Tag.PREPROCESS)
    if history.vouching_for(champion.number) is None:
        # Of a champion that came from elsewhere only its tags say what is beside its file.
        names = (*tags, Tag.TWIN, Tag.PREPROCESS)
    same = all(champion.tags.get(name) == tags.get(name) for name in names)
    return same and _whole(model, release, champion, history)


def _unchanged(
    model: RegisteredModel, release: Release, champion: str, history: History
) -> Promotion:
    previous = model.alias(PREVIOUS)
    if history.was_served(champion):
        reason = f"version {champion} serves these bytes already, under the same policy"
        # What is beside its file is what was promoted, whatever was handed in now.
        about = history.vouching_for(champion) or release
        model.write("unchanged", reason, version=champion, previous=previous, about=about)
    else:
        # A crash between the alias and the ledger's line, or a promotion from elsewhere.
        reason = f"version {champion} was champion already, without a line in this ledger"
        model.write("promoted", reason, version=champion, previous=previous, about=release)
    return Promotion("unchanged", champion, previous, reason)


def _left_behind(
    model: RegisteredModel, release: Release, versions: Sequence[Version], history: History
) -> str | None:
    """The number of a whole version of this very release, or None."""
    wanted = release.draft().tags.items()
    for version in versions:
        if wanted <= version.tags.items() and _whole(model, release, version, history):
            return version.number
    return None


def _create(model: RegisteredModel, release: Release) -> str:
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
        number = model.registry.create_version(model.name, whole)
    made = model.registry.version(model.name, number)
    if not draft.tags.items() <= made.tags.items() or made.description != draft.description:
        raise RegistryError(
            f"version {number} of {model.name} reads back with other tags or another description "
            f"than it was made with: {dict(made.tags)}. It was not promoted; repeat."
        )
    beside = Beside(draft.tags.get(Tag.GOLDEN), release.twin_digests, release.preprocess_sha256)
    model.prove(number, release.decision.subject_sha256, beside=beside)
    return number


def _whole(model: RegisteredModel, release: Release, version: Version, history: History) -> bool:
    """True if a version's bytes are the release's. A violation is written down once."""
    if "violation" in history.since_passed(version.number):
        return False
    vouched = history.vouching_for(version.number)
    handed_in = Beside(
        version.tags.get(Tag.GOLDEN), release.twin_digests, release.preprocess_sha256
    )
    beside = handed_in if vouched is None else Beside.of(vouched)
    try:
        model.prove(version.number, release.decision.subject_sha256, beside=beside)
    except (DigestMismatch, ArtifactMissing):
        return False
    return True
