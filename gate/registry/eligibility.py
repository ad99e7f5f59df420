"""Decide whether a version may serve."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from gate.errors import (
    DigestMismatch,
    EvidenceError,
    LimitExceeded,
    OnnxFileError,
    PolicyError,
    ResourceGone,
)
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import ModelHistory
from gate.ledger.ledger import Ledger
from gate.policy.sections import ReviewTag
from gate.registry import reviews
from gate.registry.interface import Tag, Version
from gate.registry.registered_model import RegisteredModel
from gate.registry.verify_release import Terms, judge_version
from gate.registry.version_files import ExpectedDigests
from gate.registry.version_page import VersionStatus
from gate.signing.trust import SECTION, Trust
from gate.storage.files import temporary_folder
from gate.storage.yaml_section import has_section


def check_bytes_allowed(
    model: RegisteredModel, history: ModelHistory, number: str, *, tags: Mapping[str, str] | None
) -> str | None:
    """Return the objection to a version's bytes for a promotion with access to the ledger, or None.

    tags: the tags of the version; None if the registry did not find these bytes under its number.
    A rollback is undone in two steps: a user deletes the tag in the registry and submits the file
    again with access to the ledger. Raises the RegistryErrors.
    """
    name, rolled_back = model.name, history.rollback_of(number)
    if rolled_back is not None and tags is None:
        with contextlib.suppress(ResourceGone):
            tags = model.registry.version(name, number).tags
    tags = tags or {}
    if rolled_back is not None and Tag.ROLLED_BACK in tags:
        return (
            f"these bytes were rolled back as version {number} ({rolled_back.at}: "
            f"{rolled_back.reason}). To promote them anyway, delete the tag {Tag.ROLLED_BACK} of "
            f"version {number} of {name}, then retry."
        )
    return _rejection(model, history, number, tags=tags)


def objection_to_submission(
    model: RegisteredModel, history: ModelHistory, entry: LedgerEntry
) -> str | None:
    """Return the objection to bytes that were submitted without access to the ledger, or None.

    entry: the ledger entry to be written for them.
    A submission can't undo a rollback, and a verdict can bring its bytes into service only once:
    earlier versions are restored by a rollback. A review of that version itself is handled
    elsewhere. Raises the RegistryErrors.
    """
    assert entry.sha256 is not None
    for number in history.versions_with_bytes(entry.sha256):
        rolled_back = history.rollback_of(number)
        if rolled_back is not None:
            return (
                f"these bytes were rolled back as version {number} ({rolled_back.at}: "
                f"{rolled_back.reason}). To promote them anyway, run gate promote --direct on a "
                "machine with access to the ledger."
            )
        objection = _rejection(model, history, number, tags={})
        if objection is not None:
            return objection
        if number != entry.version and _is_replayed(model, history, number, entry=entry):
            return (
                f"version {number} was promoted with the same verdict before. To return to it, run "
                "gate rollback. Otherwise measure the file again and submit the result."
            )
    for version in model.registry.find(model.name, entry.sha256):
        if version.number != entry.version and reviews.rejects(version.tags, model.reviews.tag):
            return _rejection(model, history, version.number, tags=version.tags)
    return None


def _is_replayed(
    model: RegisteredModel, history: ModelHistory, number: str, *, entry: LedgerEntry
) -> bool:
    """Return whether the same verdict already made version `number` champion, and that version
    still exists unchanged."""
    approval = history.approving_entry(number)
    status = VersionStatus.from_history(history, number)
    if approval is None or status is None or status.kind not in ("champion", "replaced"):
        return False
    verdicts = [
        (each.evidence_sha256, each.policy_sha256, each.compared_with) for each in (approval, entry)
    ]
    if verdicts[0] != verdicts[1]:
        return False
    try:
        created_at = model.registry.version(model.name, number).created_at
    except ResourceGone:  # the registry was recreated
        return False
    return history.has_outcome(number, created_at=created_at)


def _rejection(
    model: RegisteredModel, history: ModelHistory, number: str, *, tags: Mapping[str, str]
) -> str | None:
    if "rejected" in history.since_passed(number) or reviews.rejects(tags, model.reviews.tag):
        return (
            f"a reviewer rejected these bytes as version {number} of {model.name}. Train or export "
            "the model again and submit the new file."
        )
    return None


# Only the ledger can approve a version, and a veto in the ledger applies without a tag. The only
# tags that count are reviews: the gate's other tags repeat the ledger, and any user can edit them.
# Records and bytes must have the digests in the ledger.
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eligibility:
    """Whether a version may serve. `problem` is the reason against it, or None."""

    version: Version
    entry: LedgerEntry | None
    problem: str | None
    unreviewed: bool = False
    """True if the only problem is that the policy requires a review and there was none."""


def veto(
    model: RegisteredModel, version: str, *, history: ModelHistory, terms: Terms | None = None
) -> Eligibility:
    """Return the eligibility of a version according to ledger and tags, without a download.

    Raises the RegistryErrors.
    """
    details = model.registry.version(model.name, version)
    entry = history.approving_entry(version)
    tag = details.tags.get(Tag.ROLLED_BACK)
    if tag is not None and history.rollback_of(version) is None:
        _warn_of_unrecorded_tag(model.key, version, tag)
    problem = _objection(details, history, model.reviews.tag)
    wait_reason = _reason_to_wait(details, entry, terms) if problem is None else None
    return Eligibility(details, entry, problem or wait_reason, unreviewed=wait_reason is not None)


def examine(
    model: RegisteredModel,
    version: str,
    *,
    history: ModelHistory,
    terms: Terms | None,
    golden: bool = False,
) -> Eligibility:
    """Download a version, verify it, and return its eligibility.

    terms: the terms of the promotion to judge by; None: only verify that the version still has the
    bytes that were promoted. golden: also verify the golden vectors.
    Wrong bytes count as a problem if a second download confirms them. Raises the RegistryErrors,
    including MismatchUnconfirmed, and StorageError if nothing can be determined now.
    """
    eligibility = veto(model, version, history=history, terms=terms)
    entry, problem = eligibility.entry, eligibility.problem
    if problem is not None or entry is None:
        return eligibility
    expect = ExpectedDigests.from_entry if golden else ExpectedDigests.needed
    judge = partial(judge_version, model=model, entry=entry, terms=terms)
    try:
        with temporary_folder() as folder:
            problem = model.read(version, expect(entry), judge, into=folder)
    except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
        problem = str(error)
    return replace(eligibility, problem=problem)


def _objection(version: Version, history: ModelHistory, tag: ReviewTag) -> str | None:
    number = version.number
    if history.approving_entry(number) is None:
        return f"the ledger has no entry that version {number} passed the gate"
    actions, rolled_back = history.since_passed(number), history.rollback_of(number)
    if rolled_back is not None:
        return f"version {number} was rolled back ({rolled_back.at}: {rolled_back.reason})"
    if "rejected" in actions or reviews.rejects(version.tags, tag):
        return f"a reviewer rejected version {number}"
    return None


def _reason_to_wait(version: Version, entry: LedgerEntry | None, terms: Terms | None) -> str | None:
    """Return why a version has to wait for its review, or None.

    The policy by which it was promoted counts only if it is still the one in force. The reviewers
    are read from the ledger, never from tags.
    """
    if terms is None or terms.policy.review == "automatic":
        return None
    number, tag = version.number, terms.policy.review_tag
    promoted = entry is not None and entry.action != "passed"
    if terms.policy.review == "signed":
        approvers = entry.approvers if promoted and entry is not None else ()
        if terms.approved is not None or is_approval_valid(approvers, terms.trust):
            return None
        return (
            f"version {number} waits for review: the ledger has no entry with a signed approval "
            "that still counts"
        )
    policy = None if entry is None else entry.policy_sha256
    if (promoted and policy == terms.policy.digest()) or reviews.approves(version.tags, tag):
        return None
    return f"version {number} waits for review: no tag {tag.name}={tag.approved}"


@lru_cache(maxsize=1024)
def _warn_of_unrecorded_tag(model: str, number: str, text: str) -> None:
    """Log a warning, once for each tag."""
    _log.warning(
        "Version %s of %s has the tag %s=%r, but the ledger has no entry of a rollback: the tag "
        "is ignored. Delete it. To take a version out of service, use gate rollback.",
        number, model, Tag.ROLLED_BACK, text,
    )  # fmt: skip


class TrustFile:
    """The file with the trusted keys, if one is configured. Implements `ReadTrust`."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        """None: the service trusts no key and relies on its ledger alone."""
        self._warned: dict[str, str] = {}
        """The last warning about the serving version, by model."""

    @classmethod
    def named(cls, trust: Path | None, *, policy: Path | None) -> TrustFile:
        """Use the named file, or else the policy file if it has a section `trust:`.

        Raises PolicyError if the policy can't be read."""
        if trust is None and policy is not None and has_section(policy, SECTION):
            return cls(policy)
        return cls(trust)

    def __call__(self) -> Trust | None:
        """Read the current trust file; return None if no file is configured.

        Messages show its name without the folder, because every reader of the version's page sees
        them. Raises PolicyError if the file is damaged; then no new version is trusted.
        """
        return None if self.path is None else Trust.from_file(self.path).read_from(self.path.name)

    def follow(self, ledger: Ledger) -> None:
        """Set the current trust on a ledger; keep the previous one if the file is damaged."""
        if self.path is not None:
            with contextlib.suppress(PolicyError):
                ledger.trust = self()

    def problem(self) -> str | None:
        """Return why the configured trust file can't be used now, or None.

        The log contains details that the page must not show.
        """
        try:
            self()
        except PolicyError as error:
            _log.warning("no submission is evaluated: %s", error)
            return "can't be read"
        return None

    def warn_of(self, model: str, history: ModelHistory) -> None:
        """Log once that the serving version has no trusted signature.

        The version keeps serving, because a change of settings alone never takes a version out of
        service. Raises PolicyError.
        """
        trust, number = self(), history.serving
        entry = None if number is None else history.approving_entry(number)
        if trust is None or entry is None:
            return
        text = trust_problem(entry, trust)
        if text is None:
            self._warned.pop(model, None)
            return
        warning = f"version {number} {text}"
        if self._warned.get(model) != warning:
            self._warned[model] = warning
            _log.warning(
                "%s: %s. It keeps serving. Submit a signed version, or run gate rollback.",
                model,
                warning,
            )


