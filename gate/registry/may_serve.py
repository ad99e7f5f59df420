"""May a version serve? Its lines in the ledger, its tags, its records, its bytes; in this order.

The ledger alone allows. Tags veto. Records and bytes must have the digests of the ledger.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gate.errors import DigestMismatch, EvidenceError, OnnxFileError
from gate.policy.policy import Policy
from gate.records.evidence import Evidence
from gate.registry.ledger import LedgerEntry
from gate.registry.port import REJECTED, TAG_REVIEW, TAG_ROLLED_BACK, Version
from gate.registry.proof import Beside
from gate.registry.records import Records
from gate.registry.registered_model import Desk
from gate.registry.release import Release
from gate.registry.twin import QUANTIZED, twin_in

SERVED = ("promoted", "unchanged", "rolled_back", "reverted")
"""Lines that say which version serves from then on."""
VOUCHING = ("passed", *SERVED)
"""Lines that say that the gate passed a version."""
_CLOCKS_DAYS = 1.0
"""How far the clocks of two machines may be apart."""


@dataclass(frozen=True)
class Examined:
    """A version that was looked at. `problem`: why it must not serve; None if it may."""

    version: Version
    vouched: LedgerEntry | None
    problem: str | None


def vouching(history: Sequence[LedgerEntry], number: str) -> LedgerEntry | None:
    """The last line that vouches for a version, with digests."""
    lines = [e for e in history if e.version == number and e.action in VOUCHING and e.sha256]
    return lines[-1] if lines else None


def veto(desk: Desk, history: Sequence[LedgerEntry], number: str) -> Examined:
    """What ledger and tags say, without a download. Raises the RegistryErrors."""
    version = desk.registry.version(desk.model, number)
    vouched = vouching(history, number)
    return Examined(version, vouched, _veto(version, vouched, history))


def examine(desk: Desk, number: str, policy: Policy, *, anew: bool) -> Examined:
    """The whole examination. `anew`: as if it were to be promoted now, by `policy`, with evidence
    that is young enough; else only that it still is what was promoted.

    Other bytes are written down as a violation, once. Raises the RegistryErrors and StorageError
    where nothing can be said now.
    """
    history = desk.history()
    seen = veto(desk, history, number)
    if seen.problem is not None or seen.vouched is None:
        return seen
    try:
        with _downloaded(desk, seen.vouched) as path:
            problem = _records(path, desk.model, seen.vouched, policy) if anew else None
    except (DigestMismatch, EvidenceError, OnnxFileError) as error:
        problem = str(error)
    return Examined(seen.version, seen.vouched, problem)


@contextmanager
def _downloaded(desk: Desk, vouched: LedgerEntry) -> Iterator[Path]:
    """A version's file with all that is beside it, for as long as this lasts; proven bytes.

    Raises DigestMismatch, after writing a violation down.
    """
    assert vouched.version is not None
    assert vouched.sha256 is not None
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        beside = Beside.needed(vouched)
        yield desk.download(vouched.version, vouched.sha256, Path(folder), beside=beside)


def _veto(
    version: Version, vouched: LedgerEntry | None, history: Sequence[LedgerEntry]
) -> str | None:
    number, tags = version.number, version.tags
    if vouched is None:
        return f"no line of the ledger says that the gate passed version {number}"
    said = since_passed(history, number)
    if "violation" in said:
        return f"the bytes of version {number} were found to be others than those that passed"
    if TAG_ROLLED_BACK in tags:
        return f"version {number} was rolled back ({tags[TAG_ROLLED_BACK]})"
    if "rejected" in said or tags.get(TAG_REVIEW) == REJECTED:
        return f"a reviewer rejected version {number}"
    return None


def since_passed(history: Sequence[LedgerEntry], number: str) -> list[str]:
    """What was said of a version since it passed last: a registry that was made anew counts its
    versions from one again."""
    actions = [entry.action for entry in history if entry.version == number]
    passed = [place for place, action in enumerate(actions) if action in ("passed", "promoted")]
    return list(actions[passed[-1] :]) if passed else list(actions)


def _records(path: Path, model: str, vouched: LedgerEntry, policy: Policy) -> str | None:
    """Why evidence and decision do not allow these bytes under the policy, or None.

    Raises DigestMismatch and EvidenceError where they do not belong together.
    """
    records = Records.beside(path)
    evidence, decision = records.evidence, records.decision
    assert vouched.sha256 is not None
    _known(vouched.evidence_sha256, evidence)
    evidence.subject.sha256.verify(vouched.sha256, what="the file that passed")
    if decision.policy_sha256 != policy.digest():
        return (
            f"it was judged by another policy ({decision.policy_sha256.short}) than the one in "
            f"force ({policy.digest().short})"
        )
    release = _release(path, model, records)
    if release.twin is not None and vouched.twin is not None:
        _known(vouched.twin.evidence_sha256, release.twin.evidence)
    release.verify(policy)
    if release.refusal is not None:
        return f"its decision is {release.refusal}"
    for judged in (release, release.twin):
        old = _too_old(judged.evidence, policy) if judged is not None else None
        if old is not None:
            return old
    return None


def _known(expected: object, evidence: Evidence) -> None:
    if evidence.digest() != expected:
        raise DigestMismatch(
            f"the evidence beside the version has digest {evidence.digest()}, the ledger recorded "
            f"{expected}. It was exchanged: promote the file anew."
        )


def _release(path: Path, model: str, records: Records) -> Release:
    beside = path.parent / QUANTIZED
    return Release(
        model_name=model,
        onnx_path=path,
        evidence=records.evidence,
        decision=records.decision,
        run_id="",
        description="",
        twin=twin_in(beside) if beside.is_dir() else None,
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
