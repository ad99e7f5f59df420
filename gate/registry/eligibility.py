"""May a version serve? Its lines in the ledger, its tags, its records, its bytes; in this order.

The ledger alone allows, and its veto needs no tag. Of tags only a reviewer's word is heard: what
the gate itself wrote into a tag is in the ledger too, or was written by somebody else. Records and
bytes must have the digests of the ledger.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError
from gate.ledger.entry import LedgerEntry
from gate.ledger.history import History
from gate.policy.review_tag import ReviewTag
from gate.registry.page import reviewer
from gate.registry.port import Tag, Version
from gate.registry.proof import ExpectedFiles
from gate.registry.registered_model import RegisteredModel
from gate.registry.terms import Terms, judge
from gate.registry.trusted import is_approved
from gate.storage.temporary import temporary_folder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examined:
    """A version that was looked at. `problem`: why it must not serve; None if it may."""

    version: Version
    vouched: LedgerEntry | None
    problem: str | None
    unreviewed: bool = False
    """The problem is only that the policy asks for a review, and that there was none."""


def veto(
    model: RegisteredModel, version: str, *, history: History, terms: Terms | None = None
) -> Examined:
    """What ledger and tags say, without a download. Raises the RegistryErrors."""
    found = model.registry.version(model.name, version)
    vouched = history.vouching_for(version)
    _report_strange(model.name, found, history)
    problem = _objection(found, history, model.reviews.tag)
    waits = _wait(found, vouched, terms) if problem is None else None
    return Examined(found, vouched, problem or waits, unreviewed=waits is not None)


def examine(
    model: RegisteredModel, version: str, *, history: History, terms: Terms | None
) -> Examined:
    """The whole examination. `terms`: those of the promotion that it has to stand; None: only that
    it still is what was promoted.

    Other bytes are written down as a violation, once, when a second download says the same. Raises
    the RegistryErrors, of them MismatchUnconfirmed, and StorageError where nothing can be said now.
    """
    examined = veto(model, version, history=history, terms=terms)
    vouched, problem = examined.vouched, examined.problem
    if problem is not None or vouched is None:
        return examined

    def judged(path: Path) -> str | None:
        if terms is None:
            return None
        return judge(path, model, vouched=vouched, terms=terms)

    try:
        with temporary_folder() as folder:
            problem = model.read(version, ExpectedFiles.needed(vouched), judged, into=folder)
    except (DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError) as error:
        problem = str(error)
    return replace(examined, problem=problem)


def _objection(version: Version, history: History, tag: ReviewTag) -> str | None:
    number = version.number
    if history.vouching_for(number) is None:
        return f"no line of the ledger says that the gate passed version {number}"
    actions, rolled_back = history.since_passed(number), history.rollback_of(number)
    if "violation" in actions:
        return f"the bytes of version {number} were found to be others than those that passed"
    if rolled_back is not None:
        return f"version {number} was rolled back ({rolled_back.at}: {rolled_back.reason})"
    if "rejected" in actions or reviewer.rejects(version.tags, tag):
        return f"a reviewer rejected version {number}"
    return None


def _wait(version: Version, vouched: LedgerEntry | None, terms: Terms | None) -> str | None:
    """Why a version has to wait for its review: the policy of whoever promoted it counts only where
    it is the one in force. Of those who signed, the ledger tells, and no tag."""
    if terms is None or terms.policy.review == "automatic":
        return None
    number, tag = version.number, terms.policy.review_tag
    promoted = vouched is not None and vouched.action != "passed"
    if terms.policy.review == "signed":
        approvers = vouched.approvers if promoted and vouched is not None else ()
        if terms.approved is not None or is_approved(approvers, terms.trust):
            return None
        return (
            f"version {number} waits for review: no line says that reviewers signed an approval "
            "that still counts"
        )
    by = None if vouched is None else vouched.policy_sha256
    if (promoted and by == terms.policy.digest()) or reviewer.approves(version.tags, tag):
        return None
    return f"version {number} waits for review: no tag {tag.name}={tag.approved}"


def _report_strange(model: str, version: Version, history: History) -> None:
    text = version.tags.get(Tag.ROLLED_BACK)
    if text is not None and history.rollback_of(version.number) is None:
        _warn_once(model, version.number, text)


@functools.lru_cache(maxsize=1024)
def _warn_once(model: str, number: str, text: str) -> None:
    _log.warning(
        "Version %s of %s has the tag %s=%r, and no line of the ledger says that it was rolled "
        "back: the tag is ignored. Delete it; gate rollback takes a version out of service.",
        number, model, Tag.ROLLED_BACK, text,
    )  # fmt: skip
