"""May a version serve? Its lines in the ledger, its tags, its records, its bytes; in this order.

The ledger alone allows, and its veto needs no tag. Of tags only a reviewer's word is heard: what
the gate itself wrote into a tag is in the ledger too, or was written by somebody else. Records and
bytes must have the digests of the ledger.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from gate.decision.decision import Decision, decide
from gate.errors import DigestMismatch, EvidenceError, LimitExceeded, OnnxFileError
from gate.policy.policy import Policy
from gate.registry.comparison.compared import verify_comparison
from gate.registry.history import History
from gate.registry.judged import Judged, moment
from gate.registry.ledger import LedgerEntry
from gate.registry.page import reviewer
from gate.registry.port import APPROVED, Tag, Version
from gate.registry.proof import ExpectedFiles
from gate.registry.records import Records
from gate.registry.registered_model import RegisteredModel
from gate.registry.release import Release
from gate.registry.twin import QUANTIZED, TwinDigests, twin_in
from gate.storage.foreign import mismatch_of
from gate.storage.temporary import temporary_folder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """Whoever decides what serves judges by these: its own policy, and the moment of the promotion,
    at which the evidence had to be young enough."""

    policy: Policy
    at: datetime

    @classmethod
    def now(cls, policy: Policy) -> Terms:
        """Of a promotion at this moment."""
        return cls(policy, datetime.now(UTC))

    @classmethod
    def of(cls, policy: Policy, history: History, version: str) -> Terms | None:
        """Of a version that the ledger says was promoted. None: the service judged and deployed it
        then, and neither age nor another policy takes it out of service."""
        line, present = history.promotion_of(version), datetime.now(UTC)
        if history.was_deployed(version):
            return None
        promoted = moment(line.at) if line is not None else None
        return cls(policy, present if promoted is None else min(promoted, present))


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
    problem = _objection(found, history)
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


def judge(path: Path, model: RegisteredModel, *, vouched: LedgerEntry, terms: Terms) -> str | None:
    """Why the evidence beside a proven file does not allow it under these terms, or None. What was
    decided by another policy is decided anew.

    Raises DigestMismatch and EvidenceError where file and records do not belong together, or can't
    be read; LimitExceeded where reading takes too much; StorageError where this machine can't.
    """
    with mismatch_of(f"version {vouched.version} of {model.name} in the registry"):
        return _judge(path, model, vouched=vouched, terms=terms)


def _judge(path: Path, model: RegisteredModel, *, vouched: LedgerEntry, terms: Terms) -> str | None:
    records = Records.beside(path, evidence=vouched.evidence_sha256)
    assert vouched.sha256 is not None
    records.evidence.subject.sha256.verify(vouched.sha256, what="the file that passed")
    verify_comparison(records.decision, vouched.compared_with)
    release = _release(path, records, name=model.name, twin=vouched.twin)
    policy, passed_by = terms.policy, release.decision.policy_sha256
    if passed_by != policy.digest():
        release = _decided_anew(release, policy)
    release.verify(policy, limits=model.reading.limits)
    if release.refusal is not None and passed_by != policy.digest():
        return (
            f"it was judged by another policy ({passed_by.short}) than the one in force "
            f"({policy.digest().short}), by which its decision is {release.refusal} "
            "Promote what passes by the policy in force."
        )
    if release.refusal is not None:
        return f"its decision is {release.refusal}"
    return release.untimely(policy, at=terms.at)


def _objection(version: Version, history: History) -> str | None:
    number = version.number
    if history.vouching_for(number) is None:
        return f"no line of the ledger says that the gate passed version {number}"
    actions, rolled_back = history.since_passed(number), history.rollback_of(number)
    if "violation" in actions:
        return f"the bytes of version {number} were found to be others than those that passed"
    if rolled_back is not None:
        return f"version {number} was rolled back ({rolled_back.at}: {rolled_back.reason})"
    if "rejected" in actions or reviewer.rejects(version.tags):
        return f"a reviewer rejected version {number}"
    return None


def _wait(version: Version, vouched: LedgerEntry | None, terms: Terms | None) -> str | None:
    """Why a version has to wait for its review: the policy of whoever promoted it counts only where
    it is the one in force."""
    if terms is None or terms.policy.review == "automatic":
        return None
    promoted = vouched is not None and vouched.action != "passed"
    by = None if vouched is None else vouched.policy_sha256
    if (promoted and by == terms.policy.digest()) or reviewer.approves(version.tags):
        return None
    return f"version {version.number} waits for review: no tag {Tag.REVIEW}={APPROVED}"


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


def _release(path: Path, records: Records, *, name: str, twin: TwinDigests | None) -> Release:
    beside = path.parent / QUANTIZED
    return Release(
        model_name=name,
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        run_id="",
        description="",
        # What the ledger does not name was put there afterwards, and is not read.
        twin=twin_in(beside, twin) if twin is not None and beside.is_dir() else None,
    )


def _decided_anew(release: Release, policy: Policy) -> Release:
    twin = release.twin
    if twin is not None and policy.twin is not None:
        # The golden vectors are of the policy that passed it; the ledger has their digest.
        twin = replace(twin, decision=_decision(twin, policy.twin), golden=None)
    return replace(release, decision=_decision(release, policy), twin=twin)


def _decision(judged: Judged, policy: Policy) -> Decision:
    decision = judged.decision
    return decide(
        policy, judged.evidence, incumbent=decision.incumbent, decided_at=decision.decided_at
    )