def is_approval_valid(approvers: tuple[str, ...], trust: Trust | None) -> bool:
    """Return whether an approval in the ledger still counts.

    The threshold was applied at the time of the approval. It is applied again only if one of the
    keys has been revoked since.
    """
    revoked = () if trust is None else trust.revoked
    remaining = [key_id for key_id in approvers if key_id not in revoked]
    needed = 1 if trust is None or len(remaining) == len(approvers) else trust.reviewers_threshold
    return len(remaining) >= needed


def trust_problem(entry: LedgerEntry, trust: Trust) -> str | None:
    """Return why the signatures of a version that served are no longer trusted, or None.

    Only the ledger is read. Age and thresholds are checked at promotion, not here.
    """
    revoked = sorted(set(entry.measured_by).intersection(trust.revoked))
    if revoked:
        ids = ", ".join(key_id[:12] for key_id in revoked)
        return f"was measured with keys that have been revoked since: {ids}"
    if not entry.signers:
        return None if trust.unsigned == "accept_existing" else "has no signed statement"
    trusted = {key.key_id for key in trust.measurers} - set(trust.revoked)
    if not trusted.intersection(entry.signers):
        ids = ", ".join(key_id[:12] for key_id in entry.signers)
        return f"is signed with keys that are not trusted or have been revoked: {ids}"
    if entry.approvers and not is_approval_valid(entry.approvers, trust):
        ids = ", ".join(key_id[:12] for key_id in entry.approvers)
        return f"was approved with keys of which too many have been revoked: {ids}"
    return None
