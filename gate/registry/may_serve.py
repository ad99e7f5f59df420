"""May a version serve? Its lines in the ledger, its tags, its records, its bytes; in this order.

The ledger alone allows. Tags veto. Records and bytes must have the digests of the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, OnnxFileError
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.registry.history import History
from gate.registry.ledger import LedgerEntry
from gate.registry.port import REJECTED, Tag, Version
from gate.registry.proof import ExpectedFiles
from gate.registry.records import Records
from gate.registry.registered_model import RegisteredModel, temporary_folder
from gate.registry.release import Release
from gate.registry.twin import QUANTIZED, TwinDigests, twin_in
from gate.storage.foreign import mismatch_of

_CLOCKS_DAYS = 1.0
"""How far the clocks of two machines may be apart."""


@dataclass(frozen=True)
class Examined:
    """A version that was looked at. `problem`: why it must not serve; None if it may."""

    version: Version
    vouched: LedgerEntry | None
    problem: str | None


def veto(model: RegisteredModel, version: str, *, history: History) -> Examined:
    """What ledger and tags say, without a download. Raises the RegistryErrors."""
    found = model.registry.version(model.name, version)
    vouched = history.vouching_for(version)
    return Examined(found, vouched, _objection(found, history))


def examine(
    model: RegisteredModel, version: str, *, policy: Policy, history: History, anew: bool
) -> Examined:
    """The whole examination. `anew`: as if it were to be promoted now, by `policy`, with evidence
    that is young enough; else only that it still is what was promoted.

    Other bytes are written down as a violation, once. Raises the RegistryErrors and StorageError
    where nothing can be said now.
    """
    examined = veto(model, version, history=history)
    vouched, problem = examined.vouched, examined.problem
    if problem is not None or vouched is None:
        return examined
    try:
        with temporary_folder() as folder:
            path = model.download(version, ExpectedFiles.needed(vouched), into=folder)
            if anew:
                with mismatch_of(f"version {version} of {model.name} in the registry"):
                    problem = _records(path, name=model.name, vouched=vouched, policy=policy)
    except (DigestMismatch, EvidenceError, OnnxFileError) as error:
        problem = str(error)
    return replace(examined, problem=problem)


def _objection(version: Version, history: History) -> str | None:
    number, tags = version.number, version.tags
    if history.vouching_for(number) is None:
        return f"no line of the ledger says that the gate passed version {number}"
    actions = history.since_passed(number)
    if "violation" in actions:
        return f"the bytes of version {number} were found to be others than those that passed"
    if Tag.ROLLED_BACK in tags:
        return f"version {number} was rolled back ({tags[Tag.ROLLED_BACK]})"
    if "rejected" in actions or tags.get(Tag.REVIEW) == REJECTED:
        return f"a reviewer rejected version {number}"
    return None


def _records(path: Path, *, name: str, vouched: LedgerEntry, policy: Policy) -> str | None:
    """Why evidence and decision do not allow these bytes under the policy, or None.

    Raises DigestMismatch and EvidenceError where they do not belong together.
    """
    records = Records.beside(path, evidence=vouched.evidence_sha256)
    evidence, decision = records.evidence, records.decision
    assert vouched.sha256 is not None
    evidence.subject.sha256.verify(vouched.sha256, what="the file that passed")
    if decision.policy_sha256 != policy.digest():
        return (
            f"it was judged by another policy ({decision.policy_sha256.short}) than the one in "
            f"force ({policy.digest().short})"
        )
    release = _release(path, records, name=name, twin=vouched.twin)
    release.verify(policy)
    if release.refusal is not None:
        return f"its decision is {release.refusal}"
    for judged in (release, release.twin):
        old = _too_old(judged.evidence, policy) if judged is not None else None
        if old is not None:
            return old
    return None


def _release(path: Path, records: Records, *, name: str, twin: TwinDigests | None) -> Release:
    beside = path.parent / QUANTIZED
    return Release(
        model_name=name,
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        run_id="",
        description="",
        twin=twin_in(beside, twin) if beside.is_dir() else None,
    )


def _too_old(evidence: Evidence, policy: Policy) -> str | None:
    try:
        measured = datetime.fromisoformat(evidence.measured_at)
    except ValueError:
        return f"its evidence was measured at '{evidence.measured_at}', which is no time"
    if measured.tzinfo is None:
        measured = measured.replace(tzinfo=UTC)
    age = (datetime.now(UTC) - measured) / timedelta(days=1)
    if -_CLOCKS_DAYS <= age <= policy.max_age_days:
        return None
    return (
        f"its evidence is {age:.1f} days old, the policy allows {policy.max_age_days:g} "
        "(max_age_days)"
    )
